"""Training runs for tests, and how to compare, break and read them."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mulstm import optim, outcome, train, update
from mulstm.recipe import Recipe

Tiny = Callable[..., Recipe]
# Everything a run can carry along: masks, dropped states, an average, rotation, clearing.
RICH = (
    "dropout.hidden=0.2",
    "dropout.embedding=0.2",
    "train.drop_state=0.1",
    "train.ema=0.8",
    "train.rotate=true",
    "train.clear_every=7",
    "train.lanes=16",
    "train.chunk=50",
    "train.updates=17",  # more than two epochs
)


def run(recipe: Recipe, root: Path, **more: Any) -> tuple[dict[str, Any], Path]:
    return train.train(recipe, runs_dir=root, device="cpu", quiet=True, **more)


def weights(folder: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return load_file(folder / f"{name}.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def steady(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A log without what depends on the clock."""
    return [{k: v for k, v in line.items() if k not in ("seconds", "symbols_per_second")} for line in log]


def interrupt_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal comes in the middle of the next validation."""
    real = outcome.evaluate

    def interrupted(*given: Any, progress: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        progress(1, 1.0)
        return real(*given, progress=progress, **named)

    monkeypatch.setattr(outcome, "evaluate", interrupted)


def at_update(monkeypatch: pytest.MonkeyPatch, n: int, act: Callable[[], None]) -> None:
    """Does something in the middle of the n-th update."""
    real, calls = update.Update.step, [0]

    def step(self: update.Update) -> None:
        calls[0] += 1
        if calls[0] == n:
            act()
        real(self)

    monkeypatch.setattr(update.Update, "step", step)


def tell_validations(monkeypatch: pytest.MonkeyPatch, *bits: float) -> None:
    """Has the validations of a run find these bits/char, one after the other."""
    real, told = outcome.evaluate, iter(bits)

    def evaluate(*given: Any, **named: Any) -> Any:
        found = real(*given, **named)
        if "symbols" in named:  # during training
            return replace(found, nats=next(told) * math.log(2) * found.symbols)
        return found

    monkeypatch.setattr(outcome, "evaluate", evaluate)


def tell_norms(monkeypatch: pytest.MonkeyPatch, norm: float) -> None:
    """Has every update find a gradient of this length."""
    real = optim.clip_and_step
    monkeypatch.setattr(optim, "clip_and_step", lambda *given: torch.full_like(real(*given), norm))
