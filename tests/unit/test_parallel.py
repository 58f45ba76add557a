"""Which device a name stands for, and what the first process tells the others."""

from __future__ import annotations

import os

import pytest
import torch

from mulstm import parallel
from mulstm.errors import BackendError


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


def test_a_folder_whose_name_is_no_text_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel.dist, "broadcast", lambda data, src: None)
    name = os.fsdecode(b"runs/caf\xe9")
    assert parallel.Share(count=2).tell(name) == name
