"""Clipping and Adam in one, against torch's in float64."""

from __future__ import annotations

import pytest
import torch

from distance import rms
from mulstm import optim
from mulstm.recipe import OptimiserRecipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize(
    ("name", "decay", "clip"), [("adam", 0.0, 1.0), ("adam", 0.01, 0.0), ("adamw", 0.05, 0.5)]
)
def test_fused_adam(name: str, decay: float, clip: float) -> None:
    torch.manual_seed(0)
    shapes = [(205, 40), (7, 4096), (33,), (5000,), (1900, 401)]
    ours = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    theirs = [torch.nn.Parameter(p.detach().double()) for p in ours]  # float64: not fused
    recipe = OptimiserRecipe(name=name, weight_decay=decay, clip=clip)
    rate = torch.tensor(1e-2, device="cuda")
    one, other = (optim.build(recipe, [(str(k), p) for k, p in enumerate(ps)], rate) for ps in (ours, theirs))
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.double()
        norms = [float(optim.clip_and_step(*work, clip)) for work in ((one, ours), (other, theirs))]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert max(float((p - q).detach().abs().max()) for p, q in zip(ours, theirs, strict=True)) < 1e-5
    state = optim.state_tensors(one, [(str(k), p) for k, p in enumerate(ours)])
    wanted = optim.state_tensors(other, [(str(k), p) for k, p in enumerate(theirs)])
    assert state.keys() == wanted.keys()
    for key, value in state.items():
        assert rms(value, wanted[key]) < 1e-5


def test_without_memory_it_is_the_sign() -> None:
    p = torch.nn.Parameter(torch.zeros(4, device="cuda"))
    rate = torch.tensor(0.5, device="cuda")
    optimiser = optim.build(OptimiserRecipe(beta1=0.0, beta2=0.0), [("p", p)], rate)
    p.grad = torch.tensor([2.0, -2.0, 4.0, -8.0], device="cuda")
    optim.clip_and_step(optimiser, [p], 0.0)
    torch.testing.assert_close(p.detach().cpu(), torch.tensor([-0.5, 0.5, -0.5, 0.5]))
