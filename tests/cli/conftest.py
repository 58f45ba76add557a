"""A way to call the command line, and a small trained model to call it with."""

from __future__ import annotations

from pathlib import Path

import pytest
from process import Answer, Call

from made import TINY, made_text, text_recipe
from mulstm import cli, train


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command in this process."""

    def run(*arguments: object) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Answer(int(caught.value.code or 0), out, err)

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run over the file whose name stands in its recipe."""
    root = tmp_path_factory.mktemp("trained")
    (root / "made.txt").write_bytes(made_text(6_000))
    recipe = text_recipe(root / "made.txt", TINY)
    return train.train(recipe, runs_dir=root / "runs", device="cpu", quiet=True)[1]
