"""One recurrent layer with the paper's parameters: from symbols or vectors to h, whatever the cell."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mulstm.ops import GATES, State, affine, blocks, keep, recurrence, require_plain, tensor_recurrence
from mulstm.recipe import LSTM_TYPE, MULTIPLICATIVE

SHUT = -1e4  # a gate's pre-activation whose sigmoid is exactly zero in every precision


def time_first(x: Tensor) -> Tensor:
    """(B, T, ...) as (T, B, ...) and back: a view."""
    return x.transpose(0, 1)


def normalised(W: Tensor, g: Tensor) -> Tensor:
    """The rows of W with the lengths g; a row of zeros stays one instead of becoming NaN."""
    length = W.square().sum(dim=-1, keepdim=True)
    empty = length == 0
    # The root's slope at zero is infinite, so a zero must not reach it, masked afterwards or not.
    length = torch.where(empty, 1.0, length).sqrt()
    return W * (g.unsqueeze(-1) / length)


class Weights(NamedTuple):
    """A layer's matrices as they act: weight norm applied, cast to the type that computes."""

    W_mx: Tensor | None  # (H, E)
    W_mh: Tensor | None  # (H, H)
    W_ml: Tensor | None  # (H, H)  from the layer below
    W_zx: Tensor  # (4H, E)
    W_zm: Tensor | None  # (4H, H)
    W_zl: Tensor | None  # (4H, H)
    W_hh: Tensor | None  # (N, H, H)  tensor RNN
    b_z: Tensor  # (4H)  what is added to z
    b_h: Tensor | None  # (H)   "initial" unit: what is added inside the last tanh
    alpha: Tensor | None  # (4H)  MI-LSTM
    beta_1: Tensor | None
    beta_2: Tensor | None

    def kept(self) -> Weights:
        """The same; the recurrent matrices are promised not to change, so that they are packed once."""

        def promise(W: Tensor | None) -> Tensor | None:
            return None if W is None else keep(W)

        return self._replace(W_mh=promise(self.W_mh), W_zm=promise(self.W_zm))


class Tables(NamedTuple):
    """The input side of every symbol, one row each: W_mx x, W_zx x + b, and MI-LSTM's factor."""

    mx: Tensor | None  # (N, H)
    zx: Tensor  # (N, 4H)
    px: Tensor | None  # (N, 4H)


def make_anew(module: nn.Module) -> None:
    """Has pruning and the old weight norm make their matrices, which by themselves they do too late."""
    for hook in module._forward_pre_hooks.values():
        if _makes_matrices(hook):
            hook(module, ())


def _makes_matrices(hook: Any) -> bool:
    return type(hook).__module__.startswith("torch.nn.utils.")


def hooks_of(module: nn.Module) -> list[Any]:
    """What its user has it do besides: all hooks on its way forward but those of `make_anew`."""
    before = [hook for hook in module._forward_pre_hooks.values() if not _makes_matrices(hook)]
    return [*before, *module._forward_hooks.values()]


