"""A decoder of .mul archives written from docs/codec.md alone: slow, plain, nothing of the package in it."""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from typing import Any

import numpy as np

TYPES = {"I8": "<i1", "U8": "<u1", "I16": "<i2", "I32": "<i4"}


def read_model(data: bytes) -> dict[str, Any]:
    """The arrays and facts of an integer model's file."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    meta = json.loads(header.pop("__metadata__")["mulstm"])
    arrays = {}
    for name, entry in header.items():
        low, high = (8 + size + offset for offset in entry["data_offsets"])
        arrays[name] = np.frombuffer(data[low:high], TYPES[entry["dtype"]]).reshape(entry["shape"])
    digest = hashlib.sha256(json.dumps(meta["facts"], sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(f"\n{name} {arrays[name].dtype.name} {arrays[name].shape}\n".encode())
        digest.update(arrays[name].tobytes())
    assert digest.hexdigest() == meta["fingerprint"]
    wide = {name: array.astype(np.int64) for name, array in arrays.items()}
    return {"facts": meta["facts"], "fingerprint": digest.digest(), **wide}


def half_up(x: Any, s: int) -> Any:
    return (x + (1 << (s - 1))) >> s


def clip(x: Any, m: int) -> Any:
    return np.clip(x, -m, m)


SIGMOID = [math.floor(2**16 / (1 + math.exp(-z / 1024)) + 0.5) for z in range(-12288, 12288)]
TANH = [math.floor(2**16 * math.tanh(z / 1024) + 0.5) for z in range(-6144, 6144)]
EXP = [math.floor(2**22 * 2 ** (-d / 1024) + 0.5) for d in range(23552)] + [0]

_SIGMOID, _TANH = np.array(SIGMOID), np.array(TANH)


def sigmoid(z: Any) -> Any:
    return _SIGMOID[np.clip(z, -12288, 12287) + 12288]


def tanh(z: Any) -> Any:
    return _TANH[np.clip(z, -6144, 6143) + 6144]


def product(W: Any, v: Any) -> Any:
    return W @ (v >> 7) + ((W @ (v & 127)) >> 7)


class Lane:
    """One lane, on its own: states, the escape's likelihood, and the matcher's place."""

    def __init__(self, model: dict[str, Any]) -> None:
        H, L = model["facts"]["hidden"], model["facts"]["layers"]
        self.h = [np.zeros(H, dtype=np.int64) for _ in range(L)]
        self.c = [np.zeros(H, dtype=np.int64) for _ in range(L)]
        self.escape = 4096
        self.place: int | None = None
        self.length = self.key = 0

    def seen(self, model: dict[str, Any]) -> Any:
        return np.concatenate(self.h) if model["facts"]["skip"] else self.h[-1]

    def move(self, model: dict[str, Any], x: int) -> None:
        low = None
        for k in range(model["facts"]["layers"]):
            w = {n.split(".")[2]: a for n, a in model.items() if n.startswith(f"layers.{k}.")}
            low = self.move_layer(model["facts"], w, k, x, low)

    def move_layer(self, facts: dict[str, Any], w: dict[str, Any], k: int, x: int, low: Any) -> Any:
        row, h, c, unit = x if len(w["zx"]) > 1 else 0, self.h[k], self.c[k], facts["unit"]
        m = h
        if "W_mh" in w:
            p = w["mx"][row]
            if low is not None:
                p = clip(p + half_up(product(w["W_ml"], low) * w["R_ml"], 24), 32767)
            m = clip(half_up(p * 2 ** w["e_m"] * product(w["W_mh"], h), 24), 16383)
        r = product(w["W_zm"], m) * w["R_zm"]
        if "px" in w:
            r = half_up(r, 24) * w["px"][row] * 2**12
        z = w["zx"][row] * 2**24 + r
        if low is not None:
            z = z + product(w["W_zl"], low) * w["R_zl"]
        z = half_up(z, 24)
        if unit == "tanh":
            self.h[k] = clip(half_up(tanh(z), 2), 16383)
            return self.h[k]
        h_hat, i, o, f = z.reshape(4, -1)
        candidate = h_hat * 2**6 if unit == "initial" else tanh(h_hat)
        self.c[k] = c = clip(half_up(sigmoid(f) * c + sigmoid(i) * candidate, 16), 2**31 - 1)
        if unit == "standard":
            h = half_up(sigmoid(o) * tanh(c >> 6), 18)
        else:
            h = half_up(tanh((half_up(sigmoid(o) * c, 16) + w.get("b_h", 0)) >> 6), 2)
        self.h[k] = clip(h, 16383)
        return self.h[k]


def table(logits: Any, escape: int | None) -> list[int]:
    N = len(logits)
    entries = N if escape is None else N + 1
    free = 2**24 - entries
    if escape is not None:
        free -= (escape * free) >> 22
    weights = [EXP[min(int(logits.max() - l), 23552)] for l in logits]
    until, v = 0, []
    ratio = 2**28 * free // sum(weights)
    for k in range(N + 1):
        v.append(k + (until * ratio >> 28))
        until += weights[k] if k < N else 0
    if escape is None:
        v[-1] = 2**24
    else:
        v.append(2**24)
    return v


class Coder:
    def __init__(self, payload: bytes) -> None:
        self.words = list(struct.unpack(f"<{len(payload) // 4}I", payload))
        self.range = 2**64 - 1
        self.point = self.word() << 32 | self.word()

    def word(self) -> int:
        return self.words.pop(0) if self.words else 0

    def entry(self, v: list[int]) -> int:
        s = self.range >> 24
        q = self.point // s
        assert q < 2**24
        k = max(k for k in range(len(v) - 1) if v[k] <= q)
        self.point -= s * v[k]
        self.range = s * (v[k + 1] - v[k])
        if self.range < 2**32:
            self.point = self.point << 32 | self.word()
            self.range <<= 32
        return k


class Learner:
    def __init__(self, model: dict[str, Any], lanes: int) -> None:
        self.model, self.lanes, self.coded = model, lanes, 0
        self.A = np.zeros(model["W_out"].shape, dtype=np.int64)
        self.a = np.zeros(len(model["W_out"]), dtype=np.int64)

    def view(self, h: Any) -> Any:
        return clip(half_up(h - self.model["h_mean"], int([*self.model["rate"], 7][3])), 127)

    def says(self, g: Any) -> Any:
        used = self.A >> 17
        return half_up(128 * ((used >> 7) @ g) + (used & 127) @ g + (self.a >> 10), 8)

    def taught(self, gs: list[Any], tables: list[list[int]], xs: list[int]) -> None:
        first, least, haste = map(int, self.model["rate"][:3])
        rate = max(first * haste // (haste + self.coded), least)
        if self.lanes > 128:
            rate = 128 * rate // self.lanes
        dA, da = np.zeros_like(self.A), np.zeros_like(self.a)
        for g, v, x in zip(gs, tables, xs, strict=True):
            if x < len(self.a):
                error = -np.diff(v[: len(self.a) + 1])
                error[x] += 2**24
                error = clip(half_up(rate * error, 23), min(16383, 2**22 // self.lanes))
                dA += np.outer(error, g)
                da += 128 * error
        self.A, self.a = clip(self.A + dA, 2**30 - 1), clip(self.a + da, 2**30 - 1)
        self.coded += len(xs)


class Matcher:
    def __init__(self, lanes: int, steps: int) -> None:
        self.lanes, self.text = lanes, {}
        self.bits = min(22, max(10, (lanes * steps).bit_length()))
        self.slots: dict[int, tuple[int, int]] = {}
        self.seen = [[32] * 48 for _ in range(16)]
        self.right = [
            [max(1, (96 if k % 2 == 0 else 64) >> (2 + k // 2)) for k in range(48)] for _ in range(16)
        ]

    def byte_at(self, place: int) -> int:
        return self.text.get(place, 0)  # none stands past the end of a shorter last lane

    def change(self, lane: Lane, v: list[int], symbol_of: dict[int, int]) -> tuple[list[int], Any]:
        if lane.place is None or self.byte_at(lane.place) not in symbol_of:
            return v, None
        y, free = symbol_of[self.byte_at(lane.place)], 2**24 - (len(v) - 1)
        p = v[y + 1] - v[y]
        digits = bin(p)[2:]
        i = 2 * (24 - len(digits)) + (0 if digits[1:2] == "1" else 1)
        j = lane.length if lane.length < 12 else 12 + min(3, (lane.length - 8) >> 3)
        q = min(max(self.right[j][i] * free // self.seen[j][i], 1), free - (free >> 13))
        ratio = 2**28 * (free - q) // max(1, free - (p - 1))
        changed = [
            k + ((u - k) * ratio >> 28) if k <= y else k + ((u - k - (p - 1)) * ratio >> 28) + q
            for k, u in enumerate(v)
        ]
        changed[-1] = 2**24
        return changed, (j, i)

    def afterwards(self, t: int, lanes: list[Lane], text: list[int], contexts: list[Any]) -> None:
        for lane, byte, context in zip(lanes, text, contexts, strict=True):
            if context is not None:
                j, i = context
                self.seen[j][i] += 16
                self.right[j][i] += 16 * (self.byte_at(lane.place) == byte)
        for j in range(16):
            for i in range(48):
                if self.seen[j][i] > 16384:
                    self.seen[j][i] >>= 1
                    self.right[j][i] >>= 1
        for n, (lane, byte) in enumerate(zip(lanes, text, strict=True)):
            if lane.place is not None and self.byte_at(lane.place) == byte:
                lane.place, lane.length = lane.place + self.lanes, lane.length + 1
            else:
                lane.place, lane.length = None, 0
            lane.key = (256 * lane.key + byte) % 2**40
            self.text[t * self.lanes + n] = byte
        if t < 4:
            return
        found = []
        for n, lane in enumerate(lanes):
            x = lane.key * 0x9E3779B97F4A7C15 % 2**64
            slot, check = x >> (64 - self.bits), (x >> 20) % 2**20
            if lane.place is None and slot in self.slots and self.slots[slot][1] == check:
                lane.place = self.slots[slot][0]
            found.append((slot, ((t + 1) * self.lanes + n, check)))
        for slot, entry in found:
            self.slots[slot] = max(self.slots.get(slot, (-1, -1)), entry)


def decode_block(model: dict[str, Any], payload: bytes, n: int, lanes: int, adaptive: bool) -> bytes:
    T = -(-n // lanes)
    B = -(-n // T)
    symbols = bytes.fromhex(model["facts"]["alphabet"]["bytes"])
    symbol_of = {byte: k for k, byte in enumerate(symbols)}
    outside = [byte for byte in range(256) if byte not in symbol_of]
    N = model["facts"]["alphabet"]["size"]
    coder, learner, matcher = Coder(payload), Learner(model, B), Matcher(B, T)
    all_lanes, out = [Lane(model) for _ in range(B)], bytearray(B * T)
    for t in range(T):
        active = all_lanes if (B - 1) * T + t < n else all_lanes[:-1]
        plain, contexts, xs, views, text = [], [], [], [], []
        changed = []
        for lane in active:
            h = lane.seen(model)
            logits = half_up(model["b_out"] * 2**24 + product(model["W_out"], h) * model["R_out"], 24)
            if adaptive:
                views.append(learner.view(h))
                logits = logits + learner.says(views[-1])
            plain.append(table(logits, lane.escape if outside else None))
            v, context = matcher.change(lane, plain[-1], symbol_of) if adaptive else (plain[-1], None)
            changed.append(v)
            contexts.append(context)
        xs = [coder.entry(v) for v in changed]
        uniform = [k * 2**24 // len(outside) for k in range(len(outside) + 1)] if outside else []
        text = [outside[coder.entry(uniform)] if x == N else symbols[x] for x in xs]
        if adaptive:
            learner.taught(views, plain, xs)
            matcher.afterwards(t, active, text, contexts)
        for k, (lane, x, byte) in enumerate(zip(active, xs, text, strict=True)):
            out[k * T + t] = byte
            lane.escape += (2**22 - lane.escape) >> 5 if x == N else -(lane.escape >> 5)
            lane.move(model, symbol_of.get(ord(" "), 0) if x == N else x)
    return bytes(out[:n])


def checked(data: bytes, size: int) -> tuple[bytes, bytes]:
    piece, (crc,) = data[:size], struct.unpack("<I", data[size : size + 4])
    assert zlib.crc32(piece) == crc
    return piece, data[size + 4 :]


def decompress(model: dict[str, Any], archive: bytes) -> bytes:
    """The content of an archive, every check made."""
    header, rest = checked(archive, 56)
    assert header[:8] == b"\x89MUL\r\n\x1a\n"
    version, flags, block, length = struct.unpack("<HHIQ", header[8:24])
    assert (version, flags >> 1) == (1, 0)
    assert header[24:] == model["fingerprint"]
    content, number = b"", 0
    while True:
        head, rest = checked(rest, 20)
        kind, zero, lanes, its_number, n, size, crc = struct.unpack("<BBHIIII", head)
        assert (zero, its_number) == (0, number)
        number += 1
        payload, rest = checked(rest, size)
        if kind == 255:
            break
        assert 1 <= n <= block
        piece = payload if kind == 0 else decode_block(model, payload, n, lanes, bool(flags & 1))
        assert zlib.crc32(piece) == crc
        content += piece
    assert (rest, payload) == (b"", struct.pack("<Q", len(content)) + hashlib.sha256(content).digest())
    assert length in (len(content), 2**64 - 1)
    return content
