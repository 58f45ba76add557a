"""Where a model's parameters start."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

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
        W = torch.empty_like(getattr(layer, name))
        for matrix in W if W.dim() == 3 else [W]:
            _draw(matrix, *how[name], generator)
        _put(layer, name, W)
        if (g := "g" + name[1:]) in layer.names:
            _put(layer, g, W.norm(dim=-1))
    if layer.b_z is not None:
        b_z = torch.zeros_like(layer.b_z)
        if layer.unit != "tanh":
            b = dict(zip(GATES, b_z.chunk(len(GATES)), strict=True))
            b["f"].fill_(init.forget_bias)
            b["o"].fill_(init.output_gate_bias)
        _put(layer, "b_z", b_z)
    for name, value in (("alpha", init.alpha), ("beta_1", init.beta), ("beta_2", init.beta)):
        vector = layer.parameter(name)
        if vector is not None:
            _put(layer, name, torch.full_like(vector, value))


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    """Into the parameter, or where something makes it anew each time, into what that is made of."""
    own = module._parameters
    if parametrize.is_parametrized(module, name):
        made = module.get_submodule(f"parametrizations.{name}")
        assert isinstance(made, parametrize.ParametrizationList)
        parts: Any = value  # one tensor, or several
        step: Any
        for step in reversed(list(made)):
            # One that cannot go back begins where it is told to, as when it was registered.
            with contextlib.suppress(NotImplementedError):
                parts = step.right_inverse(parts) if hasattr(step, "right_inverse") else parts
        originals = made.parameters(recurse=False)
        for original, part in zip(originals, [parts] if made.is_tensor else parts, strict=True):
            original.copy_(part)
    elif f"{name}_v" in own:  # the old weight norm
        hooks: Any = module._forward_pre_hooks.values()
        (dim,) = (hook.dim for hook in hooks if getattr(hook, "name", "") == name)
        module.get_parameter(f"{name}_v").copy_(value)
        module.get_parameter(f"{name}_g").copy_(torch.norm_except_dim(value, 2, dim))
    else:
        module.get_parameter(name if name in own else f"{name}_orig").copy_(value)  # _orig: of pruning


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
