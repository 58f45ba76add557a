"""Chunks to compare backends on, and how far apart two answers are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mulstm.ops import State, blocks, recurrence

# cell, unit: every pair that a model can ask for, and factors together with a second product.
CASES = [
    *[
        (cell, unit)
        for cell in ("mlstm", "lstm", "milstm")
        for unit in ("standard", "initial", "initial-text")
    ],
    ("mrnn", "tanh"),
    ("rnn", "tanh"),
    ("both", "standard"),
]


@dataclass
class Chunk:
    """Everything the recurrence is given."""

    mx: Tensor | None
    zx: Tensor
    W_mh: Tensor | None
    W_zm: Tensor
    h_0: Tensor
    c_0: Tensor
    mask: Tensor | None
    px: Tensor | None
    b_h: Tensor | None
    unit: str

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Chunk:
        """A copy whose floats are leaves that want a gradient; c and b_h never below float32."""

        def cast(name: str, x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            wide = torch.promote_types(dtype, torch.float32) if name in ("c_0", "b_h", "mask") else dtype
            return x.detach().to(device, wide).requires_grad_(name != "mask")

        return Chunk(**{name: cast(name, x) for name, x in vars(self).items()})

    def leaves(self) -> dict[str, Tensor]:
        """What has a gradient, by name."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor) and name != "mask"}

    def run(self, backend: str, low: int = 0, high: int | None = None, state: State | None = None) -> Any:
        """The recurrence over steps low to high."""

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[low:high]

        zx = self.zx[low:high]
        return recurrence(
            cut(self.mx),
            zx,
            self.W_mh,
            self.W_zm,
            state or State(self.h_0, self.c_0),
            mask=self.mask,
            px=cut(self.px),
            b_h=self.b_h,
            unit=self.unit,
            backend=backend,
        )


def make(cell: str, unit: str, T: int = 6, B: int = 3, H: int = 7, mask: bool = True, seed: int = 0) -> Chunk:
    """A chunk in float64."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 0.6) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g) * scale

    Z = blocks(unit) * H
    factored, second = cell in ("mlstm", "mrnn", "both"), cell in ("milstm", "both")
    return Chunk(
        mx=draw(T, B, H, scale=1.0) if factored else None,
        zx=draw(T, B, Z, scale=1.0),
        W_mh=draw(H, H, scale=H**-0.5) if factored else None,
        W_zm=draw(Z, H, scale=H**-0.5),
        h_0=draw(B, H),
        c_0=draw(B, 0 if unit == "tanh" else H),
        mask=(torch.rand(B, H, generator=g, dtype=torch.float64) > 0.3) / 0.7 if mask else None,
        px=draw(T, B, Z) if second else None,
        b_h=draw(H) if unit == "initial" else None,
        unit=unit,
    )


def answers(chunk: Chunk, backend: str, seed: int = 1) -> dict[str, Tensor]:
    """h, the final state and the gradient of everything, for random gradients of all three."""
    h, state = chunk.run(backend)
    g = torch.Generator().manual_seed(seed)
    outputs = {"h": h, "h_T": state.h, "c_T": state.c}
    loss = torch.zeros((), dtype=torch.float64, device=h.device)
    for x in outputs.values():
        weight = torch.randn(x.shape, dtype=torch.float64, generator=g).to(x.device)
        loss = loss + (x.double() * weight).sum()
    leaves = chunk.leaves()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {k: x.detach() for k, x in outputs.items()}
    for name, d in zip(leaves, gradients, strict=True):
        found["d" + name] = torch.zeros_like(leaves[name]) if d is None else d
    return found


def error(a: Tensor, b: Tensor) -> float:
    """rms(a - b) / rms(b), in float64."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    if b.numel() == 0:
        return 0.0
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=1e-300))


def errors(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """The error of each answer; the types and shapes are those asked for."""
    assert found.keys() == truth.keys()
    assert all(found[k].shape == truth[k].shape for k in truth)
    return {k: error(found[k], truth[k]) for k in truth}
