"""One block of a file, cut into lanes that are coded in lock-step: bytes to a coded stream and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from mulstm.codec.coder import decoder, encoder, uniform
from mulstm.codec.network import ESCAPE_BITS, Network
from mulstm.data.alphabet import Alphabet

Progress = Callable[[int], None]  # told how many bytes are done since it was last called

_ROWS = 1024  # tables computed at once by the encoder, which knows the text beforehand
_ESCAPE_START = 1 << (ESCAPE_BITS - 10)
_ESCAPE_RATE = 5


@dataclass(frozen=True)
class Bytes:
    """Which bytes are symbols of the model, and how the others are spelled."""

    symbol_of: NDArray[np.int16]  # (256)  -1: none
    byte_of: NDArray[np.uint8]  # (N)
    outside: NDArray[np.uint8]  # the bytes that need the escape, in order
    stand_in: int  # what the model is told instead of such a byte

    @classmethod
    def of(cls, alphabet: Alphabet) -> Bytes:
        """The bytes that have a symbol of their own; one that only shares a symbol would not come back."""
        own = np.frombuffer(alphabet.symbols, dtype=np.uint8)
        symbol_of = np.full(256, -1, dtype=np.int16)
        symbol_of[own] = np.arange(len(own), dtype=np.int16)
        byte_of = np.zeros(alphabet.size, dtype=np.uint8)
        byte_of[: len(own)] = own
        outside = np.flatnonzero(symbol_of < 0).astype(np.uint8)
        return cls(symbol_of, byte_of, outside, max(0, int(symbol_of[ord(" ")])))


def cut(length: int, lanes: int) -> tuple[int, int]:
    """How many lanes a block of that length really has, and how many bytes each but the last."""
    steps = -(-length // lanes)
    return -(-length // steps), steps


class _Escapes:
    """How likely the next byte is to be outside the alphabet, for each lane, counting 2**-22."""

    def __init__(self, lanes: int) -> None:
        self.share = np.full(lanes, _ESCAPE_START, dtype=np.int64)

    def update(self, escaped: NDArray[np.bool_]) -> None:
        to = np.where(escaped, ((1 << ESCAPE_BITS) - self.share) >> _ESCAPE_RATE, -(self.share >> _ESCAPE_RATE))
        self.share += to


def encode(
    network: Network, data: bytes, lanes: int, *, coder: str = "auto", progress: Progress | None = None
) -> bytes:
    """The coded stream of a block that is not empty."""
    bytes_ = Bytes.of(network.model.alphabet)
    B, L = cut(len(data), lanes)
    text = np.zeros(B * L, dtype=np.uint8)
    text[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    text = text.reshape(B, L)
    last = len(data) - (B - 1) * L  # steps in which the last lane takes part
    state, escapes = network.start(B), _Escapes(B) if len(bytes_.outside) else None
    out, T = encoder(coder), max(1, _ROWS // B)
    with torch.inference_mode():
        for low in range(0, L, T):
            piece = np.ascontiguousarray(text[:, low : low + T].T)  # (T, B)
            symbols = bytes_.symbol_of[piece]
            escaped, n = symbols < 0, len(piece)
            fed = torch.from_numpy(np.where(escaped, bytes_.stand_in, symbols).astype(np.int64))
            fed = fed.to(network.device)
            seen, shares = [], []
            for t in range(n):
                seen.append(network.output(state))
                if escapes is not None:
                    shares.append(escapes.share.copy())
                    escapes.update(escaped[t])
                state = network.step(fed[t], state)
            escape = torch.from_numpy(np.concatenate(shares)).to(network.device) if shares else None
            begins = network.shares(torch.cat(seen, dim=1), escape).cpu().numpy()
            entry = np.where(escaped, len(bytes_.byte_of), symbols).astype(np.int32)
            taking_part = np.full(n, B)
            taking_part[max(0, last - low) :] = B - 1
            _put(out, begins.reshape(n, B, -1), entry, piece, escaped, taking_part, bytes_)
            if progress is not None:
                progress(int(taking_part.sum()))
    return out.finish()


def _put(out, begins, entry, piece, escaped, taking_part, bytes_) -> None:
    n, B = entry.shape
    if not escaped.any():
        mask = np.arange(B) < taking_part[:, None]
        out.put(begins[mask], entry[mask])
        return
    flat = uniform(max(1, len(bytes_.outside)))
    for t in range(n):
        k = int(taking_part[t])
        out.put(begins[t, :k], entry[t, :k])
        spelled = piece[t, :k][escaped[t, :k]]
        if len(spelled):
            index = np.searchsorted(bytes_.outside, spelled).astype(np.int32)
            out.put(np.broadcast_to(flat, (len(spelled), len(flat))), index)


def decode(
    network: Network,
    stream: bytes,
    length: int,
    lanes: int,
    *,
    coder: str = "auto",
    progress: Progress | None = None,
) -> bytes:
    """The `length` bytes of a coded stream."""
    bytes_ = Bytes.of(network.model.alphabet)
    B, L = cut(length, lanes)
    last = length - (B - 1) * L
    text = np.zeros((B, L), dtype=np.uint8)
    state, escapes = network.start(B), _Escapes(B) if len(bytes_.outside) else None
    given, flat = decoder(stream, coder), uniform(max(1, len(bytes_.outside)))
    N = len(bytes_.byte_of)
    x = np.zeros(B, dtype=np.int64)
    with torch.inference_mode():
        for t in range(L):
            k = B if t < last else B - 1
            escape = None if escapes is None else torch.from_numpy(escapes.share).to(network.device)
            begins = network.shares(network.output(state), escape).cpu().numpy()
            x[:k] = given.get(begins[:k])
            escaped = x == N
            text[:, t] = bytes_.byte_of[np.where(escaped, 0, x)]
            if escapes is not None:
                if escaped.any():
                    rows = np.broadcast_to(flat, (int(escaped.sum()), len(flat)))
                    text[escaped, t] = bytes_.outside[given.get(rows)]
                    x[escaped] = bytes_.stand_in
                escapes.update(escaped)
            if t + 1 < L:
                state = network.step(torch.from_numpy(x).to(network.device), state)
            if progress is not None:
                progress(k)
    return text.tobytes()[:length]
