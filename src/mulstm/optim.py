"""How a gradient becomes an update: Adam, the paper's length-normalised RMSprop, and the rate's course."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mulstm.recipe import OptimiserRecipe

Named = Iterable[tuple[str, Tensor]]


def rate_at(optimiser: OptimiserRecipe, n: int, updates: int) -> float:
    """The rate of the update that follows `n` finished ones, in a run of `updates`."""
    over = optimiser.decay_updates or max(updates, 1)
    left = max(over - n, 0) / over
    match optimiser.decay:
        case "linear":
            rate = max(optimiser.rate * left, optimiser.floor)
        case "cosine":
            swing = 0.5 * (1.0 - math.cos(math.pi * left))
            rate = optimiser.floor + (optimiser.rate - optimiser.floor) * swing
        case "exponential":
            rate = max(optimiser.rate * optimiser.decay_factor ** (n + 1), optimiser.floor)
        case "constant":
            rate = optimiser.rate
        case other:
            raise ValueError(f"there is no decay {other!r}")
    return rate * min(1.0, (n + 1) / optimiser.warmup) if optimiser.warmup else rate


def build(optimiser: OptimiserRecipe, named: Named, rate: Tensor) -> torch.optim.Optimizer:
    """The optimiser of a recipe. `rate` is a tensor that the caller refills before each update."""
    parameters = [(name, tensor) for name, tensor in named if tensor.requires_grad]
    if optimiser.name == "rmsprop-normalised":
        return NormalisedRMSprop(
            [tensor for _, tensor in parameters], rate, optimiser.beta2, optimiser.epsilon
        )
    # Decay is for matrices: pulling gains, biases and gate offsets to zero is not regularisation.
    decayed = [tensor for name, tensor in parameters if tensor.dim() >= 2 and not _is_gain(name)]
    others = [tensor for name, tensor in parameters if tensor.dim() < 2 or _is_gain(name)]
    groups = [
        {"params": decayed, "weight_decay": optimiser.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    kind = torch.optim.AdamW if optimiser.name == "adamw" else torch.optim.Adam
    return kind(
        [group for group in groups if group["params"]],
        lr=rate,
        betas=(optimiser.beta1, optimiser.beta2),
        eps=optimiser.epsilon,
        fused=all(tensor.is_contiguous() for _, tensor in parameters),  # the kernel knows no strides
        capturable=rate.is_cuda,
    )


def _is_gain(name: str) -> bool:
    """Whether a parameter is a gain of weight norm; the tensor RNN has one a symbol and row, as a matrix."""
    return name.rpartition(".")[2].startswith("g_")


class NormalisedRMSprop(torch.optim.Optimizer):
    """RMSprop whose update, over all parameters together, always has the length `rate`.

    MS <- decay MS + (1 - decay) g^2,  v = g / (sqrt(MS) + epsilon),  p <- p - rate v / |v|,
    where the decay of a parameter's j-th update is 1 - 1/j while j < 10: MS starts as a plain mean.
    """

    def __init__(self, parameters: Iterable[Tensor], rate: Tensor, decay: float, epsilon: float) -> None:
        super().__init__(parameters, {"lr": rate, "decay": decay, "epsilon": epsilon})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One group only: an update has one length."""
        if self.param_groups:
            raise ValueError(
                "The length of an update is that of all parameters together. Give them as one group."
            )
        super().add_param_group(param_group)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "mean_square": torch.zeros_like(parameter),
            }

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update. Nothing here reads a value back, so that it can be captured in a CUDA graph."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return loss
        gradients = [parameter.grad for parameter in parameters]
        steps = [self.state[parameter]["step"] for parameter in parameters]
        squares = [self.state[parameter]["mean_square"] for parameter in parameters]
        torch._foreach_add_(steps, 1)
        j = torch.stack(steps)  # of each: one may have joined late
        decay = torch.where(j < 10, 1 - 1 / j, torch.full_like(j, group["decay"]))
        for square, gradient, share in zip(squares, gradients, (1 - decay).unbind(), strict=True):
            square.lerp_(gradient * gradient, share.to(square.dtype))
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["epsilon"])
        moves = torch._foreach_div(gradients, roots)
        length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(moves)))
        # A gradient of exactly zero moves nothing; dividing by its length would.
        scale = torch.where(length > 0, group["lr"] / length, torch.zeros_like(length))
        torch._foreach_mul_(moves, scale)
        torch._foreach_sub_(parameters, moves)
        return loss


