"""Launches compiled kernels through the driver: with clusters, after the kernel before has begun to end."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import byref, c_char, c_char_p, c_float, c_int, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from mulstm.ops.cuda_source import BK_BYTES, LARGEST_SHARED, Variant, machine_code

CLUSTER, EARLY_LAUNCH, SHARED_MEMORY, SHARED_SHARE = 4, 6, 8, 9  # the driver's names for attributes


class LaunchError(Exception):
    """The driver did not take a kernel or a tensor."""


class Arguments(ctypes.Structure):
    """As in step.cu; the last field fills up a multiple of 64 bytes."""

    _fields_ = (
        *((name, c_uint64 * 16) for name in ("A", "W")),
        *((name, c_void_p) for name in ("x0", "x1", "x2", "x3", "x4", "x5", "y0", "y1", "y2", "y8")),
        *((name, c_void_p) for name in ("fault", "rows")),
        *((name, c_int) for name in ("row", "B", "N", "blocks", "stride_x", "stride_y")),
        *((name, c_float) for name in ("undo", "scale")),
        ("factor", c_void_p),
        ("rest", c_int * 14),
    )


class _Attribute(ctypes.Structure):
    _fields_ = (("id", c_int), ("pad", c_char * 4), ("value", c_uint32 * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        *((name, c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", c_uint),
    )


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        text = c_char_p()
        _driver().cuGetErrorString(code, byref(text))
        raise LaunchError(f"{what}: {text.value.decode() if text.value else code}")


def why_not(device: torch.device) -> str | None:
    """None, or the reason why these kernels cannot run there."""
    if torch.version.cuda is None or device.type != "cuda":
        return "they need an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"they are made for Hopper, and this is {torch.cuda.get_device_name(device)}"
    try:
        _driver()
    except OSError as error:
        return f"the driver's library does not open: {error}"
    return None


def tensor_map(x: Tensor, rows: int) -> Any:
    """For copies of so many rows and 128 bytes of a matrix of 16 or 8 bits, swizzled over these bytes.

    Beyond the matrix a copy brings zeros.
    """
    space = (c_uint64 * 32)()
    at = ctypes.addressof(space)
    at += -at % 64  # the driver's wish
    size = x.element_size()
    kind, no_interleaving, swizzle_128, sectors_256, zeros = {2: 9, 1: 0}[size], 0, 3, 3, 0  # bf16 or bytes
    code = _driver().cuTensorMapEncodeTiled(
        c_void_p(at), c_int(kind), c_uint32(2), c_void_p(x.data_ptr()),
        (c_uint64 * 2)(x.shape[1], x.shape[0]), (c_uint64 * 1)(x.stride(0) * size),
        (c_uint32 * 2)(BK_BYTES // size, rows), (c_uint32 * 2)(1, 1),
        c_int(no_interleaving), c_int(swizzle_128), c_int(sectors_256), c_int(zeros),
    )  # fmt: skip
    _check(code, f"a tensor map over {tuple(x.shape)}")
    return (c_uint64 * 16).from_buffer_copy(ctypes.string_at(at, 128))


class Kernel:
    """A variant, loaded on one device."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        form = variant.form
        if variant.shared > LARGEST_SHARED:
            raise LaunchError(
                f"{form} wants {variant.shared:,} bytes of shared memory, a block has {LARGEST_SHARED:,}"
            )
        self.code = machine_code(variant.text())
        module, self.function = c_void_p(), c_void_p()
        cu = _driver()
        _check(cu.cuModuleLoadData(byref(module), self.code), "loading a kernel")
        _check(cu.cuModuleGetFunction(byref(self.function), module, b"step_product"), "finding a kernel")
        shared = c_int(variant.shared)
        _check(cu.cuFuncSetAttribute(self.function, SHARED_MEMORY, shared), f"{variant.shared} bytes")
        if form.share:
            _check(cu.cuFuncSetAttribute(self.function, SHARED_SHARE, c_int(form.share)), "shared memory")
        self.attributes = (_Attribute * 2)()
        self.attributes[0].id, self.attributes[1].id = CLUSTER, EARLY_LAUNCH
        self.attributes[0].value[:3] = [form.CM, 1, form.CS]
        self.attributes[1].value[0] = 1

    def arguments(self, x: Tensor, W: Tensor, fault: Tensor) -> Arguments:
        """Those that no step changes: x is (T, B, K), W (N, K), or (K, N) where the variant says so."""
        form, variant = self.variant.form, self.variant
        T, B, K = x.shape
        rows = torch.as_strided(x, (T * B, K), (x.stride(1), 1))
        BK = BK_BYTES // x.element_size()
        part = (BK if variant.rows_are_k else form.BN) // form.CM
        out = Arguments(A=tensor_map(rows, form.BM), W=tensor_map(W, part))
        out.B, out.N, out.blocks = B, W.shape[1] if variant.rows_are_k else W.shape[0], -(-K // BK)
        out.fault = fault.data_ptr()
        return out

    def launcher(self, arguments: Arguments) -> Callable[[], None]:
        """A function that launches with the arguments as they then are, on the stream that is current now."""
        variant = self.variant
        config = _Config(
            *variant.grid(arguments.B, arguments.N), variant.threads + 32, 1, 1, variant.shared,
            torch.cuda.current_stream().cuda_stream, self.attributes, 2,
        )  # fmt: skip
        launch, how = _driver().cuLaunchKernelEx, byref(config)
        parameters = (c_void_p * 1)(ctypes.addressof(arguments))

        def run() -> None:
            if code := launch(how, self.function, parameters, None):
                _check(code, f"a launch of {arguments.B} rows")

        return run


_KERNELS: dict[tuple[torch.device, Variant], Kernel] = {}


def kernel(variant: Variant, device: torch.device) -> Kernel:
    """The loaded kernel, compiled at its first use."""
    key = (device, variant)
    if key not in _KERNELS:
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the device's context, which a load needs
            _KERNELS[key] = Kernel(variant)
    return _KERNELS[key]
