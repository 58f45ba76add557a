"""Who is timed on a CPU: our layers and others', and one stream of symbols."""

from __future__ import annotations

import copy
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor, nn

from mulstm.bench.timing import Contender, Ready, Say, Session, largest
from mulstm.machine import cores
from mulstm.nn.cell import MultiplicativeLSTM
from mulstm.nn.model import LanguageModel
from mulstm.recipe import ModelRecipe

LAYER = {"inputs": 64, "hidden": 512, "lanes": 32, "chunk": 100}
STREAM = {"hidden": 1900, "alphabet": 205}


def run(repeats: int = 15, quick: bool = False, say: Say = lambda line: None) -> dict[str, Any]:
    """{"machine": ..., "rows": [...]}: everybody on the CPU; `quick`: at small sizes, for tests."""
    layer = LAYER | ({"hidden": 32, "lanes": 4, "chunk": 10} if quick else {})
    stream = STREAM | ({"hidden": 32} if quick else {})
    torch.manual_seed(1)
    about, session = machine(), Session("cpu", repeats, say)
    rows = session.in_turn(list(layers(**layer))) + session.in_turn(list(streams(**stream)))
    return {"machine": about, "rows": rows, "left_out": session.left_out}


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
        pairs.append((short.forward(), truth.forward()))
        return largest(pairs)


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
            prepare = partial(Ready, work, _count(module), layer.error)
            how: dict[str, Any] = {"precision": precision, "calls": 1}
            yield Contender(name, backend, level, H, lanes, chunk, None, prepare, **how)


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
    fast, twin = copy.deepcopy(model), copy.deepcopy(model).double()
    fast.backend, twin.backend = "fused", "reference"

    def row(name: str, backend: str, precision: str, make: Callable[[], _Stream | _NaiveStream]) -> Contender:
        def error() -> float:
            mine, truth = make(), _Stream(twin, "fp64")  # from their beginnings
            return largest([(mine.step(), truth.step()) for _ in range(10)])

        def prepare() -> Ready:
            return Ready(make().step, model.parameter_count(), error)

        how: dict[str, Any] = {"precision": precision, "calls": 20}
        return Contender(name, backend, "sample", hidden, 1, 1, None, prepare, **how)

    yield row("mlstm", "fused", "fp32", lambda: _Stream(copy.deepcopy(fast), "fp32"))
    yield row("mlstm", "fused", "bf16", lambda: _Stream(fast, "bf16"))
    yield row("naive", "plain loop", "fp32", lambda: _NaiveStream(model))
