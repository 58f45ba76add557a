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


def failed(device: torch.device | str) -> bool:
    """Whether a kernel has waited in vain there; asking makes the host wait for the device."""
    found = _FLAGS.get(_numbered(device))
    return found is not None and bool(found)


def forget(device: torch.device | str) -> None:
    """What failed there is dealt with: kernels wait for each other again."""
    if (found := _FLAGS.get(_numbered(device))) is not None:
        found.zero_()


def _numbered(device: torch.device | str) -> torch.device:
    """As a tensor on it says: "cuda" is the current one."""
    device = torch.device(device)
    if device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return device
