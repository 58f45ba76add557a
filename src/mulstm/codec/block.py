"""One block of a file, cut into lanes that are coded in lock-step: bytes to a coded stream and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mulstm.codec.coder import Encoder, decoder, encoder, most_symbols, uniform
from mulstm.codec.network import Network
from mulstm.codec.session import Session
from mulstm.errors import CheckFailedError

Progress = Callable[[int], None]  # told how many more bytes are done

_TOGETHER = 64  # steps whose shares leave the device at once, where the text is known beforehand


def encode(
    network: Network,
    data: bytes,
    lanes: int,
    adaptive: bool,
    *,
    coder: str = "auto",
    progress: Progress | None = None,
) -> bytes:
    """The coded stream of a block that is not empty."""
    with torch.inference_mode():
        session = Session(network, len(data), lanes, adaptive)
        B, L = session.lanes, session.steps
        text = np.zeros(B * L, dtype=np.uint8)
        text[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        text = np.ascontiguousarray(text.reshape(B, L).T)  # (L, B)
        out = encoder(coder)
        for low in range(0, L, _TOGETHER):
            piece = text[low : low + _TOGETHER]
            done = _encode_piece(session, network.device, piece, out)
            if progress is not None:
                progress(done)
    return out.finish()


def _encode_piece(session: Session, device: torch.device, piece: NDArray[np.uint8], out: Encoder) -> int:
    """Some steps of all lanes; how many bytes they have."""
    symbols = session.spelling.symbol_of[piece]
    entries = np.where(symbols < 0, session.entries, symbols)
    fed, text = torch.from_numpy(entries).to(device), torch.from_numpy(piece).to(device)
    own = torch.stack([fed, fed + 1], dim=2)
    shares = torch.zeros(own.shape, dtype=torch.float64, device=device)
    parts = []
    for t in range(len(piece)):
        begins = session.tables()
        k = session.taking_part
        parts.append(k)
        if out.whole:
            _put(out, _whole(begins), entries[t], entries[t], piece[t], session)
        else:
            torch.gather(begins, 1, own[t, :k], out=shares[t, :k])
        session.feed(fed[t, :k], text[t, :k])
    if not out.whole:
        zeros = np.zeros(piece.shape[1], dtype=np.int64)
        for t, pairs in enumerate(_whole(shares)):
            _put(out, pairs[: parts[t]], zeros, entries[t], piece[t], session)
    return sum(parts)


def _put(
    out: Encoder,
    begins: NDArray[Any],
    columns: NDArray[np.int64],
    entries: NDArray[np.int64],
    text: NDArray[np.uint8],
    session: Session,
) -> None:
    """The entries of one step, found in `columns` of the tables, then the bytes that were escaped."""
    B = len(begins)
    out.put(begins, columns[:B])
    escaped = entries[:B] == session.entries
    if escaped.any():
        outside = session.spelling.outside
        rows = np.tile(uniform(len(outside)), (int(escaped.sum()), 1))
        out.put(rows, np.searchsorted(outside, text[:B][escaped]))


def _whole(begins: Tensor) -> NDArray[Any]:
    """Shares as the coder wants them: whole numbers, at most 2**24."""
    return begins.to(torch.int32).cpu().numpy()


def decode(
    network: Network,
    stream: bytes,
    length: int,
    lanes: int,
    adaptive: bool,
    *,
    coder: str = "auto",
    progress: Progress | None = None,
) -> bytes:
    """The `length` bytes of a coded stream."""
    if length > most_symbols(len(stream), network.model.alphabet.size):
        raise CheckFailedError(
            f"A block of {len(stream):,} bytes cannot hold {length:,}. Take another copy of the archive."
        )
    with torch.inference_mode():
        session = Session(network, length, lanes, adaptive)
        text = np.zeros((session.steps, session.lanes), dtype=np.uint8)
        given, outside = decoder(stream, coder), session.spelling.outside
        byte_of = np.append(session.spelling.byte_of, np.uint8(0))
        from_device = _Host(session.tables().shape, torch.int32, network.device)
        settled = _Host((session.lanes,), torch.int64, network.device)
        plain = _Host((session.lanes,), torch.uint8, network.device)
        for row in text:
            k = session.taking_part
            entries = given.get(from_device.fetch(session.tables()))
            settled.array[:k] = entries
            row[:k] = byte_of[entries]
            escaped = entries == session.entries
            if escaped.any():
                rows = np.tile(uniform(len(outside)), (int(escaped.sum()), 1))
                row[:k][escaped] = outside[given.get(rows)]
            plain.array[:k] = row[:k]
            session.feed(settled.tensor[:k], plain.tensor[:k])
            if progress is not None:
                progress(k)
    return np.ascontiguousarray(text.T).tobytes()[:length]


class _Host:
    """Memory on this side that a graphics card reads and writes by itself."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.array = self.tensor.numpy()

    def fetch(self, tensor: Tensor) -> NDArray[Any]:
        """A tensor of the device, once it is there; it may have fewer rows than there is room for."""
        k = len(tensor)
        self.tensor[:k].copy_(tensor.to(self.tensor.dtype), non_blocking=True)
        if tensor.device.type == "cuda":
            torch.cuda.current_stream(tensor.device).synchronize()
        array: NDArray[Any] = self.array[:k]
        return array
