"""A whole layer on a GPU in bf16: pack, input product, recurrence, and one backward for all of it.

Weight gradients stay in fp32 from the product to the parameter, which they could not do across a tape whose
tensors are bf16.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mulstm.data.pairs import Pairs
from mulstm.ops import eight
from mulstm.ops import triton_steps as steps
from mulstm.ops.triton_beside import Beside
from mulstm.ops.triton_cell import from_packed, to_packed
from mulstm.ops.triton_choice import plan_for
from mulstm.ops.triton_chunk import Chunk, Gradients, Saved
from mulstm.ops.triton_pack import pack_rows, pad_columns, transposed, unpack_rows
from mulstm.ops.triton_pairs import collect, spread
from mulstm.ops.triton_plan import padded
from mulstm.ops.triton_steps import product_fp32
from mulstm.ops.triton_vectors import pack_vectors, unpack_vectors

Parameters = dict[str, Tensor]  # by the paper's names, with their gains
ONES = 2  # columns of ones behind the input, for the two parts of the bias


@dataclass(frozen=True)
class Spec:
    """What kind of layer it is."""

    H: int
    blocks: int  # of z: 4, or 1 for the tanh unit
    unit: str
    learn_b_h: bool = True
    ones: bool = True  # whether the input ends in columns of ones, which bring the bias
    eight: bool = False  # whether training multiplies by the recurrent matrices in 8 bits

    @property
    def HP(self) -> int:
        """The padded width."""
        return padded(self.H)

    def width(self, inputs: int) -> int:
        """Columns of an input of that many, padded and with its ones."""
        return wide(inputs) if self.ones else padded(inputs)


@dataclass
class Packed:
    """A layer's weights as the kernels want them."""

    W_x: Tensor | None = None  # (HP + 4 HP, EP)  from the input: m's rows, then z's in packed order
    W_l: Tensor | None = None  # (HP + 4 HP, HP)  from the layer below
    W_mh: Tensor | None = None  # (HP, HP)
    W_zm: Tensor | None = None  # (4 HP, HP)
    W_mht: Tensor | None = None  # of 8-bit numbers: the same two transposed, for the backward
    W_zmt: Tensor | None = None
    b: Tensor | None = None  # (HP + 4 HP)  where the input has no columns of ones
    b_h: Tensor | None = None  # (HP)  fp32
    vectors: Tensor | None = None  # (4, 4 HP) fp32: MI-LSTM's alpha, beta_1, beta_2 and b
    scales: dict[str, Tensor] = field(default_factory=dict)  # g / |v| of each parameter


