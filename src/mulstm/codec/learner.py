"""The output layer goes on learning from what has been coded, in whole numbers: both sides learn the same."""

from __future__ import annotations

import torch
from torch import Tensor

from mulstm.codec.network import Network
from mulstm.codec.products import LOW_BITS, planes
from mulstm.codec.tables import LOGIT_BITS, TOTAL_BITS

H_BITS = 7  # the learner's one counts 2**-7, and so does its h where H_DROP bits of it are left out
A_BITS = 28  # what is learnt counts 2**-28 bits; of that its upper part is used
USED_BITS = 11
MOST = (1 << 30) - 1
ERROR_BITS = A_BITS - H_BITS  # an error times the rate counts 2**-21
ERROR_MOST = (1 << 14) - 1
RATE_BITS = 20
FULL_LANES = 128  # with more lanes, so many errors are added up that each must count less


class Learner:
    """A correction of the logits, linear in h, shared by all lanes of a block."""

    def __init__(self, network: Network, lanes: int) -> None:
        model, device = network.model, network.device
        self._products, self._lanes, self._seen, self._rate = network.products, lanes, 0, 0
        N, H = model.W_out.shape
        self._first, self._least, self._haste = map(int, model.rate[:3])
        self._drop = model.h_drop
        # With the half that rounds what is taken less of it.
        self._mean = torch.as_tensor(model.h_mean).to(device, torch.int32) - (1 << (self._drop - 1))
        self._A = torch.zeros(N, H, dtype=torch.int32, device=device)
        self._a = torch.zeros(N, dtype=torch.float64, device=device)
        self._used = torch.zeros(2 * N, H, dtype=torch.int8, device=device)
        self._h = torch.zeros(lanes, H, dtype=torch.int8, device=device)
        self._said = torch.zeros(lanes, N, dtype=torch.float64, device=device)
        self._rate_now = torch.zeros((), dtype=torch.float64, device=device)
        # No sum over the lanes, added to what was learnt before, leaves 32 bits.
        self._error_most = min(ERROR_MOST, (1 << 22) // lanes)
        self._loops = network.loops

    def keep(self, lanes: int) -> None:
        """Goes on with the first lanes only."""
        self._h, self._said = self._h[:lanes], self._said[:lanes]

    def tick(self, symbols: int) -> None:
        """Another step begins, with so many symbols to learn from: what is known without looking at them."""
        rate = max(self._first * self._haste // (self._haste + self._seen), self._least)
        self._rate = rate if self._lanes <= FULL_LANES else rate * FULL_LANES // self._lanes
        self._rate_now.fill_(self._rate)
        self._seen += symbols

    def correction(self, h: Tensor) -> Tensor:
        """What is added to the logits of h, (2, B, H) planes."""
        if self._loops is not None:
            self._loops.centred(h.numpy(), self._mean.numpy(), self._drop, self._h.numpy())
            sums = self._products.once(self._h, self._used.T)
            self._loops.learnt(sums.numpy(), self._a.numpy(), self._said.numpy())
            return self._said
        v = (h[0].to(torch.int32) << LOW_BITS) + h[1] - self._mean
        self._h.copy_((v >> self._drop).clamp_(-127, 127))
        high, low = self._products.once(self._h, self._used.T).chunk(2, dim=1)
        added = high.double().mul_(1 << LOW_BITS).add_(low)
        added += torch.floor(self._a * 2.0 ** (USED_BITS + H_BITS - A_BITS))
        return _rounded(added, USED_BITS + H_BITS - LOGIT_BITS)

    def learn(self, begins: Tensor, symbols: Tensor) -> None:
        """One step down the slope of what the symbols (B) cost; a symbol past the last teaches nothing."""
        N = len(self._a)
        if self._loops is not None:
            pair = torch.empty(2, N, len(symbols), dtype=torch.int8)
            self._loops.errors(
                begins.numpy(), symbols.numpy(), self._rate, self._error_most, pair.numpy(), self._a.numpy()
            )
            sums = self._products.once(pair.flatten(0, 1), self._h)
            self._loops.absorb(sums.numpy(), self._A.numpy(), self._used.numpy())
            return
        error = begins[:, :N] - begins[:, 1 : N + 1]
        known = (symbols < N).double()[:, None]
        error.scatter_add_(1, symbols.clamp(max=N - 1)[:, None], known * 2.0**TOTAL_BITS)
        error = _rounded(error.mul_(known * self._rate_now), TOTAL_BITS + RATE_BITS - ERROR_BITS)
        error.clamp_(-self._error_most, self._error_most)
        high, low = self._products.once(planes(error.T).flatten(0, 1), self._h).chunk(2)
        self._A.add_(low).add_(high, alpha=1 << LOW_BITS).clamp_(-MOST, MOST)
        self._a.add_(error.sum(dim=0), alpha=1 << H_BITS).clamp_(-MOST, MOST)
        self._used.copy_(planes(self._A >> (A_BITS - USED_BITS)).flatten(0, 1))


def _rounded(value: Tensor, bits: int) -> Tensor:
    return value.mul_(2.0**-bits).add_(0.5).floor_()
