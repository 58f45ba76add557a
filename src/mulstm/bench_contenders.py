"""Who is timed on a GPU: our layer and update, cuDNN's LSTM, plain loops, with their checks."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mulstm import update
from mulstm.nn.model import LanguageModel
from mulstm.ops import State, reference
from mulstm.recipe import DropoutRecipe, ModelRecipe, OptimiserRecipe, Recipe, TrainRecipe

E, N = 400, 205  # the paper's embedding, and the alphabet of enwik8
SMALL = (256, 8, 50)  # H, B, T of the checks
Run = Callable[[], None]


@dataclass
class Contender:
    """Something to be timed: `prepare` builds it on the GPU and returns what is called again and again."""

    name: str
    backend: str
    level: str
    cell: str
    hidden: int
    lanes: int
    chunk: int
    prepare: Callable[[], tuple[Run, int]]  # and its parameters
    error: Callable[[], float]
    slow: bool = False  # repeated less often
    milliseconds: list[float] = field(default_factory=list)


def rms(a: Tensor, b: Tensor) -> float:
    """rms(a - b) / rms(b)."""
    a, b = a.double(), b.double()
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt())


def captured(work: Run) -> Run:
    """The same work as the replay of one CUDA graph."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay() -> None:
        assert work is not None  # what it holds is what the graph reads and writes
        graph.replay()

    return replay


def shapes(H: int, inputs: int) -> dict[str, tuple[int, ...]]:
    """Of a multiplicative LSTM's parameters."""
    return {"W_mx": (H, inputs), "W_zx": (4 * H, inputs), "W_mh": (H, H), "W_zm": (4 * H, H), "b_z": (4 * H,)}


def drawn(shape: tuple[int, ...]) -> Tensor:
    """A random parameter whose numbers are bf16's, so that nobody loses by the cast."""
    scaled: Tensor = torch.randn(shape, device="cuda") * shape[-1] ** -0.5
    return scaled.bfloat16().float()


class OurLayer:
    """Forward and backward of our layer: input product inside, zero state, gradient on h only."""

    def __init__(self, H: int, B: int, T: int, inputs: int = E) -> None:
        from mulstm.ops.triton_layer import Spec

        self.spec = Spec(H, 4, "standard", ones=False)
        self.p = {name: drawn(shape).requires_grad_() for name, shape in shapes(H, inputs).items()}
        self.T, self.B, self.H = T, B, H
        # Rows padded with zeros to the width that the products like, as the model's own input has them.
        self.x = torch.zeros(T * B, self.spec.width(inputs), dtype=torch.bfloat16, device="cuda")
        self.x[:, :inputs] = torch.randn(T * B, inputs, device="cuda")
        self.x.requires_grad_()
        self.dh = torch.randn(T, B, self.spec.HP, device="cuda").bfloat16()
        self.dh[..., H:] = 0
        self.state = (torch.zeros(B, H, device="cuda").bfloat16(), torch.zeros(B, H, device="cuda"))

    def __call__(self) -> None:
        from mulstm.ops.triton_layer import LayerFunction

        self.x.grad = None
        for p in self.p.values():
            p.grad = None
        h, _, _ = LayerFunction.apply(  # type: ignore[no-untyped-call]
            self.spec, tuple(self.p), {}, self.x, None, *self.state, None, *self.p.values()
        )
        self.h = h
        h.backward(self.dh)

    def error(self) -> float:
        """The largest relative error of h and of any gradient."""
        self()
        H, E_ = self.H, self.p["W_mx"].shape[1]
        p = {name: value.detach().double().requires_grad_() for name, value in self.p.items()}
        x = self.x.detach()[:, :E_].double().view(self.T, self.B, E_).requires_grad_()
        zero = State(*(torch.zeros(self.B, H, dtype=torch.float64, device="cuda") for _ in range(2)))
        h, _ = reference.recurrence(x @ p["W_mx"].T, x @ p["W_zx"].T + p["b_z"], p["W_mh"], p["W_zm"], zero)
        h.backward(self.dh[..., :H].double())  # type: ignore[no-untyped-call]
        assert self.x.grad is not None
        pairs = [(self.h[..., :H], h), (self.x.grad[:, :E_].reshape(x.shape), x.grad)]
        pairs += [(self.p[name].grad, p[name].grad) for name in p]
        return max(rms(a, b) for a, b in pairs if a is not None and b is not None)


