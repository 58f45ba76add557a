import copy
import dataclasses
import json
import math
import os
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from made import repeating_text
from mulstm import adapt, dynamic, record_corpus, tensorfile
from mulstm.data import corpus
from mulstm.data.text import Text
from mulstm.dynamic import Settings, evaluate_dynamic, gather_statistics, got_worse, kept_statistics
from mulstm.errors import BackendError, CheckpointError, DataError, MulstmError
from mulstm.evaluate import Evaluation, evaluate
from mulstm.nn.model import LanguageModel
from mulstm.recipe import DataRecipe, ModelRecipe

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
        state = tuple(s.detach() for s in state)
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
        evaluate_dynamic(model, text.split("test"), R, dataclasses.replace(SETTINGS, rate=1e38))


@pytest.mark.parametrize(("first", "last", "worse"), [(1.0, 1.9, False), (1.0, 2.1, True), (3.0, 1.0, False)])
def test_a_text_whose_end_costs_too_much(first: float, last: float, worse: bool) -> None:
    losses = np.repeat(np.float32([first, (first + last) / 2, last]), [100, 800, 100])
    assert got_worse(losses) == worse
    assert not got_worse(losses[-9:])  # no tenth at all


def test_a_model_that_gives_no_number_has_no_statistics(model, text, tmp_path) -> None:
    """Nor is the rate to blame."""
    with torch.no_grad():
        model.W_out.fill_(1e38)
    with pytest.raises(CheckpointError, match=r"gives no number for the train part of text\.txt"):
        kept_statistics(tmp_path, model, text.alphabet, text.split("train"), lanes=4, segment=7, batches=5)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_kernel_that_waited_in_vain_measured_nothing(model, text, monkeypatch) -> None:
    R = gather_statistics(model, text.split("train"), lanes=4, segment=7, batches=5)
    monkeypatch.setattr("mulstm.nn.packed.has_failed", lambda device: True)
    with pytest.raises(BackendError, match="waited in vain"):
        evaluate_dynamic(model, text.split("test"), R, SETTINGS, symbols=14)


def test_statistics_are_kept_for_the_model_and_text_they_are_of(model, text, tmp_path, monkeypatch) -> None:
    made = []

    def gather(*given, **named):
        made.append(1)
        return gather_statistics(*given, **named)

    monkeypatch.setattr(dynamic, "gather_statistics", gather)
    folder, train = tmp_path / "statistics", text.split("train")

    def ask(split=train, **changed):
        return kept_statistics(
            folder, model, text.alphabet, split, **{"lanes": 4, "segment": 7, "batches": 5} | changed
        )

    first, kept = ask(), ask()
    assert len(made) == 1
    assert all(torch.equal(first[name], kept[name]) for name in first)
    (damaged,) = folder.iterdir()
    damaged.write_bytes(damaged.read_bytes()[:100])
    repaired = ask()
    assert len(made) == 2
    assert all(torch.equal(first[name], repaired[name]) for name in first)
    meta = tensorfile.read_meta(damaged)
    del meta[tensorfile.CHECKSUM]
    unsealed = {name: tensor * math.nan for name, tensor in first.items()}
    save_file(unsealed, damaged, {tensorfile.KEY: json.dumps(meta)})
    assert all(bool(torch.isfinite(tensor).all()) for tensor in ask().values())
    assert len(made) == 3
    ask(segment=8)
    edited = train.text.read(0, len(train.text)).copy()
    edited[edited == ord("a")] = ord("b")
    ask(dataclasses.replace(train, text=Text([edited])))
    ask(text.split("valid"))
    model.precision = "bf16"
    ask()
    with torch.no_grad():
        model.W_out.add_(1.0)
    ask()
    assert len(made) == 8
    hook = model.register_forward_hook(lambda model, given, found: (found[0] / 2, found[1]))
    other = ask()
    hook.remove()
    assert len(made) == 9
    assert not all(torch.equal(other[name], mine) for name, mine in ask().items())
    made.pop()
    left = folder / ".half-written.tmp"  # by a process that was killed
    left.touch()
    os.utime(left, (0, 0))
    ask()
    assert (len(made), left.exists()) == (8, True)
    ask(batches=7)
    assert (len(made), left.exists()) == (9, False)


