"""The fused op is a good citizen of PyTorch: gradcheck, opcheck, torch.compile without a graph break."""

from __future__ import annotations

from typing import Any

import chunks
import pytest
import torch
from chunks import CASES

from mulstm.errors import BackendError
from mulstm.nn.model import LanguageModel
from mulstm.ops import State, fused, recurrence
from mulstm.recipe import ModelRecipe


@pytest.mark.parametrize(("cell", "unit"), CASES)
def test_gradcheck(cell: str, unit: str) -> None:
    chunk = chunks.make(cell, unit, T=3, B=2, H=3).to(torch.float64)
    leaves = {k: v for k, v in chunk.leaves().items() if v.numel()}

    def run(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = vars(chunk) | dict(zip(leaves, values, strict=True))
        h, state = chunks.Chunk(**given).run("fused")
        return (h, state.h, state.c) if state.c.numel() else (h, state.h)

    assert torch.autograd.gradcheck(run, tuple(leaves.values()))


@pytest.mark.parametrize(("cell", "unit"), CASES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck(cell: str, unit: str) -> None:
    chunk = chunks.make(cell, unit, T=3, B=2, H=4)
    torch.library.opcheck(fused._infer, tuple(vars(chunk).values()))
    given = chunk.to(torch.float32)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(fused._forward, tuple(vars(given).values()), test_utils=tests)
    if cell == "mlstm":
        torch.library.opcheck(
            fused._forward, tuple(vars(chunk.to(torch.bfloat16)).values()), test_utils=tests[:3]
        )


@pytest.mark.parametrize(("cell", "unit"), [("mlstm", "standard"), ("milstm", "initial"), ("rnn", "tanh")])
def test_compile_has_no_graph_break(cell: str, unit: str) -> None:
    torch._dynamo.reset()
    chunk = chunks.make(cell, unit).to(torch.float64)

    def loss(c: dict[str, Any]) -> torch.Tensor:
        given = chunks.Chunk(**c, mask=chunk.mask, unit=unit)
        h, state = recurrence(
            given.mx,
            given.zx * 1.0,
            given.W_mh,
            given.W_zm,
            State(given.h_0, given.c_0),
            mask=given.mask,
            px=given.px,
            b_h=given.b_h,
            unit=unit,
        )
        return (h * h).sum() + state.h.sum() + state.c.sum()

    given = {k: v for k, v in vars(chunk).items() if k not in ("mask", "unit")}
    leaves = [v for v in given.values() if v is not None and v.numel()]
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    right = torch.autograd.grad(loss(given), leaves)
    found = torch.autograd.grad(compiled(given), leaves)
    assert all(chunks.error(a, b) < 1e-13 for a, b in zip(found, right, strict=True))
    with torch.no_grad():
        assert chunks.error(compiled(given), loss(given)) < 1e-13


def test_model_compiles_whole() -> None:
    torch._dynamo.reset()
    model = LanguageModel(ModelRecipe(hidden=8, embedding=4, weight_norm=True), 5)
    x = torch.randint(5, (2, 6))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    logits, state = compiled(x)
    right, end = model(x)
    assert chunks.error(logits, right) < 1e-6
    assert chunks.error(state[0].c, end[0].c) < 1e-6


def test_second_derivatives_are_refused() -> None:
    chunk = chunks.make("mlstm", "standard").to(torch.float64)
    h, _ = chunk.run("fused")
    (d,) = torch.autograd.grad(h.sum(), [chunk.zx], create_graph=True)
    with pytest.raises(BackendError, match="Only the backend 'reference' has second derivatives"):
        torch.autograd.grad(d.sum(), [chunk.W_zm])
