"""The single step as an ONNX model: symbol and state in, logits and state out."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mulstm.checkpoint import Checkpoint
from mulstm.errors import CheckFailedError, CheckpointError, ExtraError
from mulstm.files import filling
from mulstm.nn.model import LanguageModel
from mulstm.ops.reference import State

INPUTS, OUTPUTS = ("symbol", "h", "c"), ("logits", "h_next", "c_next")
TOLERANCE = 1e-5


class Step(nn.Module):
    """A model's step on plain tensors, all layers' states stacked."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model.folded().eval().cpu().float()  # folded: a copy, the caller's stays as it is
        self.model.backend, self.model.precision = "reference", "fp32"

    def forward(self, symbol: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """symbol (B,), h and c (layers, B, H) -> logits (B, N), h, c."""
        before = tuple(State(h[k], c[k]) for k in range(h.shape[0]))
        logits, after = self.model(symbol.unsqueeze(1), before)
        return logits[:, 0], torch.stack([s.h for s in after]), torch.stack([s.c for s in after])


def write(loaded: Checkpoint, path: Path) -> list[Path]:
    """Writes the model, its weights beside it, and returns the files' paths.

    Both are checked in onnxruntime before they take their places.
    """
    loaded.require_head()
    _require("onnx", "onnxscript", "onnxruntime")
    _require_text(path)
    step = Step(loaded.model)
    example = _example(step.model, 2)
    batch = torch.export.Dim("batch")
    with filling(path.parent) as folder, _silence():
        program = torch.onnx.export(
            step,
            example,
            dynamo=True,
            input_names=list(INPUTS),
            output_names=list(OUTPUTS),
            dynamic_shapes=({0: batch}, {1: batch}, {1: batch}),
        )
        if program is None:
            raise CheckFailedError("The model could not be traced for ONNX. Export it from a newer PyTorch.")
        made = folder / path.name
        program.save(str(made), external_data=True)
        error = difference(step, made)
        if not error <= TOLERANCE:
            raise CheckFailedError(
                f"The ONNX model differs from ours by {error:.1e} where {TOLERANCE:.0e} is allowed. "
                "Nothing was written; try another version of onnxruntime."
            )
        return sorted(path.with_name(file.name) for file in folder.iterdir())


def session(path: Path) -> Any:
    """An onnxruntime session on the CPU, with the telemetry that it has by default switched off."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    import onnxruntime

    with contextlib.suppress(AttributeError):
        onnxruntime.disable_telemetry_events()
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@torch.no_grad()
def difference(step: Step, path: Path) -> float:
    """The largest rms difference of logits and states over a few steps, another batch than the traced."""
    runtime = session(path)
    _, h, c = _example(step.model, 3)
    ours: tuple[Tensor, ...] = (h, c)
    theirs: list[Any] = [h.numpy(), c.numpy()]
    worst = 0.0
    for t in range(4):
        symbol = (torch.arange(3) + t) % step.model.alphabet_size
        logits, *ours_next = step(symbol, *ours)
        given = dict(zip(INPUTS, [symbol.numpy(), *theirs], strict=True))
        # A cell without c has no such input either.
        known = {entry.name for entry in runtime.get_inputs()}
        found, *theirs = runtime.run(None, {k: v for k, v in given.items() if k in known})
        ours = tuple(ours_next)
        for a, b in zip((found, *theirs), (logits, *ours), strict=True):
            if b.numel():
                scale = max(float(b.square().mean().sqrt()), 1e-6)
                off = np.asarray(a) - b.numpy()
                worst = max(worst, float(np.sqrt((off**2).mean())) / scale)
    return worst


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """The exporter tells of packages that it could use and of its progress; none of that is for our users."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _example(model: LanguageModel, B: int) -> tuple[Tensor, Tensor, Tensor]:
    states = model.zero_state(B)
    return (
        torch.zeros(B, dtype=torch.long),
        torch.stack([s.h for s in states]),
        torch.stack([s.c for s in states]),
    )


def _require_text(path: Path) -> None:
    """The model holds the name of the file with its weights, as UTF-8."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{path.absolute()} is no UTF-8, and ONNX can hold no other path. Give another one."
        ) from None


def _require(*packages: str) -> None:
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ExtraError(f"ONNX needs what is not installed: {', '.join(missing)}", "onnx")
