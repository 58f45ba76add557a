"""The command line. Each module here is a command, but for those that begin with an underscore.

A command module has either a function `command`, whose signature is its options and whose docstring is its
help, or a Typer `app` with commands of its own. It imports nothing heavy until it is called.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from mulstm import __version__, console
from mulstm.cli._ending import leaving
from mulstm.errors import MulstmError, RunInterruptedError

# How torch says it of a CPU.
NO_MEMORY = ("DefaultCPUAllocator", "Storage size calculation overflowed")

# What is wrong with the words of a command line. Typer exports the kinds of it alone.
USAGE: Any = typer.BadParameter.__base__


# By the command's name: `import` cannot be a module, so import_ stands for it.
MODULES = {name.rstrip("_"): name for _, name, _ in pkgutil.iter_modules(__path__) if name[0] != "_"}


class _Group(TyperGroup):
    """Its commands are made when they are asked for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = MODULES  # of which Typer asks the names alone

    def get_command(self, ctx: Any, name: str) -> Any:
        return _make(name) if name in MODULES else None

    def make_context(self, *given: Any, **more: Any) -> Any:
        with _told_cleanly():
            return super().make_context(*given, **more)

    def invoke(self, ctx: Any) -> Any:
        with _told_cleanly():
            return super().invoke(ctx)


@contextlib.contextmanager
def _told_cleanly() -> Iterator[None]:
    """What Typer tells by itself: usage errors, made fit for a terminal, and an end where none should be."""
    try:
        yield
    except EOFError as fault:
        # Typer would say that the user gave up. Nobody is asked anything here: it is a fault of ours.
        raise RuntimeError("Something that was read ended too early.") from fault
    except RunInterruptedError as stop:  # of a KeyboardInterrupt Typer would tell nothing
        raise SystemExit(stop.exit_code) from stop
    except USAGE as fault:
        fault.message = console.printable(fault.message)
        raise


def _make(name: str) -> Any:
    module = import_module(f"{__name__}.{MODULES[name]}")
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name)(module.command)
    made = typer.main.get_command(app)
    made.name = name
    return made


app = typer.Typer(
    cls=_Group,
    name="mulstm",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(value: bool) -> None:
    if value:
        console.result(f"mulstm {__version__}")
        raise typer.Exit


@app.callback()
def main(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The multiplicative LSTM: train it, measure it, sample from it.

    First steps: "mulstm quickstart"; "mulstm train my.txt"; "mulstm sample runs/..."
    """


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Exits: 0 done, 1 a fault of ours, 2 usage, 3 something given is wrong, 4 a check failed.

    And 128 + a signal's number, as shells have it; 141 where nobody reads what is written.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    _open_streams()
    try:
        with leaving():
            app(args=given, prog_name="mulstm")
    except SystemExit as end:
        if isinstance(end.__cause__, RunInterruptedError) and console.speaks():
            console.error(str(end.__cause__))
        # Of a pipe whose other end is closed Typer makes a 1.
        sys.exit(141 if isinstance(end.__context__, BrokenPipeError) else end.code)
    except (MulstmError, OSError, RuntimeError, MemoryError) as fault:
        sentence = _sentence(fault)
        if sentence is None:
            raise
        if "--debug" in given:
            traceback.print_exc()
        elif console.speaks():
            console.error(sentence)
        sys.exit(fault.exit_code if isinstance(fault, MulstmError) else 3)
    finally:
        _drop_unwritten()
    sys.exit(0)


def _open_streams() -> None:
    """Standard streams that a shell has closed become empty ones; no character is too much for stdout."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_unwritten() -> None:
    """What a full disk or a closed pipe refused: Python would try again at its end, and change the code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _sentence(fault: BaseException) -> str | None:
    """What to say of a fault that is not ours; None for one that is."""
    if isinstance(fault, MulstmError):
        return str(fault)
    if isinstance(fault, OSError) and fault.filename is not None:
        return f"{fault.filename}: {fault.strerror}. Check the path and your rights to it."
    if isinstance(fault, OSError):
        return f"Reading or writing failed ({fault.strerror or fault}). Check the disk and where output goes."
    if (
        isinstance(fault, MemoryError)
        or type(fault).__name__ == "OutOfMemoryError"
        or any(words in str(fault) for words in NO_MEMORY)
    ):
        return (
            "Memory ran out. Use a smaller model, or less of lanes, streams and beam where --help names them."
        )
    return None
