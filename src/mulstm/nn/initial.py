"""Where a model's parameters start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mulstm.errors import RecipeError
from mulstm.ops import GATES
from mulstm.recipe import InitRecipe

if TYPE_CHECKING:
    from mulstm.nn.layer import Layer
    from mulstm.nn.model import LanguageModel


@torch.no_grad()
def initialise(model: LanguageModel, init: InitRecipe, generator: torch.Generator | None = None) -> None:
    """Draws all parameters of a model anew, in a fixed order, on the generator's device (CPU without one)."""
    if model.embedding is not None:
        r = init.embedding_range
        model.embedding.copy_(_empty(model.embedding, generator).uniform_(-r, r, generator=generator))
    for k, layer in enumerate(model.stack):
        initialise_layer(layer, init, generator, from_below=k > 0 and not model.recipe.skip)
    _draw(model.W_out, init.output, init.output_scale, generator)
    if model.b_out is not None:
        model.b_out.zero_()


@torch.no_grad()
def initialise_layer(
    layer: Layer, init: InitRecipe, generator: torch.Generator | None, from_below: bool = False
) -> None:
    """Draws one layer. `from_below`: its input matrices come from the layer below, not from the text."""
    lower, upper = (init.lower, init.lower_scale), (init.input, init.input_scale)
    recurrent = (init.recurrent, init.recurrent_scale)
    how = dict.fromkeys(("W_mx", "W_zx"), lower if from_below else upper)
    how |= dict.fromkeys(("W_ml", "W_zl"), lower) | dict.fromkeys(("W_mh", "W_zm", "W_hh"), recurrent)
    for name in layer.matrices:
        W = layer.get_parameter(name)
        for matrix in W if W.dim() == 3 else [W]:
            _draw(matrix, *how[name], generator)
        g = layer.parameter("g" + name[1:])
        if g is not None:
            g.copy_(W.norm(dim=-1))
    if layer.b_z is not None:
        layer.b_z.zero_()
        if layer.unit != "tanh":
            b = dict(zip(GATES, layer.b_z.chunk(len(GATES)), strict=True))
            b["f"].fill_(init.forget_bias)
            b["o"].fill_(init.output_gate_bias)
    for name, value in (("alpha", init.alpha), ("beta_1", init.beta), ("beta_2", init.beta)):
        vector = layer.parameter(name)
        if vector is not None:
            vector.fill_(value)


def _empty(like: Tensor, generator: torch.Generator | None) -> Tensor:
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.empty(like.shape, dtype=wide, device=generator.device if generator else "cpu")


def _draw(W: Tensor, kind: str, scale: float, generator: torch.Generator | None) -> None:
    if kind == "gaussian":
        W.copy_(_empty(W, generator).normal_(0, 1, generator=generator) * scale)
    elif kind == "orthogonal":
        W.copy_(nn.init.orthogonal_(_empty(W, generator), gain=scale, generator=generator))
    elif kind == "orthogonal-blocks":
        for block in torch.split(W, W.shape[1]):
            _draw(block, "orthogonal", scale, generator)
    else:
        raise RecipeError(
            f"There is no initialisation {kind!r}. Choose orthogonal, orthogonal-blocks or gaussian."
        )
