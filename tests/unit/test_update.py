from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from distance import rms
from mulstm.data.pairs import Pairs, pairs_of
from mulstm.nn.model import LanguageModel
from mulstm.parallel import Share
from mulstm.recipe import Recipe
from mulstm.update import GraphedUpdate, Update, make

N = 20


def chunk(k: int, lanes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(k)
    symbols = rng.integers(N, size=(lanes, 11))
    return symbols[:, :-1], symbols[:, 1:]


def fresh(recipe: Recipe, share: Share | None = None) -> Update:
    model = LanguageModel(recipe.model, N, init=None).float()
    model.initialise(recipe.init, torch.Generator().manual_seed(7))
    return make(model.train(), recipe, torch.Generator().manual_seed(3), share)


@pytest.fixture
def plain(tiny: Callable[..., Recipe]) -> Recipe:
    adam = ("optimiser.name=adam", "optimiser.weight_decay=0", "optimiser.clip=0.5")
    recipe = tiny("dropout.hidden=0", "dropout.embedding=0", *adam)
    return replace(recipe, model=replace(recipe.model, hidden=9))


def test_updates_equal_a_plain_loop(plain: Recipe) -> None:
    update = fresh(plain)
    other = fresh(plain).model
    other.backend = "reference"
    adam = torch.optim.Adam(other.parameters(), lr=0.01)
    state = None
    for k in range(4):
        x, y = chunk(k)
        loss = update(x, y, rate=0.01)
        adam.zero_grad()
        logits, state = other(torch.from_numpy(x), state)
        state = tuple(s.detach() for s in state)
        expected = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(y).flatten())
        expected.backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        adam.step()
        assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    for ours, theirs in zip(update.model.parameters(), other.parameters(), strict=True):
        assert rms(ours, theirs) < 1e-4
    for ours, theirs in zip(update.state, state, strict=True):
        assert rms(ours.h, theirs.h) < 1e-4
        assert rms(ours.c, theirs.c) < 1e-4


def test_totals_are_summed_on_the_device(plain: Recipe) -> None:
    update = fresh(plain)
    losses = [float(update(*chunk(k), rate=0.01)) for k in range(3)]
    nats, symbols, norms = update.totals.tolist()
    assert nats == pytest.approx(40 * sum(losses))
    assert symbols == 3 * 40
    assert norms > 0


def test_totals_of_records_count_what_is_predicted(plain: Recipe) -> None:
    update = fresh(replace(plain, data=replace(plain.data, records="lines")))
    x, y = chunk(0)
    few = np.where(np.arange(10) < 2, y, -1)
    losses = [float(update(x, part, rate=0.0, first=np.zeros((4, 10), dtype=bool))) for part in (y, few)]
    nats, symbols, _ = update.totals.tolist()
    assert symbols == 40 + 8
    assert nats == pytest.approx(40 * losses[0] + 8 * losses[1], rel=1e-6)


def test_records_that_do_not_begin_are_a_text(plain: Recipe) -> None:
    one, other = fresh(plain), fresh(replace(plain, data=replace(plain.data, records="lines")))
    for k in range(3):
        x, y = chunk(k)
        loss = one(x, y, rate=0.01)
        assert float(other(x, y, rate=0.01, first=np.zeros_like(x, dtype=bool))) == pytest.approx(float(loss))
    for ours, theirs in zip(one.parameters, other.parameters, strict=True):
        assert rms(theirs, ours) < 1e-5


def test_refresh_runs_the_chunk_again_with_the_new_weights(plain: Recipe) -> None:
    update = fresh(replace(plain, train=replace(plain.train, refresh=True)))
    update(*chunk(0), rate=0.1)
    with torch.no_grad():
        _, state = update.model(torch.from_numpy(chunk(0)[0]))
    assert torch.equal(update.state[0].h, state[0].h)
    without = fresh(plain)
    without(*chunk(0), rate=0.1)
    assert rms(without.state[0].h, state[0].h) > 1e-3


def test_refresh_starts_where_the_chunk_did_with_its_masks(tiny: Callable[..., Recipe]) -> None:
    recipe = tiny("train.refresh=true", "train.drop_state=0.5", "dropout.hidden=0.5", "dropout.embedding=0.5")
    update, twin = fresh(recipe), fresh(recipe)
    for work in (update, twin):
        work.state[0].h.fill_(0.3)
        work.state[0].c.fill_(0.2)
    masks, before = twin._masks(), twin._surviving()
    update(*chunk(0), rate=0.1)
    with torch.no_grad():
        _, state = update.model.hidden(torch.from_numpy(chunk(0)[0]), before, masks)
    assert torch.equal(update.state[0].h, state[0].h)
    assert torch.equal(update.state[0].c, state[0].c)


