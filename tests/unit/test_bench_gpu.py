"""What `mulstm bench` does on a GPU, run on a CPU at sizes of a few units; and what it asks for and finds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mulstm import bench
from mulstm.bench import cuda, floor, layers, losses, updates
from mulstm.bench.timing import Contender, Ready, Session, fault
from mulstm.cli import bench as command
from mulstm.data import corpus
from mulstm.errors import BackendError, DataError
from mulstm.nn.model import LanguageModel
from mulstm.recipe import ModelRecipe
from mulstm.report import musts

TINY = cuda.Sizes(
    layer=((24, 4, 6, 28),),
    inputs=8,
    update=((24, 4, 6, 28, True),),
    cells=(4, 6, 16),
    evaluate=(24, 4, 6, 3),
    sample=(),
    losses=losses.Size(hidden=16, lanes=4, chunk=5, updates=6, embedding=8, held_out=2),
)
KEYS = ["name", "backend", "level", "hidden", "lanes", "chunk", "parameters", "milliseconds"]
KEYS += ["symbols_per_second", "tflops", "percent_of_floor", "error_vs_float64", "peak_mib"]
KEYS += ["milliseconds_p10", "milliseconds_p90"]


def session(repeats: int = 2) -> Session:
    return Session("cpu", repeats, lambda line: None)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    seen: list[dict[str, Any]] = []
    whole = cuda.bench(
        session(), cuda.PARTS, TINY, lambda so_far: seen.append(json.loads(json.dumps(so_far)))
    )
    # After each part there is something to keep, and the last is all of it.
    assert [sorted(one["seconds"]) for one in seen] == [sorted(cuda.PARTS[: n + 1]) for n in range(6)]
    assert seen[-1] == json.loads(json.dumps(whole))
    return whole


def test_every_row_has_its_keys(found: dict[str, Any]) -> None:
    assert found["left_out"] == []
    for row in found["rows"]:
        assert all(key in row for key in KEYS)
        assert row["milliseconds_p10"] <= row["milliseconds"] <= row["milliseconds_p90"]
        assert 0 < row["error_vs_float64"] < 0.03


def test_everybody_takes_part(found: dict[str, Any]) -> None:
    names = {(row["level"], row["name"], row["backend"]) for row in found["rows"]}
    for name in ("nn.LSTM", "nn.LSTM padded", "nn.LSTM equal parameters"):
        assert {("layer", name, "cudnn"), ("layer", name, "cudnn, one graph")} <= names
    assert {("layer", "mlstm", "fused"), ("layer", "naive", "reference")} <= names
    assert {("update", "naive", "reference"), ("update", "mlstm", "triton, one graph")} <= names
    assert ("update", "nn.LSTM equal parameters", "cudnn, one graph") in names
    assert set(musts.CELLS) <= {name for level, name, _ in names if level == "update"}
    assert any(level == "evaluate" for level, _, _ in names)


def test_parts_can_be_left_out() -> None:
    rows = cuda.bench(session(1), ["cells"], TINY, lambda so_far: None)["rows"]
    # The other cells are measured by the multiplicative LSTM, so it takes its turn with them.
    assert [row["name"] for row in rows] == ["mlstm", *musts.CELLS]
    rows = cuda.bench(session(1), ["evaluate"], TINY, lambda so_far: None)["rows"]
    assert [row["level"] for row in rows] == ["evaluate"]


def test_who_is_wrong_or_breaks_is_left_out_and_named() -> None:
    def contender(name: str, error: float, why: str = "") -> Contender:
        def prepare() -> Ready:
            if why:
                raise RuntimeError(why)
            return Ready(lambda: None, 1, lambda: error)

        work = floor.layer("lstm", 8, 8, 1, 1)
        return Contender(name, "b", "layer", 8, 1, 1, lambda ready: work, prepare)

    here = session()
    entered = [contender("mlstm", 0.5), contender("naive", float("nan")), contender("nn.LSTM", 0.001)]
    rows = here.in_turn([*entered, contender("flashrnn", 0.0, "no compiler")])
    assert [row["name"] for row in rows] == ["nn.LSTM"]
    reasons = {one["contender"].split()[0]: one["reason"] for one in here.left_out}
    assert reasons["mlstm"] == "differs from float64 by 0.5, more than 0.03"
    assert "nan" in reasons["naive"]
    assert reasons["flashrnn"] == "RuntimeError: no compiler"
    wrong = fault({"left_out": here.left_out})
    assert wrong is not None
    assert str(wrong).startswith("1 of our contenders could not be timed, first mlstm 8")
    assert fault({"left_out": [one for one in here.left_out if not one["ours"]]}) is None


def test_contenders_take_turns() -> None:
    order: list[str] = []

    def contender(name: str, slow: bool) -> Contender:
        def prepare() -> Ready:
            return Ready(lambda: order.append(name), 1, lambda: 0.001)

        work = floor.layer("lstm", 8, 8, 1, 1)
        return Contender(name, "b", "layer", 8, 1, 1, lambda ready: work, prepare, slow, inside=2)

    rows = session(4).in_turn([contender("a", False), contender("b", False), contender("slow", True)])
    # One call each before the check; then rounds, of which the slow one sees every third.
    fast = ["a"] * 4 + ["b"] * 4
    assert order == ["a", "b", "slow", *(fast * 2), *fast, "slow", *(fast * 2), *fast, "slow"]
    assert [row["repeats"] for row in rows] == [4, 4, 2]


def test_a_check_sees_what_the_last_run_left() -> None:
    layer = layers.ModuleLayer(nn.LSTM(8, 12), "cpu", 12, 3, 5, inputs=8)
    layer()
    assert layer.error() < 0.02
    grad = next(layer.module.parameters()).grad
    assert grad is not None
    grad.mul_(1.1)
    assert layer.error() == pytest.approx(0.1, abs=0.02)
    next(layer.module.parameters()).grad = None
    assert layer.error() != layer.error()  # not a number: a gradient that is missing is no agreement


def test_the_error_of_an_update_is_the_gradients() -> None:
    torch.manual_seed(1)
    work = updates.OurUpdate(updates.recipe(ModelRecipe(hidden=16, embedding=8), 3, 5), "cpu")
    work()
    assert 0 < work.error() < 0.02
    work.model.precision = "fp32"
    assert work.error() < 1e-4
    lstm = updates.LSTMUpdate(16, 3, 5, "cpu")
    before = lstm.model.table.detach().clone()
    lstm()
    assert not torch.equal(before, lstm.model.table)
    assert 0 < lstm.error() < 0.03


def test_work_counts_the_matrices_that_are_multiplied() -> None:
    for recipe in (
        ModelRecipe(hidden=20, embedding=7, weight_norm=True),
        ModelRecipe(cell="lstm", hidden=20, embedding=7, layers=3, skip=True),
        ModelRecipe(cell="lstm", hidden=20, layers=2),
        ModelRecipe(cell="milstm", hidden=20),
    ):
        model = LanguageModel(recipe, updates.N)
        looked_up = () if recipe.embedding else ("W_mx", "W_zx")
        matrices = sum(
            p.numel()
            for name, p in model.named_parameters()
            if ".W_" in name and not (name.endswith(looked_up) and (recipe.skip or "layers.0." in name))
        )
        work = updates.work_of(recipe, B=2, T=3, parameters=0)
        assert work.flops == 6 * 2 * 3 * (matrices + model.W_out.numel()), recipe
        assert updates.work_of(recipe, 2, 3, backward=False).flops == work.flops / 3


def test_the_floor_of_a_layer() -> None:
    # 1920 units, 128 lanes, 200 steps: the reference's +bar of 7.8 us a step and direction.
    work = floor.layer("mlstm", 1920, 400, 128, 200)
    step = 2 * 128 * 5 * 1920**2 / floor.PRODUCTS + 2 * floor.BARRIER
    assert step == pytest.approx(7.8e-6, rel=0.01)
    rest = work.flops / floor.PRODUCTS - 2 * 200 * (step - 2 * floor.BARRIER)
    assert work.floor == pytest.approx(2 * 200 * step + rest)
    assert floor.layer("mlstm", 2816, 400, 1, 200).floor > 2 * 200 * 10 * 2816**2 / floor.MEMORY


def test_losses_start_alike_and_read_alike(found: dict[str, Any]) -> None:
    plain, *fast = found["losses"]["curves"]
    assert [curve["seed"] for curve in fast] == [1, 2, 3]
    assert (plain["seed"], plain["precision"], fast[0]["precision"]) == (1, "fp32", "bf16")
    assert all(len(curve["bits"]) == TINY.losses.updates for curve in (plain, *fast))
    # Same weights, symbols and masks: only rounding is between the two; another seed reads another text.
    assert fast[0]["bits"] == pytest.approx(plain["bits"], abs=1e-3)
    assert fast[1]["bits"] != pytest.approx(plain["bits"], abs=1e-3)


def test_agreement_is_measured_by_the_range_of_seeds() -> None:
    def curve(bits: float) -> dict[str, Any]:
        return {"held_out_bits": bits, "bits": [bits] * 60}

    close = losses.agreement([curve(2.0), curve(2.01), curve(2.0), curve(2.02)])
    assert close["held_out_difference_bits"] == pytest.approx(0.01)
    assert close["held_out_range_of_seeds_bits"] == pytest.approx(0.02)
    assert close["within_noise"] is True
    assert losses.agreement([curve(2.0), curve(2.1), curve(2.11), curve(2.12)])["within_noise"] is False


def test_losses_want_a_text_that_is_long_enough(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"abcd" * 100)
    with pytest.raises(DataError, match="has 17 chunks of 4 x 5, fewer than 300"):
        losses.compare(session(), losses.Size(8, 4, 5, 300, 4), corpus.load(file))


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(BackendError, match="There is no CUDA device here"):
        bench.run("cuda")


def test_where_a_record_belongs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = {"machine": {"device": "NVIDIA H200"}, "rows": [], "losses": {"curves": []}}
    assert command._usual(found) is None
    (tmp_path / "results" / "bench").mkdir(parents=True)
    path = command._usual(found)
    assert path == Path("results/bench/h200.json")
    assert command._usual({"machine": {"cores": 2}}) is None
    command._write(path, found)
    assert "losses" not in json.loads(path.read_text())
    assert json.loads((path.parent / "losses-h200.json").read_text()) == {"curves": []}
    assert command.PARTS == cuda.PARTS


def test_the_machine_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(multi_processor_count=1, total_memory=2**30)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda d: SimpleNamespace(name=f"GPU {d.index}", **vars(gpu))
    )
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3"))
    assert cuda.machine("cuda:1")["device"] == "GPU 1"
