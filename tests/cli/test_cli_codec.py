"""compress, decompress and quantize from the command line."""

from __future__ import annotations

import hashlib
import io
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from process import Call, environment

from codec_models import integer
from made import made_text, settings
from mulstm.codec.archive import compress
from mulstm.codec.integer import load, save
from mulstm.codec.network import Network


@pytest.fixture
def note(tmp_path: Path) -> Path:
    path = tmp_path / "note.txt"
    path.write_bytes(made_text(1_500))
    return path


def test_a_file_goes_there_and_back(call: Call, trained: Path, note: Path) -> None:
    content = note.read_bytes()
    code, out, err = call("compress", trained, note, "--lanes", 20)
    assert code == 0
    assert out.startswith("1,500 -> ")
    assert "verified" in out
    assert "integer model" in err
    packed = note.with_name("note.txt.mul")
    assert packed.stat().st_size < 1_500
    note.unlink()
    code, out, _ = call("decompress", trained, packed, "--products", "float64", "--coder", "python")
    assert code == 0
    assert "checksums agree" in out
    assert note.read_bytes() == content


def test_an_archive_by_a_model_that_may_be_replaced_is_warned_of(
    call: Call, trained: Path, note: Path
) -> None:
    warning = f"warning: the run in {trained} has not ended. When it goes on, its model is replaced"
    assert warning not in call("compress", trained, note, "--lanes", 20, "-q").err
    (trained / "metrics.json").rename(note.with_name("kept.json"))
    try:
        assert warning in call("compress", trained, note, "--lanes", 20, "-q", "--force").err
        copy = note.with_name("copy.safetensors")
        copy.write_bytes((trained / "last.safetensors").read_bytes())
        assert call("compress", copy, note, "--lanes", 20, "-q", "--force").err == ""
    finally:
        note.with_name("kept.json").rename(trained / "metrics.json")


def test_quantize_keeps_the_model_and_both_sides_may_use_either(
    call: Call, trained: Path, note: Path
) -> None:
    made = note.with_name("m.safetensors")
    assert "--against only" in call("quantize", trained, "-o", made, "--symbols", 10).err
    answer = call("quantize", trained, "-o", made, "--against", note.with_name("none"))
    assert answer.code == 3
    assert not made.exists()
    empty = note.with_name("empty")
    empty.touch()
    assert call("quantize", trained, "-o", made, "--against", empty).code == 3
    assert made.exists()  # a fault of the text takes no work away
    made.unlink()
    code, out, _ = call("quantize", trained, "-o", made, "--against", note, "--json")
    facts = json.loads(out)
    assert code == 0
    assert abs(facts["cost_bits_per_char"]) < 0.02
    assert facts["bytes"] == made.stat().st_size
    code, out, _ = call("compress", made, note, "--json", "-q", "--static", "--lanes", 20)
    assert code == 0
    assert json.loads(out)["adaptive"] is False
    assert call("decompress", trained, f"{note}.mul", "-o", note.with_name("out"), "-q").code == 0
    assert note.with_name("out").read_bytes() == note.read_bytes()


def test_what_quantize_left_beside_a_checkpoint_is_used(call: Call, trained: Path, note: Path) -> None:
    model, kept = (note.with_name(f"m{end}.safetensors") for end in ("", ".integer"))
    model.write_bytes((trained / "last.safetensors").read_bytes())
    given = ("compress", model, note, "--force", "--lanes", 20)
    size = json.loads(call(*given, "--json").out)["model_bytes"]  # of what is made for this once
    assert call("quantize", model).code == 0
    assert size == kept.stat().st_size
    code, out, err = call(*given, "--json")
    assert (code, "integer model" in err) == (0, False)
    assert json.loads(out)["model_bytes"] == kept.stat().st_size
    archive, whole = Path(f"{note}.mul").read_bytes(), kept.read_bytes()
    assert call("quantize", model).code == 0  # a file of ours, made anew
    save(kept, replace(load(kept), parent="of an earlier checkpoint"))
    for other in (kept.read_bytes(), whole[:-1]):
        kept.write_bytes(other)
        assert "made the integer model" in call(*given).err
        assert Path(f"{note}.mul").read_bytes() == archive
        # Archives of that checkpoint may want it.
        assert f"{kept} exists already" in call("quantize", model).err
        assert kept.read_bytes() == other
    assert call("quantize", model, "--force").code == 0
    assert kept.read_bytes() == whole


def test_damage_and_the_wrong_model_end_with_four(
    call: Call, trained: Path, note: Path, tmp_path: Path
) -> None:
    assert call("compress", trained, note, "-q", "--lanes", 20).code == 0
    packed = Path(f"{note}.mul")
    data = bytearray(packed.read_bytes())
    data[-30] ^= 4
    packed.write_bytes(data)
    code, out, err = call("decompress", trained, packed, "-o", tmp_path / "out")
    assert (code, out) == (4, "")
    assert "damaged in its end" in err
    assert not (tmp_path / "out").exists()
    code, _, err = call("decompress", trained, note, "-o", tmp_path / "out")
    assert code == 4
    assert "not a .mul archive" in err


