"""What follows the products, in loops that numba compiles: the same whole numbers, several times sooner.

Import this module only where numba is installed: `kernels.find` does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mulstm.codec.integer import ACT_MOST
from mulstm.codec.machine_code import compiled
from mulstm.codec.tables import EXP_END, SIGMOID_END, TANH_END

Array = Any  # numpy arrays; numba makes a version for each type it meets

_int: Any = np.int64  # numba asks for it where a number must not become unsigned or a float
_LOW, _LOW_MASK = 7, 127
_HALF = 1 << 23
_MOST_MX, _MOST_C = 32767, (1 << 31) - 1


@compiled
def _put(v: int, planes: Array, b: int, j: int) -> None:
    """A number of 15 bits in its two planes."""
    v = min(max(v, -ACT_MOST), ACT_MOST)
    planes[0, b, j], planes[1, b, j] = v >> _LOW, v & _LOW_MASK


@compiled
def factor(sums: Array, x: Array, mx: Array, e_m: Array, below: Array, R_ml: Array, m: Array) -> None:
    """The planes of m from the two planes' sums; `below` is empty in the lowest layer."""
    B, H = m.shape[1], m.shape[2]
    stacked = below.shape[0] > 0
    for b in range(B):
        row = x[b] if mx.shape[0] > 1 else 0
        for j in range(H):
            p = _int(mx[row, j])
            if stacked:
                low = _int(below[b, j]) + (below[B + b, j] >> _LOW)
                p = min(max(p + ((low * R_ml[j] + _HALF) >> 24), -_MOST_MX), _MOST_MX)
            a = _int(sums[b, j]) + (sums[B + b, j] >> _LOW)
            v = ((p * a << _int(e_m[j])) + _HALF) >> 24
            _put(v, m, b, j)


@compiled
def gather_z(
    sums: Array, x: Array, zx: Array, R_zm: Array, px: Array, below: Array, R_zl: Array, z: Array
) -> None:
    """z, rounded; `px` is empty but for MI-LSTMs, `below` in the lowest layer."""
    B, Z = z.shape
    stacked, gated = below.shape[0] > 0, px.shape[0] > 0
    for b in range(B):
        row = x[b] if zx.shape[0] > 1 else 0
        for j in range(Z):
            r = (_int(sums[b, j]) + (sums[B + b, j] >> _LOW)) * R_zm[j]
            if gated:
                r = (((r + _HALF) >> 24) * px[row, j]) << 12
            if stacked:
                r += (_int(below[b, j]) + (below[B + b, j] >> _LOW)) * R_zl[j]
            z[b, j] = ((_int(zx[row, j]) << 24) + r + _HALF) >> 24


@compiled
def _sigmoid(z: int, curve: Array) -> Any:
    return _int(curve[min(max(z + SIGMOID_END, 0), 2 * SIGMOID_END - 1)])


@compiled
def _tanh(z: int, curve: Array) -> Any:
    return _int(curve[min(max(z + TANH_END, 0), 2 * TANH_END - 1)])


@compiled
def plain_unit(z: Array, tanh: Array, h: Array) -> None:
    """The unit "tanh"."""
    for b in range(z.shape[0]):
        for j in range(z.shape[1]):
            _put((_tanh(z[b, j], tanh) + 2) >> 2, h, b, j)


@compiled
def gated_unit(
    z: Array, sigmoid: Array, tanh: Array, linear: bool, inside: bool, b_h: Array, c: Array, h: Array
) -> None:
    """The next c and h. `linear`: h_hat is not squashed; `inside`: the output gate is inside the tanh."""
    B, H = c.shape
    biased = b_h.shape[0] > 0
    for b in range(B):
        for j in range(H):
            h_hat = z[b, j] << 6 if linear else _tanh(z[b, j], tanh)
            i, o = _sigmoid(z[b, H + j], sigmoid), _sigmoid(z[b, 2 * H + j], sigmoid)
            new = (_sigmoid(z[b, 3 * H + j], sigmoid) * _int(c[b, j]) + i * h_hat + (1 << 15)) >> 16
            new = min(max(new, -_MOST_C), _MOST_C)
            c[b, j] = new
            if inside:
                inner = (o * new + (1 << 15)) >> 16
                if biased:
                    inner += b_h[j]
                v = (_tanh(inner >> 6, tanh) + 2) >> 2
            else:
                v = (o * _tanh(new >> 6, tanh) + (1 << 17)) >> 18
            _put(v, h, b, j)


