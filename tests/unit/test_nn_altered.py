"""Models that are more than their weights, by hooks or by methods of their own class, and wrapped ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from mulstm import Predictor, checkpoint, data
from mulstm.data.alphabet import Alphabet
from mulstm.data.corpus import Split
from mulstm.dynamic import moving
from mulstm.evaluate import evaluate, evaluate_together
from mulstm.nn import packed
from mulstm.nn.model import LanguageModel
from mulstm.recipe import ModelRecipe

RECIPE = ModelRecipe(hidden=11, embedding=6, weight_norm=True)
Change = Callable[[LanguageModel], LanguageModel]


class Cool(LanguageModel):
    """Half as sure of itself as its weights are."""

    def output(self, hs: Any, mask: Tensor | None = None) -> Tensor:
        return super().output(hs, mask) / 2


def made() -> LanguageModel:
    torch.manual_seed(1)
    model = LanguageModel(RECIPE, 256)
    with torch.no_grad():
        model.W_out.mul_(20)
    return model.eval()


def silenced(model: LanguageModel) -> LanguageModel:
    model.layers[-1].register_forward_hook(lambda layer, given, found: (0 * found[0], found[1]))
    return model


def cooled(model: LanguageModel) -> LanguageModel:
    model.register_forward_hook(lambda model, given, found: (found[0] / 2, found[1]))
    return model


def muffled(model: LanguageModel) -> LanguageModel:
    def half(layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        weights, mx, zx, *rest = given
        return weights, mx, zx / 2, *rest

    model.layers[0].register_forward_pre_hook(half)
    return model


def of_its_own_class(model: LanguageModel) -> LanguageModel:
    other = Cool(RECIPE, 256)
    other.load_state_dict(model.state_dict())
    return other.eval()


CHANGES: list[Change] = [silenced, cooled, muffled, of_its_own_class]


@pytest.fixture
def split(text_file: Path) -> Split:
    return data.load(text_file).split("test")


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_measured_and_predicted_is_the_model_as_it_runs(change: Change, split: Split) -> None:
    plain = evaluate(made(), split, lanes=1, symbols=300).nats
    model = change(made())
    symbols = torch.from_numpy(split.read(-1, 300).astype(np.int64))[None]
    nats, _ = model.losses(symbols[:, :-1], symbols[:, 1:])
    assert abs(plain - float(nats.sum())) > 5
    assert evaluate(model, split, lanes=1, symbols=300).nats == pytest.approx(float(nats.sum()), rel=1e-5)
    predictor = Predictor(model, Alphabet.bytes())
    predictor.feed(symbols[:, :50])
    with torch.no_grad():
        logits, _ = model(symbols[:, :50])
    torch.testing.assert_close(predictor.log_probs(), torch.log_softmax(logits[:, -1].double(), -1))


@pytest.mark.parametrize("change", CHANGES)
def test_its_folded_form_is_a_copy_of_it(change: Change) -> None:
    model = change(made())
    for copy in (model.folded(), moving(model)):
        assert type(copy) is type(model)
        before = model.W_out.clone()
        with torch.no_grad():
            copy.W_out.zero_()
        assert torch.equal(model.W_out, before)


@pytest.mark.parametrize("cell", ["rnn", "tensor-rnn", "mrnn", "lstm", "milstm", "mlstm"])
def test_where_texts_begin_a_hook_acts_once(cell: str) -> None:
    torch.manual_seed(1)
    model = LanguageModel(ModelRecipe(cell=cell, hidden=8), 5).eval()
    model.layers[0].register_forward_hook(lambda layer, given, found: (found[0] / 2, found[1]))
    x = torch.randint(5, (2, 6))
    first = torch.zeros(2, 6, dtype=torch.bool)
    first[:, 0] = True  # as from a zero state
    with torch.no_grad():
        torch.testing.assert_close(model(x, first=first)[0], model(x)[0])


def test_a_pruned_model_with_hooks_is_folded_after_training() -> None:
    model = cooled(made())
    prune.l1_unstructured(model, "W_out", amount=0.3)
    prune.l1_unstructured(model.layers[0], "W_zm", amount=0.3)
    x = torch.zeros(1, 3, dtype=torch.long)
    model(x)[0].sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(model.eval().folded()(x)[0], model(x)[0])


def test_a_copy_has_the_very_hooks() -> None:
    """One that belongs to an object tells that object, and no copy of it."""

    class Recorder:
        def __init__(self) -> None:
            self.seen = 0

        def hook(self, *_: Any) -> None:
            self.seen += 1

    recorder, model = Recorder(), made()
    model.layers[0].register_forward_hook(recorder.hook)
    model.folded()(torch.zeros(1, 3, dtype=torch.long))
    assert recorder.seen == 1


def test_pruning_and_parametrizations_are_no_such_thing(split: Split) -> None:
    """They make the weights, and those are still multiplied out."""
    model = made()
    prune.l1_unstructured(model.layers[0], "g_zm", 0.5)
    parametrize.register_parametrization(model, "W_out", nn.Tanh())
    assert not model.is_altered
    assert not model.folded().recipe.weight_norm
    symbols = torch.from_numpy(split.read(-1, 300).astype(np.int64))[None]
    nats, _ = model.losses(symbols[:, :-1], symbols[:, 1:])
    assert evaluate(model, split, lanes=1, symbols=300).nats == pytest.approx(float(nats.sum()), rel=1e-5)


def test_fused_kernels_know_weights_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_objection", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    model = made()
    model.precision = "bf16"
    assert packed.serves(model)
    assert not packed.serves(cooled(model))


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        torch.optim.swa_utils.AveragedModel,
        lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
    ],
)
def test_a_wrapped_model_is_the_model_inside(
    wrap: Callable[[LanguageModel], Any], split: Split, tmp_path: Path
) -> None:
    model = made()
    wrapped = wrap(model)
    plain = evaluate(model, split, lanes=3)
    assert evaluate(wrapped, split, lanes=3).nats == plain.nats
    assert evaluate_together(wrapped, [split], lanes=3)[0].nats == plain.nats
    checkpoint.save(tmp_path / "wrapped.safetensors", wrapped, Alphabet.bytes())
    loaded = checkpoint.load(tmp_path / "wrapped.safetensors")
    assert torch.equal(loaded.model.W_out, model.W_out)
    assert Predictor(wrapped, Alphabet.bytes()).model.alphabet_size == 256


def test_what_is_no_model_is_told(split: Split, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    checkpoint.save(file, made(), Alphabet.bytes())
    for given in (checkpoint.load(file), str(file), nn.Linear(2, 2)):
        for use in (
            lambda it: evaluate(it, split),
            lambda it: evaluate_together(it, [split]),
            lambda it: Predictor(it, Alphabet.bytes()),
            lambda it: checkpoint.save(file, it, Alphabet.bytes()),
        ):
            with pytest.raises(TypeError, match=r"is no LanguageModel\. Give the model itself"):
                use(given)
