"""The multiplicative LSTM in the manner of torch.nn.LSTM and torch.nn.LSTMCell, for use in any network."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from itertools import groupby
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from mulstm.nn.initial import initialise_layer
from mulstm.nn.kept import Keeping, Kept, parameters_of
from mulstm.nn.layer import Layer, Weights, project, time_first
from mulstm.ops import State, modes, require_known
from mulstm.recipe import UNITS, InitRecipe

Hidden = tuple[Tensor, Tensor]  # (h, c)


class _Base(Keeping):
    """What the layer and the cell share: sizes, start, weights as they act."""

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool, weight_norm: bool, unit: str, backend: str
    ) -> None:
        super().__init__()
        _require_counts(input_size=input_size, hidden_size=hidden_size)
        _require_flags(bias=bias, weight_norm=weight_norm)
        if unit not in UNITS:
            raise ValueError(f"There is no unit {unit!r}. Choose one of: {', '.join(UNITS)}.")
        require_known(backend)
        self.input_size, self.hidden_size = input_size, hidden_size
        self.bias, self.weight_norm, self.unit, self.backend = bias, weight_norm, unit, backend
        self._kept: Kept[tuple[Weights, ...]] = Kept()
        self.layers = nn.ModuleList()

    def _build(self, sizes: list[int], device: Any, dtype: torch.dtype | None) -> None:
        """A layer for each size of input."""
        how: dict[str, Any] = {"unit": self.unit, "weight_norm": self.weight_norm, "bias": self.bias}
        with nullcontext() if device is None else torch.device(device):
            for size in sizes:
                self.layers.append(Layer("mlstm", size, self.hidden_size, **how))
            self.reset_parameters()
        if dtype is not None:
            self.to(dtype)

    def reset_parameters(self) -> None:
        """Draws the weights anew: orthogonal matrices, forget gates open (bias 3), as in the paper."""
        for layer in self.stack:
            initialise_layer(layer, InitRecipe(), None)
        self.forget()

    def _weights(self, dtype: torch.dtype) -> tuple[Weights, ...]:
        if not self.keeps_or_forgets():
            return tuple(layer.weights(dtype) for layer in self.stack)
        make = lambda: tuple(layer.weights(dtype).kept() for layer in self.stack)  # noqa: E731
        return self._kept.get(parameters_of(self), dtype, make)

    def _check(self, x: Tensor) -> torch.dtype:
        """The type that computes: the weights' own, or what autocast asks for."""
        if x.shape[-1] != self.input_size:
            raise ValueError(
                f"The input's last dimension is {x.shape[-1]}, and input_size is {self.input_size}. "
                "Give vectors of that size."
            )
        dtype: torch.dtype = getattr(self.stack[0], "b_z" if self.bias else "W_zx").dtype
        # Autocast leaves float64 alone, and what is no plain number as well.
        if modes.autocasts(x.device) and dtype != torch.float64 and x.is_floating_point():
            return torch.get_autocast_dtype(x.device.type)
        if x.dtype != dtype:
            raise ValueError(f"The input is {x.dtype} and the weights are {dtype}. Cast one of the two.")
        return dtype

    def _check_state(self, hx: Hidden, shape: tuple[int, ...], x: Tensor) -> None:
        if len(hx) != 2:
            raise ValueError(f"The state's length is {len(hx)}. Give two tensors, (h_0, c_0).")
        for name, v in zip(("h_0", "c_0"), hx, strict=True):
            if not isinstance(v, Tensor):
                raise ValueError(f"{name} is a {type(v).__name__}. Give two tensors, (h_0, c_0).")
            if v.shape != shape:
                raise ValueError(f"{name} has shape {tuple(v.shape)}. Give {shape}.")
            if v.dtype != x.dtype and not modes.autocasts(x.device):
                if name == "c_0" and v.dtype == torch.promote_types(x.dtype, torch.float32):
                    continue  # as c_n is
                raise ValueError(f"{name} is {v.dtype} and the input {x.dtype}. Cast one of the two.")

    def extra_repr(self) -> str:
        parts = [f"{self.input_size}, {self.hidden_size}"]
        for name, usual in _USUAL.items():
            value = getattr(self, name, usual)
            parts += [f"{name}={value!r}"] * (value != usual)
        return ", ".join(parts)


def _require_counts(**counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}. Give a whole number.")
        if value < 1:
            raise ValueError(f"{name} is {value}. Give at least 1.")


def _require_flags(**flags: bool) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}. Give True or False.")


_USUAL = {
    "num_layers": 1,
    "bias": True,
    "batch_first": False,
    "dropout": 0.0,
    "bidirectional": False,
    "weight_norm": False,
    "unit": "standard",
    "backend": "auto",
}


