"""One block being coded: the lanes' tables, then their bytes, step after step, in either direction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mulstm.codec.learner import Learner
from mulstm.codec.matcher import Matcher
from mulstm.codec.network import ESCAPE_BITS, IntegerState, Network
from mulstm.data.alphabet import Alphabet

_ESCAPE_START = 2.0 ** (ESCAPE_BITS - 10)
_ESCAPE_RATE = 2.0**-5


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
    """All lanes of a block. For each step: ask for `tables`, settle the entries, `feed` them."""

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
        self._matcher = Matcher(self.lanes, self.lanes * self.steps, symbol_of) if adaptive else None
        self._plain: Tensor | None = None

    def tables(self) -> Tensor:
        """For each lane that takes part, where each entry's share begins: (B, entries + 1)."""
        if self._t == self._last:
            self._end_last_lane()
        h = self._network.output(self._state)
        logits = self._network.logits(h)
        if self._learner is not None:
            logits += self._learner.correction(h)
        begins = self._plain = self._network.shares(logits, self._escape)
        return begins if self._matcher is None else self._matcher.refine(begins)

    def feed(self, entries: Tensor, text: Tensor) -> None:
        """The entries (B) int64 that the lanes settled on, and the bytes (B) uint8 that they stand for."""
        escaped = entries == self.entries
        if self._learner is not None and self._plain is not None:
            self._learner.learn(self._plain, entries)
        if self._matcher is not None:
            self._matcher.learn(text)
        if self._escape is not None:
            up = ((2.0**ESCAPE_BITS - self._escape) * _ESCAPE_RATE).floor_()
            down = (self._escape * _ESCAPE_RATE).floor_()
            self._escape = self._escape + torch.where(escaped, up, -down)
            entries = entries.masked_fill(escaped, self.spelling.stand_in)
        self._t += 1
        if self._t < self.steps:
            self._state = self._network.step(entries, self._state)

    def _end_last_lane(self) -> None:
        """The last lane may be shorter: from here on it is as if it had never been there."""
        k = self.taking_part = self.lanes - 1
        self._state = [IntegerState(s.h[:, :k].contiguous(), s.c[:k]) for s in self._state]
        if self._escape is not None:
            self._escape = self._escape[:k]
        if self._matcher is not None:
            self._matcher.keep(k)
