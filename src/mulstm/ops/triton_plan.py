"""Which kernels run a step at which size, and with which tiles: measured on an H200, stored here."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tile:
    """One product's tile. `split` parts of K are summed by the kernel after it."""

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int
    split: int = 1


@dataclass(frozen=True)
class Form:
    """One product in CUDA: its tile, its ring, and the cluster of CTAs that share tiles or K."""

    BM: int
    BN: int
    stages: int
    CM: int = 1  # CTAs with the same columns: each loads a part of W's tile for all of them
    CS: int = 1  # CTAs that share K and exchange their sums
    parts: int = 1  # further parts of K, added by the kernel after it
    WGN: int = 1  # warpgroups side by side
    ahead: int = 1  # how much of what follows the product is loaded before it: 0 (gates only), 1, 2
    stream: bool = False  # W leaves L2 first: it would not stay until the next step anyway
    share: int = 0  # percent of all shared memory that L1 leaves, for kernels beside it; 0: just enough
    fp32: bool = False  # sums exchanged in fp32 instead of bf16
    fused: bool = True  # gates and backward: with the pointwise work that follows


@dataclass(frozen=True)
class Plan:
    """None: cuBLAS makes the product and a pointwise kernel follows."""

    m: Tile | Form | None = None  # a = W_mh h, fused with m
    gates: Tile | Form | None = None  # z = zx + W_zm m, fused with the cell
    dm: Tile | Form | None = None  # dz W_zm; a tile leaves partial sums
    dh: Tile | Form | None = None  # da W_mh; likewise
    pdl: bool = True  # programmatic dependent launch
    lanes: int = 0  # > 0: one launch for the whole chunk, so many lanes a group (triton_small)
    eight: bool = False  # its products are of 8-bit numbers

    @property
    def uses_cuda(self) -> bool:
        """Whether any of its kernels is one in CUDA."""
        return any(isinstance(place, Form) for place in (self.m, self.gates, self.dm, self.dh))


PLAIN = Plan()
NARROW = 1152  # layers up to this width are not worth clusters
# Wide layers, few lanes.
WIDE_FEW = Plan(
    m=Tile(64, 64, 128, 4, 4),
    gates=Tile(64, 128, 64, 4, 4),
    dm=Tile(128, 128, 128, 8, 3, split=6),
    dh=Tile(64, 64, 64, 4, 4, split=3),
)

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
        ),
    ),
    (4096, 128, WIDE_FEW),
    (
        4096,
        320,
        Plan(
            dm=Tile(128, 128, 64, 4, 4, split=3),
            dh=Tile(128, 64, 64, 4, 4, split=3),
        ),
    ),
)


# The same for kernels in CUDA, on Hopper; where no row covers a layer, the table above.
_CUDA: tuple[tuple[int, int, Plan], ...] = (
    (
        2304,
        128,
        Plan(
            m=Form(128, 64, 6, CS=4, fp32=True),
            gates=Form(128, 64, 8, ahead=2),
            dm=Form(128, 64, 6, CS=4),
            dh=Form(128, 64, 6, CS=4),
        ),
    ),
    (
        2304,
        320,
        Plan(
            m=Form(128, 64, 6, CM=2, CS=2),
            gates=Form(128, 128, 6, CM=2),
            dm=Form(128, 128, 5, CM=2, CS=4),
            dh=Form(128, 64, 6, CS=2, share=100, fused=False),
        ),
    ),
    (
        4096,
        128,
        replace(  # back, CUDA was no faster
            WIDE_FEW,
            m=Form(128, 96, 5, CS=4, fp32=True),
            gates=Form(64, 192, 6, CM=2, WGN=3, ahead=2, stream=True),
        ),
    ),
    (
        4096,
        320,
        Plan(
            m=Form(128, 96, 6, CM=2, CS=2),
            gates=Form(128, 192, 4, CM=2, ahead=0, stream=True),
            dm=Form(128, 128, 6, CM=2, parts=3, share=100, fused=False),
            dh=Form(128, 128, 6, CM=2, parts=3, share=100, fused=False),
        ),
    ),
)


# MI-LSTM's, where W_zm h is made by itself: its tile need not hold whole gates. At 2304 the rows above would
# need 144 CTAs, more than the chip takes at a time; these 128 forward and 120 back. Chosen by that estimate.
_BARE: tuple[tuple[int, int, Plan], ...] = (
    (
        2304,
        320,
        Plan(
            gates=Form(128, 144, 6, CM=2, fused=False),
            dm=Form(128, 192, 5, CM=2, parts=5, fused=False),
        ),
    ),
)


# Products of 8-bit numbers: a tile has twice as much of K.
_EIGHT: tuple[tuple[int, int, Plan], ...] = (
    (
        2304,
        320,
        Plan(
            m=Form(128, 64, 6, CM=2, CS=2),
            gates=Form(128, 128, 6, CM=2),
            dm=Form(128, 128, 6, CM=2, parts=4, share=100, fused=False),
            dh=Form(128, 128, 6, CM=2, parts=2, share=100, fused=False),
            eight=True,
        ),
    ),
    (
        4096,
        320,
        Plan(
            m=Form(128, 96, 6, CM=2, CS=2),
            gates=Form(128, 192, 5, CM=2, ahead=0, stream=True),
            dm=Form(128, 128, 6, CM=2, parts=3, share=100, fused=False),
            dh=Form(128, 96, 6, CM=2, parts=2, share=100, fused=False),
            eight=True,
        ),
    ),
)


def padded(H: int) -> int:
    """The width the kernels work at: a multiple of 128, of 32 for small layers."""
    step = 32 if H <= 512 else 128
    return -(-H // step) * step


def plan_in_eight(H: int, B: int) -> Plan | None:
    """The one for products of 8-bit numbers, where there is one."""
    return _covering(_EIGHT, H, B) if H > NARROW else None


def plan_of(H: int, B: int, cuda: bool = False, px: bool = False) -> Plan:
    """The fastest plan measured at the nearest size that covers this one; `cuda` allows kernels in CUDA.

    `px`: for an MI-LSTM.
    """
    in_cuda = _BARE * px + _CUDA if cuda and H > NARROW else ()
    return _covering(in_cuda + _TABLE, H, B) or PLAIN


def _covering(rows: tuple[tuple[int, int, Plan], ...], H: int, B: int) -> Plan | None:
    """The plan of the first row that covers such a layer."""
    return next((plan for largest_H, largest_B, plan in rows if largest_H >= H and largest_B >= B), None)