def wide(inputs: int) -> int:
    """Columns of an input with its ones, a multiple of 16."""
    return -(-(inputs + ONES) // 16) * 16


def _places(spec: Spec, p: Parameters) -> list[tuple[str, str, int, int]]:
    """For each matrix parameter: the packed matrix it goes to, its first row there, its blocks."""
    below = spec.HP if "W_mh" in p else 0
    rows = [("W_mx", "W_x", 0, 1), ("W_zx", "W_x", below, spec.blocks)]
    rows += [("W_ml", "W_l", 0, 1), ("W_zl", "W_l", below, spec.blocks)]
    rows += [("W_mh", "W_mh", 0, 1), ("W_zm", "W_zm", 0, spec.blocks)]
    return [row for row in rows if row[0] in p]


def pack(spec: Spec, p: Parameters, drop: Parameters, columns: int, beside: Beside | None = None) -> Packed:
    """All of a layer's weights, for an input of that many columns.

    Where the input brings columns of ones, the bias is a column of W_x, but for MI-LSTM's. What the input
    product does not need is packed beside it; the caller joins.
    """
    HP, device = spec.HP, p["W_zx"].device
    total = spec.blocks * HP + (HP if "W_mh" in p else 0)
    augmented = spec.ones and "alpha" not in p
    widths = {"W_x": columns, "W_l": HP, "W_mh": HP, "W_zm": HP}
    rows = {"W_x": total, "W_l": total, "W_mh": HP, "W_zm": spec.blocks * HP}
    packed = Packed()
    b_z = p["b_z"]
    if spec.unit == "initial":
        packed.b_h = to_packed(b_z[: spec.H], 1, HP)
        b_z = torch.cat([torch.zeros_like(b_z[: spec.H]), b_z[spec.H :]])
    # The recurrent matrices first, so that their work is under way when the input's begins.
    for name, matrix, at, blocks in reversed(_places(spec, p)):
        later = matrix in ("W_mh", "W_zm")
        with beside.fork() if beside is not None and later else nullcontext():
            in_eight = spec.eight and later
            if getattr(packed, matrix) is None:
                dtype = eight.E4M3 if in_eight else torch.bfloat16
                out = torch.empty(rows[matrix], widths[matrix], dtype=dtype, device=device)
                setattr(packed, matrix, out)
            bias = b_z if augmented and name == "W_zx" else None
            out = getattr(packed, matrix)[at : at + blocks * HP]
            gain = p.get("g" + name[1:])
            packed.scales[name] = pack_rows(p[name], gain, drop.get(name), bias, out, blocks)
            if in_eight:
                setattr(packed, matrix + "t", transposed(out))
    if "alpha" in p:
        packed.vectors = pack_vectors(p, b_z, spec.blocks, HP)
    elif not augmented:
        b = to_packed(b_z, spec.blocks, HP)
        b = torch.cat([b.new_zeros(total - b.numel()), b])
        packed.b = b.to(torch.bfloat16)
    return packed


def _input(w: Packed, x: Tensor, low: Tensor | None, index: Tensor | None) -> Tensor:
    """(T * B or P, HP + 4 HP): mx and zx side by side, for MI-LSTM the bare product."""
    assert w.W_x is not None
    if w.b is None:
        y = torch.mm(x, w.W_x.t())
    else:
        y = torch.addmm(w.b, x, w.W_x.t())
    if low is not None and w.W_l is not None:
        y = y if index is None else spread(y, index)
        y.addmm_(low, w.W_l.t())
    return y


def _chunk(
    spec: Spec,
    w: Packed,
    x: Tensor,
    low: Tensor | None,
    h_0: Tensor,
    c_0: Tensor,
    mask: Tensor | None,
    index: Tensor | None = None,
) -> Chunk:
    """What the loop is given: the input product, padded states and mask.

    With an index, and no layer below, the product keeps a row for each pair.
    """
    B, HP = h_0.shape[0], spec.HP
    assert w.W_zm is not None
    # Not on the second stream: beside the product there is no room, and the loop would wait for them.
    h_0, c_0, mask = (_pad(part, HP) for part in (h_0, c_0, mask))
    y = _input(w, x, low, index)
    if index is None or low is not None:
        y, index = y.view(-1, B, y.shape[1]), None
    mx, zx = (None, y) if w.W_mh is None else (y[..., :HP], y[..., HP:])
    index = None if index is None else index.view(-1, B)
    return Chunk(mx, zx, w.vectors, w.W_mh, w.W_zm, h_0, c_0, mask, w.b_h, spec.unit, index)


def _every_place(chunk: Chunk) -> Chunk:
    """For kernels that read no rows by an index: mx and zx of all places."""
    if chunk.rows is None:
        return chunk
    HP, width = chunk.h_0.shape[1], chunk.zx.stride(0)
    first = chunk.zx if chunk.mx is None else chunk.mx  # of one matrix, mx before zx
    y = spread(first.as_strided((first.shape[0], width), (width, 1)), chunk.rows.flatten())
    y = y.view(*chunk.rows.shape, width)
    mx, zx = (None, y) if chunk.mx is None else (y[..., :HP], y[..., HP:])
    return chunk._replace(mx=mx, zx=zx, rows=None)


def _pad(x: Any, HP: int) -> Any:
    """A (B, H) tensor with zeros up to the padded width; None and width 0 stay."""
    if x is None or x.shape[1] in (0, HP):
        return x
    return pad_columns(x, HP)


def infer(
    spec: Spec, w: Packed, x: Tensor, low: Tensor | None, h_0: Tensor, c_0: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """h of all steps (T, B, HP) and the last h and c; nothing is kept for a backward."""
    chunk = _chunk(spec, w, x, low, h_0, c_0, mask)
    saved = steps.forward(chunk, plan_for(chunk, save=False), save=False)
    return saved.h[1:], saved.h[-1], saved.c_T


class LayerFunction(torch.autograd.Function):
    """(T, B, HP) h, and the last h and c, from the input's rows and the layer's parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        spec: Spec,
        names: tuple[str, ...],
        drop: Parameters,
        pairs: Pairs[Tensor] | None,  # where the input has a row for each pair instead of each place
        x: Tensor,  # (T * B or P, EP)
        low: Tensor | None,  # (T * B, HP)
        h_0: Tensor,
        c_0: Tensor,
        mask: Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        p = dict(zip(names, parameters, strict=True))
        beside = Beside(x.device)
        w = pack(spec, p, drop, x.shape[1], beside)
        W_xt = None
        if ctx.needs_input_grad[4] and w.W_x is not None:
            with beside.fork():  # cuBLAS makes dx faster, by a sixth, where this matrix is transposed
                W_xt = transposed(w.W_x)
        index = None if pairs is None else pairs.pair
        chunk = _chunk(spec, w, x, low, h_0, c_0, mask, index)
        beside.join()
        plan = plan_for(chunk)
        if not steps.reads_rows(chunk, plan):
            chunk = _every_place(chunk)
        saved = steps.forward(chunk, plan, save=True)
        # What autograd saves it frees with the backward. The state as its copy: an update overwrites it.
        chunk_back = chunk._replace(h_0=saved.h[0], c_0=saved.c[0])
        if plan.eight and w.W_zmt is not None:
            chunk_back = chunk_back._replace(W_mh=w.W_mht, W_zm=w.W_zmt)
        tensors = chunk_back[:9]
        ctx.save_for_backward(x, low, W_xt, w.W_l, w.b, *saved, *tensors, *w.scales.values(), *parameters)
        ctx.kept = (spec, names, tuple(w.scales), drop, pairs, chunk.rows, plan, c_0.shape)
        ctx.set_materialize_grads(False)
        return saved.h[1:], saved.h[-1].clone(), saved.c_T.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        spec, names, scaled, drop, pairs, index, plan, c_shape = ctx.kept
        x, low, W_xt, W_l, b, *rest = ctx.saved_tensors
        saved, chunk, rest = Saved(*rest[:6]), Chunk._make((*rest[6:15], spec.unit, index)), rest[15:]
        w = Packed(W_l=W_l, b=b, vectors=chunk.px, scales=dict(zip(scaled, rest, strict=False)))
        p = dict(zip(names, rest[len(scaled) :], strict=True))
        dh, dh_T, dc_T = grads
        dh = torch.zeros_like(saved.h[1:]) if dh is None else dh.contiguous()
        g = steps.backward(chunk, saved, dh, dh_T, dc_T, plan, ctx.needs_input_grad[6])
        H = spec.H
        d = _vectors(spec, w, g)
        dy = g.dx.flatten(0, 1)
        beside = Beside(x.device)
        rows = dy
        if pairs is not None:
            with beside.fork():  # beside the products that do not need it
                rows = collect(dy, pairs.order, pairs.first)
        made = beside.mark()
        matrices, _kept = _matrices(spec, p, drop, w, saved, g, dy, low, x, rows, made, beside)
        d |= matrices
        dx = torch.mm(rows, W_xt.t()) if W_xt is not None else None
        dlow = torch.mm(dy, W_l) if low is not None and ctx.needs_input_grad[5] else None
        beside.join()
        if "b_h" in d:
            d["b_z"][:H] = d.pop("b_h")
        dh_0 = g.dh_0[:, :H] if ctx.needs_input_grad[6] else None
        dc_0 = g.dc_0[:, : c_shape[1]] if ctx.needs_input_grad[7] else None
        return None, None, None, None, dx, dlow, dh_0, dc_0, None, *(d.get(name) for name in names)


def _vectors(spec: Spec, w: Packed, g: Gradients) -> Parameters:
    """Gradients of b_z's part in the last tanh, of b_z where no column of ones brings it, and MI-LSTM's."""
    d: Parameters = {} if g.dpx is None else unpack_vectors(g.dpx, spec.blocks, spec.H)
    if w.b is not None:
        db = column_sums(g.dz.flatten(0, 1))
        d["b_z"] = from_packed(db, spec.blocks, spec.H)
    if g.db_h is not None:
        db_h = g.db_h.sum(0)[: spec.H]
        d["b_h"] = db_h if spec.learn_b_h else torch.zeros_like(db_h)
    return d


def column_sums(x: Tensor) -> Tensor:
    """Sums over rows in fp32, as a product: in a fixed order, and at the speed of memory."""
    ones = torch.ones(16, x.shape[0], dtype=x.dtype, device=x.device)
    return product_fp32(ones, x)[0]


def _matrices(
    spec: Spec,
    p: Parameters,
    drop: Parameters,
    w: Packed,
    saved: Saved,
    g: Gradients,
    dy: Tensor,
    low: Tensor | None,
    x: Tensor,
    rows: Tensor,
    made: torch.cuda.Event,
    beside: Beside,
) -> tuple[Parameters, list[Tensor]]:
    """Gradients of all matrices, their gains, and b_z; and what must be kept until the caller has joined.

    Each product's gradient is unpacked beside the products that follow. `rows` are dy's, or their sums for
    the rows of x, which are there when they are `made`.
    """
    products = steps.weight_gradients(saved, g)
    products["W_x"] = lambda: product_fp32(rows.t(), x)
    if low is not None and w.W_l is not None:
        products["W_l"] = lambda: product_fp32(dy.t(), low)
    d: Parameters = {}
    kept: list[Tensor] = []
    for matrix, product in products.items():
        if matrix == "W_x":
            beside.until(made)
        packed = product()
        kept.append(packed)
        with beside.fork():
            for name, _, at, blocks in (place for place in _places(spec, p) if place[1] == matrix):
                bias = p["b_z"] if name == "W_zx" and w.b is None and w.vectors is None else None
                gain = "g" + name[1:]
                dv, dgain, dbias = unpack_rows(
                    packed, p[name], p.get(gain), w.scales[name], drop.get(name), bias, at, blocks
                )
                d[name] = dv
                if dgain is not None:
                    d[gain] = dgain
                if dbias is not None:
                    d["b_z"] = dbias
    return d, kept
