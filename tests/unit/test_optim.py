from __future__ import annotations

import copy
import math
import pickle
import re

import numpy as np
import pytest
import torch
from torch import Tensor

from mulstm import optim
from mulstm.nn.model import LanguageModel
from mulstm.recipe import ModelRecipe, OptimiserRecipe


def test_linear_decay_is_the_authors() -> None:
    paper = OptimiserRecipe(rate=1e-3, floor=7e-5, decay="linear", decay_updates=108_000)
    assert optim.rate_at(paper, 0, 180_000) == 1e-3
    assert optim.rate_at(paper, 54_000, 180_000) == pytest.approx(5e-4)
    assert optim.rate_at(paper, 100_439, 180_000) > 7e-5
    assert optim.rate_at(paper, 100_440, 180_000) == pytest.approx(7e-5)
    assert optim.rate_at(paper, 179_999, 180_000) == 7e-5


def test_exponential_decay_is_the_authors() -> None:
    paper = OptimiserRecipe(rate=10.0, floor=0.01, decay="exponential", decay_factor=0.9999)
    assert optim.rate_at(paper, 0, 38_000) == pytest.approx(9.999)  # once before the first update
    assert optim.rate_at(paper, 37_999, 38_000) == pytest.approx(0.2237, abs=1e-4)
    assert optim.rate_at(paper, 200_000, 38_000) == 0.01


def test_other_courses() -> None:
    whole = OptimiserRecipe(rate=2.0)
    assert [optim.rate_at(whole, n, 4) for n in range(5)] == [2.0, 1.5, 1.0, 0.5, 0.0]
    cosine = OptimiserRecipe(rate=2.0, floor=1.0, decay="cosine")
    assert [optim.rate_at(cosine, n, 2) for n in range(4)] == pytest.approx([2.0, 1.5, 1.0, 1.0])
    constant = OptimiserRecipe(rate=2.0, decay="constant", warmup=4)
    assert [optim.rate_at(constant, n, 9) for n in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def made(seed: int = 0) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (name, torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)))
        for name, shape in {"layers.0.W_mh": (3, 4), "b_out": (5,)}.items()
    ]


def gradients(step: int) -> list[np.ndarray]:
    rng = np.random.default_rng(step)
    return [rng.normal(size=(3, 4)), rng.normal(size=5) * 10]


def give(named: list[tuple[str, Tensor]], step: int) -> None:
    for (_, tensor), gradient in zip(named, gradients(step), strict=True):
        tensor.grad = torch.from_numpy(gradient)


def test_normalised_rmsprop_is_the_papers() -> None:
    named = made()
    rate = torch.tensor(0.0, dtype=torch.float64)
    recipe = OptimiserRecipe(name="rmsprop-normalised", beta2=0.95, epsilon=1e-6)
    optimiser = optim.build(recipe, named, rate)
    p = np.concatenate([t.detach().numpy().ravel().copy() for _, t in named])
    ms = np.zeros(17)
    for j in range(1, 16):
        length = 3.0 * 0.9999**j
        g = np.concatenate([x.ravel() for x in gradients(j)])
        decay = 1 - 1 / j if j < 10 else 0.95
        ms = decay * ms + (1 - decay) * g * g
        v = g / (np.sqrt(ms) + 1e-6)
        v *= length / np.sqrt((v * v).sum())
        p -= v
        rate.fill_(length)
        give(named, j)
        before = torch.cat([t.detach().ravel() for _, t in named])
        optimiser.step()
        after = torch.cat([t.detach().ravel() for _, t in named])
        assert float((after - before).norm()) == pytest.approx(length, rel=1e-12)
        np.testing.assert_allclose(after.numpy(), p, rtol=0, atol=1e-6)