@pytest.mark.parametrize("cell", ["mlstm", "lstm"])
def test_refresh_begins_records_where_the_chunk_did(plain: Recipe, cell: str) -> None:
    data = replace(plain.data, records="lines")
    recipe = replace(plain, model=replace(plain.model, cell=cell), data=data)
    first = np.zeros((4, 10), dtype=bool)
    first[1, 6] = first[2, 0] = True
    states = []
    for refresh in (True, False):
        update = fresh(replace(recipe, train=replace(plain.train, refresh=refresh)))
        update.state[0].c.fill_(3.0)
        update(*chunk(0), rate=0.0, first=first)
        states.append(update.state[0])
    torch.testing.assert_close(states[0].h, states[1].h)
    torch.testing.assert_close(states[0].c, states[1].c)


def test_clear(plain: Recipe) -> None:
    update = fresh(plain)
    update(*chunk(0), rate=0.1)
    update.clear()
    assert not update.state[0].h.any()
    assert not update.state[0].c.any()


def test_dropped_states(plain: Recipe) -> None:
    dropping = fresh(replace(plain, train=replace(plain.train, drop_state=0.999999)))
    clearing = fresh(plain)
    for k in range(3):
        clearing.clear()
        assert torch.equal(dropping(*chunk(k), rate=0.1), clearing(*chunk(k), rate=0.1))
    some = fresh(replace(plain, train=replace(plain.train, drop_state=0.5)))
    some(*chunk(0), rate=0.1)
    kept = [bool(row.any()) for row in torch.cat([some._surviving()[0].h for _ in range(8)])]
    assert 8 <= sum(kept) <= 24


def test_average(plain: Recipe) -> None:
    update = fresh(replace(plain, train=replace(plain.train, ema=0.9)))
    assert update.averaged is not None
    mean = None
    for k, blend in enumerate([1.0, 1.0, 0.25, 0.25]):
        update(*chunk(k), rate=0.1, blend=blend)
        now = update.model.W_out.detach().clone()
        mean = now if blend == 1.0 else 0.75 * mean + 0.25 * now
    assert rms(update.averaged.W_out, mean) < 1e-6
    assert rms(update.averaged.W_out, now) > 1e-3


def test_the_same_generator_draws_the_same_masks(tiny: Callable[..., Recipe]) -> None:
    recipe = tiny("dropout.hidden=0.5", "dropout.embedding=0.5")
    one, two = fresh(recipe), fresh(recipe)
    for k in range(2):
        assert torch.equal(one(*chunk(k), rate=0.1), two(*chunk(k), rate=0.1))
    two.generator.manual_seed(9)
    assert not torch.equal(one(*chunk(2), rate=0.1), two(*chunk(2), rate=0.1))


class Apart(Share):
    """A share whose gradients stay apart, to be added up by the test."""

    def sum(self, tensors: Iterable[Tensor | None]) -> None:
        list(tensors)


def test_shares_of_the_lanes_add_up(tiny: Callable[..., Recipe]) -> None:
    recipe = tiny(
        "dropout.hidden=0.4",
        "dropout.embedding=0.3",
        "dropout.output=0.2",
        "train.drop_state=0.4",
        "optimiser.clip=0",
    )
    recipe = replace(recipe, dropout=replace(recipe.dropout, weights=0.1))
    whole = fresh(recipe)
    shares = [fresh(recipe, Apart(rank, 2)) for rank in range(2)]
    for state in (u.state[0] for u in (whole, *shares)):
        state.h.fill_(0.3)
        state.c.fill_(0.2)
    whole(*chunk(0), rate=0.0)
    losses = [float(share(*chunk(0), rate=0.0)) for share in shares]
    assert sum(losses) / 2 == pytest.approx(float(whole.loss), rel=1e-5)
    for k in range(2):
        assert sum(float(s.totals[k]) for s in shares) == pytest.approx(float(whole.totals[k]), rel=1e-5)
    for k, parameter in enumerate(whole.parameters):
        both = shares[0].parameters[k].grad + shares[1].parameters[k].grad
        assert rms(both, parameter.grad) < 1e-5
    assert torch.allclose(torch.cat([s.state[0].h for s in shares]), whole.state[0].h, atol=1e-6)