@compiled
def shares(
    sums: Array, R_out: Array, b_out: Array, said: Array, exp: Array, escape: Array, begins: Array
) -> None:
    """Tables from the output layer's sums; `said` is empty without a learner, `escape` without an escape."""
    B, last = begins.shape[0], begins.shape[1] - 1
    N = sums.shape[1]
    logits = np.empty(N, dtype=np.int64)
    for b in range(B):
        most = _int(-(1 << 62))
        for n in range(N):
            s = _int(sums[b, n]) + (sums[B + b, n] >> _LOW)
            logit = ((_int(b_out[n]) << 24) + s * R_out[n] + _HALF) >> 24
            if said.shape[0] > 0:
                logit += _int(said[b, n])
            logits[n] = logit
            most = max(most, logit)
        total = _int(0)
        for n in range(N):
            d = most - logits[n]
            if d < EXP_END:
                total += exp[d]
            logits[n] = total
        free = _int((1 << 24) - last)
        if escape.shape[0] > 0:
            free -= (_int(escape[b]) * free) >> 22
        ratio = (free << 28) // total
        begins[b, 0] = 0
        for n in range(N):
            begins[b, n + 1] = n + 1 + ((logits[n] * ratio) >> 28)
        begins[b, last] = 1 << 24


# ---- the learner ----


@compiled
def centred(h: Array, mean: Array, drop: int, g: Array) -> None:
    """The learner's h; `mean` is less half of what is rounded away."""
    for b in range(g.shape[0]):
        for j in range(g.shape[1]):
            v = ((_int(h[0, b, j]) << _LOW) + h[1, b, j] - mean[j]) >> drop
            g[b, j] = min(max(v, -127), 127)


@compiled
def learnt(sums: Array, a: Array, said: Array) -> None:
    """What is added to the logits, from the sums of both planes side by side."""
    N = said.shape[1]
    for b in range(said.shape[0]):
        for n in range(N):
            v = (_int(sums[b, n]) << _LOW) + sums[b, N + n] + (_int(a[n]) >> 10)
            said[b, n] = (v + 128) >> 8


@compiled
def errors(begins: Array, symbols: Array, rate: int, most: int, planes: Array, a: Array) -> None:
    """The planes (2, N, B) of the errors; their sums go into a."""
    N = a.shape[0]
    for b in range(symbols.shape[0]):
        known = symbols[b] < N
        for n in range(N):
            v = _int(0)
            if known:
                v = _int(begins[b, n]) - _int(begins[b, n + 1])
                if n == symbols[b]:
                    v += 1 << 24
                v = min(max((v * rate + (1 << 22)) >> 23, -most), most)
            planes[0, n, b], planes[1, n, b] = v >> _LOW, v & _LOW_MASK
            a[n] += np.float64(v << _LOW)
    for n in range(N):
        a[n] = min(max(a[n], -float((1 << 30) - 1)), float((1 << 30) - 1))


@compiled
def absorb(sums: Array, A: Array, used: Array) -> None:
    """Adds the errors' sums (2 N, H) to A; the planes of its upper part are what is used next."""
    N, H = A.shape
    most = (1 << 30) - 1
    for n in range(N):
        for j in range(H):
            v = _int(A[n, j]) + (_int(sums[n, j]) << _LOW) + sums[N + n, j]
            v = min(max(v, -most), most)
            A[n, j] = v
            v >>= 17
            used[n, j], used[N + n, j] = v >> _LOW, v & _LOW_MASK


# ---- the matcher ----


@compiled
def refine(
    begins: Array,
    place: Array,
    length: Array,
    text: Array,
    symbol_of: Array,
    seen: Array,
    right: Array,
    context: Array,
    used: Array,
    refined: Array,
) -> None:
    """The tables, with what each lane's place says."""
    last = begins.shape[1] - 1
    free = _int((1 << 24) - last)
    for b in range(place.shape[0]):
        y = symbol_of[text[max(place[b], 0)]]
        used[b] = place[b] >= 0 and y >= 0
        if not used[b]:
            refined[b] = begins[b]
            continue
        p = _int(begins[b, y + 1]) - _int(begins[b, y])
        digits = 0
        while p >> digits:
            digits += 1
        price = 2 * (24 - digits) + (0 if digits > 1 and (p >> (digits - 2)) & 1 else 1)
        run = length[b]
        context[b] = (run if run < 12 else 12 + min(3, (run - 8) >> 3)) * 48 + price
        q = _int(right[context[b]]) * free // _int(seen[context[b]])
        q = min(max(q, 1), free - (free >> 13))
        ratio = ((free - q) << 28) // max(1, free - (p - 1))
        for k in range(last):
            v = _int(begins[b, k]) - k
            refined[b, k] = k + (((v * ratio) >> 28) if k <= y else (((v - (p - 1)) * ratio) >> 28) + q)
        refined[b, last] = 1 << 24


