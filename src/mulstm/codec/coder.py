"""The range coder: symbols' shares to words and back, by compiled loops, constriction or plain Python."""

from __future__ import annotations

from bisect import bisect_right
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mulstm.codec import kernels
from mulstm.codec.tables import TOTAL_BITS
from mulstm.errors import BackendError, CheckFailedError, ExtraError

Whole = NDArray[Any]  # of whole numbers
KINDS = ("numba", "constriction", "python")
# The decoder begins with two words and takes one more for each that the encoder had written by then.
PAST = 2
_WORD = 0xFFFFFFFF
_STATE = 0xFFFFFFFFFFFFFFFF


class Encoder(Protocol):
    """Takes symbols in the order in which they will be asked for."""

    whole: bool  # whether tables must be given whole: else two columns will do, each symbol's own share

    def put(self, begins: Whole, symbols: Whole) -> None:
        """The symbols (n) with their tables (n, entries + 1)."""

    def finish(self) -> bytes:
        """All words, little-endian."""


class Decoder(Protocol):
    """Gives the symbols back in the same order."""

    def get(self, begins: Whole) -> Whole:
        """One symbol for each table."""


def encoder(kind: str = "auto") -> Encoder:
    """A new encoder. All kinds write the same bytes, or refuse to."""
    kind = require_coder(kind)
    if kind == "numba":
        return _CompiledEncoder()
    return _ConstrictionEncoder() if kind == "constriction" else PythonEncoder()


def decoder(data: bytes, kind: str = "auto") -> Decoder:
    """A decoder of what an encoder of any kind has written."""
    if len(data) % 4:
        raise CheckFailedError(
            f"A coded stream of {len(data)} bytes is not made of whole words. Take another copy of it."
        )
    kind = require_coder(kind)
    if kind == "numba":
        return _CompiledDecoder(data)
    return _ConstrictionDecoder(data) if kind == "constriction" else PythonDecoder(data)


def require_coder(kind: str) -> str:
    """The kind that "auto" is here, or the one asked for, if it is there."""
    at_hand = {"numba": kernels.find() is not None, "constriction": find_spec("constriction") is not None}
    if kind == "auto":
        # Not constriction's: it wants every table whole, and takes longer than Python's for it.
        return "numba" if at_hand["numba"] else "python"
    if kind not in KINDS:
        raise BackendError(
            f"There is no coder {kind!r}. Choose auto, {', '.join(KINDS[:-1])} or {KINDS[-1]}."
        )
    if not at_hand.get(kind, True):
        raise ExtraError(f"{kind} is not installed", "codec")
    return kind


def most_symbols(size: int, entries: int) -> int:
    """An upper bound of what `size` bytes can code in tables of so many entries or more.

    No entry's share is below 2**-24, so none is above 1 - (entries - 1) / 2**24, and each symbol narrows the
    coder's range by (entries - 1) / 2**24 bits or more. Of the range's 64 bits 32 are left at the end at
    least; all others were written.
    """
    return ((8 * size + 32) << TOTAL_BITS) // max(1, entries - 1)


