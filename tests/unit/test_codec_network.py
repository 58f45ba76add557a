"""The integer network: exact in every way it can be run, and close to the model it was made from."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from codec_models import integer, mixed, parent
from codec_oracle import Lane
from codec_oracle import Learner as TheirLearner
from codec_oracle import Matcher as TheirMatcher
from mulstm.codec import block, kernels, products
from mulstm.codec import integer as files
from mulstm.codec.learner import A_BITS, MOST, USED_BITS, Learner
from mulstm.codec.matcher import Matcher
from mulstm.codec.network import C_MOST, MX_MOST, Network
from mulstm.codec.products import KINDS, Products, planes
from mulstm.codec.quantize import quantize
from mulstm.data.alphabet import Alphabet
from mulstm.errors import BackendError

CPU = torch.device("cpu")


def run(network: Network, text: torch.Tensor) -> torch.Tensor:
    """All tables of a text (B, T)."""
    state, rows = network.start(len(text)), []
    for x in text.T.contiguous():
        begins = torch.zeros(len(text), network.model.alphabet.size + 1, dtype=torch.float64)
        network.tables(network.output(state), None, None, begins)
        rows.append(begins)
        network.step(x, state)
    return torch.stack(rows, dim=1)


def _loops(compiled: bool) -> ModuleType | None:
    if compiled and kernels.find() is None:
        pytest.skip("numba is not installed")
    return kernels.find() if compiled else None


def test_int8_products_that_are_not_exact_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_int8_is_exact", lambda device: False)
    assert Products(CPU).kind == "float32"
    with pytest.raises(BackendError, match=r"int8 products of this machine are not exact\. Say float32"):
        Products(CPU, "int8")


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_autocast_rounds_no_product(kind: str) -> None:
    W = torch.randint(-127, 128, (40, 300)).to(torch.int8)
    v = torch.randint(-127, 128, (20, 300)).to(torch.int8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = Products(CPU, kind).by(W)(v)
    assert torch.equal(sums.long(), v.long() @ W.long().T)


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_exact_at_the_extremes(kind: str) -> None:
    if kind == "int8" and not products._int8_is_exact(CPU):
        pytest.skip("int8 products of this machine are not exact")
    for K in (1, 7, 1900, 4099):
        W = torch.where(torch.arange(5 * K).view(5, K) % 3 == 0, -127, 127).to(torch.int8)
        W[0] = 127
        W[1] = torch.randint(60, 128, (K,))
        v = torch.cat(
            [torch.full((2, K), -16384), torch.full((1, K), 16383), torch.randint(-16384, 16384, (3, K))]
        )
        v[4] = 16_383 - torch.randint(0, 4000, (K,))
        high, low = v >> 7, v & 127
        right = W.long().T
        expected = high @ right + ((low @ right) >> 7)
        assert torch.equal(Products(CPU, kind).by_planes(W)(planes(v)).long(), expected)
        assert torch.equal(Products(CPU, kind).once(W, planes(v)[0].T).long(), W.long() @ high.T)


def test_planes_give_every_number_back() -> None:
    v = torch.arange(-16384, 16384)
    high, low = planes(v).long()
    assert torch.equal(128 * high + low, v)
    assert int(low.min()) == 0


def test_a_machine_that_saturates_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = products._int8

    def saturating(W: torch.Tensor) -> products.Sums:
        return lambda v: exact(W)(v).clamp(-(1 << 20), 1 << 20)

    monkeypatch.setattr(products, "_int8", saturating)
    assert Products(CPU).kind == "float32"
    with pytest.raises(BackendError, match="'int4'"):
        Products(CPU, "int4")


@pytest.mark.parametrize("kind", KINDS)
def test_tables_depend_on_nothing_but_the_lane(kind: str) -> None:
    model = integer()
    text = torch.from_numpy(np.frombuffer(mixed(6 * 30), dtype=np.uint8).copy()).long().view(6, 30)
    together = run(Network(model), text)
    for part in (text[:1], text[2:5]):
        alone = run(Network(model, products=kind), part)
        rows = slice(0, 1) if len(part) == 1 else slice(2, 5)
        assert torch.equal(alone, together[rows])


@pytest.mark.parametrize(
    "wiring",
    [
        {},
        {"layers": 2, "skip": True, "unit": "initial"},
        {"layers": 2, "unit": "initial-text", "skip": False},
        {"cell": "lstm", "layers": 3, "skip": False},
        {"cell": "milstm"},
        {"cell": "mrnn"},
        {"cell": "rnn", "layers": 2},
    ],
    ids=str,
)
def test_compiled_loops_give_the_same(wiring: dict[str, object]) -> None:
    _loops(True)
    model = integer(**wiring)
    text = torch.from_numpy(np.frombuffer(mixed(5 * 40), dtype=np.uint8).copy()).long().view(5, 40)
    assert torch.equal(run(Network(model), text), run(Network(model, compiled=False), text))


def test_tables_are_tables() -> None:
    network = Network(integer())
    logits = (torch.randint(-40_000, 40_000, (50, 256)) * torch.randint(0, 9, (50, 1))).double()
    for escape in (None, torch.randint(31, (1 << 22) - 31, (50,)).double()):
        begins = network.shares(logits, escape)
        assert begins[:, 0].eq(0).all()
        assert begins[:, -1].eq(1 << 24).all()
        assert int((begins[:, 1:] - begins[:, :-1]).min()) >= 1
        assert begins.shape[1] == (257 if escape is None else 258)


def test_the_integer_model_is_close_to_its_parent() -> None:
    model = parent(hidden=40, embedding=0, weight_norm=False, scale=0.5)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    network = Network(quantize(weights, model.recipe, Alphabet.bytes(), ""))
    text = torch.randint(0, 256, (8, 60), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits, _ = model(text)
    expected = torch.softmax(logits[:, :-1].double(), dim=-1)
    begins = run(network, text)[:, 1:]
    found = (begins[..., 1:] - begins[..., :-1]).double() / (1 << 24)
    divergence = (expected * (expected / found).log2()).sum(dim=-1)
    assert expected.max() > 0.1
    assert float(divergence.mean()) < 2e-3


@pytest.mark.parametrize("compiled", [False, True])
def test_the_matcher_counts_as_the_oracle_does(compiled: bool) -> None:
    """Long enough for counts to be halved, some at the very limit before, and slots to be fought for."""
    loops = _loops(compiled)
    rng = np.random.default_rng(1)
    B, T, N = 12, 260, 6
    text = rng.integers(0, N, (T, B))
    text[:, ::2] = text[:, ::2] // 2 * (np.arange(T)[:, None] % 7 < 5)
    ours = Matcher(B, B * T, torch.tensor([*range(N - 1), *[-1] * (256 - N + 1)]), loops)
    mine = torch.zeros(B, N + 1, dtype=torch.float64)
    theirs, lanes = TheirMatcher(B, T), [Lane({"facts": {"hidden": 1, "layers": 1}}) for _ in range(B)]
    theirs.seen = [[16_304] * 48 for _ in range(16)]
    ours._seen.fill_(16_304)
    theirs.right[1] = [16_299] * 48  # surer than any place may be
    ours._right[48:96] = 16_299
    symbol_of = {k: k for k in range(N - 1)}
    for t in range(T):
        cuts = np.sort(rng.choice(1 << 23, (B, N - 1), replace=False), axis=1) + np.arange(1, N)
        tables = np.concatenate([np.zeros((B, 1), int), cuts, np.full((B, 1), 1 << 24)], axis=1)
        if t % 3 == 0:  # as sure as a table can be: nothing is left for the others
            tables[:] = np.arange(N + 1) + (np.arange(N + 1) > text[t, :, None]) * ((1 << 24) - N)
        ours.refine(torch.from_numpy(tables).double(), mine)
        yours = [
            theirs.change(lane, row.tolist(), symbol_of) for lane, row in zip(lanes, tables, strict=True)
        ]
        assert mine.tolist() == [v for v, _ in yours]
        ours.tick()
        ours.learn(torch.from_numpy(text[t].astype(np.uint8)))
        theirs.afterwards(t, lanes, text[t].tolist(), [context for _, context in yours])
    assert ours._seen.view(16, 48).tolist() == theirs.seen
    assert min(map(min, theirs.seen)) < 16_304


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("lanes", [1, 9, 300])
@pytest.mark.parametrize("drop", [(), (1,), (4,)])
def test_the_learner_learns_as_the_oracle_does(drop: tuple[int, ...], lanes: int, compiled: bool) -> None:
    _loops(compiled)
    rate = np.array([1 << 19, 1 << 16, 500, *drop], dtype=np.int32)
    model = replace(integer(Alphabet(b"abcdef"), hidden=7), rate=rate)
    ours = Learner(Network(model, compiled=compiled), lanes)
    theirs = TheirLearner({name: array.astype(np.int64) for name, array in model.tensors().items()}, lanes)
    rng = np.random.default_rng(2)
    for _ in range(30):
        h = rng.integers(-16383, 16384, (lanes, 7))
        cuts = np.sort(rng.choice(1 << 23, (lanes, 5), replace=False), axis=1) + np.arange(1, 6)
        tables = np.concatenate([np.zeros((lanes, 1), int), cuts, np.full((lanes, 1), 1 << 24)], axis=1)
        views = [theirs.view(row) for row in h]
        said = ours.correction(planes(torch.from_numpy(h)))
        assert said.tolist() == [theirs.says(view).tolist() for view in views]
        x = rng.integers(0, 7, lanes)
        ours.tick(lanes)
        ours.learn(torch.from_numpy(tables).double(), torch.from_numpy(x))
        theirs.taught(views, tables.tolist(), x.tolist())
    assert int(said.abs().max()) > 200


@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_wide_model_has_learnt_is_more_than_32_bits_hold(compiled: bool) -> None:
    _loops(compiled)
    H, model = 2400, integer(Alphabet(b"abcdef"), hidden=7)
    wide = replace(model, W_out=np.zeros((6, H), np.int8), h_mean=np.zeros(H, np.int16))
    ours = Learner(Network(model, compiled=compiled), 1)
    theirs = TheirLearner({name: array.astype(np.int64) for name, array in wide.tensors().items()}, 1)
    ours._A = torch.full((6, H), MOST, dtype=torch.int32)
    ours._used = planes(ours._A >> (A_BITS - USED_BITS)).flatten(0, 1)
    ours._h, ours._mean = torch.zeros(1, H, dtype=torch.int8), ours._mean[:1].expand(H).contiguous()
    theirs.A[:] = MOST
    h = np.full((1, H), 16383)
    assert ours.correction(planes(torch.from_numpy(h))).tolist() == [theirs.says(theirs.view(h[0])).tolist()]


@pytest.mark.parametrize("scale", [1 / 4, 1 / 64])
def test_a_model_whose_h_is_small_learns_as_well(scale: float) -> None:
    """Output gates half open, or nearly shut and W_mh and W_out so much larger: one and the same model."""
    alphabet, H = Alphabet(b" abcdefghijklmnopqrstuvwxyz"), 64
    letters = random.Random(0)
    content = bytes(letters.choices(alphabet.symbols, [1 / (k + 1) for k in range(27)], k=9000))
    sizes = []
    for opening in (0.5, 0.5 * scale):
        model = parent(alphabet, hidden=H, embedding=0, weight_norm=False, scale=3.0)
        weights = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
        for name in ("W_zx", "W_zm", "b_z"):
            weights[f"layers.0.{name}"][2 * H : 3 * H] = 0
        weights["layers.0.b_z"][2 * H : 3 * H] = math.log(opening / (1 - opening))
        weights["layers.0.W_mh"] *= 0.5 / opening
        weights["W_out"] *= 0.5 / opening
        network = Network(quantize(weights, model.recipe, alphabet, "0" * 64))
        sizes.append(len(block.encode(network, content, 30, adaptive=True)))
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)


def test_places_are_found_by_tables_of_this_size() -> None:
    for length, size in ((1, 10), (3_000, 12), (6_000, 13), (1 << 24, 22), (1 << 28, 22)):
        assert Matcher(1, length, torch.arange(256))._bits == size


def test_compiled_loops_have_the_bounds_of_the_plain_ones() -> None:
    compiled = pytest.importorskip("mulstm.codec.compiled")
    assert (compiled._MOST_MX, compiled._MOST_C) == (MX_MOST, C_MOST) == (32767, 2**31 - 1)
    assert (compiled._LOW, compiled._LOW_MASK) == (products.LOW_BITS, 127)
    assert compiled._HALF == 1 << (files.SHIFT - 1)