class ModuleLayer:
    """The same for a module with torch.nn.LSTM's conventions, in bf16."""

    def __init__(self, module: nn.Module, H: int, B: int, T: int, inputs: int = E) -> None:
        self.module = module.to("cuda", torch.bfloat16)
        with torch.no_grad():
            for p in self.module.parameters():
                p.copy_(drawn(tuple(p.shape)))
        if isinstance(self.module, nn.LSTM):
            self.module.flatten_parameters()
        self.x = torch.randn(T, B, inputs, device="cuda").bfloat16().requires_grad_()
        self.dh = torch.randn(T, B, H, device="cuda").bfloat16()

    def __call__(self) -> None:
        self.x.grad = None
        self.module.zero_grad(set_to_none=True)
        h, _ = self.module(self.x)
        self.h = h
        h.backward(self.dh)

    def error(self) -> float:
        """The largest relative error of h and of any gradient."""
        self()
        twin = copy.deepcopy(self.module).double()
        x = self.x.detach().double().requires_grad_()
        h, _ = twin(x)
        h.backward(self.dh.double())
        pairs = [(self.h, h), (self.x.grad, x.grad)]
        pairs += [(a.grad, b.grad) for a, b in zip(self.module.parameters(), twin.parameters(), strict=True)]
        return max(rms(a, b) for a, b in pairs if a is not None and b is not None)


class Naive(nn.Module):
    """The loop as one would write it: one step after another, on autograd's tape."""

    def __init__(self, inputs: int, H: int) -> None:
        super().__init__()
        self.H = H
        for name, shape in shapes(H, inputs).items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """h of all steps; the state is left out."""
        zero = x.new_zeros(x.shape[1], self.H)
        wide = torch.promote_types(x.dtype, torch.float32)
        W_mx, W_zx, W_mh, W_zm, b_z = (
            self.get_parameter(name) for name in ("W_mx", "W_zx", "W_mh", "W_zm", "b_z")
        )
        mx, zx = nn.functional.linear(x, W_mx), nn.functional.linear(x, W_zx, b_z)
        return reference.recurrence(mx, zx, W_mh, W_zm, State(zero, zero.to(wide)))[0], None


def count(module: nn.Module) -> int:
    """Parameters of a module."""
    return sum(p.numel() for p in module.parameters())


