"""A text that begins inside a chunk is read as if nothing had come before it, by every cell."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mulstm.nn.model import LanguageModel
from mulstm.recipe import CELLS, ModelRecipe

N, H, T = 7, 6, 9
RECIPES = [ModelRecipe(cell=cell, hidden=H) for cell in CELLS]
RECIPES += [
    ModelRecipe(hidden=H, unit="initial"),
    ModelRecipe(hidden=H, layers=2, embedding=3, weight_norm=True),
    ModelRecipe(hidden=H, layers=2, skip=True, cell="lstm"),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.cell}-{r.unit}-{r.layers}")
def test_texts_that_begin_inside_a_chunk(recipe: ModelRecipe) -> None:
    torch.manual_seed(1)
    model = LanguageModel(replace(recipe), N).double()
    model.precision = "fp64"
    x = torch.randint(N, (2, T))
    first = torch.zeros(2, T, dtype=torch.bool)
    first[0, 4] = first[1, 0] = first[1, 7] = True
    state = tuple(s._replace(h=torch.rand_like(s.h), c=torch.rand_like(s.c)) for s in model.zero_state(2))

    logits, _ = model(x, state, first=first)
    loss = logits[0, 4:].square().sum()
    got = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    alone, _ = model(x[:1, 4:])
    want = torch.autograd.grad(alone.square().sum(), list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(logits[:1, 4:], alone, rtol=0, atol=1e-12)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=1e-10)
    before, _ = model(x[:1, :4], tuple(s._replace(h=s.h[:1], c=s.c[:1]) for s in state))
    torch.testing.assert_close(logits[:1, :4], before, rtol=0, atol=1e-12)
    torch.testing.assert_close(logits[1:, :7], model(x[1:, :7])[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(logits[1:, 7:], model(x[1:, 7:])[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.cell}-{r.unit}-{r.layers}")
def test_what_is_no_number_is_forgotten_too(recipe: ModelRecipe) -> None:
    model = LanguageModel(recipe, N)
    x, first = torch.randint(N, (2, T)), torch.zeros(2, T, dtype=torch.bool)
    first[:, 0] = True
    state = tuple(
        s._replace(h=s.h.fill_(float("nan")), c=s.c.fill_(float("inf"))) for s in model.zero_state(2)
    )
    torch.testing.assert_close(model(x, state, first=first)[0], model(x)[0], rtol=0, atol=1e-6)
