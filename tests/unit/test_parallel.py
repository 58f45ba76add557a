"""Which device a name stands for, and what the first process tells the others."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from mulstm import parallel
from mulstm.errors import BackendError, MulstmError


def test_the_gpu_asked_for_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert parallel.pick("cpu") == torch.device("cpu")
    assert current == []
    assert parallel.pick("cuda:1") == torch.device("cuda", 1)
    assert parallel.pick("auto") == torch.device("cuda", 0)
    assert parallel.pick("cuda", local_rank=1) == torch.device("cuda", 1)
    with pytest.raises(BackendError, match="GPU 2 was asked for"):
        parallel.pick("cuda:2")
    assert [device.index for device in current] == [1, 0, 1]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc', and not a whole number from 1 on"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "2"}, "more processes, and RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "x"}, "RANK is 'x', and not a whole number from 0 on"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "The 2 processes could not be joined .*MASTER_ADDR"),
    ],
)
def test_an_environment_that_torchrun_did_not_make(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], words: str
) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BackendError, match=rf"{words}.*\. Start several processes with torchrun"):
        parallel.joined("cpu").__enter__()


def test_a_program_that_joined_its_processes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(BackendError, match="destroy_process_group"), parallel.joined("cpu"):
        pass


def test_a_folder_whose_name_is_no_text_is_told(tmp_path: Path) -> None:
    name = Path(os.fsdecode(b"runs/caf\xe9"))
    parallel.dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        assert parallel.Share(count=2).by_first(lambda: name) == name
    finally:
        parallel.dist.destroy_process_group()


def test_a_chunk_in_which_nobody_has_anything_to_predict(tmp_path: Path) -> None:
    parallel.dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        assert float(parallel.Share(count=2).part(torch.full((4,), -1))) == 0
    finally:
        parallel.dist.destroy_process_group()


def test_the_first_process_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, timedelta] = {}

    def join(backend: str, timeout: timedelta, **_: object) -> None:
        given[backend] = timeout
        raise ValueError("no further")

    monkeypatch.setattr(parallel.dist, "init_process_group", join)
    monkeypatch.setattr(parallel, "_meeting_place", parallel.dist.HashStore)
    for name, value in {"WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BackendError, match="no further"):
        parallel.joined("cpu").__enter__()
    assert given["gloo"] > timedelta(days=1)


def test_others_are_told_when_the_first_process_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(parallel.dist, "broadcast_object_list", lambda what, **_: told.append(what))

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        parallel.Share(count=2).by_first(stop)
    assert told == [[None, False]]


@pytest.mark.parametrize(("rank", "told"), [(0, ""), (1, "error: Process 1: It is broken. Mend it.\n")])
def test_a_process_that_is_alone_with_its_fault_does_not_wait(
    rank: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    join, barriers = parallel.dist.init_process_group, []

    def join_alone(backend: str, **_: object) -> None:
        join(backend, init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)

    def fail() -> None:
        with parallel.joined("cpu"):
            raise MulstmError("It is broken. Mend it.")

    for name, value in {"WORLD_SIZE": "2", "RANK": str(rank)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(parallel.dist, "init_process_group", join_alone)
    monkeypatch.setattr(parallel, "_meeting_place", parallel.dist.HashStore)
    monkeypatch.setattr(parallel.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(parallel.dist, "barrier", lambda: barriers.append(rank))  # which would last for days
    monkeypatch.setattr(parallel, "ALONE", timedelta(seconds=0.1), raising=False)
    try:
        with pytest.raises(MulstmError, match="It is broken"):
            fail()
        assert (barriers, capsys.readouterr().err) == ([], told)
    finally:
        if parallel.dist.is_initialized():
            parallel.dist.destroy_process_group()
