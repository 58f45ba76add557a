"""A second stream: work bound by memory beside products that are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_STREAMS: dict[tuple[torch.device, int], torch.cuda.Stream] = {}  # by the stream that it is beside


class Beside:
    """Runs work on a second stream of higher priority, beside what the current stream is given after it.

    What such work reads must be kept until `join`: the allocator knows nothing of the second stream. What it
    allocates may be freed whenever the host likes, since the next work here begins after a `fork`.
    """

    def __init__(self, device: torch.device) -> None:
        key = device, torch.cuda.current_stream(device).cuda_stream
        if key not in _STREAMS:
            _STREAMS[key] = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.stream = _STREAMS[key]

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Work that begins when what the current stream was given so far is done."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> torch.cuda.Event:
        """The work so far, for `until`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def until(self, mark: torch.cuda.Event) -> None:
        """The current stream goes on when the work up to the mark is done."""
        torch.cuda.current_stream().wait_event(mark)

    def join(self) -> None:
        """The current stream goes on when all of it is done."""
        torch.cuda.current_stream().wait_stream(self.stream)
