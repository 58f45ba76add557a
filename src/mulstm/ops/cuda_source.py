"""The step kernels in CUDA C++: one text, compiled for a form of the product and what follows it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import site
import sys
from contextlib import suppress
from ctypes import byref, c_char_p, c_size_t, c_void_p
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from mulstm.data import store
from mulstm.errors import MulstmError
from mulstm.files import write_atomic
from mulstm.ops.reference import UNITS
from mulstm.ops.triton_plan import Form

EPILOGUES = {"sums": 0, "m": 1, "gates": 2, "dm": 3, "cell": 4}
BK_BYTES = 128  # of K in a tile
OPTIONS = (b"--gpu-architecture=sm_90a", b"--std=c++17", b"-default-device")
LARGEST_SHARED = 227 * 1024  # bytes of a block on Hopper


class CompileError(Exception):
    """NVRTC is missing or did not take the text."""


@dataclass(frozen=True)
class Variant:
    """A form of the product with what follows it."""

    form: Form
    epilogue: str
    rows_are_k: bool = False  # W is (K, N), as in the backward, and not (N, K)
    unit: str = "standard"
    mask: bool = False
    bias: bool = False
    save: bool = True
    early: bool = True  # another kernel ran since c_prev was written
    indexed: bool = False  # rows of mx or zx are found by an index
    eight: str = ""  # A and W are 8-bit numbers: A's type, e4m3 or e5m2; W's is e4m3

    @property
    def columns(self) -> int:
        """Those of one warpgroup."""
        return self.form.BN // self.form.WGN

    @property
    def threads(self) -> int:
        """Of all multiplying warpgroups."""
        return self.form.BM // 64 * self.form.WGN * 128

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: the ring, aligned, and what a cluster exchanges."""
        form = self.form
        blocks = self.columns // 8 // max(1, form.CS // 2)
        words = blocks * 2 if form.fp32 else blocks
        return 1024 + form.stages * (form.BM + form.BN) * BK_BYTES + (form.CS - 1) * words * 4 * self.threads

    def grid(self, B: int, N: int) -> tuple[int, int, int]:
        """CTAs along rows, columns and K, whole clusters."""
        form = self.form
        return -(-B // (form.BM * form.CM)) * form.CM, -(-N // form.BN), form.CS * form.parts

    def macros(self) -> dict[str, int]:
        """What the text is compiled with."""
        form = self.form
        return {
            "BM": form.BM, "BN": form.BN, "WGM": form.BM // 64, "WGN": form.WGN, "STAGES": form.stages,
            "CM": form.CM, "CS": form.CS, "XF32": form.fp32, "AHEAD": form.ahead,
            "STREAM": form.stream,
            "W_MN": self.rows_are_k, "EPI": EPILOGUES[self.epilogue],
            "UNIT": UNITS.index(self.unit), "HAS_MASK": self.mask, "HAS_B": self.bias, "SAVE": self.save,
            "C_EARLY": self.early, "INDEXED": self.indexed, "EIGHT": bool(self.eight),
        }  # fmt: skip

    def text(self) -> str:
        """The whole source."""
        body, epilogues = (_read(name) for name in ("step.cu", "epilogues.h"))
        defines = "".join(f"#define {name} {int(value)}\n" for name, value in self.macros().items())
        body = body.replace("/*WGMMA*/", _multiply(self.columns, self.rows_are_k, self.eight))
        return defines + body.replace('#include "epilogues.h"', epilogues)


@functools.cache
def _read(name: str) -> str:
    return (resources.files("mulstm.ops") / "kernels" / name).read_text(encoding="utf-8")


def _multiply(columns: int, rows_are_k: bool, eight: str) -> str:
    """The function wgmma(): d += A W' for 64 x columns x 16 or 32, whose operands C++ cannot write by itself.

    The descriptors' low words are given; their high words are constants.
    """
    n = columns // 2
    places = ", ".join(f"%{i}" for i in range(n))
    sums = ", ".join(f'"+f"(d[{i}])' for i in range(n))
    types, order = (
        (f"k32.f32.{eight}.e4m3", "") if eight else ("k16.f32.bf16.bf16", f", 0, {int(rows_are_k)}")
    )
    return (
        f"__device__ __forceinline__ void wgmma(float (&d)[{n}], u32 a, u32 w, int add) {{\n"
        f'  asm volatile("{{ .reg .pred p; .reg .b64 x, y; setp.ne.b32 p, %{n + 2}, 0; "\n'
        f'    "mov.b64 x, {{%{n}, %{n + 3}}}; mov.b64 y, {{%{n + 1}, %{n + 4}}}; "\n'
        f'    "wgmma.mma_async.sync.aligned.m64n{columns}{types} {{{places}}}, "\n'
        f'    "x, y, p, 1, 1{order}; }}"\n'
        f'    : {sums} : "r"(a), "r"(w), "r"(add), "n"(A_HIGH), "n"(W_HIGH));\n}}\n'
    )


@functools.cache
def _library() -> Any:
    """NVRTC from torch's own packages, else from the system."""
    folders = [Path(name) for name in (*site.getsitepackages(), *sys.path) if name]
    for path in (p for folder in folders for p in sorted(folder.glob("nvidia/*/lib/libnvrtc.so.1[23]"))):
        with suppress(OSError):
            # It asks for its builtins by their bare name: opened before, they are found.
            for builtins in path.parent.glob("libnvrtc-builtins.so.1*"):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(path))
    for name in ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        with suppress(OSError):
            return ctypes.CDLL(name)
    raise CompileError("no NVRTC library was found")


def compiled(text: str) -> bytes:
    """Machine code for Hopper."""
    library, program, size = _library(), c_void_p(), c_size_t()
    if library.nvrtcCreateProgram(byref(program), text.encode(), b"step.cu", 0, None, None):
        raise CompileError("NVRTC did not start")
    try:
        failed = library.nvrtcCompileProgram(program, len(OPTIONS), (c_char_p * len(OPTIONS))(*OPTIONS))
        if failed:
            library.nvrtcGetProgramLogSize(program, byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise CompileError(log.value.decode(errors="replace")[:500])
        library.nvrtcGetCUBINSize(program, byref(size))
        code = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        library.nvrtcDestroyProgram(byref(program))


def machine_code(text: str) -> bytes:
    """Compiled once and kept in the user's cache; what is damaged there is made anew."""
    key = hashlib.sha256(b"\0".join((*OPTIONS, text.encode()))).hexdigest()[:32]
    code = b""
    with suppress(OSError, MulstmError):  # a cache that cannot be had costs a second each time, no more
        path = store.cache_folder() / "kernels" / f"{key}.cubin"
        if store.is_sound(path):
            return path.read_bytes()
        code = compiled(text)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, code)
        store.seal(path)
    return code or compiled(text)