def test_progress_is_of_the_file_whether_it_is_verified_or_not(
    call: Call, trained: Path, note: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("mulstm.console.Progress._show", lambda progress: lines.append(progress.line()))
    monkeypatch.setattr("mulstm.codec.archive.length_of", lambda path: None)
    for more in ("--verify", "--no-verify"):
        assert call("compress", trained, note, "--force", more).code == 0
        assert lines[-1].startswith("compress  1.50k bytes"), lines[-1]


def test_an_archive_that_is_not_there(call: Call, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"kept")
    code, _, err = call("decompress", trained, tmp_path / "a.mul")
    assert (code, f"There is no file {tmp_path / 'a.mul'}" in err) == (3, True)


def test_bytes_that_a_model_does_not_know_are_counted(call: Call, text_file: Path, tmp_path: Path) -> None:
    given = ["--runs-dir", tmp_path / "r", "-q", "--json", "--device", "cpu"]
    out = call("train", text_file, *settings("data.alphabet=corpus"), *given).out
    other = tmp_path / "other.txt"
    other.write_bytes(text_file.read_bytes()[:500] + b"\xfe\xff" * 9)
    found = call("quantize", json.loads(out)["folder"], "-o", tmp_path / "i.safetensors", "--against", other)
    assert found.code == 0
    assert f"left out: 18 bytes of {other}" in found.err


def test_usage(call: Call, trained: Path, note: Path, tmp_path: Path) -> None:
    assert call("decompress", trained, note).code == 2  # where to?
    assert call("compress", trained, tmp_path / "nothing").code == 3
    assert call("compress", tmp_path / "no-model", note).code == 3
    code, _, err = call("compress", trained, note, "--products", "magic")
    assert code == 3
    assert "'magic'" in err


@pytest.mark.parametrize("folder", [".", "", "/"])
def test_a_folder_is_no_file(call: Call, trained: Path, folder: str) -> None:
    answer = call("compress", trained, folder)
    assert answer.code == 3
    assert "is a folder" in answer.err


def test_no_file_is_lost(call: Call, trained: Path, note: Path) -> None:
    content, packed = note.read_bytes(), Path(f"{note}.mul")
    code, _, err = call("compress", trained, note, "-o", note, "--force")
    assert code == 3
    assert "the file that is read" in err
    assert call("compress", trained, note, "-q", "--lanes", 20).code == 0
    for command, given in (("compress", note), ("decompress", packed)):
        code, _, err = call(command, trained, given, "-q")
        assert code == 3
        assert "exists already" in err
    note.write_bytes(b"something else")
    assert call("decompress", trained, packed, "-q", "-f").code == 0
    assert note.read_bytes() == content


def test_the_others_are_compared_and_drawn(call: Call, trained: Path, note: Path, tmp_path: Path) -> None:
    figure = tmp_path / "size.svg"
    code, out, _ = call("compress", trained, note, "--bench", "-q", "--lanes", 50, "--figure", figure)
    assert code == 0
    for name in ("gzip -9", "bzip2 -9", "xz -9e", "mulstm static", "mulstm adaptive"):
        assert name in out
    assert figure.read_text().startswith("<?xml")
    assert figure.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert not Path(f"{note}.mul").exists()
    code, out, _ = call("compress", trained, note, "--bench", "-q", "--json", "--lanes", 50)
    ours = {row["name"]: row for row in json.loads(out)["rows"]}["mulstm adaptive"]
    assert ours["bits_per_byte_with_model"] > ours["bits_per_byte"] > 0


@pytest.mark.parametrize(
    "options",
    [
        ("--figure", "size.svg"),
        ("--bench", "-o", "x.mul"),
        ("--bench", "--static"),
        ("--bench", "--no-verify"),
    ],
)
def test_what_would_be_of_no_effect_is_refused(
    options: tuple[str, ...], call: Call, note: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call("compress", "nosuch", note, *options)
    assert (code, out, "--bench" in err) == (2, "", True)


@pytest.mark.parametrize(
    ("option", "value"), [("--lanes", 20_000), ("--block", 300_000_000), ("--coder", "x"), ("--device", "x")]
)
def test_options_are_looked_at_before_any_work(
    option: str, value: object, call: Call, trained: Path, note: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mulstm.codec.source.open_model", lambda path: pytest.fail("a model was made"))
    assert call("compress", trained, note, option, value).code == 3


@pytest.mark.parametrize(("signal_", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_stopped_in_the_middle_nothing_is_left(
    trained: Path, tmp_path: Path, signal_: signal.Signals, code: int
) -> None:
    given = tmp_path / "long.txt"
    given.write_bytes(made_text(400_000))
    # Not through a shell: what a shell sends to the background does not hear Ctrl-C.
    process = subprocess.Popen(
        [sys.executable, "-m", "mulstm", "compress", str(trained), str(given), "-q", "--lanes=1"],
        env=environment(),
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:  # until it has begun to write
        time.sleep(0.05)
    process.send_signal(signal_)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert [p.name for p in tmp_path.iterdir()] == ["long.txt"]


def test_verifying_asks_too() -> None:
    network, told = Network(integer()), []
    content = made_text(300)
    compress(io.BytesIO(content), io.BytesIO(), network, lanes=1, progress=told.append)
    assert told[-len(content) :] == [1] * len(content)  # each step of the way back


def test_pipes(trained: Path, note: Path) -> None:
    content = note.read_bytes()[:400]
    there, back = ("compress", "--lanes=9"), ("decompress",)
    for command, *more in (there, back):
        done = subprocess.run(
            [sys.executable, "-m", "mulstm", command, str(trained), "-", "-q", *more],
            input=content,
            capture_output=True,
            check=True,
            env=environment(),
            timeout=90,
        )
        assert re.match(rb"[\d,]+ -> [\d,]+ bytes, ", done.stderr)  # beside the file, not in it
        content = done.stdout
    assert content == note.read_bytes()[:400]


STREAMS = {
    "m compress $MODEL note.txt -o - -q >&-": "The standard output is closed",
    "m compress $MODEL - -o c.mul -q <&-": "The standard input is closed",
    "m decompress $MODEL - -o c.txt -q <&-": "The standard input is closed",
    "m compress $MODEL big -q --static --no-verify; ulimit -f 1; "
    "PYTHONUNBUFFERED=1 m decompress $MODEL big.mul -o - -q > out": "too large",
}


@pytest.mark.parametrize("line", STREAMS)
def test_streams_that_are_closed_or_full(trained: Path, note: Path, line: str) -> None:
    # Bytes that the model has no use for are stored as they are: more than there is room for.
    (note.parent / "big").write_bytes(hashlib.shake_128(b"big").digest(5_000))
    shell = f'm() {{ "$PYTHON" -m mulstm "$@"; }}; trap "" XFSZ; {line}'
    environ = environment() | {"PYTHON": sys.executable, "MODEL": str(trained)}
    done = subprocess.run(
        ["bash", "-c", shell], capture_output=True, env=environ, timeout=60, cwd=note.parent
    )
    assert done.returncode == 3, done.stderr
    assert STREAMS[line] in done.stderr.decode()
    assert not (note.parent / "c.mul").exists()


def test_another_model_is_told_by_the_name_of_its_file(
    call: Call, trained: Path, note: Path, text_file: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    train = ["train", text_file, *settings(), "--device", "cpu", "-q", "--runs-dir", runs]
    assert call(*train).code == 0
    assert call("compress", runs, note, "-q").code == 0
    assert call(*train, "--set", "train.seed=2").code == 0
    code, _, err = call("decompress", runs, f"{note}.mul", "-o", tmp_path / "again", "-q")
    assert code == 4
    assert re.search(
        r"written with the integer model [0-9a-f]{16}, and .*-seed2/.*\.safetensors is [0-9a-f]{16}", err
    )


def test_info_of_an_integer_model(call: Call, trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "i.safetensors"
    assert call("quantize", trained, "-o", path).code == 0
    about = json.loads(call("info", path, "--json").out)
    assert (about["integer model"], about["alphabet"]) == (load(path).fingerprint.hex(), 256)


def test_a_file_may_be_named_like_a_stream(
    call: Call, trained: Path, note: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(note.parent)
    Path("-").write_bytes(note.read_bytes())
    code, out, _ = call("compress", trained, "./-", "--lanes", 20)
    assert (code, out.startswith("1,500 -> ")) == (0, True)
    Path("-").unlink()
    for more in (("-o", "./-"), ()):
        assert call("decompress", trained, "./-.mul", *more).code == 0
        assert Path("-").read_bytes() == note.read_bytes()
        Path("-").unlink()
    for name in (".mul", "..mul", "...mul"):
        Path("-.mul").rename(name)
        code, _, err = call("decompress", trained, name)
        assert (code, "say where to write" in err) == (2, True), name
        Path(name).rename("-.mul")


def test_what_is_no_archive_is_told_before_the_model_is_made(
    call: Call, trained: Path, note: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mulstm.codec.source.open_model", None)
    code, _, err = call("decompress", trained, note, "-o", note.with_name("out"))
    assert (code, "This is not a .mul archive" in err) == (4, True)
