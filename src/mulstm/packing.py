"""Many records of mixed lengths through one model: every lane always full, no padding, bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mulstm.errors import DataError
from mulstm.nn.model import LanguageModel
from mulstm.nn.packed import check_kernels
from mulstm.ops.reference import State

Symbols = npt.NDArray[np.integer]
States = tuple[State, ...]

LANES = 128
FEWEST_LANES = 8
LONGEST_CHUNK = 32
# How far reading runs ahead, so that long records can start first: whichever is reached sooner.
AHEAD_RECORDS = 4096
AHEAD_SYMBOLS = 4_000_000


@dataclass(frozen=True)
class Packed:
    """One chunk. A record ends at the chunk's last column, always, so that its state can be read there;
    what stands before its first symbol is what the lane held before, or nothing."""

    x: npt.NDArray[np.int64]  # (B, T)
    first: npt.NDArray[np.bool_]  # (B, T)  where a record begins
    record: list[int]  # (B,)  which record a lane is reading
    start: npt.NDArray[np.int64]  # (B,)  the place in the record of the lane's first column; < 0: not begun
    ended: list[int]  # lanes whose record is over after this chunk
    kept: list[int]  # this chunk's lanes, as places in the chunk before it; new ones come last


@dataclass
class _Lane:
    record: int
    symbols: Symbols
    at: int  # place of the next column; negative before the record begins


def pack(
    records: Iterable[Symbols], *, lanes: int = LANES, chunk: int = 0, ahead: int = AHEAD_RECORDS
) -> Iterator[Packed]:
    """Chunks in which each record is read once, whole; lanes that nothing is left for are dropped.

    Records are taken longest first from those read ahead, so that no long one is left over at the end.
    """
    if lanes < 1:
        raise DataError(f"{lanes} lanes cannot read anything. Give 1 or more.")
    blocks = _blocks(records, ahead)
    queue = next(blocks, [])
    chunk = chunk or _fitting_chunk(queue)
    later = next(blocks, [])
    if not later:
        lanes = min(lanes, _enough_lanes(queue))
    blocks = chain([later], blocks)
    running: list[_Lane] = []
    kept: list[int] = []
    while True:
        while len(running) < lanes and (queue or (queue := next(blocks, []))):
            index, symbols = queue.pop()
            running.append(_Lane(index, symbols, -(-len(symbols) % chunk)))
        if not running:
            return
        packed = _columns(running, chunk, kept)
        yield packed
        over = set(packed.ended)
        kept = [lane for lane in range(len(running)) if lane not in over]
        running = [running[lane] for lane in kept]


def _blocks(records: Iterable[Symbols], ahead: int) -> Iterator[list[tuple[int, Symbols]]]:
    """(place in the input, symbols) of what is read ahead, the longest last."""
    block: list[tuple[int, Symbols]] = []
    total = 0
    for index, symbols in enumerate(records):
        if len(symbols) == 0:
            raise ValueError(f"record {index} has no symbols")
        block.append((index, symbols))
        total += len(symbols)
        if len(block) >= ahead or total >= AHEAD_SYMBOLS:
            yield sorted(block, key=lambda item: (len(item[1]), -item[0]))
            block, total = [], 0
    if block:
        yield sorted(block, key=lambda item: (len(item[1]), -item[0]))


def _fitting_chunk(block: list[tuple[int, Symbols]]) -> int:
    """A record begins anywhere in a chunk, half a chunk is lost on average: about a thirtieth, or less."""
    mean = sum(len(symbols) for _, symbols in block) / max(1, len(block))
    return min(LONGEST_CHUNK, 1 << max(0, int(mean / 16).bit_length() - 1))


def _enough_lanes(block: list[tuple[int, Symbols]]) -> int:
    """With as many lanes all end about when the longest record does: more would only empty sooner, and a
    step of few lanes takes as long as one of several."""
    lengths = [len(symbols) for _, symbols in block]
    return max(FEWEST_LANES, -(-sum(lengths) // max(lengths, default=1)))


def _columns(running: list[_Lane], chunk: int, kept: list[int]) -> Packed:
    B = len(running)
    x = np.zeros((B, chunk), dtype=np.int64)
    first = np.zeros((B, chunk), dtype=bool)
    start = np.array([lane.at for lane in running], dtype=np.int64)
    ended = []
    for b, lane in enumerate(running):
        skip = max(0, -lane.at)
        if lane.at <= 0:
            first[b, skip] = True
        x[b, skip:] = lane.symbols[max(0, lane.at) : lane.at + chunk]
        lane.at += chunk
        if lane.at == len(lane.symbols):
            ended.append(b)
    return Packed(x, first, [lane.record for lane in running], start, ended, kept)


def nats_of(
    packed: Packed, logits: Tensor, targets: Mapping[int, Symbols]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """(B, T): nats of each place's target, 0 where there is none (-1); and where there is one."""
    B, T = packed.x.shape
    y = np.full((B, T), -1, dtype=np.int64)
    for lane, (record, start) in enumerate(zip(packed.record, packed.start.tolist(), strict=True)):
        y[lane, max(0, -start) :] = targets[record][max(0, start) : start + T]
    places = torch.from_numpy(np.maximum(y, 0)).to(logits.device).unsqueeze(-1)
    log_p = torch.log_softmax(logits.double(), dim=-1).gather(-1, places).squeeze(-1)
    return np.where(y >= 0, -log_p.cpu().numpy(), 0.0), y >= 0


Call = Callable[..., tuple[Tensor, States]]


@torch.no_grad()
def run(
    model: LanguageModel, call: Call, records: Iterable[Symbols], **how: Any
) -> Iterator[tuple[Packed, Tensor, State]]:
    """For each chunk what `call` (the model, or model.hidden) gives, (B, T, ...), and the last layer's state.

    Two cores are used best by one large product at a time, so lanes are many and chunks short.
    """
    device = model.device
    states = model.zero_state(0)
    with model.evaluating():
        for packed in pack(records, **how):
            fresh = model.zero_state(len(packed.record) - len(packed.kept))
            rows = torch.tensor(packed.kept, dtype=torch.long, device=device)
            states = tuple(
                State(torch.cat([old.h[rows], new.h]), torch.cat([old.c[rows], new.c]))
                for old, new in zip(states, fresh, strict=True)
            )
            x = torch.from_numpy(packed.x).to(device)
            first = torch.from_numpy(packed.first).to(device) if packed.first.any() else None
            out, states = call(x, states, first=first)
            yield packed, out, states[-1]
    check_kernels(device)