class MultiplicativeLSTM(_Base):
    """One or more multiplicative LSTM layers, called as torch.nn.LSTM is: `output, (h_n, c_n) = layer(x)`.

    Left out: `proj_size`, and torch.jit.script. c_n is never of less than float32. Second derivatives want
    backend="reference". In evaluation weights are prepared once: after a change through `.data` call
    `forget()`.
    """

    proj_size = 0

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        weight_norm: bool = False,
        unit: str = "standard",
        backend: str = "auto",
    ) -> None:
        super().__init__(input_size, hidden_size, bias, weight_norm, unit, backend)
        if proj_size != 0:
            raise ValueError(f"proj_size is {proj_size}; projections are not made here. Use a Linear layer.")
        _require_counts(num_layers=num_layers)
        _require_flags(batch_first=batch_first, bidirectional=bidirectional)
        if isinstance(dropout, bool) or not isinstance(dropout, int | float):
            raise TypeError(f"dropout is {dropout!r}. Give a number.")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout}. Give a share from 0 to less than 1.")
        if dropout > 0 and num_layers == 1:
            warnings.warn(f"dropout is {dropout}: it acts between layers, and there is one.", stacklevel=2)
        self.num_layers, self.batch_first = num_layers, batch_first
        self.dropout, self.bidirectional = dropout, bidirectional
        directions = 2 if bidirectional else 1
        above = [hidden_size * directions] * (num_layers - 1)
        self._build([size for size in (input_size, *above) for _ in range(directions)], device, dtype)

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The parameters of every layer and direction."""
        return [list(layer.named().values()) for layer in self.stack]

    def flatten_parameters(self) -> None:
        """Does nothing: there is nothing to flatten. Here because callers of torch.nn.LSTM call it."""

    @overload
    def forward(self, input: Tensor, hx: Hidden | None = None) -> tuple[Tensor, Hidden]: ...
    @overload
    def forward(self, input: PackedSequence, hx: Hidden | None = None) -> tuple[PackedSequence, Hidden]: ...
    def forward(
        self, input: Tensor | PackedSequence, hx: Hidden | None = None
    ) -> tuple[Tensor | PackedSequence, Hidden]:
        """All h of the last layer in the form of the input, and (h_n, c_n) of every layer and direction."""
        if isinstance(input, PackedSequence):
            return self._packed(input, hx)
        if input.dim() not in (2, 3):
            raise ValueError(f"The input has {input.dim()} dimensions. Give 2 (one sequence) or 3 (a batch).")
        dtype = self._check(input)
        single = input.dim() == 2
        x = input.unsqueeze(1) if single else time_first(input) if self.batch_first else input
        if x.shape[0] == 0:
            raise ValueError("The input has no steps. Give at least one.")
        sizes = [(x.shape[0], x.shape[1])]
        state = self._state(hx, x, x.shape[1], single)
        y, h_n, c_n = self._run(x, sizes, state, dtype)
        if single:
            return y.squeeze(1), (h_n.squeeze(1), c_n.squeeze(1))
        return time_first(y) if self.batch_first else y, (h_n, c_n)

    def _packed(self, packed: PackedSequence, hx: Hidden | None) -> tuple[PackedSequence, Hidden]:
        data, batch_sizes, order, back = packed
        dtype = self._check(data)
        lanes = batch_sizes.tolist()
        # Stretches of steps with the same lanes: (steps, lanes), lanes falling.
        sizes = [(len(list(steps)), n) for n, steps in groupby(lanes)]
        h, c = self._state(hx, data, lanes[0], False)
        if order is not None:
            h, c = h.index_select(1, order), c.index_select(1, order)
        y, h_n, c_n = self._run(data, sizes, (h, c), dtype)
        if back is not None:
            h_n, c_n = h_n.index_select(1, back), c_n.index_select(1, back)
        return PackedSequence(y, batch_sizes, order, back), (h_n, c_n)

    def _state(self, hx: Hidden | None, x: Tensor, lanes: int, single: bool) -> Hidden:
        """h_0 and c_0, (layers x directions, B, H)."""
        shape = (len(self.layers), lanes, self.hidden_size)
        if hx is None:
            wide = torch.promote_types(x.dtype, torch.float32)
            return x.new_zeros(shape), torch.zeros(shape, dtype=wide, device=x.device)
        self._check_state(hx, (shape[0], shape[2]) if single else shape, x)
        h, c = hx
        return (h.unsqueeze(1), c.unsqueeze(1)) if single else (h, c)

    def _run(
        self, x: Tensor, sizes: list[tuple[int, int]], state: Hidden, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All layers over packed rows (steps of the longest sequences first), or (T, B, E): h, h_n, c_n."""
        weights = self._weights(dtype)
        directions = 2 if self.bidirectional else 1
        h_n: list[Tensor] = []
        c_n: list[Tensor] = []
        for k in range(self.num_layers):
            if k > 0 and self.dropout > 0:
                x = nn.functional.dropout(x, self.dropout, self.training)
            outputs = []
            for d in range(directions):
                j = k * directions + d
                h, end = self._sweep(j, weights[j], x, sizes, State(state[0][j], state[1][j]), d == 1)
                outputs.append(h)
                h_n.append(end.h)
                c_n.append(end.c)
            x = outputs[0] if directions == 1 else torch.cat(outputs, dim=-1)
        return x, torch.stack(h_n), torch.stack(c_n)

    def _sweep(
        self,
        j: int,
        w: Weights,
        x: Tensor,  # (rows, E), or (T, B, E) where no sequence ends before the others
        sizes: list[tuple[int, int]],
        start: State,
        backwards: bool,
    ) -> tuple[Tensor, State]:
        """One layer in one direction: h as x is, and each lane's last state."""
        dtype = w.W_zx.dtype
        wide = torch.promote_types(dtype, torch.float32)
        start = State(start.h.to(dtype), start.c.to(wide))
        mx, zx, _ = project(w, x.to(dtype).contiguous(), None, None)
        assert mx is not None
        rows = [steps * lanes for steps, lanes in sizes]
        # One stretch is not cut: the gradients of pieces would have to be put together again.
        mxs, zxs = ((v,) if len(rows) == 1 else torch.split_with_sizes(v, rows) for v in (mx, zx))
        numbers = range(len(sizes))
        state, done = State(*(v[: sizes[-1 if backwards else 0][1]] for v in start)), []
        hs: list[Tensor] = []
        for s in reversed(numbers) if backwards else numbers:
            steps, lanes = sizes[s]
            have = state.h.shape[0]
            if lanes > have:  # going backwards: lanes that end here begin
                state = State(*(torch.cat([a, b[have:lanes]]) for a, b in zip(state, start, strict=True)))
            elif lanes < have:
                done.append(State(state.h[lanes:], state.c[lanes:]))
                state = State(state.h[:lanes], state.c[:lanes])
            chunk = [v[s] if x.dim() == 3 else v[s].view(steps, lanes, v[s].shape[1]) for v in (mxs, zxs)]
            if backwards:
                chunk = [v.flip(0) for v in chunk]
            h, state = self.stack[j](w, chunk[0], chunk[1], None, state, None, self.backend)
            h = h.flip(0) if backwards else h
            hs.append(h if x.dim() == 3 else h.flatten(0, 1))
        if len(hs) == 1:
            return hs[0], state
        ends = [state, *reversed(done)]
        end = State(torch.cat([e.h for e in ends]), torch.cat([e.c for e in ends]))
        return torch.cat(hs[::-1] if backwards else hs), end


