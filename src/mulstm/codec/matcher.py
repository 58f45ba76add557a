"""What stood after the same bytes the last time may stand there again: how often is counted, exactly."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from mulstm.codec.network import RATIO_BITS
from mulstm.codec.tables import TOTAL_BITS

ORDER = 5  # bytes that must agree for a place to be looked at
_KEY = (1 << (8 * ORDER)) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed number
_CHECK_BITS = 20
_MOST_BITS, _LEAST_BITS = 22, 10
_LENGTHS, _PRICES = 16, 48
_UNIT = 16  # one event, in the counts
_LIMIT = 1 << 14  # counts above are halved
_SURE = 13  # no place is trusted more than 1 - 2**-13


class Matcher:
    """A place to copy from for each lane, among all that the block's lanes have coded."""

    def __init__(self, lanes: int, length: int, symbol_of: Tensor, loops: ModuleType | None = None) -> None:
        device, self._loops = symbol_of.device, loops
        self._lanes, self._t, self._symbol_of = lanes, 0, symbol_of
        self._text = torch.zeros(-(-length // lanes) * lanes, dtype=torch.uint8, device=device)  # time first
        self._bits = min(_MOST_BITS, max(_LEAST_BITS, length.bit_length()))
        self._table = torch.full((1 << self._bits,), -1, dtype=torch.int64, device=device)
        self._place = torch.full((lanes,), -1, dtype=torch.int64, device=device)
        self._length = torch.zeros(lanes, dtype=torch.int64, device=device)
        self._key = torch.zeros(lanes, dtype=torch.int64, device=device)
        self._at = torch.arange(lanes, device=device)  # where the bytes of this step go
        self._seen = torch.full((_LENGTHS * _PRICES,), 2.0 * _UNIT, dtype=torch.float64, device=device)
        # Before anything is known, a place is as good as the network finds its byte likely.
        first = [max(1, (2 * _UNIT * (3 if k % 2 == 0 else 2)) >> (2 + k // 2)) for k in range(_PRICES)]
        self._right = torch.tensor(first * _LENGTHS, dtype=torch.float64, device=device)
        self._context = torch.zeros(lanes, dtype=torch.int64, device=device)
        self._used = torch.zeros(lanes, dtype=torch.bool, device=device)

    def keep(self, lanes: int) -> None:
        """Goes on with the first lanes only."""
        self._place, self._length = self._place[:lanes], self._length[:lanes]
        self._key, self._at = self._key[:lanes], self._at[:lanes]
        self._context, self._used = self._context[:lanes], self._used[:lanes]

    def tick(self) -> None:
        """Another step begins."""
        self._t += 1

    def refine(self, begins: Tensor, refined: Tensor) -> None:
        """The tables with the share of each lane's expected byte set to how often such a place was right."""
        if self._loops is not None:
            mine = (self._place, self._length, self._text, self._symbol_of, self._seen, self._right)
            theirs = (self._context, self._used, refined)
            self._loops.refine(begins.numpy(), *(t.numpy() for t in mine + theirs))
            return
        entry = self._symbol_of[self._expected().long()]
        self._used.copy_((self._place >= 0) & (entry >= 0))
        entry = entry.clamp(min=0)[:, None]
        last = begins.shape[1] - 1
        free = float((1 << TOTAL_BITS) - last)
        p = (begins.gather(1, entry + 1) - begins.gather(1, entry)).squeeze(1)
        self._context.copy_(_length_class(self._length) * _PRICES + _price_class(p))
        # Dividends are below 2**52, as in `Network.shares`.
        right = (self._right[self._context] * free).div_(self._seen[self._context]).floor_()
        a = torch.where(self._used, right.clamp_(1, free - free // (1 << _SURE)), p - 1)
        ratio = ((free - a) * 2.0**RATIO_BITS).div_((free - (p - 1)).clamp_(min=1)).floor_()
        k = torch.arange(last + 1, dtype=torch.float64, device=begins.device)
        after = (k > entry).double()
        u = torch.addcmul(begins - k, after, (p - 1)[:, None], value=-1)
        u = u.mul_((ratio * 2.0**-RATIO_BITS)[:, None]).floor_().addcmul_(after, a[:, None])
        torch.add(u, k, out=refined)
        refined[:, -1] = 1 << TOTAL_BITS

    def learn(self, text: Tensor) -> None:
        """Counts who was right about the bytes (B) now known, and looks for places for the next ones."""
        if self._loops is not None:
            mine = (self._place, self._length, self._key, self._text, self._table, self._seen, self._right)
            arrays = (t.numpy() for t in (*mine, self._context, self._used))
            self._loops.match(text.numpy(), self._t - 1, self._lanes, self._bits, *arrays)
            return
        right = self._expected() == text
        event = self._used.double() * _UNIT
        self._seen.index_add_(0, self._context, event)
        self._right.index_add_(0, self._context, event * right)
        half = torch.where(self._seen > _LIMIT, 0.5, 1.0)
        self._seen.mul_(half).floor_()
        self._right.mul_(half).floor_()
        self._text.scatter_(0, self._at, text)
        self._at += self._lanes
        on = (self._place >= 0) & right
        self._place.copy_(torch.where(on, self._place + self._lanes, -1))
        self._length.copy_(torch.where(on, self._length + 1, 0))
        self._key.mul_(256).add_(text).bitwise_and_(_KEY)
        if self._t >= ORDER:
            self._look()

    def _look(self) -> None:
        mixed = self._key * _MULTIPLIER
        slot = (mixed >> (64 - self._bits)) & ((1 << self._bits) - 1)
        check = (mixed >> _CHECK_BITS) & ((1 << _CHECK_BITS) - 1)
        found = self._table[slot]
        good = (self._place < 0) & (found >= 0) & ((found & ((1 << _CHECK_BITS) - 1)) == check)
        self._place.copy_(torch.where(good, found >> _CHECK_BITS, self._place))
        # The latest place stays, of several lanes the last one's: no order of writing can change that.
        self._table.scatter_reduce_(0, slot, (self._at << _CHECK_BITS) | check, "amax")

    def _expected(self) -> Tensor:
        return self._text[self._place.clamp(min=0)]


def _length_class(length: Tensor) -> Tensor:
    return torch.where(length < 12, length, 12 + ((length - 8) >> 3).clamp(max=3))


def _price_class(p: Tensor) -> Tensor:
    """Half bits, roughly: twice the place of the leading one, from the top, and the digit after it."""
    mantissa, exponent = torch.frexp(p)
    return 2 * (TOTAL_BITS - exponent.long()) + (mantissa < 0.75)
