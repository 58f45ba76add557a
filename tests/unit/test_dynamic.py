import copy
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from made import repeating_text
from mulstm.data import corpus
from mulstm.dynamic import Settings, evaluate_dynamic, gather_statistics, kept_statistics
from mulstm.errors import DataError
from mulstm.evaluate import evaluate
from mulstm.nn.model import LanguageModel
from mulstm.recipe import ModelRecipe

SETTINGS = Settings(segment=7, rate=2e-3, pull=0.02, epsilon=1e-5)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(repeating_text())
    return corpus.load(str(path), split="50-25-25", alphabet="corpus")


@pytest.fixture
def model(text):
    torch.manual_seed(0)
    recipe = ModelRecipe(hidden=24, embedding=8, weight_norm=True)
    return LanguageModel(recipe, text.alphabet.size)


def test_a_rate_of_zero_is_static_evaluation(model, text) -> None:
    split = text.split("test")
    R = gather_statistics(model, text.split("train"), lanes=4, segment=7, batches=5)
    static = evaluate(model, split, lanes=1)
    dynamic = evaluate_dynamic(model, split, R, dataclasses.replace(SETTINGS, rate=0.0))
    assert dynamic.symbols == static.symbols == split.symbols_count
    assert dynamic.nats == pytest.approx(static.nats, rel=1e-5)


def test_learning_helps_on_a_text_that_repeats_and_leaves_the_model_alone(model, text) -> None:
    before = copy.deepcopy(model.state_dict())
    R = gather_statistics(model, text.split("train"), lanes=4, segment=7, batches=5)
    split = text.split("test")
    dynamic = evaluate_dynamic(model, split, R, SETTINGS)
    assert dynamic.bits_per_char < evaluate(model, split, lanes=1).bits_per_char - 0.1
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_update_is_the_published_rule(model, text) -> None:
    """Three segments by hand, in float64 and straight from the formula."""
    model = model.double()
    model.precision = "fp64"
    split = text.split("test")
    R = gather_statistics(model, text.split("train"), lanes=4, segment=7, batches=5)
    found = evaluate_dynamic(model, split, R, SETTINGS, symbols=21)

    ids = torch.from_numpy(split.read(-1, 21).astype(np.int64))[None]
    by_hand = copy.deepcopy(model)
    theta, theta_0 = dict(by_hand.named_parameters()), dict(model.named_parameters())
    mean = torch.cat([r.flatten() for r in R.values()]).mean()
    nats, state = [], None
    for start in (0, 7, 14):
        logits, state = by_hand(ids[:, start : start + 7], state)
        state = tuple(type(s)(s.h.detach(), s.c.detach()) for s in state)
        loss = F.cross_entropy(logits[0], ids[0, start + 1 : start + 8])
        nats.append(7 * loss.item())
        g = dict(zip(theta, torch.autograd.grad(loss, list(theta.values())), strict=True))
        with torch.no_grad():
            for name, p in theta.items():
                back = (SETTINGS.pull * R[name] / mean).clamp(max=1) * (theta_0[name] - p)
                p += back - SETTINGS.rate * g[name] / (R[name] + SETTINGS.epsilon)
    assert found.nats == pytest.approx(sum(nats), rel=1e-6)


def test_divergence_is_told(model, text) -> None:
    R = gather_statistics(model, text.split("train"), lanes=4, segment=7, batches=5)
    with pytest.raises(DataError, match="diverged"):
        evaluate_dynamic(model, text.split("test"), R, dataclasses.replace(SETTINGS, rate=float("inf")))


def test_statistics_are_kept_for_the_model_they_are_of(model, text, tmp_path) -> None:
    folder, how = tmp_path / "statistics", {"lanes": 4, "segment": 7, "batches": 5}
    first = kept_statistics(folder, model, text.alphabet, lambda: text.split("train"), **how)

    def again():
        raise AssertionError("they were kept")

    kept = kept_statistics(folder, model, text.alphabet, again, **how)
    assert all(torch.equal(first[name], kept[name]) for name in first)
    (damaged,) = folder.iterdir()
    damaged.write_bytes(damaged.read_bytes()[:100])
    repaired = kept_statistics(folder, model, text.alphabet, lambda: text.split("train"), **how)
    assert all(torch.equal(first[name], repaired[name]) for name in first)
    with torch.no_grad():
        model.W_out.add_(1.0)
    with pytest.raises(AssertionError, match="they were kept"):
        kept_statistics(folder, model, text.alphabet, again, **how)


def test_what_moves_may_be_the_matrices_or_what_was_trained(model, text) -> None:
    """Both are the same function at first; what they learn differs, and progress tells the same sum."""
    split = text.split("test")
    found = []
    for start in (model, model.folded(embedding=False)):
        R = gather_statistics(start, text.split("train"), lanes=4, segment=7, batches=5)
        told = {}
        result = evaluate_dynamic(
            start, split, R, dataclasses.replace(SETTINGS, segment=1), progress=told.__setitem__
        )
        assert result.losses is not None
        done, bits = told.popitem()
        assert bits == pytest.approx(result.losses[:done].sum(dtype=np.float64) / np.log(2) / done)
        found.append(result.losses)
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    assert abs(found[0][-50:] - found[1][-50:]).max() > 1e-4


def test_the_rate_goes_by_the_size_of_the_model_unless_given(model) -> None:
    assert Settings().rate_of(model) == pytest.approx(40 / model.parameter_count())
    assert Settings(rate=0.0).rate_of(model) == 0.0