def test_bf16_keeps_float32_weights(plain: Recipe) -> None:
    model = LanguageModel(plain.model, N)
    model.precision = "bf16"
    update = make(model.train(), plain, torch.Generator().manual_seed(3))
    first = float(update(*chunk(0), rate=0.05))
    for _ in range(10):
        update(*chunk(0), rate=0.05)
    assert float(update.loss) < first
    assert update.state[0].h.dtype == torch.bfloat16
    assert update.state[0].c.dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in update.parameters)


def test_a_capture_loads_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is captured, for some number of pairs or without any, ran as it stands before."""
    done: list[tuple[str, int]] = []
    how = ["runs"]

    class Graph:
        def register_generator_state(self, _: Any) -> None: ...

        def pool(self) -> tuple[int, int]:
            return 0, 1

        def replay(self) -> None:
            done.append(("replayed", rows))

    @contextmanager
    def capture(graph: Graph, pool: Any, stream: Any) -> Iterator[None]:
        assert stream is side  # where it ran as it stands, on the model's own GPU
        how[0] = "captured"
        yield
        how[0] = "runs"

    side = SimpleNamespace(wait_stream=lambda _: None)
    for name, fake in (("current_stream", lambda: side), ("stream", nullcontext), ("graph", capture)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(Update, "step", lambda _: done.append((how[0], rows)))
    update = GraphedUpdate.__new__(GraphedUpdate)
    vars(update).update(graphs={}, seen=set(), calls=0, stream=side, generator=None)
    update.optimiser = SimpleNamespace(zero_grad=lambda set_to_none: None)  # type: ignore[assignment]
    for rows in (16, 16, 16, 16, 0, 0, 32, 16, 32, 0):
        update.pairs = SimpleNamespace(lane=torch.zeros(rows)) if rows else None  # type: ignore[assignment]
        update.step()
    assert [rows for what, rows in done if what == "captured"] == [16, 0, 32]
    for k, (what, rows) in enumerate(done):
        assert what == "runs" or ("runs", rows) in done[:k]
    assert len([what for what, _ in done if what != "captured"]) == 10  # each call makes one update


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a GPU that is none was told of the copies to it; every model has a use for pairs."""
    told: list[str] = []
    event = SimpleNamespace(synchronize=lambda: told.append("waited"), record=lambda: told.append("marked"))
    monkeypatch.setattr("mulstm.nn.packed.pairs_pay", lambda model: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, lambda: event)
    return told


def graphed(plain: Recipe, count: int = 1, records: str = "") -> GraphedUpdate:
    recipe = replace(plain, train=replace(plain.train, lanes=8), data=replace(plain.data, records=records))
    return GraphedUpdate(LanguageModel(plain.model, N), recipe, torch.Generator(), Share(count=count))


@pytest.mark.parametrize(("count", "records"), [(1, ""), (2, ""), (1, "lines")])
def test_pairs_are_for_one_process_and_one_text(
    plain: Recipe, done: list[str], count: int, records: str
) -> None:
    # Each has other pairs, and so would be in another graph, or in none, while all must meet in one.
    update = graphed(plain, count, records)
    x, y = chunk(1, lanes=8)
    update.load(np.zeros_like(x), y, np.zeros(x.shape, dtype=bool) if records else None)  # one pair a lane
    assert (update.pairs is not None) == (count == 1 and not records)


def test_pairs_of_a_chunk_are_those_on_the_device(plain: Recipe, done: list[str]) -> None:
    update = graphed(plain)
    for k in range(2 * update.SLOTS):
        x, y = (part % 3 for part in chunk(k, lanes=8))
        update.load(x, y)
        update.calls += 1
        assert update.xy.tolist() == [x.tolist(), y.tolist()]
        found = pairs_of(x.astype(np.uint8))
        assert update.pairs is not None
        for name, right, rest in zip(Pairs._fields, found, (0, 0, 0, 0, x.size), strict=True):
            there = getattr(update.pairs, name)
            assert there[: right.size].tolist() == right.tolist(), name
            assert set(there[right.size :].tolist()) <= {rest}, name
    # A slot is filled anew only when what was in it has been copied.
    assert done == ["waited", "marked"] * (2 * update.SLOTS)


def test_the_type_that_is_usual_elsewhere_changes_nothing(
    tiny: Callable[..., Recipe], usual: AbstractContextManager[None]
) -> None:
    recipe = tiny("dropout.hidden=0.3", "train.drop_state=0.4", "train.ema=0.9")

    def updated() -> list[Tensor]:
        update = fresh(recipe)
        for k in range(4):
            update(*chunk(k), rate=1.2345e-3, blend=0.1234)
        assert update.averaged is not None
        return [update.totals, *update.parameters, *update.averaged.parameters()]

    truth = updated()
    with usual:
        found = updated()
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
