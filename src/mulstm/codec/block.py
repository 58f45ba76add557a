"""One block of a file, cut into lanes that are coded in lock-step: bytes to a coded stream and back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mulstm.codec.coder import Encoder, decoder, encoder, uniform
from mulstm.codec.network import Network
from mulstm.codec.session import Session

Progress = Callable[[int], None]  # told how many more bytes are done

_TOGETHER = 32  # steps whose tables leave the device at once, where the text is known beforehand


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
    session = Session(network, len(data), lanes, adaptive)
    B, L = session.lanes, session.steps
    text = np.zeros(B * L, dtype=np.uint8)
    text[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    text = np.ascontiguousarray(text.reshape(B, L).T)  # (L, B)
    out = encoder(coder)
    with torch.inference_mode():
        for low in range(0, L, _TOGETHER):
            piece = text[low : low + _TOGETHER]
            symbols = session.spelling.symbol_of[piece]
            entries = np.where(symbols < 0, session.entries, symbols)
            fed = torch.from_numpy(entries).to(network.device)
            bytes_ = torch.from_numpy(piece).to(network.device)
            tables = []
            for t in range(len(piece)):
                tables.append(session.tables())
                k = session.taking_part
                session.feed(fed[t, :k], bytes_[t, :k])
            for t, begins in enumerate(tables):
                _put(out, _whole(begins), entries[t], piece[t], session)
            if progress is not None:
                progress(sum(map(len, tables)))
    return out.finish()


def _put(
    out: Encoder,
    begins: NDArray[np.int64],
    entries: NDArray[np.int64],
    text: NDArray[np.uint8],
    session: Session,
) -> None:
    """The entries of one step, then the bytes that were escaped in it."""
    entries, text = entries[: len(begins)], text[: len(begins)]
    out.put(begins, entries)
    escaped = entries == session.entries
    if escaped.any():
        outside = session.spelling.outside
        rows = np.broadcast_to(uniform(len(outside)), (int(escaped.sum()), len(outside) + 1))
        out.put(rows, np.searchsorted(outside, text[escaped]))


def _whole(begins: Tensor) -> NDArray[np.int64]:
    """Tables as the coder wants them."""
    return begins.to(torch.int64).cpu().numpy()


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
    session = Session(network, length, lanes, adaptive)
    text = np.zeros((session.steps, session.lanes), dtype=np.uint8)
    given, outside = decoder(stream, coder), session.spelling.outside
    byte_of = np.append(session.spelling.byte_of, np.uint8(0))
    with torch.inference_mode():
        for row in text:
            begins = _whole(session.tables())
            entries = given.get(begins)
            settled = row[: len(begins)]
            settled[:] = byte_of[entries]
            escaped = entries == session.entries
            if escaped.any():
                rows = np.broadcast_to(uniform(len(outside)), (int(escaped.sum()), len(outside) + 1))
                settled[escaped] = outside[given.get(rows)]
            session.feed(
                torch.from_numpy(entries).to(network.device), torch.from_numpy(settled).to(network.device)
            )
            if progress is not None:
                progress(len(begins))
    return np.ascontiguousarray(text.T).tobytes()[:length]
