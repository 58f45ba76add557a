"""The kernels in CUDA without a GPU: which plan asks for them, the text, the cache of machine code."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mulstm.ops import cuda_driver, cuda_source
from mulstm.ops.cuda_source import CompileError, Variant
from mulstm.ops.reference import UNITS
from mulstm.ops.triton_plan import NARROW, PLAIN, Form, Plan, Tile, plan_in_eight, plan_of

SIZES = [(1920, 1), (1920, 128), (1920, 129), (1920, 256), (2816, 100), (2816, 256), (4096, 320)]


def variants(plan: Plan) -> list[Variant]:
    """What a plan launches."""
    if plan.eight:
        places = (("m", plan.m), ("gates", plan.gates), ("sums", plan.dm), ("sums", plan.dh))
        types = ("e4m3", "e4m3", "e5m2", "e5m2")
        return [
            Variant(form, place, mask=True, eight=of)
            for (place, form), of in zip(places, types, strict=True)
            if isinstance(form, Form)
        ]
    found = []
    for place, form in (("m", plan.m), ("gates", plan.gates), ("dm", plan.dm), ("cell", plan.dh)):
        if isinstance(form, Form):
            back = place in ("dm", "cell")
            found.append(Variant(form, place if form.fused else "sums", rows_are_k=back, mask=True))
    return found


@pytest.mark.parametrize(("H", "B"), SIZES)
@pytest.mark.parametrize("in_eight", [False, True])
def test_forms_fit_the_machine(H: int, B: int, in_eight: bool) -> None:
    plan = plan_in_eight(H, B) if in_eight else plan_of(H, B, cuda=True)
    assert plan is not None
    assert plan.uses_cuda
    assert len(variants(plan)) == 4 or not in_eight
    for variant in variants(plan):
        form = variant.form
        assert variant.shared + 1024 <= cuda_source.LARGEST_SHARED
        assert form.CM * form.CS <= 8  # what every Hopper allows
        assert form.BM % 64 == 0
        assert variant.columns % (64 if variant.rows_are_k or variant.epilogue == "gates" else 16) == 0
        assert variant.columns <= 256
        rows, columns, K = variant.grid(B, 4 * H if variant.epilogue == "gates" else H)
        assert rows % form.CM == K % form.CS == 0
        assert rows * form.BM >= B
        assert columns * form.BN >= H


@pytest.mark.parametrize(("H", "B"), [(1280, 100), (1920, 256), (2304, 256)])
def test_an_milstms_products_fit_the_chip_at_a_time(H: int, B: int) -> None:
    plan = plan_of(H, B, cuda=True, px=True)
    forward, back = variants(plan)
    assert forward.epilogue == back.epilogue == "sums"
    for variant, N in ((forward, 4 * H), (back, H)):
        assert variant.shared + 1024 <= cuda_source.LARGEST_SHARED
        assert variant.form.BN // variant.form.CM % 8 == 0  # a part of W's tile is whole rows of the swizzle
        rows, columns, parts = variant.grid(B, N)
        assert columns * variant.form.BN >= N
        assert rows * columns * parts <= 132


@pytest.mark.parametrize(("H", "B"), [(512, 256), (1152, 64), (1920, 321), (5000, 64)])
def test_other_sizes_keep_their_kernels(H: int, B: int) -> None:
    assert plan_of(H, B, cuda=True) == plan_of(H, B)
    assert not plan_of(H, B).uses_cuda


def test_without_them_the_plan_is_the_old_one() -> None:
    assert isinstance(plan_of(1920, 256).gates, Tile)
    assert not PLAIN.uses_cuda


def test_text() -> None:
    variant = Variant(Form(128, 96, 5, CM=2, CS=2, fp32=True), "m", save=False)
    text = variant.text()
    assert "#define BN 96\n" in text
    assert "#define XF32 1\n" in text
    assert "#define SAVE 0\n" in text
    assert "m64n96k16" in text
    assert '"+f"(d[47])' in text
    assert f"#define STANDARD {UNITS.index('standard')}\n" in text
    assert f"#define INITIAL {UNITS.index('initial')}\n" in text
    assert "/*WGMMA*/" not in text
    assert "#include" not in text
    assert text != Variant(Form(128, 96, 5, CM=2, CS=2), "m", save=False).text()


def test_text_of_8_bit_numbers() -> None:
    text = Variant(Form(128, 96, 5, CM=2, CS=2), "sums", eight="e5m2").text()
    assert "#define EIGHT 1\n" in text
    assert "m64n96k32.f32.e5m2.e4m3 " in text
    assert '"x, y, p, 1, 1; }"' in text  # these take no transposed operand
    assert "#define EIGHT 0\n" in Variant(Form(128, 96, 5), "sums").text()


def test_8_bit_numbers_are_for_wide_layers_and_some_lanes() -> None:
    plan = plan_in_eight(2816, 256)
    assert plan is not None
    assert plan.eight
    for place in (plan.dm, plan.dh):
        assert isinstance(place, Form)
        assert not place.fused  # the kernel after them makes the next product's operand
    assert not plan_of(2816, 256, cuda=True).eight
    for H, B in ((NARROW, 64), (2816, 321), (4224, 64)):
        assert plan_in_eight(H, B) is None


def test_arguments_are_laid_out_as_in_the_text() -> None:
    assert ctypes.sizeof(cuda_driver.Arguments) % 64 == 0
    body = cuda_source._read("step.cu")
    declared = body[body.index("struct Args {") : body.index("};", body.index("struct Args {"))]
    at = -1
    for name, _ in cuda_driver.Arguments._fields_[:-1]:
        place = min(
            p for sep in (" ", "*") for end in (",", ";") if (p := declared.find(sep + name + end)) > 0
        )
        assert place > at, name
        at = place


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: list[str] = []
    monkeypatch.setattr(
        cuda_source, "compiled", lambda text: made.append(text) or b"code of " + text.encode()
    )
    assert cuda_source.machine_code("one") == b"code of one"
    assert cuda_source.machine_code("one") == b"code of one"
    assert cuda_source.machine_code("two") == b"code of two"
    assert made == ["one", "two"]
    kept = sorted((tmp_path / "mulstm" / "kernels").glob("*.cubin"))
    assert len(kept) == 2
    for path in kept:
        path.write_bytes(path.read_bytes()[:-1])
    assert cuda_source.machine_code("one") == b"code of one"
    assert made == ["one", "two", "one"]
    assert cuda_source.machine_code("one") == b"code of one"
    assert made == ["one", "two", "one"]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mulstm").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cuda_source, "compiled", lambda text: b"code")
    assert cuda_source.machine_code("one") == b"code"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert cuda_source.machine_code("one") == b"code"


def no_home() -> Path:
    raise RuntimeError("an account without a home")


def test_why_not() -> None:
    assert cuda_driver.why_not(torch.device("cpu")) == "they need an NVIDIA GPU"


def test_a_form_too_large_is_said_before_it_is_compiled() -> None:
    with pytest.raises(cuda_driver.LaunchError, match="wants 263,168 bytes of shared memory"):
        cuda_driver.Kernel(Variant(Form(128, 128, 8), "sums"))


def test_a_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise OSError("not there")

    monkeypatch.setattr(cuda_source.site, "getsitepackages", list)
    monkeypatch.setattr(cuda_source.sys, "path", [])
    monkeypatch.setattr(cuda_source.ctypes, "CDLL", missing)
    cuda_source._library.cache_clear()
    try:
        with pytest.raises(CompileError, match="no NVRTC"):
            cuda_source.compiled("text")
    finally:
        cuda_source._library.cache_clear()


def test_a_broken_compiler_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "nvidia" / "x" / "lib" / "libnvrtc.so.12"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"no library")
    monkeypatch.setattr(cuda_source.site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(cuda_source.sys, "path", [])
    opened: list[str] = []

    def library(name: str, real: Callable[..., object] = ctypes.CDLL) -> object:
        opened.append(name)
        return real(name) if name == str(broken) else "the system's"

    monkeypatch.setattr(cuda_source.ctypes, "CDLL", library)
    cuda_source._library.cache_clear()
    try:
        assert cuda_source._library() == "the system's"
    finally:
        cuda_source._library.cache_clear()
    assert opened[0] == str(broken)


def test_compiles_where_there_is_a_compiler() -> None:
    try:
        cuda_source._library()
    except CompileError:
        pytest.skip("no NVRTC library")
    plans = [plan_of(1920, 256, cuda=True, px=px) for px in (False, True)]
    plans += [plan for H in (1920, 2816) if (plan := plan_in_eight(H, 256)) is not None]
    for variant in (v for plan in plans for v in variants(plan)):
        assert cuda_source.compiled(variant.text()).startswith(b"\x7fELF")
    with pytest.raises(CompileError, match="error"):
        cuda_source.compiled("this is no program")
