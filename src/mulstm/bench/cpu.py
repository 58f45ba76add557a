"""Times our layers on a CPU against others', in turn, each only after it has passed its check."""

from __future__ import annotations

import copy
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor, nn

from mulstm.bench.timing import Say, rms
from mulstm.errors import CheckFailedError
from mulstm.machine import cores
from mulstm.nn.cell import MultiplicativeLSTM
from mulstm.nn.model import LanguageModel
from mulstm.recipe import ModelRecipe

LIMITS = {"fp32": 1e-4, "bf16": 4e-2}  # of a contender's error against float64
LAYER = {"inputs": 64, "hidden": 512, "lanes": 32, "chunk": 100}
STREAM = {"hidden": 1900, "alphabet": 205}


@dataclass
class Contender:
    """Something to be timed. `work` does `symbols` symbols; `error` compares it with float64."""

    name: str
    backend: str
    level: str  # layer: forward and backward; evaluate: forward; sample: one symbol after another
    precision: str
    hidden: int
    lanes: int
    chunk: int
    parameters: int
    work: Callable[[], object]
    error: Callable[[], float]
    calls: int = 1  # of `work` in one measurement


def run(repeats: int = 15, quick: bool = False, say: Say = lambda line: None) -> dict[str, Any]:
    """{"machine": ..., "rows": [...]}: everybody on the CPU; `quick`: at small sizes, for tests."""
    layer = LAYER | ({"hidden": 32, "lanes": 4, "chunk": 10} if quick else {})
    stream = STREAM | ({"hidden": 32} if quick else {})
    torch.manual_seed(1)
    about = machine()
    rows = in_turn(list(layers(**layer)), repeats, say)
    rows += in_turn(list(streams(**stream)), repeats, say)
    return {"machine": about, "rows": rows}


def in_turn(contenders: list[Contender], repeats: int, say: Say) -> list[dict[str, Any]]:
    """Rows of all contenders, timed in rounds: whatever else the machine does meets all alike."""
    errors = []
    for one in contenders:
        error = one.error()
        if not error <= LIMITS[one.precision]:
            raise CheckFailedError(
                f"{one.name} ({one.backend}, {one.precision}) differs from float64 by {error:.3g}, "
                f"more than {LIMITS[one.precision]}. Nothing is timed before it is right: mend the backend."
            )
        errors.append(error)
    times: list[list[float]] = [[] for _ in contenders]
    for turn in range(repeats):
        say(f"round {turn + 1} of {repeats}")
        for one, taken in zip(contenders, times, strict=True):
            one.work()  # untimed: memory and caches as they are when nobody else takes turns
            start = time.perf_counter()
            for _ in range(one.calls):
                one.work()
            taken.append((time.perf_counter() - start) * 1e3 / one.calls)
    return [_row(one, taken, error) for one, taken, error in zip(contenders, times, errors, strict=True)]


def _row(one: Contender, taken: list[float], error: float) -> dict[str, Any]:
    middle = statistics.median(taken)
    tenths = statistics.quantiles(taken, n=10, method="inclusive") if len(taken) > 1 else taken * 9
    return {
        "name": one.name,
        "backend": one.backend,
        "level": one.level,
        "device": "cpu",
        "precision": one.precision,
        "hidden": one.hidden,
        "lanes": one.lanes,
        "chunk": one.chunk,
        "parameters": one.parameters,
        "milliseconds": float(f"{middle:.4g}"),
        "milliseconds_p10": float(f"{tenths[0]:.4g}"),
        "milliseconds_p90": float(f"{tenths[-1]:.4g}"),
        "milliseconds_best": float(f"{min(taken):.4g}"),
        "symbols_per_second": round(one.lanes * one.chunk * 1e3 / middle),
        "error_vs_float64": float(f"{error:.3g}"),
        "repeats": len(taken),
    }


