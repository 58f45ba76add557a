"""Weights are prepared once in evaluation, and kept only while they are right."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from mulstm.nn import LanguageModel, packed
from mulstm.nn.kept import Kept
from mulstm.recipe import InitRecipe, ModelRecipe
from nn_models import make


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

    def after_gradients(model: LanguageModel) -> None:
        with torch.enable_grad():
            model(torch.randint(9, (2, 3)))[0].square().sum().backward()
        for p in model.parameters():
            p.data.add_(0.1)

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
        ("behind, after gradients", after_gradients),
        ("initialise", lambda model: model.initialise(InitRecipe(recurrent_scale=0.3))),
    ]


@pytest.mark.parametrize("change", [pytest.param(c, id=name) for name, c in changes()])
def test_kept_weights_are_never_stale(change: Callable[[LanguageModel], Any]) -> None:
    model = make(ModelRecipe(hidden=6, embedding=4, weight_norm=True)).eval()
    x = torch.randint(9, (2, 3))
    with torch.no_grad():
        before = model(x)[0]
        assert torch.equal(model(x)[0], before)
        change(model)
        after = model(x)[0]
        fresh = copy.deepcopy(model)
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
        model.precision = "bf16"
        model(x)
        assert len(made) == 2
    with torch.inference_mode():
        model(x)
    assert len(made) == 2


def test_packed_weights_are_forgotten_when_gradients_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(ModelRecipe(hidden=8), 9)
    monkeypatch.setattr(packed, "serves", lambda *_: True)
    monkeypatch.setattr(packed, "run", lambda *_: ([], ()))
    monkeypatch.setattr(packed, "loss", lambda *_: torch.zeros(()))
    monkeypatch.setattr(packed, "pack", lambda _: object())
    x = torch.zeros(1, 2, dtype=torch.long)
    with torch.no_grad():
        before = model._packed(None)
        assert model._packed(None) is before
    model.loss(x, x)  # an optimiser that shows in no version may follow
    with torch.no_grad():
        assert model._packed(None) is not before


def test_a_model_made_in_inference_mode_works() -> None:
    with torch.inference_mode():
        model = LanguageModel(ModelRecipe(hidden=4), 5).eval()
        x = torch.randint(5, (1, 3))
        assert torch.equal(model(x)[0], model(x)[0])


def test_no_other_tensor_takes_the_place_of_what_is_kept() -> None:
    kept: Kept[int] = Kept()
    parameter = torch.zeros(1)
    alive = weakref.ref(parameter)
    kept.get([parameter], None, lambda: 5)
    del parameter
    assert alive() is not None
    kept.forget()
    assert alive() is None


def test_another_thread_may_forget_at_any_moment() -> None:
    class Forgetful(Kept[int]):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, None)

    kept = Forgetful()
    assert [kept.get([torch.zeros(1)], None, lambda: 5) for _ in range(2)] == [5, 5]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_fused_step_is_seen_however_the_gradients_came(kind: type[torch.optim.Optimizer]) -> None:
    model = make(ModelRecipe(hidden=6, embedding=4, weight_norm=True)).eval()
    x = torch.randint(9, (2, 20))
    optimiser = kind(model.parameters(), lr=0.1, fused=True)
    with torch.enable_grad():
        model(x)[0].square().sum().backward()
    with torch.no_grad():
        before = model.hidden(x)[0]  # kept between the gradients and the step
        optimiser.step()
        after = model.hidden(x)[0]
        model.forget()
        assert not after.equal(before)
        assert after.equal(model.hidden(x)[0])


@pytest.mark.parametrize("whole", [True, False])
def test_what_other_processes_may_write_to_is_not_kept(whole: bool) -> None:
    model = make(ModelRecipe(hidden=5)).eval()
    (model if whole else model.layers[0]).share_memory()
    x = torch.randint(9, (2, 20))
    with torch.no_grad():
        model(x)
        # What another process does shows in no version.
        for p in model.layers[0].parameters():
            p.data.mul_(0.5)
        found = model(x)[0]
        model.forget()
        assert torch.equal(found, model(x)[0])


def test_views_of_a_larger_tensor_are_not_kept() -> None:
    model = make(ModelRecipe(hidden=5)).eval()
    whole = parameters_to_vector(model.parameters()).detach().clone()
    vector_to_parameters(whole, model.parameters())
    x = torch.randint(9, (2, 20))
    with torch.no_grad():
        before = model(x)[0]
        whole.mul_(0.5)  # which shows in no version of a view made by way of .data
        found = model(x)[0]
        model.forget()
        assert torch.equal(found, model(x)[0])
        assert not torch.equal(found, before)


def test_the_weights_of_a_wrapped_layer_are_not_kept() -> None:
    """Their versions are those of the layer inside, as with torch.compile of a layer."""
    model = make(ModelRecipe(hidden=6, embedding=4, weight_norm=True)).eval()
    inside = model.layers[0]
    model.layers[0] = checkpoint_wrapper(inside)
    x = torch.randint(9, (2, 3))
    with torch.no_grad():
        before = model(x)[0]
        for p in inside.parameters():
            p.mul_(1.5)
        after = model(x)[0]
        model.forget()
        assert torch.equal(model(x)[0], after)
    assert not torch.allclose(before, after)


def test_frozen_weights_are_kept_while_another_module_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    model, head = make(ModelRecipe(hidden=6)).eval(), torch.nn.Linear(6, 1, dtype=torch.float64)
    prepare, made = model._prepare, []
    monkeypatch.setattr(model, "_prepare", lambda *a, **k: made.append(1) or prepare(*a, **k))
    optimiser, x = torch.optim.SGD(head.parameters(), lr=0.1), torch.randint(9, (2, 3))

    def learn() -> None:
        with torch.no_grad():
            h, _ = model.hidden(x)
        head(h).sum().backward()
        optimiser.step()

    model.requires_grad_(False)
    for _ in range(3):
        learn()
    assert len(made) == 1
    model.requires_grad_(True)  # the optimiser may be theirs
    for _ in range(2):
        learn()
    assert len(made) == 3


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_frozen_weights_that_another_model_trains_are_not_stale(kind: type[torch.optim.Optimizer]) -> None:
    learner, frozen = make(ModelRecipe(hidden=6)), make(ModelRecipe(hidden=6))
    frozen.load_state_dict(learner.state_dict(), assign=True)
    frozen.eval().requires_grad_(False)
    x = torch.randint(9, (2, 3))
    with torch.no_grad():
        before = frozen(x)[0]
    learner(x)[0].square().sum().backward()
    kind(learner.parameters(), lr=0.1, fused=True).step()  # leaves the versions as they were
    with torch.no_grad():
        after = frozen(x)[0]
        torch.testing.assert_close(after, learner(x)[0])
    assert not torch.allclose(before, after)


def test_a_fused_step_counts_only_what_it_changed() -> None:
    a, b = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    first, second = (p.square().sum() for p in (a, b))
    optimiser = torch.optim.Adam([a, b], fused=True)
    first.backward()
    optimiser.step()
    second.backward()  # b is as it was
    assert b.grad is not None