class MultiplicativeLSTMCell(_Base):
    """One step, called as torch.nn.LSTMCell is: `h, c = cell(x, (h, c))`."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        weight_norm: bool = False,
        unit: str = "standard",
        backend: str = "auto",
    ) -> None:
        super().__init__(input_size, hidden_size, bias, weight_norm, unit, backend)
        self._build([input_size], device, dtype)

    def forward(self, input: Tensor, hx: Hidden | None = None) -> Hidden:
        """The next (h, c)."""
        if input.dim() not in (1, 2):
            raise ValueError(f"The input has {input.dim()} dimensions. Give 1 (one vector) or 2 (a batch).")
        dtype = self._check(input)
        single = input.dim() == 1
        x = input.unsqueeze(0) if single else input
        (w,) = self._weights(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        if hx is None:
            shape = (x.shape[0], self.hidden_size)
            state = State(*(torch.zeros(shape, dtype=d, device=x.device) for d in (dtype, wide)))
        else:
            self._check_state(hx, (*input.shape[:-1], self.hidden_size), x)
            h, c = (v.unsqueeze(0) if single else v for v in hx)
            state = State(h.to(dtype), c.to(wide))
        mx, zx, _ = project(w, x.unsqueeze(0).to(dtype), None, None)
        _, (h, c) = self.stack[0](w, mx, zx, None, state, None, self.backend)
        h, c = h.clone(), c.clone()  # h[done] = 0, which torch's bears, must not reach what backward has kept
        return (h.squeeze(0), c.squeeze(0)) if single else (h, c)