def test_statistics_under_the_name_of_others_are_not_taken(model, text, tmp_path) -> None:
    def ask(segment):
        how = {"lanes": 4, "segment": segment, "batches": 5}
        return kept_statistics(folder, model, text.alphabet, text.split("train"), **how)

    folder = tmp_path / "statistics"
    right = ask(7)
    (seven,) = folder.iterdir()
    ask(8)
    (eight,) = set(folder.iterdir()) - {seven}
    eight.replace(seven)
    assert all(torch.equal(tensor, right[name]) for name, tensor in ask(7).items())


def test_a_text_of_fewer_batches_has_the_mean_of_those(model, text) -> None:
    train = text.split("train")
    told = []
    many = gather_statistics(
        model, train, lanes=4, segment=7, batches=10_000, progress=lambda k, n: told.append((k, n))
    )
    count = told[-1][1]
    all_there_are = gather_statistics(model, train, lanes=4, segment=7, batches=count)
    assert told == [(k, count) for k in range(1, count + 1)]
    assert count < 10_000
    assert all(torch.equal(tensor, all_there_are[name]) for name, tensor in many.items())


def test_words_count_for_a_whole_part_only(model, text) -> None:
    split = dataclasses.replace(text.split("test"), has_words=True)
    R = gather_statistics(model, text.split("train"), lanes=4, segment=7, batches=5)
    assert evaluate_dynamic(model, split, R, SETTINGS, symbols=70).word_perplexity is None
    assert evaluate_dynamic(model, split, R, SETTINGS).words == split.words


def test_what_is_best_moved_has_its_embedding_and_no_gains(model) -> None:
    names = dict(dynamic.moving(model).named_parameters())
    assert "embedding" in names
    assert not any(".g_" in name for name in names)


