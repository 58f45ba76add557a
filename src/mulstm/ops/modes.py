"""Modes of PyTorch (torch.func, autocast, tracing, export) under which only its own operations work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mulstm.errors import BackendError

P = ParamSpec("P")
R = TypeVar("R")
# PyTorch has no public question for it.
_transformed = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_batched = getattr(getattr(torch._C, "_functorch", None), "is_legacy_batchedtensor", lambda x: False)
_mode = getattr(torch._C, "_get_dispatch_mode", lambda key: None)
_FAKE = getattr(getattr(torch._C, "_TorchDispatchModeKey", None), "FAKE", None)


def objection() -> str | None:
    """None, or why no backend but the reference will do."""
    if _transformed():
        return "the transforms of torch.func do not know it"
    if getattr(forward_ad, "_current_level", -1) >= 0:
        return "it has no derivatives in forward mode"
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return "torch.jit.trace would write it down as a call into Python"
    if not torch.compiler.is_compiling() and _mode(_FAKE) is not None:
        return "fake tensors have no data"
    if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
        return "ONNX has no such operation"
    return None


def is_batch(gradient: Tensor) -> bool:
    """Whether it stands for many, of which each operation of PyTorch's own makes as many."""
    return bool(_transformed() or _batched(gradient))


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on where a tensor is; of a tensor without data it cannot be asked."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """For what has chosen its types by itself: nothing inside is cast."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


def learning(work: Callable[P, R]) -> Callable[P, R]:
    """A decorator: runs with gradients on, inference mode and autocast off, whatever the caller has set."""

    @functools.wraps(work)
    def undisturbed(*args: P.args, **kwargs: P.kwargs) -> R:
        cpu, cuda = (without_autocast(torch.device(kind)) for kind in ("cpu", "cuda"))
        with torch.inference_mode(False), torch.enable_grad(), cpu, cuda:
            return work(*args, **kwargs)

    return undisturbed


def no_second_derivative(ctx: Any, *gradients: Any) -> NoReturn:
    """The derivative of a backward that is written out."""
    raise BackendError(
        "Only the backend 'reference' has second derivatives. Choose it for the layer or the model."
    )
