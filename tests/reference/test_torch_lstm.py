"""The LSTM path = torch.nn.LSTM with the same weights: outputs, final state, gradients."""

from __future__ import annotations

import chunks
import pytest
import torch

from mulstm.ops import State, recurrence

T, B, E, H = 9, 3, 5, 8


def ours(W: torch.Tensor) -> torch.Tensor:
    """torch stacks input, forget, cell, output; the paper h_hat, i, o, f."""
    i, f, g, o = W.chunk(4)
    return torch.cat([g, i, o, f])


@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_one_layer(backend: str) -> None:
    torch.manual_seed(2)
    lstm = torch.nn.LSTM(E, H, dtype=torch.float64)
    x = torch.randn(T, B, E, dtype=torch.float64, requires_grad=True)
    h_0, c_0 = (torch.randn(B, H, dtype=torch.float64, requires_grad=True) for _ in range(2))
    h, (h_T, c_T) = lstm(x, (h_0[None], c_0[None]))
    weights = [torch.randn_like(v) for v in (h, h_T[0], c_T[0])]
    inputs = [x, h_0, c_0, lstm.weight_ih_l0, lstm.weight_hh_l0, lstm.bias_ih_l0]

    def gradients(*outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = sum((a * b).sum() for a, b in zip(outputs, weights, strict=True))
        return torch.autograd.grad(loss, inputs)

    right = gradients(h, h_T[0], c_T[0])
    zx = x @ ours(lstm.weight_ih_l0).T + ours(lstm.bias_ih_l0) + ours(lstm.bias_hh_l0)
    mine, state = recurrence(None, zx, None, ours(lstm.weight_hh_l0), State(h_0, c_0), backend=backend)
    for a, b in zip((mine, *state), (h, h_T[0], c_T[0]), strict=True):
        assert chunks.error(a, b) < 1e-14
    for a, b in zip(gradients(mine, *state), right, strict=True):
        assert chunks.error(a, b) < 1e-13
