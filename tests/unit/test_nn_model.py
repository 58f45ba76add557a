"""The language model: exact counts, starts, masks, folding, and weights kept only while they are right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mulstm.errors import RecipeError
from mulstm.nn import LanguageModel, Masks
from mulstm.nn.layer import normalised
from mulstm.recipe import CELLS, DropoutRecipe, InitRecipe, ModelRecipe

EMBEDDED = {"embedding": 400, "weight_norm": True}
BARE = {"output_bias": False}
STACKED = {"cell": "lstm", "layers": 2, "skip": True, "unit": "initial", "learn_b_h": False, **BARE}


def count(alphabet: int, **recipe: Any) -> int:
    with torch.device("meta"):
        return LanguageModel(ModelRecipe(**recipe), alphabet).parameter_count()


@pytest.mark.parametrize(
    ("alphabet", "recipe", "right"),
    [
        (205, {"hidden": 1900, "unit": "initial", **BARE}, 20_394_600),  # rows 1 and 6
        (205, {"hidden": 1900}, 20_394_805),  # row 6 with output bias
        (205, {"hidden": 1250, **STACKED}, 21_322_500),  # row 2
        (205, {"hidden": 1900, **EMBEDDED}, 22_348_305),  # rows 7 and 8
        (205, {"hidden": 2800, **EMBEDDED}, 45_495_405),  # row 9
        (205, {"hidden": 2219, "cell": "milstm", **BARE}, 22_005_823),  # row 10
        (27, {"hidden": 512, "cell": "lstm", **BARE}, 1_119_744),  # row 11
        (27, {"hidden": 512, "cell": "lstm"}, 1_119_771),
        (27, {"hidden": 450, **BARE}, 1_087_200),  # row 12
        (27, {"hidden": 450}, 1_087_227),
        (27, {"hidden": 1900, **BARE}, 18_365_400),  # row 13
        (27, {"hidden": 2800, **EMBEDDED}, 44_925_627),  # row 14
        (178, {"hidden": 2800, **EMBEDDED}, 45_408_978),  # row 15
        (256, {"hidden": 2800, **EMBEDDED}, 45_658_656),
        (205, {"hidden": 1900, "cell": "lstm", **BARE}, 16_395_100),
    ],
)
def test_parameter_counts_of_the_paper(alphabet: int, recipe: dict[str, Any], right: int) -> None:
    assert count(alphabet, **recipe) == right


@pytest.mark.parametrize(
    ("mlstm", "lstm", "millions"), [(661, 422, 3), (884, 565, 5), (1296, 831, 10), (1613, 1036, 15)]
)
def test_sizes_of_the_sweep_are_matched(mlstm: int, lstm: int, millions: int) -> None:
    a, b = count(205, hidden=mlstm, **BARE), count(205, hidden=lstm, **STACKED)
    assert abs(a - b) < 0.005 * a
    assert abs(a - millions * 1e6) < 0.01 * a


@pytest.mark.parametrize(("hidden", "right"), [(1900, 20_394_805), (2800, 42_655_405)])
def test_counts_after_folding(hidden: int, right: int) -> None:
    with torch.device("meta"):
        model = LanguageModel(ModelRecipe(hidden=hidden, **EMBEDDED), 205)
        assert model.folded().parameter_count() == right


RECIPES = [
    ModelRecipe(cell=cell, hidden=7, embedding=e, weight_norm=w, layers=k, skip=s)
    for cell in CELLS
    for e, w, k, s in [(0, True, 1, False), (5, True, 2, False), (5, True, 3, True), (5, False, 1, False)]
]
RECIPES += [ModelRecipe(unit="initial", hidden=7, embedding=5, weight_norm=True)]


def make(recipe: ModelRecipe, alphabet: int = 9, **kwargs: Any) -> LanguageModel:
    torch.manual_seed(5)
    model = LanguageModel(recipe, alphabet, **kwargs).double()
    model.precision = "fp64"
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.cell}-{r.unit}-{r.embedding}-{r.layers}")
def test_folded_is_the_same_function(recipe: ModelRecipe) -> None:
    model = make(recipe)
    x = torch.randint(9, (3, 11))
    folded = model.folded()
    assert folded.embedding is None
    assert not any(".g_" in name for name, _ in folded.named_parameters())
    logits, state = model(x)
    again, end = folded(x)
    torch.testing.assert_close(logits, again)
    torch.testing.assert_close(state, end)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.cell}-{r.unit}-{r.embedding}-{r.layers}")
def test_stepping_is_running(recipe: ModelRecipe) -> None:
    model = make(recipe).eval()
    x = torch.randint(9, (2, 6))
    with torch.no_grad():
        whole, end = model(x)
        state, steps = None, []
        for t in range(6):
            logits, state = model(x[:, t : t + 1], state)
            steps.append(logits)
        h, _ = model.hidden(x)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole)
    torch.testing.assert_close(state, end)
    assert h.shape == (2, 6, 7)
    torch.testing.assert_close(h[:, -1], end[-1].h)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_precision(precision: str) -> None:
    model = make(ModelRecipe(hidden=32, embedding=8, weight_norm=True)).float()
    x = torch.randint(9, (3, 20))
    model.precision = "fp64"
    right, _ = model(x)
    assert right.dtype == torch.float64
    model.precision = precision
    logits, (state,) = model(x)
    assert logits.dtype == state.c.dtype == torch.float32
    assert state.h.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    error = (logits.double() - right).norm() / right.norm()
    assert error < {"fp32": 1e-6, "bf16": 2e-2}[precision]
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    state64 = tuple(s._replace(h=s.h.double(), c=s.c.double()) for s in model.zero_state(3))
    with pytest.raises(ValueError, match=r"state\.c"):
        model(x, tuple(s._replace(c=s.c.bfloat16()) for s in state64))


def test_b_h_is_the_first_block_of_b_z_and_can_be_frozen() -> None:
    x = torch.randint(9, (2, 5))
    for learn in (True, False):
        model = make(ModelRecipe(unit="initial", hidden=4, learn_b_h=learn))
        model(x)[0].square().sum().backward()
        gradient = model.stack[0].b_z.grad
        assert gradient is not None
        assert bool(gradient[:4].any()) == learn
        assert bool(gradient[4:].all())


# Masks


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
        model.stack[0].get_parameter("g_mh").zero_()
    torch.testing.assert_close(model(x)[0], cut)


def test_embedding_dropout_needs_an_embedding() -> None:
    with pytest.raises(RecipeError, match="one-hot"):
        make(ModelRecipe(hidden=4)).draw_masks(2, DropoutRecipe(embedding=0.5))


# Starts


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


def test_a_tensor_rnn_starts_with_orthogonal_matrices() -> None:
    W = LanguageModel(ModelRecipe(cell="tensor-rnn", hidden=6), 4).stack[0].get_parameter("W_hh")
    torch.testing.assert_close(W @ W.transpose(1, 2), torch.eye(6).expand(4, 6, 6))


def test_weight_norm_survives_rows_of_zeros() -> None:
    W = torch.randn(4, 3, dtype=torch.float64)
    W[1] = 0
    W.requires_grad_()
    g = torch.rand(4, dtype=torch.float64, requires_grad=True)
    y = normalised(W, g)
    torch.testing.assert_close(y.detach().norm(dim=1), g.detach() * torch.tensor([1.0, 0, 1, 1]))
    for d in torch.autograd.grad(y.sum(), [W, g]):
        assert bool(d.isfinite().all())


# Weights kept in evaluation


def changes() -> list[tuple[str, Callable[[LanguageModel], Any]]]:
    def optimise(kind: type[torch.optim.Optimizer], **options: Any) -> Callable[[LanguageModel], None]:
        def change(model: LanguageModel) -> None:
            with torch.enable_grad():
                model(torch.randint(9, (2, 20)))[0].square().sum().backward()
            kind(model.parameters(), **options).step()

        return change

    def look_between(model: LanguageModel) -> None:
        x = torch.randint(9, (2, 20))
        with torch.enable_grad():
            loss = model(x)[0].square().sum()
        model(x)
        loss.backward()
        torch.optim.Adam(model.parameters(), lr=0.1, fused=True).step()

    def load(model: LanguageModel) -> None:
        model.load_state_dict({k: v + 0.1 for k, v in model.state_dict().items()})

    def swap(model: LanguageModel) -> None:
        for p in model.parameters():
            p.data = p.data + 0.1
            p.data = p.data + 0.1

    def behind(model: LanguageModel) -> None:
        for p in model.parameters():
            p.data.add_(0.1)
        model.forget()

    def through_mode(model: LanguageModel) -> None:
        model.train()
        for p in model.parameters():
            p.data.add_(0.1)
        model.eval()

    adam = {"lr": 0.1}
    return [
        ("adam", optimise(torch.optim.Adam, **adam)),
        ("adam fused", optimise(torch.optim.Adam, fused=True, **adam)),
        ("adam foreach", optimise(torch.optim.Adam, foreach=True, **adam)),
        ("evaluation between forward and backward", look_between),
        ("load", load),
        ("swap", swap),
        ("behind", behind),
        ("through train mode", through_mode),
        ("initialise", lambda model: model.initialise(InitRecipe(recurrent_scale=0.3))),
    ]


@pytest.mark.parametrize("change", [pytest.param(c, id=name) for name, c in changes()])
def test_kept_weights_are_never_stale(change: Callable[[LanguageModel], Any]) -> None:
    model = make(ModelRecipe(hidden=6, embedding=4, weight_norm=True)).eval()
    x = torch.randint(9, (2, 3))
    with torch.no_grad():
        before = model(x)[0]
        assert torch.equal(model(x)[0], before)
        assert model._kept._kept is not None
        change(model)
        after = model(x)[0]
        fresh = copy.deepcopy(model)
        assert fresh._kept._kept is None
        assert torch.equal(fresh(x)[0], after)
    assert not torch.allclose(before, after)


def test_weights_are_prepared_once_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(ModelRecipe(hidden=6, weight_norm=True)).eval()
    made = []
    prepare = model._prepare
    monkeypatch.setattr(model, "_prepare", lambda *a, **k: made.append(1) or prepare(*a, **k))
    x = torch.randint(9, (2, 3))
    with torch.no_grad():
        for _ in range(5):
            model(x)
        assert len(made) == 1
        model.precision = "fp32"
        model(x)
        assert len(made) == 2
    with torch.inference_mode():
        model(x)
    assert len(made) == 2


def test_a_model_made_in_inference_mode_works() -> None:
    with torch.inference_mode():
        model = LanguageModel(ModelRecipe(hidden=4), 5).eval()
        x = torch.randint(5, (1, 3))
        assert torch.equal(model(x)[0], model(x)[0])


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"cell": "gru"}, "no cell 'gru'"),
        ({"unit": "tanh"}, "no unit 'tanh'"),
        ({"hidden": 0}, "hidden is 0"),
        ({"layers": 0}, "layers is 0"),
        ({"embedding": -1}, "embedding is -1"),
    ],
)
def test_impossible_models(recipe: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        LanguageModel(ModelRecipe(**recipe), 5)