@compiled
def match(
    now: Array,
    t: int,
    lanes: int,
    bits: int,
    place: Array,
    length: Array,
    key: Array,
    text: Array,
    table: Array,
    seen: Array,
    right: Array,
    context: Array,
    used: Array,
) -> None:
    """Counts who was right about the bytes `now` of step t, and looks for places for the next ones."""
    B = now.shape[0]
    for b in range(B):
        correct = text[max(place[b], 0)] == now[b]
        if used[b]:
            seen[context[b]] += 16
            right[context[b]] += 16 * correct
        if place[b] >= 0 and correct:
            place[b] += lanes
            length[b] += 1
        else:
            place[b], length[b] = -1, 0
        key[b] = ((key[b] << 8) | now[b]) & ((1 << 40) - 1)
    for k in range(seen.shape[0]):
        if seen[k] > 1 << 14:
            seen[k], right[k] = np.floor(seen[k] / 2), np.floor(right[k] / 2)
    text[t * lanes : t * lanes + B] = now
    if t < 4:
        return
    slots = np.empty(B, dtype=np.int64)
    checks = np.empty(B, dtype=np.int64)
    for b in range(B):
        mixed = np.uint64(key[b]) * np.uint64(0x9E3779B97F4A7C15)
        slots[b] = _int(mixed >> np.uint64(64 - bits))
        checks[b] = _int((mixed >> np.uint64(20)) & np.uint64((1 << 20) - 1))
        found = table[slots[b]]
        if place[b] < 0 and found >= 0 and found & ((1 << 20) - 1) == checks[b]:
            place[b] = found >> 20
    for b in range(B):
        entry = (((t + 1) * lanes + b) << 20) | checks[b]
        table[slots[b]] = max(table[slots[b]], entry)


# ---- the coder ----

_ONE_WORD = np.uint64(32)
_FULL = np.uint64(24)
_WORD = np.uint64(0xFFFFFFFF)


@compiled
def put(lefts: Array, rights: Array, state: Array, words: Array, count: int) -> int:
    """Codes shares; `state` is low and range, `words` has room. How many words there are now."""
    low, span = state[0], state[1]
    for k in range(lefts.shape[0]):
        scale = span >> _FULL
        before = low
        low += scale * np.uint64(lefts[k])
        span = scale * np.uint64(rights[k] - lefts[k])
        if low < before:
            at = count - 1
            while words[at] == _WORD:
                words[at] = 0
                at -= 1
            words[at] += np.uint32(1)
        if span <= _WORD:
            words[count] = np.uint32(low >> _ONE_WORD)
            count += 1
            low <<= _ONE_WORD
            span <<= _ONE_WORD
    state[0], state[1] = low, span
    return count


@compiled
def get(begins: Array, state: Array, words: Array, at: int, symbols: Array) -> int:
    """Decodes one symbol for each table; the next word's place, or -1 where the stream is damaged."""
    point, span = state[0], state[1]
    last = begins.shape[1] - 1
    for row in range(begins.shape[0]):
        scale = span >> _FULL
        place = _int(point // scale)
        if place < 0 or place >> 24:
            return -1
        low, high = 0, last
        while high - low > 1:
            middle = (low + high) >> 1
            if begins[row, middle] <= place:
                low = middle
            else:
                high = middle
        left = np.uint64(begins[row, low])
        point -= scale * left
        span = scale * (np.uint64(begins[row, low + 1]) - left)
        if span <= _WORD:
            point <<= _ONE_WORD
            if at < words.shape[0]:
                point |= np.uint64(words[at])
            at += 1
            span <<= _ONE_WORD
        symbols[row] = low
    state[0], state[1] = point, span
    return at