class Layer(nn.Module):
    """One layer of any cell. For lstm, milstm and rnn W_zm is the matrix on h_{t-1}."""

    b_z: Tensor | None  # None: zeros

    def __init__(
        self,
        cell: str,
        inputs: int,  # E, or N for one-hot input, or the H of the layer below
        hidden: int,
        *,
        unit: str = "standard",
        lower: int = 0,  # width of the layer below, where skip wiring gives it matrices of its own
        symbols: int = 0,  # N, for the tensor RNN's matrices
        weight_norm: bool = False,
        learn_b_h: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.hidden, self.inputs = hidden, inputs
        self.unit = unit if cell in LSTM_TYPE else "tanh"
        self.learn_b_h = learn_b_h
        H, Z = hidden, blocks(self.unit) * hidden
        shapes: dict[str, tuple[int, ...]] = {"W_zx": (Z, inputs)}
        if cell == "tensor-rnn":
            shapes["W_hh"] = (symbols, H, H)
        else:
            shapes["W_zm"] = (Z, H)
        if cell in MULTIPLICATIVE:
            shapes |= {"W_mx": (H, inputs), "W_mh": (H, H)}
        if lower:
            shapes["W_zl"] = (Z, lower)
            if cell in MULTIPLICATIVE:
                shapes["W_ml"] = (H, lower)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
            if weight_norm:
                self.register_parameter("g" + name[1:], nn.Parameter(torch.zeros(shape[:-1])))
        self.register_parameter("b_z", nn.Parameter(torch.zeros(Z)) if bias else None)
        if cell == "milstm":
            for name in ("alpha", "beta_1", "beta_2"):
                self.register_parameter(name, nn.Parameter(torch.zeros(Z)))
        self.names = tuple(name for name, p in self._parameters.items() if p is not None)

    @property
    def matrices(self) -> list[str]:
        """Names of the weight matrices this layer has."""
        return [name for name in self.names if name.startswith("W_")]

    def parameter(self, name: str) -> Tensor | None:
        """The parameter of that name, or None where the cell has none."""
        return getattr(self, name) if name in self.names else None

    def named(self) -> dict[str, Tensor]:
        """All parameters, also those that a parametrization, pruning or DataParallel has taken elsewhere."""
        make_anew(self)
        return {name: getattr(self, name) for name in self.names}

    def weights(self, dtype: torch.dtype, drop: dict[str, Tensor] | None = None) -> Weights:
        """The matrices as they act; `drop` holds DropConnect masks by matrix name."""

        p = self.named()

        def matrix(name: str) -> Tensor | None:
            W = p.get(name)
            if W is None:
                return None
            g = p.get("g" + name[1:])
            wide = torch.promote_types(torch.promote_types(W.dtype, dtype), torch.float32)
            W_eff = W if g is None else normalised(W.to(wide), g.to(wide))
            if drop is not None and name in drop:
                W_eff = W_eff * drop[name]
            return W_eff.to(dtype)

        def vector(name: str) -> Tensor | None:
            v = p.get(name)
            return None if v is None else v.to(dtype)

        b_z = p["b_z"] if "b_z" in p else p["W_zx"].new_zeros(p["W_zx"].shape[0])
        b_h: Tensor | None = None
        if self.unit == "initial":
            b_h = b_z[: self.hidden]
            b_h = b_h if self.learn_b_h else b_h.detach()
            b_z = torch.cat([torch.zeros_like(b_h), b_z[self.hidden :]])
        W_zx = matrix("W_zx")
        assert W_zx is not None
        return Weights(
            W_mx=matrix("W_mx"),
            W_mh=matrix("W_mh"),
            W_ml=matrix("W_ml"),
            W_zx=W_zx,
            W_zm=matrix("W_zm"),
            W_zl=matrix("W_zl"),
            W_hh=matrix("W_hh"),
            b_z=b_z.to(dtype),
            b_h=None if b_h is None else b_h.to(dtype),
            alpha=vector("alpha"),
            beta_1=vector("beta_1"),
            beta_2=vector("beta_2"),
        )

    def forward(
        self,
        w: Weights,
        mx: Tensor | None,  # (T, B, H)
        zx: Tensor,  # (T, B, 4H)
        px: Tensor | None,
        state: State,
        mask: Tensor | None,
        backend: str,
        symbols: Tensor | None = None,  # (T, B), the tensor RNN only
        first: Tensor | None = None,  # (T, B), true where a text begins: nothing before it is remembered
    ) -> tuple[Tensor, State]:
        """All h, time first, and the state after the chunk."""
        if first is not None:
            if mx is None and px is None:
                return self._pieces(w, zx, state, mask, backend, symbols, first)
            mx, zx, px = shut(mx, zx, px, first, self.hidden)
            state = begun(state, first[0])
        if w.W_hh is not None:
            assert symbols is not None
            require_plain(backend)
            if state.h.shape != zx.shape[1:]:
                raise ValueError(f"state.h has shape {tuple(state.h.shape)}. Give {tuple(zx.shape[1:])}.")
            return tensor_recurrence(symbols, zx, w.W_hh, state, mask)
        assert w.W_zm is not None
        return recurrence(
            mx, zx, w.W_mh, w.W_zm, state, mask=mask, px=px, b_h=w.b_h, unit=self.unit, backend=backend
        )

    def _pieces(
        self,
        w: Weights,
        zx: Tensor,
        state: State,
        mask: Tensor | None,
        backend: str,
        symbols: Tensor | None,
        first: Tensor,
    ) -> tuple[Tensor, State]:
        """Cells whose h_{t-1} no factor of the input can shut out: cut where any lane begins a text."""
        cuts = [t for t in torch.nonzero(first.any(dim=1)).flatten().tolist() if t > 0]
        hs = []
        for low, high in zip([0, *cuts], [*cuts, zx.shape[0]], strict=True):
            state = begun(state, first[low])
            part = None if symbols is None else symbols[low:high]
            # Not by calling the layer: its hooks are for the whole chunk.
            h, state = self.forward(w, None, zx[low:high], None, state, mask, backend, part)
            hs.append(h)
        return torch.cat(hs), state


def begun(state: State, first: Tensor) -> State:
    """Zero in the lanes (B) where a text begins: no factor shuts out what is no number."""
    begins = first.unsqueeze(-1)
    return State(state.h.masked_fill(begins, 0), state.c.masked_fill(begins, 0))


def shut(
    mx: Tensor | None, zx: Tensor, px: Tensor | None, first: Tensor, H: int
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """The input side of a chunk in which texts begin: no backend needs to know.

    Where the factor of h_{t-1} is zero and the forget gate is shut, the step is that of a zero state,
    and no gradient passes either.
    """
    begins = first.unsqueeze(-1)
    mx = None if mx is None else mx.masked_fill(begins, 0)
    px = None if px is None else px.masked_fill(begins, 0)
    if zx.shape[-1] > H:
        f = torch.arange(zx.shape[-1], device=zx.device) >= GATES.index("f") * H
        zx = zx.masked_fill(begins & f, SHUT)
    return mx, zx, px


def tables(w: Weights, embedding: Tensor | None) -> Tables:
    """The input side of each symbol, for input that is one-hot or an unmasked embedding."""

    def rows(W: Tensor) -> Tensor:
        return W.T.contiguous() if embedding is None else embedding @ W.T

    mx = None if w.W_mx is None else rows(w.W_mx)
    zx, px = interact(w, rows(w.W_zx))
    return Tables(mx, zx, px)


def interact(w: Weights, wx: Tensor) -> tuple[Tensor, Tensor | None]:
    """zx and px from the bare product W_zx x (+ W_zl l)."""
    if w.alpha is None or w.beta_1 is None or w.beta_2 is None:
        return wx + w.b_z, None
    return w.beta_2 * wx + w.b_z, w.alpha * wx + w.beta_1


def look_up(table: Tables, x: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """mx, zx, px of symbols x (T, B)."""
    mx = None if table.mx is None else rows_of(table.mx, x)
    px = None if table.px is None else rows_of(table.px, x)
    return mx, rows_of(table.zx, x), px


def rows_of(table: Tensor, x: Tensor) -> Tensor:
    """table[x] of symbols x. On a CPU PyTorch adds up its gradient in the table's type: not in bf16 here."""
    if table.dtype == torch.bfloat16 and table.device.type == "cpu" and torch.is_grad_enabled():
        return rows_of(table.float(), x).to(table.dtype)
    try:
        return nn.functional.embedding(x, table)
    except IndexError:
        raise ValueError(
            f"A symbol is not among the model's {len(table)}. Give 0 to {len(table) - 1}."
        ) from None


def project(
    w: Weights,
    x: Tensor | None,  # (T, B, E), or None with symbols
    symbols: Tensor | None,  # (T, B), one-hot
    low: Tensor | None,  # (T, B, H) of the layer below
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """mx, zx, px where a table does not serve: masked embeddings, few symbols, a layer below."""

    def product(W: Tensor, W_low: Tensor | None, bias: Tensor | None) -> Tensor:
        if x is not None:
            y = affine(x, W, bias)
        else:
            assert symbols is not None
            y = rows_of(W.T, symbols)
            y = y if bias is None else y + bias
        return y if low is None or W_low is None else y + affine(low, W_low)

    mx = None if w.W_mx is None else product(w.W_mx, w.W_ml, None)
    if w.alpha is None:
        return mx, product(w.W_zx, w.W_zl, w.b_z), None
    zx, px = interact(w, product(w.W_zx, w.W_zl, None))
    return mx, zx, px
