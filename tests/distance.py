"""How far a backend's numbers are from the equations'."""

from torch import Tensor


def rms(a: Tensor, b: Tensor) -> float:
    """Root mean square of the difference, relative to b's."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp_min(1e-30))
