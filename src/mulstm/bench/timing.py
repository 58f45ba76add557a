"""Times contenders in turn, round after round, each only after its answers agreed with float64."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mulstm.bench.floor import Work
from mulstm.errors import CheckFailedError
from mulstm.ops.graphs import recorded

Say = Callable[[str], None]
Run = Callable[[], object]
Row = dict[str, Any]
FP32, OURS, OTHERS = 1e-4, 0.03, 0.06  # largest error against float64: in fp32; of bf16 contenders
TOGETHER = 3  # calls timed as one
UNTIMED = 2  # rounds
SLOW = 3  # a slow contender takes part in every third round


@dataclass
class Ready:
    """Something that stands on the device. `error` looks at what the last `run` left there."""

    run: Run
    parameters: int
    error: Callable[[], float]


@dataclass
class Contender:
    """Something to be timed; `prepare` builds it."""

    name: str
    backend: str
    level: str  # layer: forward and backward; update; evaluate: forward; sample: one symbol after another
    hidden: int
    lanes: int
    chunk: int
    work: Callable[[Ready], Work] | None  # None: nobody asks how near to the floor it is
    prepare: Callable[[], Ready]
    slow: bool = False
    inside: int = 1  # chunks that one run makes
    precision: str = "bf16"
    calls: int = TOGETHER
    milliseconds: list[float] = field(default_factory=list)

    @property
    def ours(self) -> bool:
        """Whether a fault in it is ours."""
        return self.name not in ("naive", "torchrecurrent", "flashrnn") and not self.name.startswith("nn.")

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.name} {self.hidden} ({self.backend}), {self.level} {self.lanes} x {self.chunk}"


@dataclass
class Session:
    """Where everything is timed, and who could not take part."""

    device: str
    repeats: int
    say: Say
    left_out: list[Row] = field(default_factory=list)

    @property
    def cuda(self) -> bool:
        """Whether there are graphs, events and counted memory."""
        return torch.device(self.device).type == "cuda"

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if self.cuda:
            torch.cuda.synchronize()

    def captured(self, work: Run) -> Run:
        """The same work as the replay of one CUDA graph; without a GPU as it stands."""
        if not self.cuda:
            return work
        graph, _ = recorded(torch.device(self.device), work, before=work, times=3)

        def replay() -> None:
            assert work is not None  # what it holds is what the graph reads and writes
            graph.replay()

        return replay

    def milliseconds(self, run: Run, calls: int) -> float:
        """Of one call among so many in a row."""
        if not self.cuda:
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            return (time.perf_counter() - begin) * 1e3 / calls
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / calls

    def warm_up(self, seconds: float) -> None:
        """Keeps the tensor cores busy: a cold card is a tenth faster than a warm one."""
        if not self.cuda:
            return
        a = torch.randn(8192, 8192, device=self.device).bfloat16()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(20):
                a @ a
            self.wait()

    def tidy(self) -> None:
        """Gives back the memory of contenders that are done."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def in_turn(self, contenders: list[Contender]) -> list[Row]:
        """Rows of all contenders, timed round after round so that a drift of the clock meets all alike."""
        entered = [(one, *found) for one in contenders if (found := self._enter(one)) is not None]
        self.warm_up(0.5)
        for turn in range(UNTIMED + self.repeats):
            for one, ready, *_ in entered:
                if one.slow and turn % SLOW != SLOW - 1:
                    continue
                # The first that is timed starts while another still runs, as in training: what it costs to
                # launch it is nobody's time. On a CPU it finds memory and caches as that one left them.
                if not one.slow:
                    ready.run()
                taken = self.milliseconds(ready.run, 1 if one.slow else one.calls)
                if turn >= UNTIMED:
                    one.milliseconds.append(taken / one.inside)
        rows = [row(one, ready, error, peak) for one, ready, error, peak in entered if one.milliseconds]
        entered.clear()
        self.tidy()
        return rows

    def _enter(self, one: Contender) -> tuple[Ready, float, float | None] | None:
        """Builds a contender and checks it; None, with a word about why, for one that cannot take part."""
        before = 0
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        try:
            ready = one.prepare()
            ready.run()
            self.wait()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if self.cuda else None
            error = ready.error()
        except Exception as fault:  # whatever it is: the others' figures must not be lost with it
            self._leave_out(one, f"{type(fault).__name__}: {str(fault).strip()[:300]}")
            return None
        if self.cuda:
            torch.cuda.empty_cache()  # what float64 took
        limit = FP32 if one.precision == "fp32" else OURS if one.ours else OTHERS
        if not error <= limit:
            self._leave_out(one, f"differs from float64 by {error:.3g}, more than {limit}")
            return None
        self.say(f"{one.title}: error {error:.2g}, ready")
        return ready, error, peak

    def _leave_out(self, one: Contender, reason: str) -> None:
        # Nothing wrong is timed; that something of ours is wrong is said again at the end.
        self.left_out.append({"contender": one.title, "reason": reason, "ours": one.ours})
        self.say(f"{one.title} is left out: {reason}")


def row(one: Contender, ready: Ready, error: float, peak: float | None) -> Row:
    """What the record says of a contender."""
    ms = float(np.median(one.milliseconds))
    low, high = np.percentile(one.milliseconds, [10, 90])
    found: Row = {
        "name": one.name,
        "backend": one.backend,
        "level": one.level,
        "precision": one.precision,
        "hidden": one.hidden,
        "lanes": one.lanes,
        "chunk": one.chunk,
        "parameters": ready.parameters,
        "milliseconds": round(ms, 4),
        "milliseconds_p10": round(float(low), 4),
        "milliseconds_p90": round(float(high), 4),
        "repeats": len(one.milliseconds),
        "symbols_per_second": round(one.lanes * one.chunk / ms * 1e3),
        "error_vs_float64": float(f"{error:.3g}"),
        "peak_mib": None if peak is None else round(peak),
    }
    if one.work is not None:
        work = one.work(ready)
        found |= {
            "tflops": round(work.flops / ms / 1e9, 1),
            "percent_of_floor": round(100e3 * work.floor / ms, 1),
        }
    return found


def fault(found: dict[str, Any]) -> CheckFailedError | None:
    """What to raise, at the very end, when something of ours could not be timed."""
    wrong: list[Row] = [one for one in found["left_out"] if one["ours"]]
    if not wrong:
        return None
    return CheckFailedError(
        f"{len(wrong)} of our contenders could not be timed, first {wrong[0]['contender']} "
        f"({wrong[0]['reason']}). Mend the backend; the rows of the others stand."
    )


def rms(a: torch.Tensor, b: torch.Tensor) -> float:
    """rms(a - b) / rms(b)."""
    a, b = a.detach().double().reshape(-1), b.detach().double().reshape(-1)
    return float((a - b).norm() / b.norm())


def largest(pairs: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]) -> float:
    """The largest rms of all pairs; NaN where one is none, or a tensor did not come: that is no agreement."""
    return float(np.max([np.nan if a is None or b is None else rms(a, b) for a, b in pairs]))
