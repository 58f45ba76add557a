"""The output layer goes on learning from what has been coded, in whole numbers: both sides learn the same."""

from __future__ import annotations

import torch
from torch import Tensor

from mulstm.codec.network import Network
from mulstm.codec.products import LOW_BITS, planes
from mulstm.codec.tables import LOGIT_BITS, TOTAL_BITS

_H_BITS = 7  # the learner's h counts 2**-7
_A_BITS = 26  # what is learnt counts 2**-26 bits; its 15 upper bits are used
_USED_BITS = 11
_MOST = (1 << 29) - 1
_ERROR_BITS = 14
_ERROR_MOST = (1 << _ERROR_BITS) - 1
_RATE_BITS = 16
_HASTE = 20_000  # symbols after which the rate has halved
_SLOWEST = 6  # the rate falls to this part of the first one
_FULL_LANES = 128  # with more lanes, so many errors are added up that each must count less


class Learner:
    """A correction of the logits, linear in h, shared by all lanes of a block."""

    def __init__(self, network: Network, lanes: int) -> None:
        model, device = network.model, network.device
        self._products, self._lanes, self._seen = network.products, lanes, 0
        N, H = model.W_out.shape
        self._first_rate = int(model.rate[0])
        self._mean = torch.as_tensor(model.h_mean).to(device, torch.int32)
        self._A = torch.zeros(N, H, dtype=torch.int64, device=device)
        self._a = torch.zeros(N, dtype=torch.int64, device=device)
        self._used = torch.zeros(2 * N, H, dtype=torch.int8, device=device)
        self._h = torch.zeros(lanes, H, dtype=torch.int8, device=device)

    def correction(self, h: Tensor) -> Tensor:
        """What is added to the logits of h, (2, B, H) planes."""
        v = (h[0].to(torch.int32) << LOW_BITS) + h[1] - self._mean
        self._h = _shifted(v, LOW_BITS).clamp_(-127, 127).to(torch.int8)
        high, low = self._products.once(self._h, self._used.T).to(torch.int64).chunk(2, dim=1)
        sums = (high << LOW_BITS) + low + (self._a >> (_A_BITS - _USED_BITS - _H_BITS))
        return _shifted(sums, _USED_BITS + _H_BITS - LOGIT_BITS)

    def learn(self, begins: Tensor, symbols: Tensor) -> None:
        """One step down the slope of what the symbols (B) cost; a symbol past the last teaches nothing."""
        N = len(self._a)
        error = begins[:, :N] - begins[:, 1 : N + 1]
        known = symbols < N
        error.scatter_add_(1, symbols.clamp(max=N - 1)[:, None], known[:, None].to(torch.int64) << TOTAL_BITS)
        error = _shifted(error, TOTAL_BITS - _ERROR_BITS).clamp_(-_ERROR_MOST, _ERROR_MOST)
        error *= known[:, None]
        both = planes(error.T)  # (2, N, B)
        high, low = self._products.once(both.flatten(0, 1), self._h).to(torch.int64).chunk(2)
        rate = self._rate()
        self._A += _shifted(((high << LOW_BITS) + low).mul_(rate), _RATE_BITS)
        self._A.clamp_(-_MOST, _MOST)
        self._a += _shifted(error.sum(dim=0) * (rate << _H_BITS), _RATE_BITS)
        self._a.clamp_(-_MOST, _MOST)
        self._used = planes(self._A >> (_A_BITS - _USED_BITS)).flatten(0, 1)
        self._seen += len(symbols)

    def _rate(self) -> int:
        rate = max(self._first_rate * _HASTE // (_HASTE + self._seen), self._first_rate // _SLOWEST)
        return rate if self._lanes <= _FULL_LANES else rate * _FULL_LANES // self._lanes


def _shifted(value: Tensor, bits: int) -> Tensor:
    return (value + (1 << (bits - 1))) >> bits
