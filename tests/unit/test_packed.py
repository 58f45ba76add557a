"""Kernels start on the current GPU: the model's must be that, whichever the caller's is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from mulstm.errors import BackendError
from mulstm.nn import packed
from mulstm.nn.model import LanguageModel
from mulstm.ops import faults
from mulstm.recipe import ModelRecipe


@pytest.mark.parametrize("work", ["run", "pack", "logits", "loss", "losses"])
def test_the_models_gpu_is_the_current_one_while_kernels_start(
    work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[torch.device] = []

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        entered.append(which)
        raise RuntimeError("far enough")
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    model = LanguageModel(ModelRecipe(hidden=8), alphabet_size=4)
    with pytest.raises(RuntimeError, match="far enough"):
        getattr(packed, work)(model)
    assert entered == [model.W_out.device]


@pytest.mark.parametrize("name", ["cuda", "cuda:3", torch.device("cuda"), torch.device("cuda", 3)])
def test_a_raised_flag_is_seen_however_the_device_is_named(
    name: torch.device | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = torch.ones((), dtype=torch.int32)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(faults, "_FLAGS", {torch.device("cuda", 3): raised})
    with pytest.raises(BackendError, match="waited in vain"):
        packed.check_kernels(name)
    assert not raised  # it is dealt with
    packed.check_kernels("cpu")
