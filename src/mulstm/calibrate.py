"""How sure of itself a trained model is to be: two factors, chosen on text that it has not learnt from.

A model that knows much of its training text by heart is too sure of itself elsewhere. Logits divided by a
temperature above 1 (Guo et al., 2017) mend a part of that. Another part is mended where certainty builds up:
dropout disturbs what the recurrence adds to the gates, and without it that counts for too much. Both factors
become part of the weights, so that the model stays what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mulstm.errors import MulstmError
from mulstm.nn.model import LanguageModel

STEP = 0.94  # from a factor that is tried to the next
FAR = 10  # steps that a search goes
WORTH = 1e-4  # the least gain, in what `cost` counts, for which a model is changed
ROUNDS = 2  # searches for each factor


class Calibration(NamedTuple):
    """What a model's logits and recurrent products were multiplied by; its cost before and after."""

    logits: float
    recurrent: float
    before: float
    after: float


@torch.no_grad()
def calibrate(model: LanguageModel, cost: Callable[[], float]) -> Calibration:
    """Multiplies logits and recurrent products, in the model's weights, by the factors of least `cost`.

    `cost` measures the model as it stands; it is called some fifteen times, at most sixty. A factor that
    gains nothing worth mentioning is 1.
    """
    output: list[Tensor] = [tensor for tensor in (model.W_out, model.b_out) if tensor is not None]
    scaled = {"logits": output, "recurrent": [*map(_length, model.layers)]}
    if not all(isinstance(tensor, nn.Parameter) for tensors in scaled.values() for tensor in tensors):
        raise MulstmError(
            "The model has parametrizations or is pruned: what is made anew cannot be scaled. Make them "
            "part of its weights first: parametrize.remove_parametrizations, prune.remove."
        )
    given = {name: [tensor.clone() for tensor in tensors] for name, tensors in scaled.items()}
    factors = dict.fromkeys(scaled, 1.0)

    def scale(name: str, factor: float) -> None:
        for tensor, own in zip(scaled[name], given[name], strict=True):
            tensor.copy_(own * factor)

    def cost_with(name: str, factor: float) -> float:
        scale(name, factor)
        return cost()

    try:
        before = least = cost()
        for name in [*scaled] * ROUNDS:
            factor, lower = _lowest(partial(cost_with, name), factors[name], least)
            if lower < least - WORTH:
                factors[name], least = factor, lower
            scale(name, factors[name])
    except BaseException:
        for name in scaled:
            scale(name, 1.0)
        raise
    return Calibration(**factors, before=before, after=least)


def _length(layer: nn.Module) -> Tensor:
    """What makes the recurrent part of the gates long or short: with weight norm the matrix's gains."""
    names = ("g_zm", "g_hh", "W_zm", "W_hh")
    found: Tensor = getattr(layer, next(name for name in names if hasattr(layer, name)))
    return found


def _lowest(cost: Callable[[float], float], start: float, here: float) -> tuple[float, float]:
    """The best factor found and its cost, `here` being that of the start: downhill, then by a parabola."""
    costs = {0.0: here}  # by steps from the start

    def ask(step: float) -> float:
        costs[step] = cost(start * STEP**step)
        return costs[step]

    for way in (1.0, -1.0):
        step = way
        while ask(step) == min(costs.values()) and abs(step) < FAR:
            step += way
        if min(costs.values()) < here:
            break
    best = min(costs, key=costs.__getitem__)
    if {best - 1, best + 1} <= costs.keys():
        left, right = costs[best - 1] - costs[best], costs[best + 1] - costs[best]
        if left + right > 0:
            ask(best + (left - right) / (left + right) / 2)
    best = min(costs, key=costs.__getitem__)
    return start * STEP**best, costs[best]
