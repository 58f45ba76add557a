"""What a user can get wrong: each kind is one sentence, the next step, and an exit code."""

from __future__ import annotations

import sys
from shlex import quote
from typing import Any


class _Whole(BaseException):
    """One that other processes get with its text and attributes, whatever it was made of."""

    def __reduce__(self) -> tuple[Any, ...]:
        return BaseException.__new__, (type(self), *self.args), self.__dict__  # past its own __init__


class MulstmError(_Whole, Exception):
    """A fault the user can mend. The text says what is wrong, then what to do; no traceback is shown."""

    exit_code = 3


class RecipeError(MulstmError):
    """A recipe has unknown keys, wrong types or impossible values."""


class DataError(MulstmError):
    """A corpus is missing, damaged, too short, or holds bytes outside the alphabet."""


class CheckpointError(MulstmError):
    """A checkpoint is truncated, foreign, tampered with, or of another alphabet."""


class BackendError(MulstmError):
    """A backend asked for by name cannot do the work."""


class RunError(MulstmError):
    """A run folder is in use, incomplete, or the run went wrong (a non-finite loss)."""


class RunInterruptedError(_Whole, KeyboardInterrupt):
    """A signal ended a run, whose state was saved first. No fault: `except MulstmError` lets it through."""

    def __init__(self, what: str, remedy: str, signum: int) -> None:
        super().__init__(f"{what}. {remedy}")
        self.what, self.signum, self.exit_code = what, signum, 128 + signum


class ExtraError(MulstmError):
    """An optional dependency is not installed: what wants it, the extra that has it, what else would do."""

    def __init__(self, what: str, extra: str, instead: str = "") -> None:
        # With the pip of this very Python: another's would look for mulstm elsewhere.
        super().__init__(f'{what}. Run {quote(sys.executable)} -m pip install "mulstm[{extra}]"{instead}.')


class CheckFailedError(MulstmError):
    """A check failed: a round trip, a benchmark's gate, an archive's integrity."""

    exit_code = 4


def no_number(what: str, precision: str) -> CheckpointError:
    """What to say where a model, after a run that diverged, makes nothing finite of `what`."""
    return CheckpointError(
        f"The model gives no number for {what}: its weights are too large for {precision}. "
        "Train it again, at a lower rate."
    )
