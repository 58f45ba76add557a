"""`mulstm quickstart`: minutes from nothing to a trained, measured and speaking model."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from mulstm import console
from mulstm.cli._options import AsJson, Device, Overrides, RunsDir
from mulstm.errors import RecipeError, RunInterruptedError


def command(
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the last quickstart if it was interrupted.")
    ] = False,
    device: Device = "auto",
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Train, measure and sample from a small model in minutes.

    Its text is Python's own library.
    """
    from mulstm import checkpoint, recipe, report, train
    from mulstm.codec.bench import STANDARD
    from mulstm.record_corpus import load
    from mulstm.sample import Sampling, sample

    chosen = recipe.load("quickstart", overrides or [])
    if chosen.data.records:
        raise RecipeError('The quickstart reads one text. For records use "mulstm train FILE".')
    corpus = load(chosen.data)
    for part in ("valid", "test"):  # what is told of them comes after minutes of training
        corpus.split(part).require_symbols()
    try:
        record, folder = train.train(
            chosen, runs_dir=runs_dir, device=device, resume_from="auto" if resume else None
        )
    except RunInterruptedError as stop:
        remedy = "Go on with the same command and --resume."
        raise RunInterruptedError(stop.what, remedy, stop.signum) from stop
    data = corpus.split("test").raw()
    compressors = {name: 8 * len(pack(data)) / len(data) for name, pack, _ in STANDARD}
    loaded = checkpoint.load(folder)
    drawn = sample(loaded.model, loaded.alphabet, b"def ", Sampling(length=400, temperature=0.7))
    text = "def " + b"".join(piece for (piece,) in drawn).decode("utf-8", errors="replace")
    figures = report.learning_curve(folder, compressors, record["test_bits_per_char"])
    if as_json:
        extra: dict[str, Any] = {"compressors": compressors, "sample": text, "folder": str(folder)}
        console.result_json({**record, **extra})
        return
    ours = f"multiplicative LSTM, {record['parameters']:,} parameters"
    rows = [[ours, f"{record['valid_bits_per_char']:.3f}", f"{record['test_bits_per_char']:.3f}"]]
    rows += [[name, "", f"{bits:.3f}"] for name, bits in compressors.items()]
    console.table(["bits/char", "valid", "test"], rows)
    console.result(f"\nA sample:\n\n{text}\n")
    console.result(f"run folder: {folder}")
    console.result(f"learning curve: {', '.join(str(path) for path in figures)}")
    mulstm = _program()
    console.result(f'more text: {mulstm} sample {quote(str(folder))} --prompt "class "')
    if find_spec("uvicorn") and find_spec("starlette"):
        console.result(f"a page to type into: {mulstm} demo {quote(str(folder))}")


def _program() -> str:
    """How this very program is called here: it need not be the one that a shell finds, if any."""
    mine, found = Path(sys.argv[0]), shutil.which("mulstm")
    if found is not None and mine.exists() and Path(found).samefile(mine):
        return "mulstm"
    return quote(str(mine)) if mine.stem == "mulstm" else f"{quote(sys.executable)} -m mulstm"
