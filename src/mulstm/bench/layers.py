"""Who is timed at the level of one layer: ours by every backend, cuDNN's LSTM, plain loops."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mulstm.bench import floor
from mulstm.bench.timing import Contender, Ready, Session, largest
from mulstm.nn.cell import MultiplicativeLSTM
from mulstm.ops import State, reference

E = 400  # the paper's embedding
Make = Callable[[int, int], nn.Module]


class _Chunk(Protocol):
    parameters: int

    def __call__(self) -> None: ...
    def error(self) -> float: ...


def shapes(H: int, inputs: int) -> dict[str, tuple[int, ...]]:
    """Of a multiplicative LSTM's parameters."""
    return {"W_mx": (H, inputs), "W_zx": (4 * H, inputs), "W_mh": (H, H), "W_zm": (4 * H, H), "b_z": (4 * H,)}


def drawn(shape: tuple[int, ...], device: str) -> Tensor:
    """A random parameter whose numbers are bf16's, so that nobody loses by the cast."""
    scaled: Tensor = torch.randn(shape, device=device) * shape[-1] ** -0.5
    return scaled.bfloat16().float()


class OurLayer:
    """Forward and backward of our layer: input product inside, zero state, gradient on h only."""

    def __init__(self, H: int, B: int, T: int, inputs: int) -> None:
        from mulstm.ops.triton_layer import Spec

        self.spec = Spec(H, 4, "standard", ones=False)
        self.p = {name: drawn(shape, "cuda").requires_grad_() for name, shape in shapes(H, inputs).items()}
        self.parameters = sum(p.numel() for p in self.p.values())
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
            self.spec, tuple(self.p), {}, None, self.x, None, *self.state, None, *self.p.values()
        )
        self.h = h
        h.backward(self.dh)

    def error(self) -> float:
        """The largest relative error of h and of any gradient that the last call left."""
        H, inputs = self.H, self.p["W_mx"].shape[1]
        p = {name: value.detach().double().requires_grad_() for name, value in self.p.items()}
        x = self.x.detach()[:, :inputs].double().view(self.T, self.B, inputs).requires_grad_()
        zero = State(*(torch.zeros(self.B, H, dtype=torch.float64, device="cuda") for _ in range(2)))
        h, _ = reference.recurrence(x @ p["W_mx"].T, x @ p["W_zx"].T + p["b_z"], p["W_mh"], p["W_zm"], zero)
        h.backward(self.dh[..., :H].double())  # type: ignore[no-untyped-call]
        assert self.x.grad is not None
        pairs = [(self.h[..., :H], h), (self.x.grad[:, :inputs], x.grad)]
        pairs += [(self.p[name].grad, p[name].grad) for name in p]
        return largest(pairs)


class ModuleLayer:
    """The same for a module with torch.nn.LSTM's conventions, in bf16."""

    def __init__(self, module: nn.Module, device: str, H: int, B: int, T: int, inputs: int) -> None:
        self.module = module.to(device, torch.bfloat16)
        self.parameters = sum(p.numel() for p in module.parameters())
        with torch.no_grad():
            for p in self.module.parameters():
                p.copy_(drawn(tuple(p.shape), device))
        if isinstance(self.module, nn.LSTM):
            self.module.flatten_parameters()
        self.x = torch.randn(T, B, inputs, device=device).bfloat16().requires_grad_()
        self.dh = torch.randn(T, B, H, device=device).bfloat16()

    def __call__(self) -> None:
        self.x.grad = None
        self.module.zero_grad(set_to_none=True)
        h, _ = self.module(self.x)
        self.h = h
        h.backward(self.dh)

    def error(self) -> float:
        """The largest relative error of h and of any gradient that the last call left."""
        twin = exact(self.module)
        x = self.x.detach().double().requires_grad_()
        h, _ = twin(x)
        h.backward(self.dh.double())
        pairs = [(self.h, h), (self.x.grad, x.grad)]
        # torch.nn.LSTM as FlashRNN's twin has a second bias, which comes last.
        pairs += [(a.grad, b.grad) for a, b in zip(self.module.parameters(), twin.parameters(), strict=False)]
        return largest(pairs)


def exact(module: nn.Module) -> nn.Module:
    """The same function in float64, by plain calls."""
    if isinstance(module, FlashLSTM):
        return module.exact()
    twin = copy.deepcopy(module).double()
    if isinstance(twin, MultiplicativeLSTM):
        twin.backend = "reference"
    return twin


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


