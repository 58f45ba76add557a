"""What only a process of its own can show: start-up, signals, sudden death, several processes."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import torch
from process import Answer, ended, environment, start
from safetensors.torch import load_file

from made import TINY, settings, text_recipe
from made_records import add
from mulstm import checkpoint, report, runs, train
from mulstm.__main__ import interrupted
from mulstm.sample import Sampling, sample

MASKED = ("dropout.hidden=0.2", "dropout.embedding=0.2", "train.ema=0.9", "train.drop_state=0.1")

HELP = """
import sys, time
from mulstm import cli
names = list(cli.MODULES)
assert len(names) >= 9, names
for arguments in [["--help"], ["--version"], *([name, "--help"] for name in names)]:
    try:
        cli.run(arguments)
    except SystemExit as end:
        assert end.code == 0, (arguments, end.code)
heavy = {"torch", "numpy.random", "matplotlib", "safetensors", "rich.live"} & set(sys.modules)
print("heavy:", heavy, file=sys.stderr)
sys.exit(len(heavy))
"""

LIGHT = """
import sys, mulstm
assert not {"torch", "numpy"} & set(sys.modules)
assert mulstm.Recipe().train.seed == 1
assert mulstm.load_recipe("quickstart").name == "quickstart"
assert "torch" not in sys.modules
assert mulstm.units.bits(0.0) == 0.0
mulstm.LanguageModel
assert "torch" in sys.modules
assert not hasattr(mulstm, "nothing")
assert all(hasattr(mulstm, name) for name in dir(mulstm))
"""

# The names that the GPU machines of this project do not have, and the rest of what training can do without.
GUARD = """
import sys
class Absent:
    names = {names!r}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"{{name}} is not here", name=name)
