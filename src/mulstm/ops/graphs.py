"""Work recorded as one CUDA graph, on the device that it is for, whichever is the current one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

R = TypeVar("R")


def recorded(
    device: torch.device, work: Callable[[], R], before: Callable[[], object], times: int = 1
) -> tuple[torch.cuda.CUDAGraph, R]:
    """The graph, and what each replay writes anew: what `work` gave while it was recorded.

    `before` really runs, so many times: a recording can load no library and no kernel.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(times):
                before()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            given = work()
    return graph, given
