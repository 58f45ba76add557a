"""A flag on each device that a kernel raises when it has waited in vain for its neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

_FLAGS: dict[torch.device, Tensor] = {}


def flag(device: torch.device) -> Tensor:
    """Not 0 once a kernel has waited in vain: whoever reads results should look at it now and then."""
    if device not in _FLAGS:
        _FLAGS[device] = torch.zeros((), dtype=torch.int32, device=device)
    return _FLAGS[device]


def failed(device: torch.device) -> bool:
    """Whether a kernel has waited in vain there; asking makes the host wait for the device."""
    return device in _FLAGS and bool(_FLAGS[device])


def forget(device: torch.device) -> None:
    """What failed there is dealt with: kernels wait for each other again."""
    if device in _FLAGS:
        _FLAGS[device].zero_()
