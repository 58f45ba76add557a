"""Which kernels run a step at which size, and with which tiles: measured on an H200, stored here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """One product's tile. `split` parts of K are summed by the kernel after it."""

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int
    split: int = 1
    more: int = 0  # further columns of the tile (gates only)


@dataclass(frozen=True)
class Plan:
    """None: cuBLAS makes the product and a pointwise kernel follows."""

    m: Tile | None = None  # a = W_mh h, fused with m
    gates: Tile | None = None  # z = zx + W_zm m, fused with the cell
    dm: Tile | None = None  # dz W_zm in partial sums
    dh: Tile | None = None  # da W_mh in partial sums
    sums_bf16: bool = False  # partial sums in bf16 instead of fp32
    pdl: bool = True  # programmatic dependent launch
    lanes: int = 0  # > 0: one launch for the whole chunk, so many lanes a group (triton_small)


PLAIN = Plan()

# (largest H, largest B, plan): the first row that covers a layer is taken; beyond them all, PLAIN.
_TABLE: tuple[tuple[int, int, Plan], ...] = (
    (
        1152,
        128,
        Plan(
            m=Tile(64, 32, 128, 4, 4),
            gates=Tile(64, 64, 128, 4, 4),
            dm=Tile(128, 64, 64, 4, 4, split=8),
            dh=Tile(64, 64, 128, 4, 4, split=2),
            sums_bf16=True,
        ),
    ),
    (
        2304,
        128,
        Plan(
            m=Tile(64, 32, 128, 4, 4),
            gates=Tile(64, 128, 64, 4, 5),
            dm=Tile(128, 64, 64, 4, 4, split=8),
            dh=Tile(64, 64, 128, 4, 4, split=2),
            sums_bf16=True,
        ),
    ),
    (
        2304,
        320,
        Plan(
            m=Tile(64, 64, 128, 4, 4),
            gates=Tile(128, 64, 64, 8, 4),
            dm=Tile(128, 128, 64, 4, 4, split=4),
            dh=Tile(64, 64, 64, 4, 4, split=2),
            sums_bf16=True,
        ),
    ),
    (
        4096,
        128,
        Plan(
            m=Tile(64, 64, 128, 4, 4),
            gates=Tile(64, 128, 64, 4, 4),
            dm=Tile(128, 128, 128, 8, 3, split=6),
            dh=Tile(64, 64, 64, 4, 4, split=3),
            sums_bf16=True,
        ),
    ),
    (
        4096,
        320,
        Plan(
            dm=Tile(128, 128, 64, 4, 4, split=3),
            dh=Tile(128, 64, 64, 4, 4, split=3),
            sums_bf16=True,
        ),
    ),
)


def padded(H: int) -> int:
    """The width the kernels work at: a multiple of 128, of 32 for small layers."""
    step = 32 if H <= 512 else 128
    return -(-H // step) * step


def plan_of(H: int, B: int) -> Plan:
    """The fastest plan measured at the nearest size that covers this one."""
    for largest_H, largest_B, plan in _TABLE:
        if largest_H >= H and largest_B >= B:
            return plan
    return PLAIN
