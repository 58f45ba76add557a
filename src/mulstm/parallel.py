"""Several processes share the lanes of one run: torchrun starts them, this joins them."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count as counting
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mulstm import console
from mulstm.errors import BackendError, MulstmError, RunError, RunInterruptedError

R = TypeVar("R")
CPU = torch.device("cpu")
LAST_WORD = 5.0  # seconds: torchrun ends all processes with the first that fails, which has still to say why
PATIENCE = timedelta(days=7)  # the first process may measure for hours; torchrun ends those of one that dies
ALONE = timedelta(seconds=30)  # after which a fault that the others have not met is this process's own
TORCHRUN = "Start several processes with torchrun, or unset WORLD_SIZE to train in one."
_groups = counting()  # that this process has joined, one a training


@dataclass(frozen=True)
class Share:
    """This process's part of the work; with one process, all of it."""

    rank: int = 0
    count: int = 1
    device: torch.device = CPU

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def lanes(self, B: int) -> slice:
        """This process's lanes of all B."""
        each = B // self.count
        return slice(self.rank * each, (self.rank + 1) * each)

    def sum(self, tensors: Iterable[Tensor | None]) -> None:
        """Each tensor becomes its sum over the processes, in place: one message for all of a type."""
        if self.count == 1:
            return
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            if tensor is not None:
                kinds.setdefault(tensor.dtype, []).append(tensor)
        for same in kinds.values():
            flat = torch.cat([tensor.flatten() for tensor in same])
            dist.all_reduce(flat)
            for tensor, total in zip(same, torch.split(flat, [t.numel() for t in same]), strict=True):
                tensor.copy_(total.view_as(tensor))

    def part(self, y: Tensor | None) -> Tensor | float:
        """What this process's mean over its symbols counts in the mean over those of all processes.

        y says where there are symbols; without it all processes have as many.
        """
        if self.count == 1 or y is None:
            return 1 / self.count
        symbols = (y >= 0).sum()
        total = symbols.clone()
        dist.all_reduce(total)
        return symbols / total.clamp(min=1)

    def whole(self, own: Tensor) -> Tensor:
        """The rows of all processes, in the order of the lanes."""
        if self.count == 1:
            return own
        rows = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(rows, own.contiguous())
        return torch.cat(rows)

    def largest(self, *values: float) -> list[float]:
        """For each value the largest that any process has: all of them then decide alike."""
        if self.count == 1:
            return list(values)
        agreed = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return [float(value) for value in agreed.tolist()]

    def by_first(self, work: Callable[[], R]) -> R:
        """What `work` returns in the first process, told to all; if it fails there, all fail."""
        if self.count == 1:
            return work()
        fault: BaseException | None = None
        told: list[Any] = [None, False]  # what it returned, whether it did
        if self.first:
            try:
                told = [work(), True]
            except BaseException as error:
                fault = error
        dist.broadcast_object_list(told, src=0, device=self.device)
        if fault is not None:
            raise fault
        if not told[1]:
            time.sleep(LAST_WORD)
            raise RunError("The first process stopped. Its message says why.")
        return cast(R, told[0])


def pick(device: str, local_rank: int = 0) -> torch.device:
    """The device a name stands for; "auto" is a GPU where there is one. A GPU becomes the current one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as fault:
        raise BackendError(f"There is no device {device!r}. Say auto, cpu, cuda or cuda:1.") from fault
    if chosen.type not in ("cpu", "cuda"):
        raise BackendError(f"The device {device!r} is not supported. Say auto, cpu, cuda or cuda:1.")
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise BackendError(
                f"The device {device!r} was asked for and there is no GPU here. Say --device cpu."
            )
        index = local_rank if chosen.index is None else chosen.index
        if index >= torch.cuda.device_count():
            raise BackendError(
                f"GPU {index} was asked for and there are {torch.cuda.device_count()}. Say a smaller number."
            )
        chosen = torch.device("cuda", index)
        torch.cuda.set_device(chosen)  # streams and captures are made on the current one
    return chosen


def processes() -> int:
    """How many there are, as torchrun's environment says."""
    return _told("WORLD_SIZE", 1, default="1")


@contextlib.contextmanager
def joined(device: str) -> Iterator[Share]:
    """This process's share, as torchrun's environment says; leaves the group in good order."""
    count = processes()
    if count == 1:
        yield Share(device=pick(device))
        return
    if dist.is_initialized():
        raise BackendError(
            "This program has joined its processes itself. "
            "Call torch.distributed.destroy_process_group() first, or start one process."
        )
    rank = _told("RANK", 0)
    where = pick(device, _told("LOCAL_RANK", 0, default="0"))
    kind = "nccl" if where.type == "cuda" else "gloo"
    # Imported later, by PyTorch itself, it would keep this group as a default of its functions; and a group
    # that is still there when Python ends has threads that are aborted.
    importlib.import_module("torch.distributed.nn.functional")
    try:
        # Under the same names, addresses that an earlier group has left would be taken for those of this one.
        store = cast(Any, dist).PrefixStore(f"group {next(_groups)}", _meeting_place())
        dist.init_process_group(kind, store=store, rank=rank, world_size=count, timeout=PATIENCE)
    except (ValueError, RuntimeError) as fault:  # the first process has no address, or is not there
        raise BackendError(f"The {count} processes could not be joined ({fault}). {TORCHRUN}") from fault
    share = Share(dist.get_rank(), count, where)
    try:
        yield share
    except (MulstmError, RunInterruptedError) as fault:
        if _all_failed(count):
            _leave()
        elif not share.first:  # who speaks for all, and knows nothing of it
            console.error(f"Process {share.rank}: {fault}")
        raise
    else:
        _leave()


@cache
def _meeting_place() -> Any:
    """Where the processes find each other: the same as long as they live, however often they join."""
    store, _, _ = next(cast(Any, dist).rendezvous("env://", timeout=PATIENCE))
    store.set_timeout(PATIENCE)
    return store


def _told(name: str, least: int, default: str | None = None) -> int:
    """A number that torchrun puts into the environment."""
    text = os.environ.get(name, default)
    if text is None:
        raise BackendError(
            f"WORLD_SIZE says that there are more processes, and {name} is not set. {TORCHRUN}"
        )
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
        raise BackendError(f"{name} is {text!r}, and not a whole number from {least} on. {TORCHRUN}")
    return int(text)


def _all_failed(count: int) -> bool:
    """Whether the others have too. One alone with its fault would wait for them in vain, and they for it."""
    # By its full name: builds of PyTorch without torch.distributed lack the module, and train alone.
    store = dist.distributed_c10d._get_default_store()
    with contextlib.suppress(RuntimeError):  # the time is over, or the first process has left with the store
        if store.add("failed", 1) == count:
            store.set("all failed", "")
        store.wait(["all failed"], ALONE)
        return True
    return False


def _leave() -> None:
    # Leaving while another process still sends aborts it; so all meet once more before the group ends.
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    dist.destroy_process_group()
