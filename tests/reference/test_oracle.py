"""reference = oracle: the equations of ops and of the whole model against plain numpy."""

from __future__ import annotations

import chunks
import numpy as np
import pytest
import torch

import oracle
from mulstm.nn.masks import Masks
from mulstm.nn.model import LanguageModel
from mulstm.recipe import CELLS, DropoutRecipe, ModelRecipe


@pytest.mark.parametrize("backend", ["reference", "fused"])
@pytest.mark.parametrize(("cell", "unit"), chunks.CASES)
@pytest.mark.parametrize("mask", [True, False])
def test_recurrence(cell: str, unit: str, backend: str, mask: bool) -> None:
    chunk = chunks.make(cell, unit, mask=mask)
    h, state = chunk.run(backend)
    arrays = [x.numpy() if isinstance(x, torch.Tensor) else x for x in vars(chunk).values()]
    truth = oracle.recurrence(*arrays)
    for found, right in zip((h, *state), truth, strict=True):
        assert chunks.error(found, torch.from_numpy(right)) < 1e-14


MODELS = [
    ModelRecipe(cell=cell, hidden=5, embedding=e, weight_norm=w, layers=k, skip=s, output_bias=not s)
    for cell in CELLS
    for e, w, k, s in [(0, False, 1, False), (4, True, 2, False), (0, True, 3, True), (4, True, 2, True)]
] + [
    ModelRecipe(cell=cell, unit=unit, hidden=5)
    for cell in ("mlstm", "lstm", "milstm")
    for unit in ("initial", "initial-text")
]


@pytest.mark.parametrize(
    "recipe", MODELS, ids=lambda r: f"{r.cell}-{r.unit}-{r.embedding}-{r.layers}{'-skip' * r.skip}"
)
@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_language_model(recipe: ModelRecipe, backend: str) -> None:
    if recipe.cell == "tensor-rnn":  # which has no other
        backend = "reference"
    N, B, T = 6, 2, 7
    generator = torch.Generator().manual_seed(3)
    model = LanguageModel(recipe, N).double()
    model.precision, model.backend = "fp64", backend
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.7)
    x = torch.randint(N, (B, T), generator=generator)
    share = DropoutRecipe(embedding=0.4 if recipe.embedding else 0.0, hidden=0.4, output=0.4)
    masks = model.draw_masks(B, share, generator) or Masks()
    weights = {k: v.numpy() for k, v in model.state_dict().items()}
    how = {"cell_name": recipe.cell, "unit": recipe.unit, "layers": recipe.layers, "skip": recipe.skip}

    def numpy(m: torch.Tensor | None) -> np.ndarray | None:
        return None if m is None else m.numpy()

    truth = oracle.language_model(
        weights,
        x.numpy(),
        **how,
        embedding_mask=numpy(masks.embedding),
        hidden_masks=[m.numpy() for m in masks.hidden if m is not None],
        output_mask=numpy(masks.output),
    )
    logits, _ = model(x, None, masks)
    assert logits.shape == (B, T, N)
    assert chunks.error(logits, torch.from_numpy(truth)) < 1e-13
    plain = torch.from_numpy(oracle.language_model(weights, x.numpy(), **how))
    assert chunks.error(model(x)[0], plain) < 1e-13
    model.eval()
    with torch.no_grad():
        assert chunks.error(model(x)[0], plain) < 1e-13
        # One symbol: too few for a table outside of evaluation.
        assert chunks.error(model.train()(x[:, :1])[0], plain[:, :1]) < 1e-13