def test_normalised_rmsprop_and_no_gradient() -> None:
    named = made()
    optimiser = optim.build(
        OptimiserRecipe(name="rmsprop-normalised", beta2=0.9, epsilon=1e-6), named, torch.tensor(5.0)
    )
    for _, tensor in named:
        tensor.grad = torch.zeros_like(tensor)
    optimiser.step()
    assert torch.equal(named[0][1], made()[0][1])


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam(name: str) -> None:
    named = made()
    rate = torch.tensor(0.1, dtype=torch.float64)
    recipe = OptimiserRecipe(name=name, beta1=0.8, beta2=0.95, epsilon=1e-3, weight_decay=0.2)
    optimiser = optim.build(recipe, named, rate)
    theirs = [t.detach().numpy().copy() for _, t in named]
    m, v = [np.zeros_like(t) for t in theirs], [np.zeros_like(t) for t in theirs]
    for j in range(1, 6):
        rate.fill_(0.1 / j)  # the tensor is read anew at each update
        give(named, j)
        optimiser.step()
        for k, g in enumerate(gradients(j)):
            decay = 0.2 if theirs[k].ndim == 2 else 0.0
            if name == "adam":
                g = g + decay * theirs[k]
            else:
                theirs[k] *= 1 - 0.1 / j * decay
            m[k] = 0.8 * m[k] + 0.2 * g
            v[k] = 0.95 * v[k] + 0.05 * g * g
            theirs[k] -= 0.1 / j * (m[k] / (1 - 0.8**j)) / (np.sqrt(v[k] / (1 - 0.95**j)) + 1e-3)
    for (_, ours), other in zip(named, theirs, strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), other, rtol=0, atol=1e-6)


def test_frozen_parameters_are_left_out() -> None:
    named = made()
    named[1][1].requires_grad_(False)
    optimiser = optim.build(OptimiserRecipe(), named, torch.tensor(0.1))
    assert [len(group["params"]) for group in optimiser.param_groups] == [1]


def test_clipping() -> None:
    named = made()
    give(named, 1)
    tensors = [t for _, t in named]
    norm = math.sqrt(sum(float((g * g).sum()) for g in gradients(1)))
    assert float(optim.clip(tensors, 0.0)) == pytest.approx(norm)
    assert float(optim.clip(tensors, norm * 2)) == pytest.approx(norm)
    np.testing.assert_array_equal(named[0][1].grad.numpy(), gradients(1)[0])
    assert float(optim.clip(tensors, norm / 4)) == pytest.approx(norm)
    np.testing.assert_allclose(named[0][1].grad.numpy(), gradients(1)[0] / 4, rtol=1e-6)


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop-normalised"])
def test_clip_and_step_are_both_in_turn(name: str) -> None:
    recipe = OptimiserRecipe(name=name, weight_decay=0.0 if name == "rmsprop-normalised" else 0.1)
    one, other, rate = made(), made(), torch.tensor(0.1)
    together, apart = optim.build(recipe, one, rate), optim.build(recipe, other, rate)
    for j in range(1, 4):
        give(one, j)
        give(other, j)
        norm = optim.clip_and_step(together, [t for _, t in one], 0.5)
        assert torch.equal(norm, optim.clip([t for _, t in other], 0.5))
        apart.step()
    for (_, a), (_, b) in zip(one, other, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop-normalised"])
def test_state_put_back_goes_on_as_before(name: str) -> None:
    recipe = OptimiserRecipe(name=name, beta2=0.9)
    named, rate = made(), torch.tensor(0.1)
    optimiser = optim.build(recipe, named, rate)
    for j in range(1, 4):
        give(named, j)
        optimiser.step()
    kept = {key: t.clone() for key, t in optim.state_tensors(optimiser, named).items()}
    given = {key: t.clone() for key, t in kept.items()}
    others = [(key, torch.nn.Parameter(t.detach().clone())) for key, t in named]
    again = optim.build(recipe, others, rate)
    optim.load_state_tensors(again, others, kept)
    for each, into in ((optimiser, named), (again, others)):
        give(into, 4)
        each.step()
    for (_, a), (_, b) in zip(named, others, strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(kept[key], given[key]) for key in given)
    first = named[0][0]
    without = {key: t for key, t in kept.items() if key.partition(".")[2] != first}
    with pytest.raises(ValueError, match=rf"\.{re.escape(first)} is missing"):
        optim.load_state_tensors(again, others, without)
    with pytest.raises(ValueError, match="there is no parameter other"):
        optim.load_state_tensors(again, others, kept | {"step.other": torch.zeros(())})


def test_rmsprop_bears_what_every_optimiser_bears() -> None:
    W = torch.nn.Parameter(torch.ones(3))
    optimiser = optim.NormalisedRMSprop([W], torch.tensor(0.5), 0.95, 1e-8)
    assert optimiser.step() is None  # no gradients: nothing moves
    assert W.equal(torch.ones(3))

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = W.square().sum()
        loss.backward()
        return loss

    assert float(optimiser.step(closure).detach()) == 3.0
    assert float((W - 1).norm().detach()) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="Give them as one group"):
        optimiser.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


