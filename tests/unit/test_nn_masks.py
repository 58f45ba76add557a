"""Dropout masks: drawn for a chunk, applied in a layer."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mulstm.errors import RecipeError
from mulstm.nn import Masks
from mulstm.recipe import DropoutRecipe, ModelRecipe
from nn_models import make


def test_masks_are_shared_over_the_chunk_and_keep_the_mean() -> None:
    model = make(ModelRecipe(hidden=64, embedding=32, layers=2))
    g = torch.Generator().manual_seed(0)
    masks = model.draw_masks(50, DropoutRecipe(embedding=0.5, hidden=0.2, output=0.1, weights=0.3), g)
    assert masks is not None
    assert masks.embedding is not None
    assert masks.output is not None
    assert masks.embedding.shape == (50, 32)
    assert [m.shape for m in masks.hidden if m is not None] == [(50, 64)] * 2
    assert masks.output.shape == (50, 64)
    assert [sorted(m) for m in masks.weights] == [["W_mh", "W_zm"]] * 2
    drawn = [
        (masks.embedding, 0.5),
        (masks.hidden[0], 0.2),
        (masks.output, 0.1),
        (masks.weights[1]["W_zm"], 0.3),
    ]
    for mask, p in drawn:
        assert mask is not None
        values = mask.unique()
        torch.testing.assert_close(values, torch.tensor([0.0, 1 / (1 - p)]))
        assert abs(mask.mean() - 1) < 0.05
    assert not torch.equal(masks.hidden[0], masks.hidden[1])


def test_masks_repeat_with_the_generator_and_take_device_tensors() -> None:
    model = make(ModelRecipe(hidden=8, embedding=4))
    share = DropoutRecipe(hidden=0.5)
    a, b = (model.draw_masks(3, share, torch.Generator().manual_seed(9)) for _ in range(2))
    assert a is not None
    assert b is not None
    assert torch.equal(a.hidden[0], b.hidden[0])
    assert a.embedding is None
    assert a.weights == ()
    assert model.draw_masks(3, DropoutRecipe()) is None
    zero = torch.zeros(())
    every = model.draw_masks(3, DropoutRecipe(zero, zero, zero, zero))
    assert every is not None
    assert bool((every.embedding == 1).all())
    x = torch.randint(9, (3, 5))
    torch.testing.assert_close(model(x, None, every)[0], model(x)[0])


def test_a_dropped_unit_is_gone_for_output_and_next_step() -> None:
    model = make(ModelRecipe(hidden=6))
    mask = torch.ones(2, 6)
    mask[:, 3] = 0
    x = torch.randint(9, (2, 5))
    h, (state,) = model.hidden(x, None, Masks(hidden=(mask,)))
    assert not h[..., 3].any()
    assert not state.h[:, 3].any()
    assert bool(state.c[:, 3].all())
    # The same as a model that never reads that unit.
    with torch.no_grad():
        for name in ("W_mh", "W_zm"):
            model.stack[0].get_parameter(name)[:, 3] = 0
        model.W_out[:, 3] = 0
    logits, _ = model(x, None, Masks(hidden=(mask,)))
    torch.testing.assert_close(model(x)[0], logits)


def test_drop_connect_zeroes_weights() -> None:
    model = make(ModelRecipe(hidden=6, weight_norm=True))
    x = torch.randint(9, (2, 5))
    nothing = {"W_mh": torch.zeros(6, 6), "W_zm": torch.ones(24, 6)}
    cut, _ = model(x, None, Masks(weights=(nothing,)))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x, None, Masks(weights=(nothing,)))[0], cut)
        model.stack[0].get_parameter("g_mh").zero_()
    torch.testing.assert_close(model(x)[0], cut)


@pytest.mark.parametrize(("cell", "names"), [("lstm", ["W_zm"]), ("tensor-rnn", ["W_hh"])])
def test_drop_connect_is_for_what_h_is_multiplied_by(cell: str, names: list[str]) -> None:
    masks = make(ModelRecipe(cell=cell, hidden=6)).draw_masks(2, DropoutRecipe(weights=0.5))
    assert masks is not None
    assert [sorted(drawn) for drawn in masks.weights] == [names]


def test_embedding_dropout_needs_an_embedding() -> None:
    with pytest.raises(RecipeError, match="one-hot"):
        make(ModelRecipe(hidden=4)).draw_masks(2, DropoutRecipe(embedding=0.5))


@pytest.mark.parametrize("share", [1.0, np.float32(1), np.float64(-0.5), float("nan")])
def test_shares_that_cannot_be_dropped(share: float) -> None:
    with pytest.raises(RecipeError, match="cannot be dropped"):
        make(ModelRecipe(hidden=4)).draw_masks(
            2, SimpleNamespace(embedding=0, hidden=share, output=0, weights=0)
        )
