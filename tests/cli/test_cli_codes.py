"""What a command ends with: its exit code, what it says, and to whom."""

from __future__ import annotations

from pathlib import Path

import pytest
from process import Call, told

from made import settings
from mulstm import checkpoint, cli, recipe
from mulstm.errors import CheckFailedError


def test_values_of_options(call: Call, trained: Path) -> None:
    told(call("sample", trained, "--temperature", -1), 2, "--temperature")
    told(call("sample", trained, "--temperature", "inf"), 3, "temperature")
    told(call("sample", trained, "--top-p", 2), 2, "--top-p")
    told(call("sample", trained, "--streams", 0), 2, "--streams")
    told(call("sample", trained, "--streams", 1 << 62), 3, "Memory ran out")
    told(call("neurons", "sample", trained, "--clamp", "1=1e39"), 2, "--clamp")
    told(call("neurons", "find", trained, "x.csv", "--seed", 1 << 32), 2, "--seed")
    told(call("compress", trained, "x", "--threads", 10**24), 2, "--threads")
    told(call("sample", trained, "--precision", "fp8"), 2, "fp8")
    told(call("evaluate", trained, "--lanes", 0), 2, "--lanes")
    told(call("evaluate", trained, "--precision", "fp8"), 2, "fp8")
    told(call("evaluate", trained, "--dynamic", "--lanes", 4), 2, "--lanes", "one stretch")
    told(call("evaluate", trained, "--rate", 1e-5), 2, "--dynamic", "--rate")
    told(call("evaluate", trained, "--segment", 20), 2, "--dynamic", "--segment")
    told(call("evaluate", trained, "--as-trained"), 2, "--dynamic", "--as-trained")
    told(call("evaluate", trained, "--dynamic", "--segment", 9000), 3, "9,000", "shorter --segment")
    told(call("evaluate", trained, "--split", "dev"), 3, "dev")
    told(call("evaluate", trained, "--device", "abacus"), 3, "abacus")
    told(call("evaluate", trained, "--backend", "magic", "-q"), 3, "magic")
    told(call("fetch", "enwik0"), 3, "enwik0")


def test_usage(call: Call) -> None:
    told(call("trian"), 2, "train")
    told(call("train"), 2, "give a text")
    told(call("train", "x", "--nonsense"), 2, "--nonsense")
    told(call("evaluate"), 2, "model")
    for empty in (("sample", ""), ("train", "x.txt", "--from", ""), ("train", "--resume", "")):
        told(call(*empty), 2, "the path is empty")


def test_usage_errors_do_not_command_the_terminal(call: Call) -> None:
    told(
        call("decompress", "model", "file\x1b]0;PWN\x07"),
        2,
        "file\ufffd]0;PWN\ufffd is not a file's name with .mul",
    )
    for words in (["\x1b[2J"], ["--\x1b[2J"], ["train", "--\x1b[2J"]):
        answer = call(*words)
        assert answer.code == 2
        assert "[2J" in answer.err
        assert "\x1b" not in answer.err


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (CheckFailedError("It differs. Make it again."), 4),
        (PermissionError(13, "Permission denied", "/somewhere"), 3),
        (MemoryError(), 3),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 3),
        (OSError(28, "No space left on device"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_faults_and_their_codes(
    call: Call, monkeypatch: pytest.MonkeyPatch, fault: BaseException, code: int
) -> None:
    def fail() -> None:
        raise fault

    monkeypatch.setattr(recipe, "names", fail)
    assert call("recipes").code == code


def test_our_own_faults_show_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(recipe, "names", fail)
    with pytest.raises(ZeroDivisionError):
        cli.run(["recipes"])


def test_an_end_that_comes_too_early_is_not_the_users_abort(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise EOFError

    monkeypatch.setattr(recipe, "names", fail)
    with pytest.raises(RuntimeError, match="ended too early") as caught:
        cli.run(["recipes"])
    assert isinstance(caught.value.__cause__, EOFError)
    assert capsys.readouterr() == ("", "")


def test_debug_shows_the_traceback(call: Call) -> None:
    code, out, err = call("--debug", "train", "nosuch/recipe")
    assert (code, out) == (3, "")  # as without it
    assert "Traceback" in err
    assert "RecipeError: There is no" in err


def test_only_the_first_process_speaks(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    told(call("train", "nosuch/recipe"), 3, "nosuch/recipe")  # the only one
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert call("train", "nosuch/recipe") == (3, "", "")
    monkeypatch.setenv("RANK", "x")
    told(call("train", "nosuch/recipe"), 3, "nosuch/recipe")


def test_a_group_that_is_none(
    call: Call, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for count, words in (("abc", "WORLD_SIZE is 'abc'"), ("2", "RANK is not set")):
        monkeypatch.setenv("WORLD_SIZE", count)
        given = [*settings(), "--runs-dir", tmp_path / "runs", "--device", "cpu"]
        told(call("train", text_file, *given), 3, words, "torchrun")
    assert not (tmp_path / "runs").exists()


def test_advice_for_every_command_where_memory_runs_out(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise MemoryError

    monkeypatch.setattr(checkpoint, "load", fail)
    model = "enwik8-22m"  # which is there, whatever folder this is
    for words in (
        f"score {model} text",
        f"embed {model} text -o x.npz",
        f"sample {model}",
        f"evaluate {model}",
    ):
        answer = call(*words.split())
        told(answer, 3, "Memory ran out. Use a smaller model")
        assert "--set" not in answer.err
