"""Options reach what they are for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from process import Call

from made import settings
from mulstm import recipe
from mulstm.dynamic import Settings
from mulstm.errors import RunError
from mulstm.sample import Sampling

Watch = Callable[[str], dict[str, Any]]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Puts something in the place of a function that tells what that was given, and ends the command."""

    def put(name: str) -> dict[str, Any]:
        given: dict[str, Any] = {}

        def called(*places: Any, **more: Any) -> None:
            given.clear()
            given.update(more, places=places)
            raise RunError("Enough. Stop.")

        monkeypatch.setattr(name, called)
        return given

    return put


def test_options_of_train(call: Call, watch: Watch, trained: Path, text_file: Path) -> None:
    given = watch("mulstm.train.train")
    options = {"runs_dir": Path("r"), "data_dir": Path("d"), "device": "cpu", "minutes": 2.5}
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", value)]
    assert call("train", text_file, "--from", trained, "--tensorboard", "-q", *words).code == 3
    more = {"start_from": trained, "resume_from": None, "tensorboard": True, "quiet": True}
    assert given == options | more | {"places": given["places"]}
    call("train", text_file, "--resume", "auto")
    assert (given["resume_from"], given["quiet"], given["tensorboard"]) == ("auto", False, False)


def test_a_text_is_trained_with_the_early_stop_of_its_recipe(
    call: Call, watch: Watch, trained: Path, text_file: Path
) -> None:
    given = watch("mulstm.train.train")
    for name, start in (("text", ()), ("finetune", ("--from", trained))):
        call("train", text_file, *start)
        assert given["places"][0].evaluate.patience == recipe.load(name).evaluate.patience > 0
    for more, patience in (("data.split=100-0-0", 0), ("evaluate.patience=2", 2)):
        call("train", text_file, "--set", more)
        assert given["places"][0].evaluate.patience == patience


def test_options_of_search(call: Call, watch: Watch, text_file: Path) -> None:
    given = watch("mulstm.search.search")
    options = ("--try", "train.lanes=4,5", "--set", "train.chunk=20", "--minutes", 3, "--device", "cpu")
    assert call("search", text_file, *options, "--data-dir", "d", "-q").code == 3
    assert (given["minutes"], given["device"], given["data_dir"]) == (3.0, "cpu", Path("d"))
    assert given["note"] is None
    assert [(t.recipe.train.lanes, t.recipe.train.chunk) for t in given["places"][0]] == [(4, 20), (5, 20)]


def test_options_of_evaluate(call: Call, watch: Watch, trained: Path) -> None:
    given = watch("mulstm.evaluate.evaluate")
    options = ("--split", "valid", "--lanes", 3, "--chunk", 7, "--symbols", 9, "--backend", "reference")
    assert call("evaluate", trained, *options, "--precision", "bf16", "-q").code == 3
    model, part, *sizes = given["places"]
    assert (part.name, sizes, given["symbols"]) == ("valid", [3, 7], 9)
    assert (model.backend, model.precision) == ("reference", "bf16")


def test_options_of_dynamic_evaluation(
    call: Call, watch: Watch, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given = watch("mulstm.dynamic.evaluate_dynamic")
    options = ("--segment", 15, "--rate", 1e-5, "--pull", 0.01, "--epsilon", 1e-4, "--symbols", 9)
    assert call("evaluate", trained, "--dynamic", *options, "-q") == (3, "", "error: Enough. Stop.\n")
    assert (given["places"][3], given["symbols"]) == (Settings(15, 1e-5, 0.01, 1e-4), 9)
    for more, has_gains in (((), False), (("--as-trained",), True)):  # weight norm's, or matrices alone
        call("evaluate", trained, "--dynamic", *more, "-q")
        assert any("g_" in name for name, _ in given["places"][0].named_parameters()) is has_gains


def test_any_option_of_dynamic_evaluation_sets_the_recipe_aside(
    call: Call, watch: Watch, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that says what goes without saying elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = ("dynamic.rate=5e-5", "dynamic.pull=0.05", "dynamic.segment=10")
    call("train", text_file, "--runs-dir", tmp_path / "runs", "-q", *settings(*own))
    given = watch("mulstm.dynamic.evaluate_dynamic")
    for options, used in (
        ((), Settings(10, 5e-5, 0.05)),
        (("--segment", 20), Settings(rate=1e-4)),
        (("--pull", 0.001), Settings(rate=1e-4)),
        (("--rate", 1e-5), Settings(rate=1e-5)),
    ):
        call("evaluate", tmp_path / "runs", "--dynamic", *options, "-q")
        assert given["places"][3] == used


@pytest.mark.parametrize("models", [1, 2])
def test_a_folder_of_texts(call: Call, watch: Watch, trained: Path, models: int) -> None:
    given = watch("mulstm.cli._text.part_of")
    command = ("evaluate", "surprise")[models - 1]
    assert call(command, *[trained] * models, "text8", "--split", "valid", "--data-dir", "d").code == 3
    assert given["places"][1:] == ("text8", False, "valid", Path("d"))


def test_options_of_sample(call: Call, watch: Watch, trained: Path) -> None:
    given = watch("mulstm.sample.sample")
    options = ("-n", 7, "-t", 0.5, "--top-k", 4, "--top-p", 0.9, "--seed", 2, "--stop", "end", "--streams", 3)
    assert call("sample", trained, "-p", "abc", *options).code == 3
    assert given["places"][2:] == (b"abc", Sampling(7, 0.5, 4, 0.9, 2, b"end"), 3)


def test_options_of_sampling_with_a_unit_held(call: Call, watch: Watch, trained: Path) -> None:
    given = watch("mulstm.sample.go_on")
    options = ("--clamp", "1=0.5", "--clamp", "3=-1", "-n", 7, "-t", 0.5, "--seed", 2)
    assert call("neurons", "sample", trained, "-p", "abc", *options).code == 3
    held, prompt, how = given["places"]
    assert (prompt, how) == (b"abc", Sampling(length=7, temperature=0.5, seed=2))
    held.feed_text(b"a")
    assert held.state[-1].h[0, [1, 3]].tolist() == [0.5, -1.0]


def test_options_of_compress(call: Call, watch: Watch, trained: Path, text_file: Path) -> None:
    given = watch("mulstm.codec.archive.compress_path")
    options = ("--lanes", 3, "--block", 50, "--coder", "python", "--static", "--no-verify", "-q")
    assert call("compress", trained, text_file, *options).code == 3
    how = {key: given[key] for key in ("lanes", "block", "coder", "adaptive", "verify")}
    assert how == {"lanes": 3, "block": 50, "coder": "python", "adaptive": False, "verify": False}


@pytest.mark.parametrize("command", ["compress", "decompress"])
def test_options_of_the_network(
    call: Call, watch: Watch, trained: Path, text_file: Path, command: str
) -> None:
    assert call("compress", trained, text_file, "-q").code == 0
    given = watch(f"mulstm.cli.{command}.network_of")
    file = text_file if command == "compress" else text_file.with_name("made.txt.mul")
    options = ("--device", "cpu", "--products", "float64", "--threads", 2, "-q", "--force")
    assert call(command, trained, file, *options).code == 3
    assert given["places"][1:] == ("cpu", "float64", 2, True)
