"""Errors: other processes get them whole, and an interrupted run is none."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from mulstm import files, resume
from mulstm.demo.reading import BrokenOffError
from mulstm.divergence import DivergedError
from mulstm.errors import DataError, ExtraError, MulstmError, RunInterruptedError

MADE = (
    DataError("There is none. Give one."),
    ExtraError("It is not installed", "demo"),
    DivergedError("The loss is high", ". Start again."),
    RunInterruptedError("Interrupted at update 5", "Go on.", 15),
    files.UnwritableError(Path("a"), "No space left on device"),
    resume.TextChangedError(Path("runs/a")),
    BrokenOffError(),
)


@pytest.mark.parametrize("fault", MADE, ids=lambda fault: type(fault).__name__)
def test_an_error_comes_whole_through_pickle_and_copy(fault: BaseException) -> None:
    for again in (pickle.loads(pickle.dumps(fault)), copy.copy(fault), copy.deepcopy(fault)):
        assert type(again) is type(fault)
        assert (str(again), again.args) == (str(fault), fault.args)
        assert vars(again) == vars(fault)


def test_an_interrupted_run_is_no_fault() -> None:
    """Else a sweep that goes on after a model that diverged would go on after Ctrl-C, too."""
    assert issubclass(RunInterruptedError, KeyboardInterrupt)
    assert not issubclass(RunInterruptedError, (MulstmError, Exception))
    assert RunInterruptedError("Interrupted at update 5", "Go on.", 2).exit_code == 130
