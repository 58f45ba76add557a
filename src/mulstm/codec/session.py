"""One block being coded: the lanes' tables, then their bytes, step after step, in either direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mulstm.codec.learner import Learner
from mulstm.codec.matcher import ORDER, Matcher
from mulstm.codec.network import ESCAPE_BITS, IntegerState, Network
from mulstm.data.alphabet import Alphabet

_ESCAPE_START = 2.0 ** (ESCAPE_BITS - 10)
_ESCAPE_RATE = 2.0**-5
_RECORDED = 200  # steps that must be left for a recording to pay


@dataclass(frozen=True)
class Spelling:
    """Which bytes are symbols of the model, and how the others are spelled."""

    symbol_of: NDArray[np.int64]  # (256)  -1: none
    byte_of: NDArray[np.uint8]  # (N)
    outside: NDArray[np.uint8]  # the bytes that need the escape, in order
    stand_in: int  # what the model is told instead of such a byte

    @classmethod
    def of(cls, alphabet: Alphabet) -> Spelling:
        """Only bytes with a symbol of their own: one that shares another's would not come back."""
        own = np.frombuffer(alphabet.symbols, dtype=np.uint8)
        symbol_of = np.full(256, -1, dtype=np.int64)
        symbol_of[own] = np.arange(len(own))
        byte_of = np.zeros(alphabet.size, dtype=np.uint8)
        byte_of[: len(own)] = own
        outside = np.flatnonzero(symbol_of < 0).astype(np.uint8)
        return cls(symbol_of, byte_of, outside, max(0, int(symbol_of[ord(" ")])))


def cut(length: int, lanes: int) -> tuple[int, int, int]:
    """Lanes that a block of that length really has, steps of all of them, and steps of the last one."""
    steps = -(-length // lanes)
    lanes = -(-length // steps)
    return lanes, steps, length - (lanes - 1) * steps


class Session:
    """All lanes of a block. For each step: ask for `tables`, settle the entries, `feed` them.

    Everything that lasts from step to step stays where it is in memory, so that on a graphics card one step,
    recorded once, can be played again and again: launching its hundred small kernels one by one takes longer
    than they do.
    """

    def __init__(self, network: Network, length: int, lanes: int, adaptive: bool) -> None:
        self._network, device = network, network.device
        self.lanes, self.steps, self._last = cut(length, lanes)
        self.taking_part, self._t = self.lanes, 0
        self.spelling = Spelling.of(network.model.alphabet)
        self.entries = network.model.alphabet.size  # the entry of this number is the escape
        self._state: list[IntegerState] = network.start(self.lanes)
        self._escape: Tensor | None = None
        if len(self.spelling.outside):
            self._escape = torch.full((self.lanes,), _ESCAPE_START, dtype=torch.float64, device=device)
        self._learner = Learner(network, self.lanes) if adaptive else None
        symbol_of = torch.from_numpy(self.spelling.symbol_of).to(device)
        self._matcher = (
            Matcher(self.lanes, self.lanes * self.steps, symbol_of, network.loops) if adaptive else None
        )
        width = self.entries + 1 + (self._escape is not None)
        self._plain = torch.zeros(self.lanes, width, dtype=torch.float64, device=device)
        self._begins = torch.zeros_like(self._plain) if adaptive else self._plain
        self._settled = torch.zeros(self.lanes, dtype=torch.int64, device=device)
        self._text = torch.zeros(self.lanes, dtype=torch.uint8, device=device)
        self._graph: Any = None
        self._eager = 0  # steps that were not played from a recording, since the number of lanes changed
        self._make_tables()

    def tables(self) -> Tensor:
        """For each lane that takes part, where each entry's share begins: (B, entries + 1), until `feed`."""
        return self._begins

    def feed(self, entries: Tensor, text: Tensor) -> None:
        """The entries (B) int64 that the lanes settled on, and the bytes (B) uint8 that they stand for."""
        self._t += 1
        if self._t == self.steps:
            return
        self._settled.copy_(entries, non_blocking=True)
        if self._learner is not None and self._matcher is not None:
            self._text.copy_(text, non_blocking=True)
            self._learner.tick(self.taking_part)
            self._matcher.tick()
        if self._t == self._last:
            self._move_on()
            self._end_last_lane()
            self._make_tables()
        else:
            self._play()

    def _play(self) -> None:
        if self._graph is None and self._worth_recording():
            self._graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream(self._network.device)  # type: ignore[no-untyped-call]
            with torch.cuda.graph(self._graph, stream=stream):
                self._move_on()
                self._make_tables()
        if self._graph is not None:
            self._graph.replay()
            return
        self._move_on()
        self._make_tables()
        self._eager += 1

    def _worth_recording(self) -> bool:
        until = self._last if self._t < self._last else self.steps
        return self._network.device.type == "cuda" and self._eager >= ORDER and until - self._t > _RECORDED

    def _make_tables(self) -> None:
        h = self._network.output(self._state)
        said = None if self._learner is None else self._learner.correction(h)
        self._network.tables(h, said, self._escape, self._plain)
        if self._matcher is not None:
            self._matcher.refine(self._plain, self._begins)

    def _move_on(self) -> None:
        entries = self._settled
        if self._learner is not None and self._matcher is not None:
            self._learner.learn(self._plain, entries)
            self._matcher.learn(self._text)
        if self._escape is not None:
            escaped = entries == self.entries
            up = ((2.0**ESCAPE_BITS - self._escape) * _ESCAPE_RATE).floor_()
            down = (self._escape * _ESCAPE_RATE).floor_()
            self._escape += torch.where(escaped, up, -down)
            entries = entries.masked_fill(escaped, self.spelling.stand_in)
        self._network.step(entries, self._state)

    def _end_last_lane(self) -> None:
        """The last lane may be shorter: from here on it is as if it had never been there."""
        k = self.taking_part = self.lanes - 1
        self._graph, self._eager = None, 0
        self._state = [IntegerState(s.h[:, :k].contiguous(), s.c[:k]) for s in self._state]
        self._plain, self._begins = self._plain[:k], self._begins[:k]
        self._settled, self._text = self._settled[:k], self._text[:k]
        if self._escape is not None:
            self._escape = self._escape[:k]
        if self._learner is not None and self._matcher is not None:
            self._learner.keep(k)
            self._matcher.keep(k)