@pytest.mark.parametrize("cell", ["mlstm", "tensor-rnn"])
def test_gains_of_weight_norm_do_not_decay(cell: str) -> None:
    model = LanguageModel(ModelRecipe(cell=cell, hidden=3, weight_norm=True), 4)
    named = list(model.named_parameters())
    before = {name: tensor.detach().clone() for name, tensor in named}
    optimiser = optim.build(OptimiserRecipe(name="adamw", weight_decay=0.5), named, torch.tensor(0.1))
    assert sum(len(group["params"]) for group in optimiser.param_groups) == len(named)
    for _, tensor in named:
        tensor.grad = torch.zeros_like(tensor)
    optimiser.step()
    for name, tensor in named:
        is_matrix = tensor.dim() >= 2 and not name.startswith("layers.0.g_")
        assert torch.allclose(tensor, before[name] * (0.95 if is_matrix else 1.0)), name


def test_each_parameter_counts_its_own_updates() -> None:
    late, early = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimiser = optim.NormalisedRMSprop([late, early], torch.tensor(0.1), 0.95, 1e-8)
    for _ in range(30):
        early.grad = torch.ones(3)
        optimiser.step()
    late.grad, early.grad = torch.ones(3), torch.zeros(3)
    optimiser.step()
    assert optimiser.state[early]["mean_square"].tolist() == pytest.approx([0.95] * 3)
    assert optimiser.state[late]["mean_square"].tolist() == [1.0] * 3


def test_state_is_put_back_for_names_that_can_be_read_once_only() -> None:
    model = LanguageModel(ModelRecipe(hidden=4), 5)
    first, second = (
        optim.build(OptimiserRecipe(), model.named_parameters(), torch.tensor(0.1)) for _ in "ab"
    )
    model.loss(torch.ones(2, 3).long(), torch.ones(2, 3).long())[0].backward()
    first.step()
    optim.load_state_tensors(
        second, model.named_parameters(), optim.state_tensors(first, model.named_parameters())
    )
    assert len(second.state) == len(first.state) > 0


def test_rmsprop_can_be_copied() -> None:
    W = torch.nn.Parameter(torch.ones(3))
    optimiser = optim.NormalisedRMSprop([W], torch.tensor(0.5), 0.95, 1e-8)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(optimiser)))
    (V,) = twin.param_groups[0]["params"]
    for p, o in ((W, optimiser), (V, twin)):
        for k in range(12):
            p.grad = torch.tensor([1.0, 2.0, k])
            o.step()
    assert W.equal(V)


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("how", ["every second", "transposed"])
def test_parameters_that_lie_otherwise_in_memory(name: str, how: str) -> None:
    recipe, rate = OptimiserRecipe(name=name, weight_decay=0.1), torch.tensor(0.1)
    wide = torch.randn(6, 14)
    odd = wide[:, ::2] if how == "every second" else torch.randn(7, 6).t()
    beside = wide[:, 1::2].clone()
    named = [("W", torch.nn.Parameter(odd))]
    plain = [("W", torch.nn.Parameter(odd.detach().clone(memory_format=torch.contiguous_format)))]
    pairs = [(x, optim.build(recipe, x, rate)) for x in (named, plain)]
    for k in range(4):
        for x, optimiser in pairs:
            x[0][1].grad = torch.randn(6, 7, generator=torch.Generator().manual_seed(k))
            optimiser.step()
            state = {n: t.contiguous() for n, t in optim.state_tensors(optimiser, x).items()}
            optim.load_state_tensors(optimiser, x, state)
    torch.testing.assert_close(named[0][1], plain[0][1])
    assert beside.equal(wide[:, 1::2])
