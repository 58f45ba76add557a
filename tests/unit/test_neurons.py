"""Units are followed step by step, held where told, and found when they know a label."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import foreign
import mulstm
from mulstm import interop, neurons, probe
from mulstm.checkpoint import Checkpoint
from mulstm.data.alphabet import Alphabet
from mulstm.errors import DataError, MulstmError
from mulstm.interop import unirep
from mulstm.nn.model import LanguageModel
from mulstm.predict import Predictor
from mulstm.recipe import ModelRecipe, Recipe
from mulstm.records import Record
from mulstm.sample import Sampling, go_on, sample


def byte_model(**recipe: object) -> Checkpoint:
    torch.manual_seed(3)
    model = LanguageModel(ModelRecipe(**({"hidden": 8} | recipe)), 256)  # type: ignore[arg-type]
    with torch.no_grad():
        model.W_out.normal_(0, 1)
    return Checkpoint(model.eval(), Alphabet.bytes(), Recipe(), {})


@pytest.mark.parametrize("layers", [1, 2])
def test_a_trace_is_the_state_after_each_symbol(layers: int) -> None:
    loaded = byte_model(layers=layers)
    text = b"a text"
    found = neurons.trace(loaded, Record("r", text), [5, 0])
    with torch.no_grad():
        h, _ = loaded.model.hidden(torch.tensor([list(text)]))
        c = [
            loaded.model.hidden(torch.tensor([list(text[: t + 1])]))[1][-1].c[0, 5] for t in range(len(text))
        ]
    np.testing.assert_allclose(found.values, h[0, :, [5, 0]], atol=1e-6)
    np.testing.assert_allclose(neurons.trace(loaded, Record("r", text), [5], "c").values[:, 0], c, atol=1e-6)
    assert found.text == text


def test_a_proteins_trace_leaves_its_start_out() -> None:
    weights = unirep.from_arrays(foreign.unirep().arrays, "unirep", "w")
    loaded = interop.to_checkpoint(weights)
    found = neurons.trace(loaded, Record("p", b"MKT"), [1])
    with torch.no_grad():
        h, _ = loaded.model.hidden(torch.tensor([[24, *loaded.alphabet.encode(b"MKT").tolist()]]))
    np.testing.assert_allclose(found.values[:, 0], h[0, 1:, 1], atol=1e-6)
    assert found.text == b"MKT"


@pytest.mark.parametrize("recipe", [{}, {"layers": 2, "skip": True, "cell": "lstm"}])
def test_a_unit_held_at_its_own_value_changes_nothing_and_another_does(recipe: dict[str, object]) -> None:
    loaded = byte_model(**recipe)
    plain = Predictor(loaded.model, loaded.alphabet)
    plain.feed_text(b"a")
    held = neurons.Clamped(loaded.model, loaded.alphabet, units={3: float(plain.state[-1].h[0, 3])})
    held.feed_text(b"a")
    torch.testing.assert_close(held.log_probs(), plain.log_probs(), atol=1e-6, rtol=0)
    other = neurons.Clamped(loaded.model, loaded.alphabet, units={3: 5.0})
    other.feed_text(b"ab")
    assert float(other.state[-1].h[0, 3]) == 5.0
    plain.feed_text(b"b")
    assert not torch.allclose(other.log_probs(), plain.log_probs(), atol=1e-3)


def test_sampling_with_a_unit_held() -> None:
    loaded = byte_model()
    how = Sampling(length=20)

    def text(value: float) -> bytes:
        held = neurons.Clamped(loaded.model, loaded.alphabet, units={2: value})
        return b"".join(piece for (piece,) in go_on(held, b"x", how))

    assert len(text(1.0)) == 20
    assert text(1.0) == text(1.0)
    assert text(20.0) != text(-20.0)


def test_a_gpus_own_loop_is_not_used_where_a_unit_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would draw without the unit."""
    from mulstm import sample as sampling

    asked = []
    monkeypatch.setattr(sampling.packed, "sampler", lambda *a, **k: asked.append(a))
    loaded = byte_model()
    held = neurons.Clamped(loaded.model, loaded.alphabet, units={2: 1.0})
    list(go_on(held, b"x", Sampling(length=2)))
    assert not asked
    list(sample(loaded.model, loaded.alphabet, b"x", Sampling(length=2)))
    assert asked


def test_sampling_proteins_begins_and_ends_by_itself() -> None:
    weights = unirep.from_arrays(foreign.unirep().arrays, "unirep", "w")
    model = interop.to_model(weights)
    with torch.no_grad():
        assert model.b_out is not None
        model.b_out[25] = 2.0
    drawn = list(sample(model, weights.alphabet, b"", Sampling(length=500), streams=3))
    assert len(drawn) < 500
    texts = [b"".join(row[k] for row in drawn) for k in range(3)]
    assert len({len(text) for text in texts}) > 1
    assert set(b"".join(texts)) <= set(weights.alphabet.symbols)


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_figures_are_the_same_twice(suffix: str, tmp_path: Path) -> None:
    loaded = byte_model()
    found = neurons.trace(loaded, Record("r", b"costs $5 and $6_x"), [1, 2])
    a, b = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    neurons.draw(found, a)
    neurons.draw(found, b)
    assert a.read_bytes() == b.read_bytes()
    with pytest.raises(DataError, match="is no figure"):
        neurons.draw(found, tmp_path / "a.txt")


def test_pages(tmp_path: Path) -> None:
    found = [neurons.trace(byte_model(), Record("<b>", b"a<i>b"), [1])]
    neurons.write_page(found, tmp_path / "p.html")
    html = (tmp_path / "p.html").read_text()
    assert "&lt;b&gt;" in html
    assert "&lt;</i>" in html


