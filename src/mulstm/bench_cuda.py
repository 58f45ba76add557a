"""Times training and inference on a GPU: all contenders in one process, in turn, after their checks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mulstm.bench_contenders import Contender, E, N, layers, updates
from mulstm.errors import BackendError
from mulstm.nn.model import LanguageModel
from mulstm.recipe import ModelRecipe

Say = Callable[[str], None]
LIMIT = 0.02  # of a bf16 contender's error against float64
WARM = 10.0  # seconds of load before anything is timed: a cold card is 10 % faster than a warm one
# Measured on one H200: products, memory, cache; barrier of a whole grid.
PRODUCTS, MEMORY, CACHE, BARRIER = 790e12, 4.6e12, 8.9e12, 0.93e-6
FITS_CACHE = 50e6
TOGETHER = 4  # calls timed as one, the host running ahead of the device as it does in training


def step_flops(cell: str, H: int, B: int) -> float:
    """Of the recurrent products of one step, forward."""
    return 2.0 * B * H * H * (5 if cell == "mlstm" else 4)


def flops(cell: str, level: str, H: int, B: int, T: int) -> float:
    """Of one forward and backward, at the level given."""
    rows = 5 * H if cell == "mlstm" else 4 * H
    total = 3 * T * step_flops(cell, H, B) + 3 * 2.0 * T * B * E * rows
    return total + (3 * 2.0 * T * B * N * H if level == "update" else 0.0)


def floor(cell: str, level: str, H: int, B: int, T: int, parameters: int) -> float:
    """Seconds below which no forward and backward can be: see docs/kernels.md."""
    products, weights = step_flops(cell, H, B) / PRODUCTS, 2.0 * H * H * (5 if cell == "mlstm" else 4)
    reading = weights / (CACHE if weights <= FITS_CACHE else MEMORY)
    step = max(products, reading) + BARRIER * (2 if cell == "mlstm" else 1)
    rest = flops(cell, level, H, B, T) / PRODUCTS - 2 * T * products
    return 2 * T * step + rest + (48.0 * parameters / MEMORY if level == "update" else 0.0)


def warm_up(seconds: float) -> None:
    """Keeps the tensor cores busy."""
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


def in_turn(contenders: list[Contender], repeats: int, say: Say) -> list[dict[str, Any]]:
    """Rows of all contenders, timed round after round so that a drift of the clock meets all alike."""
    ready: list[tuple[Contender, Callable[[], None], int, float, float]] = []
    errors: dict[str, float] = {}
    for one in contenders:
        if one.name not in errors:
            errors[one.name] = one.error()
        error = errors[one.name]
        if error > LIMIT:  # NaN: not checked at this level
            if one.name == "mlstm":
                raise BackendError(
                    f"Our layer differs from float64 by {error:.3g}, more than {LIMIT}. Nothing is timed."
                )
            say(f"{one.name} ({one.backend}) differs from float64 by {error:.3g} and is left out")
            continue
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run, parameters = one.prepare()
        run()
        torch.cuda.synchronize()
        ready.append((one, run, parameters, error, (torch.cuda.max_memory_allocated() - before) / 2**20))
        say(f"{one.name} ({one.backend}), {one.level}, {one.hidden}: ready")
    warm_up(1.0)
    for turn in range(repeats + 3):
        for one, run, *_ in ready:
            if one.slow and turn % 5 != 4:
                continue
            start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            calls = 1 if one.slow else TOGETHER
            start.record()
            for _ in range(calls):
                run()
            end.record()
            torch.cuda.synchronize()
            if turn >= 3:
                one.milliseconds.append(start.elapsed_time(end) / calls)
    return [_row(one, parameters, error, peak) for one, _, parameters, error, peak in ready]


def _row(one: Contender, parameters: int, error: float, peak: float) -> dict[str, Any]:
    ms = float(np.median(one.milliseconds))
    H, B, T = one.hidden, one.lanes, one.chunk
    low, high = np.percentile(one.milliseconds, [10, 90])
    return {
        "name": one.name,
        "backend": one.backend,
        "level": one.level,
        "device": torch.cuda.get_device_name(),
        "precision": "bf16",
        "hidden": H,
        "lanes": B,
        "chunk": T,
        "parameters": parameters,
        "milliseconds": round(ms, 4),
        "milliseconds_p10": round(float(low), 4),
        "milliseconds_p90": round(float(high), 4),
        "symbols_per_second": round(B * T / ms * 1e3),
        "tflops": round(flops(one.cell, one.level, H, B, T) / ms / 1e9, 1),
        "percent_of_floor": round(100e3 * floor(one.cell, one.level, H, B, T, parameters) / ms, 1),
        "error_vs_float64": None if error != error else float(f"{error:.3g}"),
        "peak_mib": round(peak),
    }


def _model(H: int) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(ModelRecipe(hidden=H, embedding=E, weight_norm=True), N).cuda().eval()
    model.precision = "bf16"
    return model


def _plain_row(level: str, H: int, lanes: int, chunk: int, parameters: int, seconds: float) -> dict[str, Any]:
    """`seconds` for a chunk of every lane."""
    products = step_flops("mlstm", H, lanes) * chunk / PRODUCTS
    weights = 10.0 * H * H
    reading = chunk * weights / (CACHE if weights <= FITS_CACHE else MEMORY)
    return {
        "name": "mlstm",
        "backend": "triton, one graph",
        "level": level,
        "device": torch.cuda.get_device_name(),
        "precision": "bf16",
        "hidden": H,
        "lanes": lanes,
        "chunk": chunk,
        "parameters": parameters,
        "milliseconds": round(seconds * 1e3, 4),
        "symbols_per_second": round(lanes * chunk / seconds),
        "tflops": round(step_flops("mlstm", H, lanes) * chunk / seconds / 1e12, 1),
        "percent_of_floor": round(100 * (max(products, reading) + 2 * BARRIER * chunk) / seconds, 1),
        "error_vs_float64": None,
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20),
    }


@torch.inference_mode()
def evaluation(H: int, lanes: int, chunk: int, chunks: int = 50) -> dict[str, Any]:
    """Streaming a text through the model, one graph a chunk."""
    from mulstm.replay import ReplayedScorer

    torch.cuda.reset_peak_memory_stats()
    model = _model(H)
    score = ReplayedScorer(model.folded().eval(), lanes, chunk)
    sets = [torch.randint(N, (2, lanes, chunk), device="cuda") for _ in range(3)]
    nats = torch.zeros((), dtype=torch.float64, device="cuda")
    for k in range(3):
        nats += score(*sets[k]).sum(dtype=torch.float64)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for k in range(chunks):
        nats += score(*sets[k % 3]).sum(dtype=torch.float64)
    torch.cuda.synchronize()
    return _plain_row(
        "evaluate", H, lanes, chunk, model.parameter_count(), (time.perf_counter() - start) / chunks
    )


@torch.no_grad()
def sampling(H: int, streams: int, blocks: int = 40) -> dict[str, Any]:
    """Drawing symbol after symbol on the GPU."""
    from mulstm.nn.packed import sampler

    torch.cuda.reset_peak_memory_stats()
    model = _model(H)
    work = sampler(model.folded().eval(), streams, greedy=False)
    if work is None:
        raise BackendError(f"There is no sampler for {streams} streams. Give at most 4.")
    dice = torch.rand(work.steps, streams, device="cuda")
    for _ in range(3):
        work.run(dice)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(blocks):
        work.run(dice).cpu()
    seconds = (time.perf_counter() - start) / blocks
    return _plain_row("sample", H, streams, work.steps, model.parameter_count(), seconds)


def bench(say: Say, repeats: int = 20, quick: bool = False) -> list[dict[str, Any]]:
    """All rows of results/bench/<machine>.json."""
    if not torch.cuda.is_available():
        raise BackendError("There is no CUDA device here. Use --device cpu.")
    rows: list[dict[str, Any]] = []
    warm_up(1.0 if quick else WARM)
    for H, equal in ((1900, 2144), (2800, 3152)):
        for B, T in ((128, 200),) if quick else ((128, 200), (256, 100)):
            rows += in_turn(layers(H, B, T, equal), repeats, say)
            torch.cuda.empty_cache()
    for H, B, T, equal, naive in (
        (1900, 256, 100, 2144, True),
        (2800, 256, 100, 3152, False),
        (450, 128, 200, 520, True),
        (1900, 128, 200, 2144, False),
        (2800, 128, 200, 3152, False),
    ):
        rows += in_turn(updates(H, B, T, equal, naive and not quick), repeats, say)
        torch.cuda.empty_cache()
    for H in (1900, 2800):
        rows.append(evaluation(H, 500, 200))
        for streams in (1, 4):
            rows.append(sampling(H, streams))
        torch.cuda.empty_cache()
    return rows


def machine() -> dict[str, Any]:
    """What the rows were measured on."""
    import triton

    p = torch.cuda.get_device_properties(0)
    return {
        "device": p.name,
        "processors": p.multi_processor_count,
        "memory_gib": round(p.total_memory / 2**30),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "triton": triton.__version__,
    }