def machine() -> dict[str, Any]:
    """What the rows were measured on; no names of hosts, users or vendors."""
    about: dict[str, Any] = {
        "system": platform.system(),
        "architecture": platform.machine(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if hasattr(os, "getloadavg"):
        about["load_before"] = round(os.getloadavg()[0], 2)
    with suppress(metadata.PackageNotFoundError):
        about["torchrecurrent"] = metadata.version("torchrecurrent")
    return about


# Layers: forward and backward, gradients of the input and of all weights; and forward alone


class _Layer:
    """A module with torch.nn.LSTM's conventions at work on one chunk."""

    def __init__(self, module: nn.Module, x: Tensor, dh: Tensor, precision: str) -> None:
        self.module, self.x, self.precision = module, x, precision
        self.dh = dh.bfloat16() if precision == "bf16" else dh

    def _cast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def both(self) -> Tensor:
        """Forward and backward; h."""
        self.x.grad = None
        self.module.zero_grad(set_to_none=True)
        with self._cast():
            h, _ = self.module(self.x)
        h.backward(self.dh)
        return h  # type: ignore[no-any-return]

    @torch.no_grad()
    def forward(self) -> Tensor:
        """Forward alone; h."""
        with self._cast():
            h, _ = self.module(self.x)
        return h  # type: ignore[no-any-return]

    def error(self) -> float:
        """The largest rms error of h and of any gradient against the same in float64, over a short chunk."""
        x = self.x.detach()[:20, :4].requires_grad_()
        dh = self.dh[:20, :4]
        short = _Layer(self.module, x, dh, self.precision)
        twin = copy.deepcopy(self.module).double()
        if isinstance(twin, MultiplicativeLSTM):
            twin.backend = "reference"
        truth = _Layer(twin, x.detach().double().requires_grad_(), dh.double(), "fp64")
        pairs = [(short.both(), truth.both()), (short.x.grad, truth.x.grad)]
        pairs += [(a.grad, b.grad) for a, b in zip(self.module.parameters(), twin.parameters(), strict=True)]
        return max(rms(a, b) for a, b in pairs if a is not None and b is not None)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def equal_hidden(inputs: int, hidden: int) -> int:
    """The hidden size of a torch.nn.LSTM with as many parameters as our layer."""
    wanted = _count(MultiplicativeLSTM(inputs, hidden, device="meta"))
    return min(range(hidden, 2 * hidden), key=lambda H: abs(4 * H * (inputs + H + 2) - wanted))


def layers(inputs: int, hidden: int, lanes: int, chunk: int) -> Iterator[Contender]:
    """Everybody at the level of one layer, with gradients and without."""
    torch.manual_seed(2)
    x = torch.randn(chunk, lanes, inputs, requires_grad=True)
    equal = equal_hidden(inputs, hidden)
    ours = MultiplicativeLSTM(inputs, hidden, backend="fused")
    naive = MultiplicativeLSTM(inputs, hidden, backend="reference")
    entries: list[tuple[str, str, str, nn.Module, int]] = [
        ("mlstm", "fused", "fp32", ours, hidden),
        ("mlstm", "fused", "bf16", ours, hidden),
        ("nn.LSTM", "torch", "fp32", nn.LSTM(inputs, hidden), hidden),
        ("nn.LSTM equal parameters", "torch", "fp32", nn.LSTM(inputs, equal), equal),
        ("naive", "autograd loop", "fp32", naive, hidden),
    ]
    with suppress(ImportError):
        other = import_module("torchrecurrent").MultiplicativeLSTM
        entries.append(("torchrecurrent", "autograd loop", "fp32", other(inputs, hidden), hidden))
    for level in ("layer", "evaluate"):
        for name, backend, precision, module, H in entries:
            layer = _Layer(module, x, torch.randn(chunk, lanes, H), precision)
            work = layer.both if level == "layer" else layer.forward
            yield Contender(
                name, backend, level, precision, H, lanes, chunk, _count(module), work, layer.error
            )


# One stream: a symbol in, logits out, no gradients


class _Stream:
    """A language model fed one symbol after another."""

    def __init__(self, model: LanguageModel, precision: str) -> None:
        self.model, self.precision = model.eval(), precision
        self.x = torch.zeros(1, 1, dtype=torch.long)
        self.state = model.zero_state(1)
        self.turn = 0

    @torch.inference_mode()
    def step(self) -> Tensor:
        """The next symbol; logits."""
        self.model.precision = self.precision
        self.turn += 1
        self.x.fill_(self.turn * 7 % self.model.alphabet_size)
        logits, self.state = self.model(self.x, self.state)
        last: Tensor = logits[0, 0]
        return last


class _NaiveStream:
    """The same as one would write it: products with the parameters, step by step, in float32."""

    def __init__(self, model: LanguageModel) -> None:
        self.p = {k: p.detach() for k, p in model.named_parameters()}
        self.alphabet = model.alphabet_size
        self.h = self.c = torch.zeros(1, model.recipe.hidden)
        self.turn = 0

    @torch.inference_mode()
    def step(self) -> Tensor:
        """The next symbol; logits."""
        p = self.p
        self.turn += 1
        x = self.turn * 7 % self.alphabet
        m = p["layers.0.W_mx"][:, x] * (self.h @ p["layers.0.W_mh"].T)
        z = p["layers.0.W_zx"][:, x] + m @ p["layers.0.W_zm"].T + p["layers.0.b_z"]
        h_hat, i, o, f = z.chunk(4, dim=-1)
        self.c = torch.sigmoid(f) * self.c + torch.sigmoid(i) * torch.tanh(h_hat)
        self.h = torch.tanh(self.c) * torch.sigmoid(o)
        return (self.h @ p["W_out"].T + p["b_out"])[0]


def streams(hidden: int, alphabet: int) -> Iterator[Contender]:
    """Everybody at one symbol after another."""
    torch.manual_seed(3)
    model = LanguageModel(ModelRecipe(hidden=hidden), alphabet, init=None)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, p.shape[-1] ** -0.5)
    parameters = model.parameter_count()

    def check(stream: _Stream | _NaiveStream) -> float:
        twin = copy.deepcopy(model).double()
        twin.precision, twin.backend = "fp64", "reference"
        truth = _Stream(twin, "fp64")
        return max(rms(stream.step(), truth.step()) for _ in range(10))

    def row(name: str, backend: str, precision: str, stream: _Stream | _NaiveStream) -> Contender:
        return Contender(
            name,
            backend,
            "sample",
            precision,
            hidden,
            1,
            1,
            parameters,
            stream.step,
            lambda: check(stream),
            20,
        )

    fast = copy.deepcopy(model)
    fast.backend = "fused"
    yield row("mlstm", "fused", "fp32", _Stream(copy.deepcopy(fast), "fp32"))
    yield row("mlstm", "fused", "bf16", _Stream(fast, "bf16"))
    yield row("naive", "plain loop", "fp32", _NaiveStream(model))