class FlashLSTM(nn.Module):
    """FlashRNN's LSTM, whose kernel takes the input product ready made, with that product round it."""

    def __init__(self, inputs: int, H: int) -> None:
        super().__init__()
        self.function: Any = importlib.import_module("flashrnn").flashrnn
        self.W = nn.Parameter(torch.zeros(4 * H, inputs))
        self.R = nn.Parameter(torch.zeros(4, 1, H, H))  # gate, head, to, from
        self.b = nn.Parameter(torch.zeros(4, 1, H))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """h of all steps; the state is left out."""
        T, B, _ = x.shape
        Wx = nn.functional.linear(x, self.W).view(T, B, 4, 1, -1)
        # It asks for lanes first; what it does with this view is to turn it back without a copy.
        states, _ = self.function(Wx.transpose(0, 1), self.R, self.b, function="lstm", backend="cuda")
        h: Tensor = states[0].transpose(0, 1).flatten(2)
        return h, None

    def exact(self) -> nn.LSTM:
        """torch's LSTM with these weights in float64; its gates stand in the same order."""
        H, inputs = self.b.shape[2], self.W.shape[1]
        twin = nn.LSTM(inputs, H, device=self.W.device, dtype=torch.float64)
        with torch.no_grad():
            for mine, its in zip((self.W, self.R, self.b), twin.parameters(), strict=False):
                its.copy_(mine.view(its.shape))
            twin.get_parameter("bias_hh_l0").zero_()
        return twin


def _prepare(session: Session, make: Callable[[], _Chunk], graph: bool) -> Ready:
    chunk = make()
    return Ready(session.captured(chunk) if graph else chunk, chunk.parameters, chunk.error)


def layers(session: Session, H: int, B: int, T: int, equal: int, inputs: int) -> list[Contender]:
    """Everybody at the level of one layer; `equal` is the LSTM's H of as many parameters."""

    def entry(
        name: str, backend: str, cell: str, h: int, make: Callable[[], _Chunk], graph: bool = False
    ) -> Contender:
        work = floor.layer(cell, h, inputs, B, T)
        prepare = partial(_prepare, session, make, graph)
        # Launches by the thousand take as long as they take: fewer rounds.
        slow = not graph and not name.startswith("nn.")
        return Contender(name, backend, "layer", h, B, T, lambda ready: work, prepare, slow)

    def module(name: str, backend: str, cell: str, h: int, make: Make, graph: bool = False) -> Contender:
        def built() -> ModuleLayer:
            return ModuleLayer(make(inputs, h), session.device, h, B, T, inputs)

        return entry(name, backend, cell, h, built, graph)

    found = []
    if session.cuda:
        ours = partial(OurLayer, H, B, T, inputs)
        found.append(entry("mlstm", "triton, one graph", "mlstm", H, ours, True))
        found.append(entry("mlstm", "triton, launch by launch", "mlstm", H, ours))
    padded = -(-H // 128) * 128
    lstm = partial(nn.LSTM, device=session.device)
    for h, name in ((H, "nn.LSTM"), (padded, "nn.LSTM padded"), (equal, "nn.LSTM equal parameters")):
        found.append(module(name, "cudnn", "lstm", h, lstm))
        found.append(module(name, "cudnn, one graph", "lstm", h, lstm, True))
    found.append(module("naive", "reference", "mlstm", H, Naive))
    if importlib.util.find_spec("torchrecurrent"):
        other = importlib.import_module("torchrecurrent").MultiplicativeLSTM
        found.append(module("torchrecurrent", "python loop", "mlstm", H, other))
    if session.cuda:
        found.append(module("mlstm", "triton, nn.MultiplicativeLSTM", "mlstm", H, _ours("triton")))
    found.append(module("mlstm", "fused", "mlstm", H, _ours("fused")))
    found.append(module("mlstm", "fused, one graph", "mlstm", H, _ours("fused"), True))
    if session.cuda and importlib.util.find_spec("flashrnn"):
        found.append(module("flashrnn", "cuda", "lstm", equal, FlashLSTM))
    return found


def _ours(backend: str) -> Make:
    def make(inputs: int, H: int) -> nn.Module:
        module = copy.deepcopy(_drawn_once(inputs, H))
        module.backend = backend
        return module

    return make


@lru_cache(maxsize=1)
def _drawn_once(inputs: int, H: int) -> MultiplicativeLSTM:
    """Orthogonal matrices of this size take seconds, and nobody here needs others."""
    return MultiplicativeLSTM(inputs, H)
