"""The language model: exact counts, folding, steps, precision."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import prune

from mulstm.errors import BackendError, RecipeError
from mulstm.nn import LanguageModel
from mulstm.nn.masks import Masks
from mulstm.recipe import CELLS, DropoutRecipe, ModelRecipe
from nn_models import BARE, STACKED, make

EMBEDDED = {"embedding": 400, "weight_norm": True}


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


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.cell}-{r.unit}-{r.embedding}-{r.layers}")
@pytest.mark.parametrize("embedding", [True, False])
def test_folded_is_the_same_function(recipe: ModelRecipe, embedding: bool) -> None:
    model = make(recipe)
    x = torch.randint(9, (3, 11))
    folded = model.folded(embedding)
    assert (folded.embedding is None) == (embedding or not recipe.embedding)
    assert not any(".g_" in name for name, _ in folded.named_parameters())
    logits, state = model(x)
    again, end = folded(x)
    torch.testing.assert_close(logits, again)
    torch.testing.assert_close(state, end)


@pytest.mark.parametrize("training", [True, False])
def test_folded_runs_as_the_model_does(training: bool) -> None:
    model = make(ModelRecipe(hidden=6, embedding=4)).train(training)
    model.backend, model.precision = "reference", "bf16"
    folded = model.folded()
    assert (folded.backend, folded.precision, folded.training) == ("reference", "bf16", training)


def test_hidden_and_logits_are_those_of_two_passes() -> None:
    for recipe in (ModelRecipe(hidden=6), ModelRecipe(hidden=6, layers=2, skip=True)):
        model, x = make(recipe), torch.tensor([[1, 2, 3], [4, 0, 1]])
        h, logits, states = model.hidden_and_logits(x)
        torch.testing.assert_close((h, states), model.hidden(x), rtol=0, atol=0)
        torch.testing.assert_close((logits, states), model(x), rtol=0, atol=0)


def test_folded_sees_what_pruning_puts_off() -> None:
    model, x = make(ModelRecipe(hidden=6)), torch.randint(9, (2, 3))
    prune.l1_unstructured(model, "W_out", 0.3)
    with torch.no_grad():
        model.W_out_orig.mul_(2)
    folded = model.folded()
    torch.testing.assert_close(folded(x)[0], model(x)[0])


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


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("embedding", [0, 16])
def test_a_symbol_that_comes_often_has_its_whole_gradient_in_bf16(embedding: int, masked: bool) -> None:
    recipe = ModelRecipe(hidden=32, embedding=embedding)
    x = torch.where(torch.rand(32, 101) < 0.5, 0, torch.randint(64, (32, 101)))
    one = make(recipe, 64).float()
    exact = copy.deepcopy(one).double()
    one.precision, exact.backend = "bf16", "reference"
    masks = Masks(embedding=torch.ones(32, embedding)) if masked and embedding else Masks()
    for model in (one, exact):
        model.loss(x[:, :-1], x[:, 1:], masks=masks)[0].backward()
    for (name, p), (_, right) in zip(one.named_parameters(), exact.named_parameters(), strict=True):
        if right.grad is not None:
            assert (p.grad - right.grad).norm() < 0.02 * right.grad.norm(), name


def test_the_tensor_rnn_has_one_backend() -> None:
    model = make(ModelRecipe(cell="tensor-rnn", hidden=4), 9)
    for model.backend in ("auto", "reference"):
        model(torch.zeros(1, 3, dtype=torch.long))
    for model.backend in ("fused", "triton", "nonsense"):
        with pytest.raises(BackendError, match=f"'{model.backend}' does not run the tensor RNN"):
            model(torch.zeros(1, 3, dtype=torch.long))


def test_weights_in_float64_compute_in_it() -> None:
    model = LanguageModel(ModelRecipe(hidden=6), 5).double()
    logits, (state,) = model(torch.randint(5, (2, 3)))
    assert logits.dtype == state.h.dtype == torch.float64
    assert model.precision == "fp64"
    assert model.float().precision == "fp32"
    with pytest.raises(RecipeError, match=r"no precision 'float64'\. Choose one of: fp32, bf16, fp8, fp64"):
        model.precision = "float64"


@pytest.mark.parametrize(
    ("x", "layers", "message"),
    [
        (torch.zeros(3).long(), 1, r"x is torch.int64 of shape \(3,\). Give symbols, \(B, T\)"),
        (torch.zeros(2, 0).long(), 1, r"of shape \(2, 0\)"),
        (torch.zeros(2, 3), 1, "x is torch.float32"),
        (
            torch.zeros(2, 3).long(),
            2,
            r"not, for each layer, h and c of shapes \(\(2, 4\), \(2, 4\)\)\. Give the",
        ),
    ],
    ids=["shape", "no steps", "type", "layers"],
)
def test_what_does_not_fit(x: torch.Tensor, layers: int, message: str) -> None:
    model = make(ModelRecipe(hidden=4))
    for run in (model, model.hidden):
        with pytest.raises(ValueError, match=message):
            run(x, model.zero_state(2) * layers)


@pytest.mark.parametrize("name", ["embedding", "hidden", "output"])
def test_a_mask_that_does_not_fit(name: str) -> None:
    model = make(ModelRecipe(hidden=4, embedding=3))
    mask = torch.ones(1, 3 if name == "embedding" else 4)
    masks = Masks(**{name: (mask,) if name == "hidden" else mask})
    with pytest.raises(ValueError, match=rf"The mask {name} is \(1, \d\)\. Give \(2, \d\)"):
        model(torch.zeros(2, 3).long(), None, masks)


def test_masks_that_do_not_fit_the_layers() -> None:
    x = torch.zeros(2, 3).long()
    for layers in (1, 3):
        with pytest.raises(ValueError, match=rf"Masks of h: {layers}\. Give one a layer, 2, or none"):
            make(ModelRecipe(hidden=4, layers=2))(x, None, Masks(hidden=(torch.ones(2, 4),) * layers))
    with pytest.raises(ValueError, match="the input is one-hot"):
        make(ModelRecipe(hidden=4))(x, None, Masks(embedding=torch.ones(2, 9)))


def test_a_state_of_plain_tuples() -> None:
    model, x = make(ModelRecipe(hidden=4, layers=2)), torch.randint(9, (2, 3))
    _, state = model(x)
    assert torch.equal(model(x, tuple((s.h, s.c) for s in state))[0], model(x, state)[0])


def test_a_state_of_another_form() -> None:
    model, x = make(ModelRecipe(hidden=4)), torch.zeros(2, 3).long()
    (one,) = model.zero_state(2)
    of_torch = (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    for state in (one, of_torch, ((one.h,),), (one.h,)):
        with pytest.raises(ValueError, match="The state has not, for each layer, h and c of shapes"):
            model(x, state)


def test_targets_outside_the_alphabet() -> None:
    model, x = make(ModelRecipe(hidden=4)), torch.zeros(2, 3).long()
    for cost in (model.loss, model.losses):
        with pytest.raises(
            ValueError, match=r"A symbol of y is not among the model's 9\. Give 0 to 8, or -1"
        ):
            cost(x, x + 9)


def test_b_h_is_the_first_block_of_b_z_and_can_be_frozen() -> None:
    x = torch.randint(9, (2, 5))
    for learn in (True, False):
        model = make(ModelRecipe(unit="initial", hidden=4, learn_b_h=learn))
        model(x)[0].square().sum().backward()
        gradient = model.stack[0].b_z.grad
        assert gradient is not None
        assert bool(gradient[:4].any()) == learn
        assert bool(gradient[4:].all())


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"cell": "gru"}, r'cell = "gru" must be one of'),
        ({"unit": "tanh"}, r'unit = "tanh" must be one of'),
        ({"hidden": 0}, "hidden = 0 must be 1 to"),
        ({"hidden": np.int64(4)}, "hidden = np.int64.4. must be a whole number"),
        ({"layers": 0}, "layers = 0 must be 1 to"),
        ({"embedding": -1}, "embedding = -1 must be 0 to"),
        ({"skip": True}, "skip needs model.layers of 2 or more"),
        ({"cell": "rnn", "unit": "initial"}, "unit must stay standard for rnn"),
    ],
)
def test_impossible_models(recipe: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        LanguageModel(ModelRecipe(**recipe), 5)


def test_an_alphabet_of_nothing() -> None:
    with pytest.raises(RecipeError, match="An alphabet of 0 symbols is none"):
        LanguageModel(ModelRecipe(hidden=4), 0)


def test_targets_and_beginnings_of_another_form() -> None:
    model, x = make(ModelRecipe(hidden=6)), torch.randint(9, (4, 20))
    for ask in (model.loss, model.losses):
        with pytest.raises(ValueError, match=r"y is \(20, 4\) and x \(4, 20\)\. Give one for each symbol"):
            ask(x, x.T)
        with pytest.raises(ValueError, match=r"y is torch\.float32\. Give symbols, or -1"):
            ask(x, x.float())
    with pytest.raises(ValueError, match=r"first is \(4,\) and x"):
        model(x, first=torch.ones(4))


@pytest.mark.parametrize("cell", ["mlstm", "lstm", "rnn"])
def test_beginnings_as_numbers(cell: str) -> None:
    model, x = make(ModelRecipe(hidden=6, cell=cell)), torch.randint(9, (3, 12))
    first = torch.rand(3, 12) < 0.2
    torch.testing.assert_close(model(x, first=first.long())[0], model(x, first=first)[0])


def test_any_target_below_zero_counts_for_nothing() -> None:
    model, x = make(ModelRecipe(hidden=6)), torch.randint(9, (3, 12))
    y, none = x.clone(), torch.rand(3, 12) < 0.3
    y[none] = -100
    each, _ = model.losses(x, y)
    assert each[none].eq(0).all()
    assert float(model.loss(x, y)[0].detach()) == pytest.approx(float(each.sum()) / int((~none).sum()))


def test_no_target_at_all_costs_nothing() -> None:
    model, x = make(ModelRecipe(hidden=6)), torch.randint(9, (3, 12))
    loss, _ = model.loss(x, torch.full_like(x, -1))
    loss.backward()
    assert float(loss.detach()) == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("backend", ["fused", "reference"])
@pytest.mark.parametrize("unit", ["standard", "initial"])
def test_the_state_is_its_owners(unit: str, backend: str) -> None:
    model, x = make(ModelRecipe(hidden=6, unit=unit)), torch.randint(9, (2, 7))
    model.backend = backend
    h, state = model.hidden(x)
    before = h.detach().clone()
    with torch.no_grad():
        state[-1].h.zero_()
        state[-1].c.zero_()
    h.sum().backward()
    assert h.equal(before)


def test_all_of_a_mask_cannot_be_dropped() -> None:
    with pytest.raises(RecipeError, match=r"A share of 1.0 cannot be dropped"):
        make(ModelRecipe(hidden=6)).draw_masks(2, DropoutRecipe(hidden=1.0))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_targets_of_any_whole_type(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    model = LanguageModel(ModelRecipe(hidden=6), 256)  # in a byte, -1 would be the last symbol
    x = torch.randint(100, (3, 12))
    for ask in (model.loss, model.losses):
        assert ask(x.to(dtype), x.to(dtype))[0].equal(ask(x, x)[0])


@pytest.mark.parametrize("recipe", [{}, {"embedding": 3}])
@pytest.mark.parametrize("symbol", [-1, 9])
def test_a_symbol_that_is_none(symbol: int, recipe: dict[str, Any]) -> None:
    model = make(ModelRecipe(hidden=6, **recipe))
    for length in (1, 20):  # looked up, and in a table of all symbols
        with pytest.raises(ValueError, match=r"not among the model's 9\. Give 0 to 8"):
            model(torch.full((2, length), symbol))


@pytest.mark.parametrize("cell", CELLS)
def test_a_state_of_other_lanes(cell: str) -> None:
    model = make(ModelRecipe(hidden=6, cell=cell))
    with pytest.raises(ValueError, match=r"h and c of shapes \(\(2, 6\), "):
        model(torch.randint(9, (2, 5)), model.zero_state(1))


@pytest.mark.parametrize("weight_norm", [False, True])
def test_narrow_weights_compute_no_narrower_than_told(weight_norm: bool) -> None:
    model = make(ModelRecipe(hidden=40, embedding=7, weight_norm=weight_norm), 9).bfloat16()
    model.precision = "fp32"
    wide, x = copy.deepcopy(model).float(), torch.randint(9, (2, 30))
    with torch.no_grad():
        wanted = wide(x)[0]
        torch.testing.assert_close(model(x)[0], wanted, rtol=0, atol=1e-6)
        torch.testing.assert_close(model.folded()(x)[0], wanted, rtol=0, atol=1e-6)
        model.precision = "fp64"
        torch.testing.assert_close(model(x)[0], wide.double()(x)[0], rtol=0, atol=1e-12)