def layers(H: int, B: int, T: int, equal: int) -> list[Contender]:
    """Everybody at the level of one layer; `equal` is the LSTM's H of as many parameters."""

    def ours(graph: bool) -> Contender:
        def prepare() -> tuple[Run, int]:
            layer = OurLayer(H, B, T)
            return captured(layer) if graph else layer, sum(p.numel() for p in layer.p.values())

        def error() -> float:
            return OurLayer(*SMALL, 64).error()

        backend = "triton, one graph" if graph else "triton, launch by launch"
        return Contender("mlstm", backend, "layer", "mlstm", H, B, T, prepare, error)

    def module(
        name: str, backend: str, cell: str, h: int, make: Callable[[int, int], nn.Module], how: str
    ) -> Contender:
        def prepare() -> tuple[Run, int]:
            layer = ModuleLayer(make(E, h), h, B, T)
            return captured(layer) if how == "graph" else layer, count(layer.module)

        def error() -> float:
            return ModuleLayer(make(64, SMALL[0]), *SMALL, 64).error()

        return Contender(name, backend, "layer", cell, h, B, T, prepare, error, slow=how == "slow")

    found = [ours(True), ours(False)]
    padded = -(-H // 128) * 128
    for h, name in ((H, "nn.LSTM"), (padded, "nn.LSTM padded"), (equal, "nn.LSTM equal parameters")):
        for how, backend in (("eager", "cudnn"), ("graph", "cudnn, one graph")):
            found.append(module(name, backend, "lstm", h, nn.LSTM, how))
    found.append(module("naive", "reference", "mlstm", H, Naive, "slow"))
    try:
        other = importlib.import_module("torchrecurrent").MultiplicativeLSTM
        found.append(module("torchrecurrent", "python loop", "mlstm", H, other, "slow"))
    except ImportError:
        pass
    return found


def recipe(H: int, B: int, T: int, cell: str = "mlstm", unit: str = "standard", layers: int = 1) -> Recipe:
    """The whole update that is timed: embedding, weight norm, both dropouts, clipping, Adam."""
    return Recipe(
        model=ModelRecipe(hidden=H, embedding=E, weight_norm=True, cell=cell, unit=unit, layers=layers),
        dropout=DropoutRecipe(embedding=0.5, hidden=0.2),
        optimiser=OptimiserRecipe(rate=1e-4, clip=1.0),
        train=TrainRecipe(lanes=B, chunk=T, precision="bf16"),
    )


def _updates(H: int, B: int, T: int, how: Any) -> tuple[Run, int]:
    """Our update over three sets of random symbols in turn."""
    model = LanguageModel(how.model, N).cuda()
    model.precision, model.backend = "bf16", how.train.backend
    generator = torch.Generator("cuda").manual_seed(1)
    if how.train.backend == "auto":
        work: update.Update = update.make(model, how, generator)
    else:
        work = update.Update(model, how, generator)
    rng = np.random.default_rng(0)
    sets = [rng.integers(N, size=(2, B, T)).astype(np.uint8) for _ in range(3)]
    turn = [0]

    def run() -> None:
        turn[0] += 1
        x, y = sets[turn[0] % 3]
        work(x, y, 1e-4)

    for _ in range(5):
        run()
    return run, model.parameter_count()


class LSTMUpdate:
    """The same update round cuDNN's LSTM: embedding, masks, softmax, clipping, Adam; no weight norm."""

    def __init__(self, H: int, B: int, T: int) -> None:
        self.B = B
        self.table = nn.Parameter(torch.rand(N, E, device="cuda") * 0.4 - 0.2)
        self.lstm = nn.LSTM(E, H).cuda()
        self.out = nn.Linear(H, N).cuda()
        self.p = [self.table, *self.lstm.parameters(), *self.out.parameters()]
        rate = torch.tensor(1e-4, device="cuda")
        self.adam = torch.optim.Adam(self.p, lr=rate, fused=True, capturable=True)
        self.x = torch.randint(N, (T, B), device="cuda")
        self.y = torch.randint(N, (T, B), device="cuda")
        self.state = (torch.zeros(1, B, H, device="cuda"), torch.zeros(1, B, H, device="cuda"))

    def __call__(self) -> None:
        self.adam.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            kept = (torch.rand(self.B, E, device="cuda") >= 0.5).float() * 2
            e = self.table[self.x] * kept
            h, (h_T, c_T) = self.lstm(e, self.state)
            kept = (torch.rand(self.B, h.shape[2], device="cuda") >= 0.2).to(h.dtype) * 1.25
            loss = nn.functional.cross_entropy(self.out(h * kept).float().flatten(0, 1), self.y.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.p, 1.0)
        self.adam.step()
        for kept_state, new in zip(self.state, (h_T, c_T), strict=True):
            kept_state.copy_(new.detach())


def updates(H: int, B: int, T: int, equal: int, naive: bool) -> list[Contender]:
    """Everybody at the level of the full training update."""

    def none() -> float:
        return float("nan")  # the parts are checked at the level of the layer

    def lstm(h: int) -> Callable[[], tuple[Run, int]]:
        def prepare() -> tuple[Run, int]:
            work = LSTMUpdate(h, B, T)
            return captured(work), sum(p.numel() for p in work.p)

        return prepare

    ours = recipe(H, B, T)
    graph = "triton, one graph"
    found = [Contender("mlstm", graph, "update", "mlstm", H, B, T, partial(_updates, H, B, T, ours), none)]
    for h, name in ((-(-H // 128) * 128, "nn.LSTM padded"), (equal, "nn.LSTM equal parameters")):
        if h:
            found.append(Contender(name, "cudnn, one graph", "update", "lstm", h, B, T, lstm(h), none))
    if naive:
        slow = Recipe(
            model=ours.model,
            dropout=ours.dropout,
            optimiser=ours.optimiser,
            train=TrainRecipe(lanes=B, chunk=T, precision="bf16", backend="reference"),
        )
        one = Contender(
            "naive", "reference", "update", "mlstm", H, B, T, lambda: _updates(H, B, T, slow), none
        )
        one.slow = True
        found.append(one)
    return found
