"""A run that stops, for whatever reason, goes on as if it had not."""

from __future__ import annotations

import importlib
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from made_runs import RICH, Tiny, at_update, interrupt_validation, run, same, steady, weights
from mulstm import checkpoint, data, earlier, job, outcome, parallel, resume, runs, tensorfile, train
from mulstm.errors import DataError, RunError, RunInterruptedError
from mulstm.recipe import Recipe
from mulstm.resume import Progress


def test_nothing_is_left_to_do(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, folder = run(tiny(), tmp_path)
    before = (folder / "last.safetensors").stat().st_mtime_ns
    again = train.train(tiny(), runs_dir=tmp_path, resume_from="auto")
    assert again == (record, folder)
    assert (folder / "last.safetensors").stat().st_mtime_ns == before
    assert "complete" in capsys.readouterr().err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_resumed_equals_unbroken(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    recipe = tiny(*RICH, "evaluate.patience=9")
    _, whole = run(recipe, tmp_path / "whole")
    for n in (4, 6):  # twice interrupted, the second time across an epoch's end
        with monkeypatch.context() as patch:
            at_update(patch, n, lambda: os.kill(os.getpid(), signum))
            with pytest.raises(RunInterruptedError, match="is saved") as caught:
                run(recipe, tmp_path / "broken", resume_from="auto")
        assert caught.value.exit_code == 128 + signum
        assert signal.getsignal(signum) in (signal.default_int_handler, signal.SIG_DFL)
    record, broken = run(recipe, tmp_path / "broken", resume_from="auto")
    assert record["updates"] == 17
    for name in ("last", "best", "resume"):
        assert same(weights(whole, name), weights(broken, name)), name
    assert steady(runs.read_log(whole)) == steady(runs.read_log(broken))
    expected = json.loads((whole / "metrics.json").read_text())
    for key in ("test_bits_per_char", "valid_bits_per_char", "epochs", "best_valid_update"):
        assert record[key] == expected[key]


def test_interrupted_while_validating(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny("evaluate.patience=9")
    _, whole = run(recipe, tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_validation(patch)
        with pytest.raises(RunInterruptedError, match="update 5 of 12"):
            run(recipe, tmp_path / "broken")
    _, broken = run(recipe, tmp_path / "broken", resume_from="auto")
    assert same(weights(whole, "best"), weights(broken, "best"))
    assert steady(runs.read_log(whole)) == steady(runs.read_log(broken))


def test_interrupted_while_measuring_at_the_end(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = train.finish

    def finish(work: job.Job) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(outcome, "evaluate_together", lambda *g, progress, **n: progress(1, 1.0))
        return real(work)

    monkeypatch.setattr(train, "finish", finish)
    with pytest.raises(RunInterruptedError, match="measuring") as caught:
        run(tiny(), tmp_path)
    assert caught.value.exit_code == 143
    monkeypatch.undo()
    record, _ = run(tiny(), tmp_path, resume_from="auto")
    assert record["updates"] == 12


def test_a_signal_while_short_parts_are_measured(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too short to look for signals on the way; the record is not made, and that is said."""
    real = outcome.evaluate_together

    def signalled(*given: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return real(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(outcome, "evaluate_together", signalled)
        with pytest.raises(RunInterruptedError, match="Interrupted while measuring the trained model"):
            run(tiny(), tmp_path)
    assert not [*tmp_path.rglob("metrics.json")]
    assert run(tiny(), tmp_path, resume_from="auto")[0]["complete"]


def test_a_signal_when_all_is_done_is_told(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = outcome.record

    def signalled(*given: Any) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(outcome, "record", signalled)
        with pytest.raises(RunInterruptedError, match="is complete") as caught:
            run(tiny(), tmp_path)
    assert caught.value.exit_code == 143
    (record,) = tmp_path.rglob("metrics.json")
    assert run(tiny(), tmp_path, resume_from="auto")[1] == record.parent


def test_a_signal_that_one_process_alone_heard_is_told_by_all(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, largest = outcome.record, parallel.Share.largest
    heard_elsewhere = 0

    def late(*given: Any) -> dict[str, Any]:
        nonlocal heard_elsewhere
        heard_elsewhere = signal.SIGTERM
        return record(*given)

    def agreed(share: parallel.Share, *values: float) -> list[float]:
        return [max(value, heard_elsewhere) for value in largest(share, *values)]

    monkeypatch.setattr(outcome, "record", late)
    monkeypatch.setattr(parallel.Share, "largest", agreed)
    with pytest.raises(RunInterruptedError, match="is complete") as caught:
        run(tiny(), tmp_path)
    assert caught.value.exit_code == 143


def test_a_line_of_the_log_is_written_once(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny("evaluate.every=5")
    with monkeypatch.context() as patch:
        interrupt_validation(patch)
        with pytest.raises(RunInterruptedError, match="update 5 of 12"):
            run(recipe, tmp_path)
    with monkeypatch.context() as patch:  # line 5 is written, and the run dies before it is saved
        at_update(patch, 2, lambda: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            run(recipe, tmp_path, resume_from="auto")
    _, folder = run(recipe, tmp_path, resume_from="auto")
    lines = [line["update"] for line in runs.read_log(folder)]
    assert lines == sorted(set(lines))


def killed(patcher: pytest.MonkeyPatch, update: int, recipe: Recipe, root: Path, start_from: Path) -> Path:
    """The folder of a run that dies at this update."""

    def die() -> None:
        raise KeyboardInterrupt

    with patcher.context() as patch:
        at_update(patch, update, die)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, root, start_from=start_from)
    (folder,) = runs.newest_first("text", root=root)
    return folder


def test_a_run_killed_at_once_goes_on_from_the_model_it_started_from(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = run(tiny(), tmp_path / "first")
    start, slow = first / "last.safetensors", tiny("train.updates=2", "optimiser.rate=1e-12")
    folder = killed(monkeypatch, 1, slow, tmp_path, start)
    _, resumed = run(slow, tmp_path, resume_from=str(folder))
    assert torch.allclose(weights(first)["W_out"], weights(resumed)["W_out"], atol=1e-6)
    source = checkpoint.load(resumed).meta["source"]
    assert source["tuned_from"] == checkpoint.load(start).meta["fingerprint"]


def test_a_start_with_bytes_of_its_own_goes_on_with_any_text_of_them(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = run(tiny("data.alphabet=corpus"), tmp_path / "first")
    start = checkpoint.load(first)
    fewer, strange = tmp_path / "fewer.txt", tmp_path / "strange.txt"
    fewer.write_bytes(start.alphabet.symbols[5:8] * 600)
    strange.write_bytes(fewer.read_bytes() + b"\x00")
    more = tiny("data.alphabet=corpus", f"data.corpus={fewer}", "train.updates=4")
    folder = killed(monkeypatch, 2, more, tmp_path, first)
    _, resumed = run(more, tmp_path, resume_from=str(folder))
    assert checkpoint.load(resumed).alphabet == start.alphabet
    with pytest.raises(DataError, match=r"0x00 at offset 1,800 is not in the alphabet"):
        run(tiny("data.alphabet=corpus", f"data.corpus={strange}"), tmp_path, start_from=first)


def test_auto_takes_the_run_of_this_start_only(tiny: Tiny, tmp_path: Path) -> None:
    _, plain = run(tiny(), tmp_path)
    start, other = plain / "last.safetensors", tmp_path / "other.safetensors"
    _, tuned = run(tiny(), tmp_path, start_from=start, resume_from="auto")
    assert tuned != plain
    assert earlier.run_of(tiny(), tmp_path, "auto") == plain
    assert earlier.run_of(tiny(), tmp_path, "auto", start) == tuned
    other.write_bytes((tuned / "last.safetensors").read_bytes())
    told: list[str] = []
    assert earlier.run_of(tiny(), tmp_path, "auto", other, told.append) is None
    assert "it did not start from the same weights" in told[0]
    assert earlier.run_of(tiny(), tmp_path, str(tuned)) == tuned
    with pytest.raises(RunError, match="did not start from"):
        run(tiny(), tmp_path, start_from=other, resume_from=str(tuned))
    # The newest of a folder may be the run that was killed.
    with pytest.raises(RunError, match="stands for its newest run"):
        earlier.run_of(tiny(), tmp_path, "auto", plain.parent)


def test_a_full_disk_loses_nothing(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny("train.save_every=1e-9")
    _, whole = run(recipe, tmp_path / "whole")
    real, writes = tensorfile.save_file, [0]

    def filling(tensors: Any, path: Path, metadata: Any) -> None:
        writes[0] += 1
        if writes[0] > 9:
            path.write_bytes(b"half")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        real(tensors, path, metadata)

    with monkeypatch.context() as patch:
        patch.setattr(tensorfile, "save_file", filling)
        with pytest.raises(RunError, match=r"No space left.*Go on with .mulstm train --resume "):
            run(recipe, tmp_path / "full")
    (full,) = runs.newest_first("text", root=tmp_path / "full")
    checkpoint.load(full / "last.safetensors")
    assert not list(full.glob(".*"))
    _, resumed = run(recipe, tmp_path / "full", resume_from="auto")
    assert resumed == full
    assert same(weights(whole), weights(resumed))


def test_leftovers_of_a_killed_run_are_cleared(tiny: Tiny, tmp_path: Path) -> None:
    recipe = tiny()
    with runs.Run.create(recipe, root=tmp_path) as kept:
        folder = kept.path
        kept.log(
            {"update": 3, "train_bits_per_char": 1.0}
        )  # written after the last checkpoint: there is none
    (folder / ".last.safetensors.123.tmp").write_bytes(b"half")
    (folder / ".tmp3lzKfk").write_bytes(b"half")
    _, resumed = run(recipe, tmp_path, resume_from="auto")
    assert resumed == folder
    assert not list(folder.glob(".*"))
    assert [line["update"] for line in runs.read_log(folder)] == list(range(1, 13))


def test_a_folder_in_use(tiny: Tiny, tmp_path: Path) -> None:
    recipe = tiny()
    with runs.Run.create(recipe, root=tmp_path) as held, pytest.raises(RunError, match="in use"):
        run(recipe, tmp_path, resume_from=str(held.path))
    assert sorted(path.name for path in held.path.iterdir()) == ["lock", "recipe.toml"]


def test_resume_wants_the_same_recipe_and_text(tiny: Tiny, tmp_path: Path, text_file: Path) -> None:
    recipe = tiny()
    _, folder = run(recipe, tmp_path)
    with pytest.raises(RunError, match=r"train\.updates was 12, is 20"):
        run(tiny("train.updates=20"), tmp_path, resume_from=str(folder))
    text = text_file.read_bytes()
    text_file.write_bytes(text.replace(b"e", b"o"))
    for which in (str(folder), "auto"):  # its figures are of another text
        with pytest.raises(RunError, match="text has changed"):
            run(recipe, tmp_path, resume_from=which)
    text_file.rename(text_file.with_suffix(".gone"))
    assert run(recipe, tmp_path, resume_from=str(folder))[1] == folder
    text_file.write_bytes(text)
    (folder / "metrics.json").unlink()
    before = weights(folder)
    with pytest.raises(RunError, match=r"optimiser\.rate was 0\.004, is 0\.1"):
        run(tiny("optimiser.rate=0.1"), tmp_path, resume_from=str(folder))
    with pytest.raises(RunError, match="not a run folder"):
        run(recipe, tmp_path, resume_from=str(tmp_path / "nowhere"))
    text_file.write_bytes(text.replace(b"a", b"o"))
    with pytest.raises(RunError, match="text has changed"):
        run(recipe, tmp_path, resume_from=str(folder))
    assert same(before, weights(folder))


def test_a_recipe_edited_in_the_folder_is_not_that_of_the_run(tiny: Tiny, tmp_path: Path) -> None:
    """Its record would say that all updates were made by it."""
    _, folder = run(tiny(), tmp_path, minutes=1e-9)
    path = folder / "recipe.toml"
    whole = path.read_text()
    for edited in (whole.replace("rate = 0.004", "rate = 0.001"), whole.replace("seed = 1", "seed = 2"), ""):
        assert edited != whole
        path.write_text(edited)
        with pytest.raises(RunError, match=r"recipe\.toml of .* was changed after the run began \(.* is "):
            run(runs.recipe_of(folder), tmp_path, resume_from=str(folder))
    path.write_text(whole.replace("rate = 0.004", "rate = 0.001"))
    with pytest.raises(RunError, match=r"optimiser\.rate was 0\.004, is 0\.001"):
        run(tiny("optimiser.rate=1e-3"), tmp_path, resume_from="auto")
    path.write_text(whole)
    assert run(tiny(), tmp_path, resume_from=str(folder))[0]["updates"] == 12


def test_a_run_from_before_a_key_was_known_goes_on(tiny: Tiny, tmp_path: Path) -> None:
    _, folder = run(tiny(), tmp_path, minutes=1e-9)
    state = folder / resume.NAME
    tensors, meta = tensorfile.read(state, resume.KIND)
    del meta["recipe"]["evaluate.calibrate"]
    tensorfile.write(state, tensors, meta)
    assert run(tiny(), tmp_path, resume_from=str(folder))[0]["updates"] == 12
    _, other = run(tiny(), tmp_path / "other", minutes=1e-9)
    path = other / "recipe.toml"
    path.write_text(path.read_text().replace("calibrate = false", "calibrate = true"))
    with pytest.raises(RunError, match=r"evaluate\.calibrate was False, is True"):
        run(runs.recipe_of(other), tmp_path, resume_from=str(other))


def test_an_edit_far_from_both_ends_is_noticed(tmp_path: Path) -> None:
    facts = []
    for letter in b"ab":
        text = bytearray(b" " * 300_000)
        text[150_000] = letter
        (tmp_path / "text").write_bytes(text)
        facts.append(job.corpus_facts(data.load(tmp_path / "text")))
    assert facts[0] != facts[1]


def test_auto_takes_the_run_of_this_recipe_only(tiny: Tiny, tmp_path: Path) -> None:
    _, first = run(tiny("train.updates=2"), tmp_path)
    _, second = run(tiny("train.updates=3"), tmp_path, resume_from="auto")
    assert first != second
    assert earlier.run_of(tiny("train.updates=2"), tmp_path, "auto") == first
    assert earlier.run_of(tiny("train.updates=2", "train.save_every=9.0"), tmp_path, "auto") == first
    told: list[str] = []
    assert earlier.run_of(tiny("train.updates=4"), tmp_path, "auto", tell=told.append) is None
    assert told == [
        f"No run of this very recipe to go on with ({second} differs: train.updates was 3, is 4); "
        "starting anew."
    ]


def test_auto_knows_a_text_by_any_of_its_names(
    tiny: Tiny, tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(text_file.parent)
    _, folder = run(tiny(), tmp_path, minutes=1e-9)
    for name in (text_file.name, f"./{text_file.name}"):
        assert earlier.run_of(tiny(f"data.corpus={name}"), tmp_path, "auto") == folder
    other = text_file.with_name("other.txt")
    other.write_bytes(text_file.read_bytes())
    assert earlier.run_of(tiny(f"data.corpus={other}"), tmp_path, "auto") is None


def test_auto_passes_over_a_run_of_another_version(tiny: Tiny, tmp_path: Path) -> None:
    _, other = run(tiny(), tmp_path)
    path = other / "recipe.toml"
    path.write_text(path.read_text() + "\n[later]\nkey = 1\n")
    _, folder = run(tiny(), tmp_path, resume_from="auto")
    assert folder != other


def test_auto_finds_the_run_of_a_recipe_without_a_name(tiny: Tiny, tmp_path: Path) -> None:
    recipe = replace(tiny(), name="")
    _, cut = run(recipe, tmp_path, minutes=1e-9)
    assert run(recipe, tmp_path, resume_from="auto")[1] == cut


class Killed(BaseException):
    """Nothing of ours catches it, as nothing catches kill -9."""


@pytest.mark.parametrize(
    ("place", "reached"), [("mulstm.resume.save", (7, 7)), ("mulstm.earlier.settle_best", (8, 8))]
)
def test_a_killed_run_finds_no_best_model_of_its_future(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, reached: tuple[int, int]
) -> None:
    recipe = tiny("evaluate.patience=9", "evaluate.every=4", "train.save_every=1e-9")
    module, name = place.rsplit(".", 1)
    real = getattr(importlib.import_module(module), name)

    def killed(*given: Any) -> None:
        if any(isinstance(part, Progress) and part.update == 8 for part in given):
            raise Killed
        real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(place, killed)
        with pytest.raises(Killed):
            run(recipe, tmp_path)
    # Whatever is left of its time, the folder and its record are of the same model.
    record, folder = run(recipe, tmp_path, resume_from="auto", minutes=1e-9)
    assert (record["updates"], record["best_valid_update"]) == reached
    best = checkpoint.load(folder)
    assert best.meta["metrics"]["update"] == record["best_valid_update"]
    assert best.meta["fingerprint"] == record["fingerprint"]
    assert not (folder / earlier.BETTER).exists()


def test_killed_in_the_first_save_of_a_start(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = run(tiny(), tmp_path / "first")

    def killed(*given: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(train, "_write_model", killed)
        with pytest.raises(Killed):
            run(tiny(), tmp_path, start_from=first)
    (folder,) = runs.newest_first("text", root=tmp_path)
    assert not (folder / "last.safetensors").exists()
    for which in ("auto", str(folder)):
        with pytest.raises(RunError, match=r"was ended before it had begun\. Start a new run with --from"):
            run(tiny(), tmp_path, resume_from=which, start_from=first)


def test_a_state_of_an_earlier_version_has_its_origin_in_the_model(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = run(tiny(), tmp_path / "first")
    folder = killed(monkeypatch, 1, tiny(), tmp_path, first)
    tensors, meta = tensorfile.read(folder / "resume.safetensors", "training state")
    assert meta.pop("source")["tuned_from"]
    tensorfile.write(folder / "resume.safetensors", tensors, meta)
    assert earlier.tuned_from(folder) == checkpoint.load(first).meta["fingerprint"]