sys.meta_path.insert(0, Absent())
from mulstm.cli import run
run(sys.argv[1:])
"""
ABSENT = ["pooch", "constriction", "starlette", "uvicorn", "tensorboard", "matplotlib"]
ABSENT += ["huggingface_hub", "pyarrow"]


def python(code: str, *arguments: object) -> Answer:
    words = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment())
    return Answer(done.returncode, done.stdout, done.stderr)


def same(a: Path, b: Path) -> bool:
    one, two = load_file(a), load_file(b)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def wait_for(condition: object, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.01)


def is_writing(pid: int, folder: Path) -> bool:
    """Whether a process has begun a file there, hidden or without a name."""
    if any(path.name.startswith(".") for path in folder.iterdir()):
        return True
    with contextlib.suppress(OSError):  # one may be closed meanwhile
        links = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
        return any(link.startswith(f"{folder}/") and link.endswith("(deleted)") for link in links)
    return False


def only_run(root: Path) -> Path:
    (folder,) = [path.parent for path in root.rglob("recipe.toml")]
    return folder


def test_help_is_quick_and_light() -> None:
    answer = python(HELP)
    assert answer.code == 0, answer.err
    quickest = 9.0
    for _ in range(5):  # of a busy machine, the best try counts, and only its own time
        before = os.times()
        assert ended(start("--help")).code == 0
        after = os.times()
        used = after.children_user - before.children_user + after.children_system - before.children_system
        quickest = min(quickest, used)
    assert quickest < 0.5


def test_importing_the_package_brings_nothing_heavy() -> None:
    answer = python(LIGHT)
    assert answer.code == 0, answer.err


def test_training_needs_none_of_the_extras(text_file: Path, tmp_path: Path) -> None:
    words = ["train", text_file, "--runs-dir", tmp_path, "--json", *settings("train.updates=2")]
    answer = python(GUARD.format(names=ABSENT), *words)
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["updates"] == 2


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed(text_file: Path, tmp_path: Path) -> None:
    # A checkpoint after every update: sudden death falls into the writing as often as between.
    changes = (
        *MASKED,
        "train.updates=60",
        "train.save_every=1e-9",
        "evaluate.every=25",
        "evaluate.patience=9",
    )
    root = tmp_path / "broken"
    given = ["train", text_file, "--device", "cpu", "-q", "--runs-dir", root, "--resume", "auto"]
    given += settings(*changes)

    def lines() -> int:
        return sum(path.read_bytes().count(b"\n") for path in root.rglob("log.jsonl"))

    for moment in (12, 35):
        process = start(*given)
        wait_for(lambda moment=moment: lines() >= moment)
        process.kill()
        assert ended(process).code == -signal.SIGKILL
    last = ended(start(*given))
    assert last.code == 0, last.err
    broken = only_run(root)
    recipe = text_recipe(text_file, [*TINY, *changes])
    _, whole = train.train(recipe, runs_dir=tmp_path / "whole", device="cpu", quiet=True)
    for name in ("last", "best", "resume"):
        assert same(whole / f"{name}.safetensors", broken / f"{name}.safetensors"), name
    assert not list(broken.glob(".*"))
    bits = [[line["train_bits_per_char"] for line in runs.read_log(folder)] for folder in (whole, broken)]
    assert bits[0] == bits[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_first(text_file: Path, tmp_path: Path, number: signal.Signals) -> None:
    runs_dir = tmp_path / "my runs"
    process = start(
        "train", text_file, "--runs-dir", runs_dir, "--device", "cpu", *settings("train.updates=100000")
    )
    wait_for(lambda: list(tmp_path.rglob("log.jsonl")))
    process.send_signal(number)
    answer = ended(process)
    assert answer.code == 128 + number
    assert answer.out == ""
    assert "everything is saved" in answer.err
    assert f"--resume '{only_run(runs_dir)}'" in answer.err  # as a shell wants it
    assert "Traceback" not in answer.err
    assert checkpoint.load(only_run(runs_dir) / "last.safetensors").meta["metrics"]["update"] > 0


def page_of(model: Path) -> tuple[subprocess.Popen[str], str]:
    """The demo at work, and where its page is."""
    pytest.importorskip("uvicorn", reason="the demo extra is not installed")
    process = start("demo", model, "--port", "0")
    assert process.stdout is not None
    return process, process.stdout.readline().split()[0]


ENDS = pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])


@ENDS
def test_the_page_ends_at_a_signal_while_a_text_is_drawn(
    trained: Path, number: signal.Signals, code: int
) -> None:
    process, address = page_of(trained)
    asked = json.dumps({"text": "an", "length": 2000}).encode()
    request = urllib.request.Request(f"{address}continue", asked, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert "text" in json.loads(answer.readline())
        process.send_signal(number)
        done = ended(process)
    assert done == (code, "", "")


@ENDS
def test_the_page_ends_quietly_while_a_request_is_unfinished(
    trained: Path, number: signal.Signals, code: int
) -> None:
    process, address = page_of(trained)
    port = urllib.parse.urlsplit(address).port
    lines = ["POST /read HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Content-Length: 99"]
    with socket.create_connection(("127.0.0.1", port)) as slow:
        # The server asks for the rest, so the request is under way.
        slow.sendall("\r\n".join([*lines, "Expect: 100-continue", "", ""]).encode())
        assert b"100 Continue" in slow.recv(99)
        process.send_signal(number)
        done = ended(process)
    assert done == (code, "", "")


def test_the_page_without_its_extra(trained: Path) -> None:
    answer = python(GUARD.format(names=["uvicorn"]), "demo", trained, "--port", 0)
    assert answer.code == 3
    assert 'pip install "mulstm[demo]"' in answer.err


@pytest.mark.parametrize(
    ("words", "signum"),
    [
        (("embed", "-o", "x.npz"), signal.SIGTERM),
        (("embed", "-o", "x.npz"), signal.SIGKILL),
        (("evaluate", "--losses", "x.npy"), signal.SIGTERM),
    ],
    ids=["embed", "embed-killed", "evaluate"],
)
def test_stopped_in_the_middle_it_leaves_nothing(
    trained: Path, tmp_path: Path, words: tuple[str, str, str], signum: signal.Signals
) -> None:
    command, option, name = words
    (tmp_path / "long.txt").write_bytes(b"what it says\n" * 500_000)
    process = start(command, trained, tmp_path / "long.txt", option, tmp_path / name)
    wait_for(lambda: is_writing(process.pid, tmp_path))
    process.send_signal(signum)
    assert ended(process).code == (143 if signum == signal.SIGTERM else -signal.SIGKILL)
    assert [path.name for path in tmp_path.iterdir()] == ["long.txt"]


STREAMS = {
    "m sample $MODEL -n 9 > /dev/full": (3, "No space left on device"),
    "m sample $MODEL -n 99999 | head -c 9; exit ${PIPESTATUS[0]}": (141, ""),
    "m sample $MODEL -n 9 >&-": (0, ""),
    "m sample $MODEL -n 9 2>&-": (0, ""),
    "m score $MODEL - <&-": (3, "holds no record"),
    "m score $MODEL nosuch 2>/dev/full": (3, ""),
    "PYTHONIOENCODING=ascii m sample $MODEL -n 99": (0, ""),
    "printf 'id,text\\ncaf\\xc3\\xa9,it says\\n' | PYTHONIOENCODING=ascii m score $MODEL - --as csv --json | "
    '"$PYTHON" -m json.tool; exit ${PIPESTATUS[2]}': (0, ""),
    "m sample $MODEL -n 9 -p $'\\xff'": (0, ""),
}


@pytest.mark.parametrize("line", STREAMS)
def test_standard_streams_that_are_closed_full_or_narrow(trained: Path, line: str) -> None:
    code, words = STREAMS[line]
    shell = f'm() {{ "$PYTHON" -m mulstm "$@"; }}; {line}'
    environ = environment() | {"PYTHON": sys.executable, "MODEL": str(trained)}
    done = subprocess.run(["bash", "-c", shell], capture_output=True, env=environ, timeout=60)
    err = done.stderr.decode()
    assert done.returncode == code, err
    assert words in err
    assert "Traceback" not in err
    assert "Exception ignored" not in err


def test_bytes_are_written_as_they_are_drawn(trained: Path) -> None:
    loaded = checkpoint.load(trained)
    how = Sampling(length=60, temperature=3.0, seed=3)
    expected = b"".join(row[0] for row in sample(loaded.model, loaded.alphabet, b"ab", how))
    assert b"\xef\xbf\xbd" in expected.decode(errors="replace").encode()
    command = [
        sys.executable,
        "-m",
        "mulstm",
        "sample",
        str(trained),
        "-p",
        "ab",
        "-n",
        "60",
        "-t",
        "3",
        "--seed",
        "3",
    ]
    done = subprocess.run([*command, "--raw"], capture_output=True, env=environment(), timeout=60, check=True)
    assert done.stdout == expected


GROUP = ["--standalone", "--nproc-per-node=2", "-m", "mulstm"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one text", "records"])
def test_two_processes_equal_one(text_file: Path, tmp_path: Path, kind: str) -> None:
    changes = (*MASKED, "optimiser.clip=0.3", "optimiser.rate=1e-3")
    if kind == "records":  # one is so long that the second process has nothing left to predict
        text = text_file.read_bytes().replace(b"\n", b" ")
        text_file = tmp_path / "records.txt"
        lines = [text[20 * k : 20 * k + 20] for k in range(15)]
        text_file.write_bytes(b"\n".join([*lines[:7], text[:300], *lines[7:]]))
        changes = (*changes, "data.records=lines", "train.drop_state=0.0", "train.rotate=false")
    given = [
        "train",
        text_file,
        "--device",
        "cpu",
        "--json",
        "--runs-dir",
        tmp_path / "two",
        *settings(*changes),
    ]
    both = ended(start(*GROUP, *given, module="torch.distributed.run"))
    assert both.code == 0, both.err
    two = json.loads(both.out)  # one process speaks
    assert two["processes"] == 2
    assert both.err.count("Training in") == 1
    recipe = text_recipe(text_file, [*TINY, *changes])
    one, folder = train.train(recipe, runs_dir=tmp_path / "one", device="cpu", quiet=True)
    measured = "valid_bits_per_char"
    assert two[measured] == pytest.approx(one[measured], rel=1e-5)
    a, b = (load_file(path / "resume.safetensors") for path in (folder, Path(two["folder"])))
    assert a.keys() == b.keys()
    for name in a:
        error = (a[name].float() - b[name].float()).norm()
        assert error <= 2e-4 * a[name].float().norm() + 1e-7, name
    # What two have saved, one can go on with.
    (Path(two["folder"]) / "metrics.json").unlink()
    again, _ = train.train(recipe, device="cpu", quiet=True, resume_from=two["folder"])
    assert again[measured] == pytest.approx(two[measured], rel=1e-6)


@pytest.mark.slow
def test_an_error_of_several_processes_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_bytes(b"short")
    given = ["train", tmp_path / "short.txt", *settings(), "--runs-dir", tmp_path]
    answer = ended(start(*GROUP, *given, module="torch.distributed.run"))
    assert answer.code == 1  # torchrun's own
    assert answer.err.count("error: The train part") == 1
    assert "terminate called" not in answer.err


@pytest.mark.slow
def test_an_error_of_the_first_process_alone_ends_all(text_file: Path, tmp_path: Path) -> None:
    absent = tmp_path / "absent" / "tensorboard"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text("raise ImportError")
    given = ["train", text_file, *settings(), "--runs-dir", tmp_path / "runs", "--tensorboard"]
    env = {"PYTHONPATH": f"{absent.parent}{os.pathsep}{environment()['PYTHONPATH']}"}
    answer = ended(start(*GROUP, *given, module="torch.distributed.run", env=env))
    assert answer.code == 1
    assert answer.err.count("error: TensorBoard is not installed") == 1


JOINS = """
import os, sys, time, torch
from mulstm import parallel
for _ in range(3):
    if sys.argv[1] == os.environ["RANK"]:
        time.sleep(0.5)
    with parallel.joined("cpu") as share:
        one = torch.ones(1)
        share.sum([one])
        assert one == 2
