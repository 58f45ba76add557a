"""Where parameters start, and weight norm where a row is zero."""

from __future__ import annotations

import pytest
import torch

from mulstm.errors import RecipeError
from mulstm.nn import LanguageModel
from mulstm.nn.layer import normalised
from mulstm.recipe import InitRecipe, ModelRecipe
from nn_models import STACKED


def test_start_of_the_published_run() -> None:
    H, E, N = 40, 10, 12
    model = LanguageModel(ModelRecipe(hidden=H, embedding=E, weight_norm=True), N)
    model.initialise(InitRecipe(), torch.Generator().manual_seed(1))
    layer = model.stack[0]
    norms = {name: layer.get_parameter(name).norm(dim=1) for name in layer.matrices}
    torch.testing.assert_close(norms["W_mh"], torch.ones(H))
    assert abs(norms["W_zm"].square().mean() - 0.25) < 1e-4  # rows near 1/2
    assert abs(norms["W_zx"].square().mean() - E / (4 * H)) < 1e-4
    for name, norm in norms.items():
        torch.testing.assert_close(layer.get_parameter("g" + name[1:]), norm)
    h_hat, i, o, f = layer.b_z.chunk(4)
    assert bool((f == 3).all())
    assert not torch.cat([h_hat, i, o]).any()
    assert model.embedding is not None
    assert model.embedding.abs().max() <= 0.2
    assert model.embedding.std() > 0.1
    assert model.b_out is not None
    assert not model.b_out.any()


def test_start_of_the_authors_stacked_baseline() -> None:
    init = InitRecipe(
        recurrent="gaussian",
        recurrent_scale=1e-4,
        input="gaussian",
        input_scale=0.1,
        lower="gaussian",
        lower_scale=0.01,
        output="gaussian",
        output_scale=0.1,
        output_gate_bias=-2.0,
    )
    model = LanguageModel(ModelRecipe(hidden=50, **STACKED), 20, init=init)
    for layer, names in zip(model.stack, [("W_zx", "W_zm"), ("W_zx", "W_zm", "W_zl")], strict=True):
        right = {"W_zx": 0.1, "W_zm": 1e-4, "W_zl": 0.01}
        assert sorted(layer.matrices) == sorted(names)
        for name in names:
            assert abs(layer.get_parameter(name).std() / right[name] - 1) < 0.1
        assert bool((layer.b_z.chunk(4)[2] == -2).all())
    assert abs(model.W_out.std() / 0.1 - 1) < 0.1


def test_start_repeats_with_the_generator_and_scales() -> None:
    recipe = ModelRecipe(cell="milstm", hidden=8, layers=2)
    a, b = LanguageModel(recipe, 5, init=None), LanguageModel(recipe, 5, init=None)
    assert not any(bool(p.any()) for p in a.parameters())
    for model in (a, b):
        model.initialise(InitRecipe(recurrent_scale=0.5, lower_scale=2.0), torch.Generator().manual_seed(2))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    W = a.stack[0].get_parameter("W_zm")
    torch.testing.assert_close(W.T @ W, 0.25 * torch.eye(8))
    W = a.stack[1].get_parameter("W_zx")
    torch.testing.assert_close(W.T @ W, 4.0 * torch.eye(8))
    assert bool((a.stack[0].get_parameter("alpha") == 1).all())
    assert bool((a.stack[0].get_parameter("beta_2") == 0.5).all())
    with pytest.raises(RecipeError, match="no initialisation 'xavier'"):
        a.initialise(InitRecipe(input="xavier"))


def test_blocks_that_are_orthogonal_by_themselves() -> None:
    H = 12
    init = InitRecipe(recurrent="orthogonal-blocks", recurrent_scale=0.7)
    layer = LanguageModel(ModelRecipe(hidden=H), 5, init=init).stack[0]
    W_mh, W_zm = layer.get_parameter("W_mh").detach(), layer.get_parameter("W_zm").detach()
    for block in (W_mh, *W_zm.chunk(4)):
        torch.testing.assert_close(block.T @ block, 0.49 * torch.eye(H))
    # The paper's footnote: two of them make a product of spectral radius 0.49.
    assert float(torch.linalg.eigvals(W_zm[:H] @ W_mh).abs().max()) == pytest.approx(0.49, rel=1e-5)
    assert not torch.allclose(W_zm[:H], W_zm[H : 2 * H], atol=0.1)


def test_a_tensor_rnn_starts_with_orthogonal_matrices() -> None:
    W = LanguageModel(ModelRecipe(cell="tensor-rnn", hidden=6), 4).stack[0].get_parameter("W_hh")
    torch.testing.assert_close(W @ W.transpose(1, 2), torch.eye(6).expand(4, 6, 6))


def test_narrow_weights_start_as_wide_ones_do() -> None:
    recipe = ModelRecipe(hidden=8, embedding=3)
    wide, narrow = LanguageModel(recipe, 5, init=None), LanguageModel(recipe, 5, init=None).bfloat16()
    for model in (wide, narrow):
        model.initialise(InitRecipe(), torch.Generator().manual_seed(1))
    for name, tensor in narrow.named_parameters():
        assert torch.equal(tensor, wide.get_parameter(name).bfloat16()), name


def test_weight_norm_survives_rows_of_zeros() -> None:
    W = torch.randn(4, 3, dtype=torch.float64)
    W[1] = 0
    W.requires_grad_()
    g = torch.rand(4, dtype=torch.float64, requires_grad=True)
    y = normalised(W, g)
    torch.testing.assert_close(y.detach().norm(dim=1), g.detach() * torch.tensor([1.0, 0, 1, 1]))
    for d in torch.autograd.grad(y.sum(), [W, g]):
        assert bool(d.isfinite().all())


def test_a_start_leaves_nothing_of_what_was_learnt() -> None:
    fresh, used = (LanguageModel(ModelRecipe(hidden=8, embedding=4), 5, init=None) for _ in range(2))
    with torch.no_grad():
        for p in used.parameters():
            p.fill_(1.0)
    for model in (fresh, used):
        model.initialise(InitRecipe(), torch.Generator().manual_seed(2))
    assert all(torch.equal(p, q) for p, q in zip(fresh.parameters(), used.parameters(), strict=True))
