"""What README.md and docs/ tell people to type is typed here."""

import contextlib
import io
import re
import shlex
import shutil
from pathlib import Path

import pytest

from mulstm import cli, recipe

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TINY = ("model.hidden=16", "model.embedding=8", "train.updates=2", "train.lanes=2", "train.chunk=20")
SMALL = " ".join(f"--set {change}" for change in TINY)
# What a page may name and a test cannot run: the paper's corpora, hours of training, other people's weights.
NOT_HERE = re.compile(
    r"hutter|text8|wikitext2|ptb|enwik8|bench|mulstm quickstart|unirep|reproduce|--device cuda|proteins\."
)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    lines = "\n".join(blocks(page, "")).splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.startswith("mulstm ")]


SNIPPETS = [
    pytest.param(code, id=f"{page.name}-{n}")
    for page in PAGES
    for n, code in enumerate(blocks(page, "python"))
]
LINES = [pytest.param(line, id=line[:60]) for page in PAGES for line in dict.fromkeys(commands(page))]


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippets_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, "snippet", "exec"), {"__name__": "snippet"})


def run(line: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.run(shlex.split(line)[1:])
    return stopped.value.code


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, and with runs of both kinds that pages name."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "letters").mkdir()
    for name in ("my.txt", "other.txt", "notes.txt", "letters/first.txt"):
        (folder / name).write_text("It was a dark night. Once more, the clock struck. " * 60)
    (of_ones_own,) = blocks(ROOT / "docs" / "recipes.md", "toml")
    (folder / "mine.toml").write_text(of_ones_own)
    with contextlib.chdir(folder):
        assert run(f"mulstm train my.txt --quiet {SMALL}") == 0
    shutil.copytree(folder / "runs" / "text", folder / "runs" / "quickstart")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of it, in which no other line has written anything."""
    return shutil.copytree(made, tmp_path / "pages")


@pytest.mark.parametrize("line", LINES)
def test_commands_run(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line)
    for word in words:
        if re.match(r"(hutter|text8|wikitext2|ptb)/", word):
            assert word in recipe.names()
    if NOT_HERE.search(line) and words[1] != "recipes":
        assert run(f"mulstm {words[1]} --help") == 0
        told = capsys.readouterr().out
        assert all(word in told for word in words if word.startswith("--"))
        return
    newest = max((folder / "runs").glob("*/*"))
    line = re.sub(r"runs/\S*\.\.\.", str(newest), line)
    if words[1] in ("train", "search"):
        line += f" --quiet {SMALL}"
    with contextlib.chdir(folder):
        if words[1] == "decompress":  # what the line before it writes
            assert run(f"mulstm compress {newest} my.txt -o {words[3]} -q -f") == 0
        assert run(line) == 0


def test_there_are_commands_and_snippets() -> None:
    assert len(LINES) >= 8
    assert len(SNIPPETS) >= 2


def test_the_tour_passes_all_that_the_readme_lists() -> None:
    pages = (ROOT / "README.md", ROOT / "docs" / "tour.md")
    readme, tour = ({line.split()[1] for line in commands(page)} for page in pages)
    assert readme <= tour
