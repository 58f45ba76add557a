"""One recurrence behind several backends: checks what it is given and picks who runs it, never silently."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from mulstm.errors import BackendError
from mulstm.ops import fused, modes, reference
from mulstm.ops.affine import affine
from mulstm.ops.products import keep
from mulstm.ops.reference import GATES, UNITS, State, blocks, tensor_recurrence

__all__ = [
    "BACKENDS",
    "GATES",
    "UNITS",
    "State",
    "affine",
    "blocks",
    "chosen",
    "keep",
    "objections",
    "recurrence",
    "require_known",
    "require_plain",
    "tensor_recurrence",
]

# In the order in which "auto" asks them.
BACKENDS = ("triton", "fused", "reference")


def recurrence(
    mx: Tensor | None,  # W_mx x
    zx: Tensor,  # W_zx x + b
    W_mh: Tensor | None,
    W_zm: Tensor,
    state: State,
    *,
    mask: Tensor | None = None,
    px: Tensor | None = None,  # MI-LSTM
    b_h: Tensor | None = None,  # "initial" unit
    unit: str = "standard",
    backend: str = "auto",
) -> tuple[Tensor, State]:
    """All h of a chunk, (T, B, H), and the state after it.

    mx (T, B, H), zx (T, B, 4H), W_mh (H, H), W_zm (4H, H), state (h, c), each (B, H), mask (B, H), px as zx,
    b_h (H). Without mx and W_mh, m_t is h_{t-1}. With the unit "tanh", 4H is H and c is (B, 0).
    """
    state = State(*state)
    _check(mx, zx, W_mh, W_zm, state, mask, px, b_h, unit)
    name = chosen(zx, mask, backend)
    with modes.without_autocast(zx.device):  # the caller has chosen the types
        h, after = _module(name).recurrence(mx, zx, W_mh, W_zm, state, mask, px, b_h, unit)
    return h, after


def chosen(zx: Tensor, mask: Tensor | None = None, backend: str = "auto") -> str:
    """Which backend would run this; BackendError with its reason when the one asked for cannot."""
    if backend == "auto":
        return next(name for name in BACKENDS if _why_not(name, zx, mask) is None)  # the reference can
    require_known(backend)
    reason = _why_not(backend, zx, mask)
    if reason is not None:
        raise BackendError(
            f"The backend {backend!r} cannot run here: {reason}. Use backend = auto, or one of the others."
        )
    return backend


def require_known(backend: str) -> None:
    """Raises BackendError for a name that no backend has."""
    if backend != "auto" and backend not in BACKENDS:
        raise BackendError(f"There is no backend {backend!r}. Choose auto or one of: {', '.join(BACKENDS)}.")


def require_plain(backend: str) -> None:
    """Raises BackendError unless the plain calls will do, the only ones that run the tensor RNN."""
    if backend not in ("auto", "reference"):
        raise BackendError(f"The backend {backend!r} does not run the tensor RNN. Use auto or reference.")


def objections(device: str, precision: str = "fp32") -> dict[str, str | None]:
    """For each backend None, or why it cannot run a multiplicative LSTM there (`mulstm info`)."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[precision]
    try:
        zx = torch.zeros(1, 1, 4, dtype=dtype, device=device)
    except (RuntimeError, AssertionError) as fault:
        return dict.fromkeys(BACKENDS, f"there is no device {device!r} here ({str(fault).splitlines()[0]})")
    return {name: _why_not(name, zx, None) for name in BACKENDS}


def _why_not(name: str, zx: Tensor, mask: Tensor | None) -> str | None:
    if name == "reference":
        return None
    if name == "triton" and not zx.is_cuda:
        return f"it needs a CUDA device and the tensors are on {zx.device}"
    reason = modes.objection()
    if reason is not None:
        return reason
    if mask is not None and mask.requires_grad:
        return "it gives no gradient for the mask"
    if name == "triton" and zx.shape[1] == 0:
        return "there are no lanes, and a kernel wants at least one"
    try:
        module = _module(name)
    except ImportError as fault:
        return f"it cannot be imported ({fault})"
    answer: str | None = module.why_not(zx)
    return answer


def _module(name: str) -> ModuleType:
    if name == "triton":
        import importlib

        return importlib.import_module("mulstm.ops.triton_recurrence")
    return fused if name == "fused" else reference


def _check(
    mx: Tensor | None,
    zx: Tensor,
    W_mh: Tensor | None,
    W_zm: Tensor,
    state: State,
    mask: Tensor | None,
    px: Tensor | None,
    b_h: Tensor | None,
    unit: str,
) -> None:
    """Raises ValueError for what does not fit together."""
    if unit not in UNITS:
        raise ValueError(f"There is no unit {unit!r}. Choose one of: {', '.join(UNITS)}.")
    if zx.dim() != 3 or zx.shape[0] == 0:
        raise ValueError(f"zx must be (T, B, width) with T > 0, not {tuple(zx.shape)}.")
    if (mx is None) != (W_mh is None):
        raise ValueError("mx and W_mh go together: give both (multiplicative cells) or neither.")
    T, B, width = zx.shape
    k = blocks(unit)
    H = width // k
    expected: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("zx", zx, (T, B, k * H)),
        ("mx", mx, (T, B, H)),
        ("W_mh", W_mh, (H, H)),
        ("W_zm", W_zm, (k * H, H)),
        ("state.h", state.h, (B, H)),
        ("state.c", state.c, (B, H if k > 1 else 0)),
        ("mask", mask, (B, H)),
        ("px", px, (T, B, k * H)),
        ("b_h", b_h, (H,)),
    ]
    for name, tensor, shape in expected:
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; with zx {tuple(zx.shape)} it must be {shape}."
            )
        if tensor.device != zx.device:
            raise ValueError(f"{name} is on {tensor.device} and zx on {zx.device}. Put both on one device.")
        if tensor.dtype != zx.dtype and name not in ("state.c", "mask", "b_h"):
            raise ValueError(f"{name} is {tensor.dtype} and zx {zx.dtype}. Cast both to one type.")
    if b_h is not None and unit != "initial":
        raise ValueError(f'b_h belongs to the unit "initial"; the unit is {unit!r}.')
    if state.c.dtype.itemsize < 4:
        raise ValueError(f"state.c is {state.c.dtype}; c is never held in less than float32.")