"""


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_several_processes_train_one_model_after_the_other(tmp_path: Path, late: int) -> None:
    """The one that comes first must not take the other's last address for the one it has now."""
    (tmp_path / "joins.py").write_text(JOINS)
    answer = ended(start(*GROUP[:2], tmp_path / "joins.py", late, module="torch.distributed.run"))
    assert answer.code == 0, answer.err


LEAVES = """
import os
from mulstm import parallel
with parallel.joined("cpu") as share:
    share.largest(1)
    import torch._dynamo  # as the first update does
names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
assert not [name for name in names if "gloo" in name], names
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are listed nowhere")
def test_no_thread_of_a_group_outlives_it(tmp_path: Path) -> None:
    """Python aborts one that wants something of it at its end."""
    (tmp_path / "leaves.py").write_text(LEAVES)
    answer = ended(start(*GROUP[:2], tmp_path / "leaves.py", module="torch.distributed.run"))
    assert answer.code == 0, answer.err


def test_files_are_read_as_utf8_in_any_locale(tmp_path: Path) -> None:
    add(tmp_path / "results", "hutter/mlstm", 1.4)
    (tmp_path / "README.md").write_text(f"# A dash: –\n\n{report.BEGIN}\n{report.END}\n", encoding="utf-8")
    env = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    answer = ended(start("report", "--check", cwd=tmp_path, env=env))
    assert "Traceback" not in answer.err
    assert "README.md" in answer.err + answer.out


def test_interrupted_while_something_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception would be swallowed there, as by the module's own `except`."""
    (tmp_path / "swallows.py").write_text(
        "import sys\nfrom mulstm.__main__ import interrupted\n"
        "try:\n    interrupted(2, sys._getframe())\nexcept BaseException:\n    pass\n"
    )
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("swallows")
    assert left[0] == 130
    left.clear()
    with pytest.raises(KeyboardInterrupt):
        interrupted(2, None)
    assert not left


def test_facts_beside_an_archive_on_stdout(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "s.txt").write_bytes(b"abda" * 50)
    words = f"compress {trained} {tmp_path / 's.txt'} -o - --json -q"
    line = [sys.executable, "-m", "mulstm", *words.split()]
    done = subprocess.run(line, capture_output=True, env=environment(), check=True)
    assert json.loads(done.stderr)["archive"] == len(done.stdout)