def uniform(n: int) -> Whole:
    """The table of n equally likely entries, (n + 1)."""
    return ((np.arange(n + 1, dtype=np.int64) << TOTAL_BITS) // n).astype(np.int32)


class PythonEncoder:
    """A range coder with 64 bits of state and words of 32; carries go into words already written."""

    whole = False

    def __init__(self, low: int = 0, span: int = _STATE, words: list[int] | None = None) -> None:
        self._low, self._range = low, span
        self._words: list[int] = words or []

    def put(self, begins: Whole, symbols: Whole) -> None:
        rows = np.arange(len(symbols))
        lefts, rights = begins[rows, symbols].tolist(), begins[rows, symbols + 1].tolist()
        low, span, words = self._low, self._range, self._words
        for left, right in zip(lefts, rights, strict=True):
            scale = span >> TOTAL_BITS
            low += scale * left
            span = scale * (right - left)
            if low > _STATE:
                low &= _STATE
                _carry(words)
            if span <= _WORD:
                words.append(low >> 32)
                low = (low << 32) & _STATE
                span <<= 32
        self._low, self._range = low, span

    def finish(self) -> bytes:
        words = list(self._words)
        if self._range != _STATE:
            # The shortest word that lies inside the last interval, whatever comes after it.
            point = self._low + _WORD
            if point > _STATE:
                _carry(words)
            words.append((point & _STATE) >> 32)
            if (self._low + self._range & _STATE) >> 32 == words[-1]:
                words.append(0)
        return np.array(words, dtype="<u4").tobytes()


def _carry(words: list[int]) -> None:
    k = len(words) - 1
    while words[k] == _WORD:
        words[k] = 0
        k -= 1
    words[k] += 1


class PythonDecoder:
    """The other half; words past the end count as zero, and are no more than PAST."""

    def __init__(self, data: bytes) -> None:
        self._words = np.frombuffer(data, dtype="<u4").tolist()
        self._words.reverse()
        self._past = 0
        self._range = _STATE
        self._point = self._next() << 32 | self._next()  # less what has been decoded

    def _next(self) -> int:
        if self._words:
            return int(self._words.pop())
        self._past += 1
        if self._past > PAST:
            raise _broken()
        return 0

    def get(self, begins: Whole) -> Whole:
        n, width = begins.shape
        table = memoryview(np.ascontiguousarray(begins).reshape(-1).data)
        symbols = np.empty(n, dtype=np.int64)
        point, span = self._point, self._range
        for row in range(n):
            first = row * width
            scale = span >> TOTAL_BITS
            place = point // scale
            if place >> TOTAL_BITS:
                raise _broken()
            k = bisect_right(table, place, first, first + width) - 1
            left = table[k]
            point -= scale * left
            span = scale * (table[k + 1] - left)
            if span <= _WORD:
                point = point << 32 | self._next()
                span <<= 32
            symbols[row] = k - first
        self._point, self._range = point, span
        return symbols


class _CompiledEncoder:
    whole = False

    def __init__(self) -> None:
        self._loops: Any = kernels.find()
        self._count = 0
        self._state = np.array([0, _STATE], dtype=np.uint64)
        self._words = np.zeros(1 << 12, dtype=np.uint32)

    def put(self, begins: Whole, symbols: Whole) -> None:
        while self._count + len(symbols) > len(self._words):
            self._words = np.concatenate([self._words, np.zeros_like(self._words)])
        rows = np.arange(len(symbols))
        lefts, rights = (begins[rows, k].astype(np.int64) for k in (symbols, symbols + 1))
        self._count = self._loops.put(lefts, rights, self._state, self._words, self._count)

    def finish(self) -> bytes:
        low, span = map(int, self._state)
        return PythonEncoder(low, span, self._words[: self._count].tolist()).finish()


class _CompiledDecoder:
    def __init__(self, data: bytes) -> None:
        self._loops: Any = kernels.find()
        self._at = 2
        words = np.frombuffer(data, dtype="<u4").astype(np.uint32)
        first, second = (int(words[k]) if k < len(words) else 0 for k in range(2))
        self._words, self._state = words, np.array([first << 32 | second, _STATE], dtype=np.uint64)

    def get(self, begins: Whole) -> Whole:
        symbols = np.empty(len(begins), dtype=np.int64)
        self._at = self._loops.get(begins, self._state, self._words, self._at, symbols)
        if not 0 <= self._at <= len(self._words) + PAST:
            raise _broken()
        return symbols


class _ConstrictionEncoder:
    whole = True

    def __init__(self) -> None:
        self._family, queue = _library()
        self._encoder = queue.RangeEncoder()

    def put(self, begins: Whole, symbols: Whole) -> None:
        if len(symbols):
            self._encoder.encode(np.ascontiguousarray(symbols, dtype=np.int32), self._family, _counts(begins))

    def finish(self) -> bytes:
        return bytes(self._encoder.get_compressed().astype("<u4").tobytes())


class _ConstrictionDecoder:
    def __init__(self, data: bytes) -> None:
        self._family, queue = _library()
        self._decoder = queue.RangeDecoder(np.frombuffer(data, dtype="<u4").astype(np.uint32))

    def get(self, begins: Whole) -> Whole:
        if not len(begins):
            return np.empty(0, dtype=np.int64)
        try:
            symbols = self._decoder.decode(self._family, _counts(begins))
        except AssertionError as fault:
            raise _broken() from fault
        return np.asarray(symbols, dtype=np.int64)


def _library() -> tuple[Any, Any]:
    import constriction

    return constriction.stream.model.Categorical(perfect=False), constriction.stream.queue


def _counts(begins: Whole) -> NDArray[np.float64]:
    """Whole numbers that sum to 2**24 - entries: constriction adds one to each and rounds nothing."""
    if begins.shape[1] == 2:  # of the one byte that an alphabet lacks
        raise BackendError("constriction knows no table of one entry. Say --coder numba, or python.")
    counts: NDArray[np.float64] = (np.diff(begins, axis=1) - 1).astype(np.float64)
    return counts


def _broken() -> CheckFailedError:
    return CheckFailedError("The coded stream is damaged. Take another copy of the archive.")