def test_records_and_empty_parts_are_refused(model, text, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "r.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n')
    records = record_corpus.load(DataRecipe(corpus=str(tmp_path / "r.jsonl"), records="jsonl"))
    R = gather_statistics(model, text.split("train"), lanes=4, segment=7, batches=5)
    with pytest.raises(DataError, match=r"r\.jsonl is a file of records"):
        gather_statistics(model, records.split("train"))
    with pytest.raises(DataError, match=r"r\.jsonl is a file of records"):
        evaluate_dynamic(model, records.split("valid"), R, SETTINGS)
    empty = dataclasses.replace(text.split("test"), stop=text.split("test").start)
    with pytest.raises(DataError, match=r"The test part of text\.txt is empty\. Give another part or"):
        evaluate_dynamic(model, empty, R, SETTINGS)


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
    large = LanguageModel(ModelRecipe(hidden=400), model.alphabet_size)
    assert Settings().rate_of(large) == 40 / large.parameter_count() < 1e-4
    assert Settings().rate_of(model) == 1e-4
    with torch.device("meta"):
        huge = LanguageModel(ModelRecipe(hidden=2800), model.alphabet_size)
    assert Settings().rate_of(huge) == 2e-6
    assert Settings(rate=0.0).rate_of(model) == 0.0


def test_statistics_of_a_kernel_that_waited_in_vain_are_not_kept(model, text, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("mulstm.nn.packed.has_failed", lambda device: True)
    with pytest.raises(BackendError, match="waited in vain"):
        kept_statistics(tmp_path, model, text.alphabet, text.split("train"), lanes=4, segment=7, batches=5)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(model, text, tmp_path) -> None:
    (tmp_path / "blocked").write_text("a file")
    how = {"lanes": 4, "segment": 7, "batches": 5}
    R = kept_statistics(tmp_path / "blocked" / "statistics", model, text.alphabet, text.split("train"), **how)
    assert R.keys() == dict(model.named_parameters()).keys()


def test_a_text_of_one_symbol_teaches_nothing(tmp_path) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(b"a" * 400)
    text = corpus.load(str(path), split="50-25-25", alphabet="corpus")
    model = LanguageModel(ModelRecipe(hidden=4), text.alphabet.size)
    R = gather_statistics(model, text.split("train"), lanes=4, segment=7, batches=5)
    assert evaluate_dynamic(model, text.split("test"), R, SETTINGS).nats == 0


def test_without_an_epsilon_what_no_text_moves_stays(model, text) -> None:
    R = gather_statistics(model, text.split("train"), lanes=4, segment=7, batches=5)
    R["embedding"][0] = 0.0
    assert (R["embedding"] > 0).any()
    bare = dataclasses.replace(SETTINGS, epsilon=0.0, rate=1e-6)
    found = evaluate_dynamic(model, text.split("test"), R, bare, symbols=70)
    assert math.isfinite(found.nats)


@pytest.mark.parametrize("how", [{"rate": float("inf")}, {"pull": float("nan")}, {"epsilon": -1.0}])
def test_impossible_settings(how) -> None:
    with pytest.raises(MulstmError, match=r"of dynamic evaluation is .*\. Give a number of 0 or more"):
        Settings(**how)


def test_frozen_parameters_and_modes_without_gradients(model, text) -> None:
    train, test = text.split("train"), text.split("test")
    R = gather_statistics(model, train, lanes=4, segment=7, batches=5)
    expected = evaluate_dynamic(model, test, R, SETTINGS, symbols=70)
    model.W_out.requires_grad_(False)
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, autocast):
        with mode():
            again = gather_statistics(model, train, lanes=4, segment=7, batches=5)
            found = evaluate_dynamic(model, test, again, SETTINGS, symbols=70)
        assert found.nats == pytest.approx(expected.nats, rel=1e-6)


def test_what_does_not_belong_together(model, text) -> None:
    test = text.split("test")
    R = gather_statistics(model, text.split("train"), lanes=4, segment=7, batches=5)
    other = LanguageModel(ModelRecipe(hidden=5), model.alphabet_size)
    with pytest.raises(DataError, match="statistics are of another model"):
        evaluate_dynamic(other, test, R, SETTINGS)
    with pytest.raises(MulstmError, match="Give 1 or more"):
        evaluate_dynamic(model, test, R, SETTINGS, symbols=-5)
    with pytest.raises(MulstmError, match="Give 1 or more"):
        gather_statistics(model, test, lanes=0)
    with pytest.raises(MulstmError, match="A segment of -3 symbols is none"):
        Settings(segment=-3)
    with pytest.raises(DataError, match="The model has 256 symbols and the alphabet"):
        gather_statistics(LanguageModel(ModelRecipe(hidden=5), 256), test)
    wide = LanguageModel(model.recipe, 256)
    with pytest.raises(DataError, match="The model has 256 symbols and the alphabet"):
        evaluate_dynamic(wide, test, {name: p.detach() for name, p in wide.named_parameters()}, SETTINGS)


def test_statistics_of_what_was_made_in_inference_mode(model, text) -> None:
    how = {"lanes": 4, "segment": 7, "batches": 2}
    right = gather_statistics(dynamic.moving(model), text.split("train"), **how)
    with torch.inference_mode():
        found = gather_statistics(dynamic.moving(model), text.split("train"), **how)
    assert all(torch.equal(found[name], right[name]) for name in right)


def test_progress(model, text, monkeypatch) -> None:
    monkeypatch.setattr(dynamic, "ASK_EVERY", 2)
    R = gather_statistics(model, text.split("train"), lanes=4, segment=7, batches=5)
    seen = []
    found = evaluate_dynamic(
        model, text.split("test"), R, SETTINGS, symbols=45, progress=lambda *told: seen.append(told)
    )
    assert [done for done, _ in seen] == [14, 28, 42, 45]
    assert seen[0][1] == pytest.approx(float(found.losses[:14].mean()) / math.log(2), rel=1e-6)
    assert seen[-1][1] == pytest.approx(found.bits_per_char)


def test_a_record_has_the_perplexity_of_words_where_they_are_counted(model) -> None:
    moved = adapt.Moved(model, {}, SETTINGS, {"rate": 2e-3})
    loaded = SimpleNamespace(model=model, meta={"storage": "fp32"})
    worded = Evaluation(nats=20.0, symbols=10, words=4, seconds=1.0)
    found = adapt.for_record(worded, moved, loaded)
    assert found["test_word_perplexity"] == pytest.approx(math.exp(5.0))
    assert found["rate"] == 2e-3
    assert "test_word_perplexity" not in adapt.for_record(
        dataclasses.replace(worded, words=None), moved, loaded
    )


def test_more_symbols_than_there_are_and_more_lanes_than_a_text_fills(model, text) -> None:
    test = text.split("test")
    R = gather_statistics(model, test, lanes=10_000, segment=20, batches=5)
    fitting = gather_statistics(model, test, lanes=test.symbols_count // 20, segment=20, batches=5)
    assert all(torch.equal(R[name], fitting[name]) for name in R)
    assert evaluate_dynamic(model, test, R, SETTINGS, symbols=10**6).symbols == test.symbols_count