def clip(parameters: Sequence[Tensor], largest: float) -> Tensor:
    """The norm of the whole gradient, after scaling it down to `largest` if that is > 0 and exceeded."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
    if largest > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm, foreach=True)
    return norm


def clip_and_step(optimiser: torch.optim.Optimizer, parameters: Sequence[Tensor], largest: float) -> Tensor:
    """Clips as `clip` does, makes the optimiser's step, and returns the norm; gradients are not kept."""
    if isinstance(optimiser, torch.optim.Adam) and _fusible(optimiser):
        return _fused_adam(optimiser, largest)
    norm = clip(parameters, largest)
    optimiser.step()
    return norm


def _fusible(optimiser: torch.optim.Adam) -> bool:
    """Whether Adam and the clipping before it can be one kernel's work: fp32 on a GPU that Triton knows."""
    held = [p for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
    if not held or find_spec("triton") is None:
        return False
    if not all(
        x.is_cuda and x.dtype == torch.float32 and x.is_contiguous() for p in held for x in (p, p.grad)
    ):
        return False
    return torch.cuda.get_device_capability(held[0].device) >= (8, 0)


@torch.no_grad()
def _fused_adam(optimiser: torch.optim.Adam, largest: float) -> Tensor:
    from mulstm.ops.triton_adam import adam

    # Those that decay come first.
    groups = sorted(optimiser.param_groups, key=lambda group: group["weight_decay"] == 0)
    held = [[p for p in group["params"] if p.grad is not None] for group in groups]
    parameters = [p for group in held for p in group]
    for p in parameters:
        if not optimiser.state[p]:
            optimiser.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
    means, squares, steps = (
        [optimiser.state[p][what] for p in parameters] for what in ("exp_avg", "exp_avg_sq", "step")
    )
    first = groups[0]
    with torch.cuda.device(parameters[0].device):  # a kernel starts on the current one
        norm = adam(
            parameters, [p.grad for p in parameters], means, squares, steps,
            first["lr"], first["betas"], first["eps"], first["weight_decay"],
            len(held[0]), isinstance(optimiser, torch.optim.AdamW), largest,
        )  # fmt: skip
    torch.autograd.graph.increment_version(parameters)  # a kernel changes them unseen
    return norm


def state_tensors(optimiser: torch.optim.Optimizer, named: Named) -> dict[str, Tensor]:
    """What the optimiser remembers, each tensor under "<what>.<parameter>"."""
    return {
        f"{what}.{name}": value
        for name, parameter in named
        for what, value in optimiser.state.get(parameter, {}).items()
    }


@torch.no_grad()
def load_state_tensors(optimiser: torch.optim.Optimizer, named: Named, tensors: Mapping[str, Tensor]) -> None:
    """Puts back what `state_tensors` gave; ValueError where a part of it is missing or of another shape."""
    parameters = dict(named)
    states: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    for key, value in tensors.items():
        what, _, name = key.partition(".")
        if name not in parameters:
            raise ValueError(f"there is no parameter {name}")
        parameter = parameters[name]
        if value.shape != (() if what == "step" else parameter.shape):
            raise ValueError(f"{key} has the shape {tuple(value.shape)}")
        states[name][what] = value.to(parameter.device).clone()
    whats = {key.partition(".")[0] for key in tensors}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            if missing := sorted(whats - states[name].keys()):
                raise ValueError(f"{missing[0]}.{name} is missing")
            optimiser.state[parameter] = states[name]