def test_wrong_units_and_names() -> None:
    loaded = byte_model()
    with pytest.raises(DataError, match="no unit 8: the model has 8"):
        neurons.trace(loaded, Record("r", b"x"), [8])
    with pytest.raises(DataError, match="no unit -1"):
        neurons.Clamped(loaded.model, loaded.alphabet, units={-1: 1.0})
    with pytest.raises(MulstmError, match='h and c, not "x"'):
        neurons.trace(loaded, Record("r", b"x"), [1], "x")
    with pytest.raises(MulstmError, match="has no c"):
        neurons.trace(byte_model(cell="rnn"), Record("r", b"x"), [1], "c")


def test_units_that_know_a_label_are_found() -> None:
    pytest.importorskip("sklearn")
    loaded = byte_model(hidden=12)
    rng = np.random.default_rng(0)
    records = []
    for k in range(80):
        letters = b"aeiou" if k % 2 else b"bcdfg"
        text = bytes(rng.choice(list(letters), 12).astype(np.uint8))
        records.append(Record(str(k), text, "vowels" if k % 2 else "consonants"))
    told: list[str] = []
    found = probe.find(loaded, records, top=3, tell=told.append)
    assert told[:2] == ["reading 80 records", "choosing units, penalty 1 of 11"]
    assert found.labels == ["consonants", "vowels"]
    assert found.accuracy >= 0.9 > found.majority
    assert 1 <= len(found.units) <= 3
    assert found.units[0].separation > 0.9
    assert abs(found.units[0].weight) >= abs(found.units[-1].weight) > 0
    assert found.strength < max(probe.STRENGTHS)  # several are as good, and the sparsest is taken
    every = probe.find(loaded, records, top=100)
    assert len(every.units) == every.units_used == found.units_used < 12
    assert all(unit.weight for unit in every.units)
    three = [r._replace(label="abc"[k % 3]) for k, r in enumerate(records)]
    assert len(probe.find(loaded, three).labels) == 3
    with pytest.raises(DataError, match="at least two different"):
        probe.find(loaded, [r._replace(label="x") for r in records])
    with pytest.raises(DataError, match='Too few different records \\(1\\) carry the label "rare"'):
        probe.find(loaded, [records[0]._replace(label="rare"), *records])
    with pytest.raises(DataError, match="no representation"):
        probe.find(loaded, records, of="h")
    with pytest.raises(DataError, match=r"The cell rnn has no c\. Read h_mean"):
        probe.find(byte_model(cell="rnn"), records, of="c_final")


def test_of_several_labels_each_unit_tells_its_own() -> None:
    pytest.importorskip("sklearn")
    rng, kinds = np.random.default_rng(0), {"early": b"abc", "late": b"xyz", "middle": b"lmn"}
    records = [
        Record(str(k), bytes(rng.choice(list(letters), 12).astype(np.uint8)), label)
        for k in range(20)
        for label, letters in kinds.items()
    ]
    found = probe.find(byte_model(hidden=12), records, top=100)
    assert found.accuracy == 1
    assert {unit.label for unit in found.units} == set(kinds)
    assert found.units_used == len({unit.unit for unit in found.units})


def test_a_text_is_never_both_learnt_and_held_out() -> None:
    pytest.importorskip("sklearn")
    loaded, rng = byte_model(hidden=64), np.random.default_rng(0)
    texts = [bytes(rng.choice(list(b"abcdefgh "), 30).astype(np.uint8)) for _ in range(60)]
    # Labels that mean nothing: known again, each text would give its own away.
    records = [Record(str(k), text, "ab"[k % 2]) for k, text in enumerate(texts)] * 10
    found = probe.find(loaded, records)
    assert found.accuracy < 0.8
    assert found.held_out == 120
    # However often a text comes, it is one of them: which are held out is for the seed to say.
    often = [*records[:60], *[Record("o", b"ok", "a")] * 60]
    tried = [probe.find(loaded, often, seed=seed) for seed in range(8)]
    assert {one.held_out > 60 for one in tried} == {True, False}
    assert all((one.majority > 0.85) == (one.held_out > 60) for one in tried)
    with pytest.raises(DataError, match=r'Too few different records \(1\) carry the label "rare"'):
        probe.find(loaded, [*records, *[Record("r", b"the same", "rare")] * 9])


@pytest.mark.parametrize("name", ["", "openai-review", "nvidia-review"])
def test_a_trace_ends_where_a_representation_is_read(name: str) -> None:
    loaded = byte_model()
    loaded = Checkpoint(loaded.model, loaded.alphabet, Recipe(), {"source": {"convention": name}})
    found = neurons.trace(loaded, Record("r", b"good film"), [1, 2], "c")
    np.testing.assert_allclose(
        found.values[-1], mulstm.embed(loaded, "good film").c_final[0, [1, 2]], atol=1e-6
    )
    assert found.text == (b"good film " if name == "openai-review" else b"good film")


def test_with_no_unit_held_nothing_differs_whatever_the_weights_are_stored_in() -> None:
    loaded = byte_model(hidden=64)
    loaded.model.bfloat16()
    plain = Predictor(loaded.model, loaded.alphabet)
    held = neurons.Clamped(loaded.model, loaded.alphabet, units={})
    for predictor in (plain, held):
        predictor.feed_text(b"hello")
    torch.testing.assert_close(held.log_probs(), plain.log_probs(), rtol=0, atol=1e-6)


def test_a_trace_leaves_the_mode_as_it_was() -> None:
    loaded = byte_model()
    for training in (True, False):
        loaded.model.train(training)
        neurons.trace(loaded, Record("r", b"a text"), [1])
        assert loaded.model.training is training
