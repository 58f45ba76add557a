"""What dropout keeps of a model, as masks that its owner draws and hands in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mulstm.errors import RecipeError
from mulstm.nn import packed
from mulstm.recipe import DropoutRecipe

if TYPE_CHECKING:
    from mulstm.nn.model import LanguageModel


class Masks(NamedTuple):
    """What variational dropout keeps, already divided by the share kept. None: keep all."""

    embedding: Tensor | None = None  # (B, E)
    hidden: tuple[Tensor | None, ...] = ()  # (B, H) for each layer; () is none at all
    output: Tensor | None = None  # (B, H), with skip wiring (B, layers * H)
    weights: tuple[dict[str, Tensor], ...] = ()  # by layer and matrix; DropConnect


def draw_masks(
    model: LanguageModel, B: int, dropout: DropoutRecipe | Any, generator: torch.Generator | None = None
) -> Masks | None:
    """As `LanguageModel.draw_masks` says."""
    r, device = model.recipe, model.device

    def draw(p: float | Tensor, *shape: int) -> Tensor | None:
        if not isinstance(p, Tensor) and not 0 < p < 1:
            if p == 0:
                return None
            raise RecipeError(f"A share of {p} cannot be dropped. Give a number from 0 to less than 1.")
        on = generator.device if generator else device
        u = torch.rand(shape, generator=generator, dtype=torch.float32, device=on)
        if isinstance(p, Tensor) and packed.serves(model):
            return packed.mask(u.to(device), p)
        return (u.to(device) >= p).float() / (1 - p)

    if not r.embedding and not (isinstance(dropout.embedding, (int, float)) and dropout.embedding == 0):
        raise RecipeError(
            f"dropout.embedding is {dropout.embedding} and the input is one-hot. "
            "Set dropout.embedding = 0 or give the model an embedding."
        )
    embedding = draw(dropout.embedding, B, r.embedding)
    hidden = tuple(draw(dropout.hidden, B, r.hidden) for _ in range(r.layers))
    output = draw(dropout.output, B, model.W_out.shape[1])
    weights = []
    for layer in model.stack:
        names = [n for n in layer.matrices if n in ("W_mh", "W_zm", "W_hh")]
        drawn = {n: draw(dropout.weights, *getattr(layer, n).shape) for n in names}
        weights.append({n: m for n, m in drawn.items() if m is not None})
    masks = Masks(
        embedding,
        hidden if any(m is not None for m in hidden) else (),
        output,
        tuple(weights) if any(weights) else (),
    )
    return None if masks == Masks() else masks


def require_masks(masks: Masks, model: LanguageModel, B: int) -> None:
    """Raises ValueError where a mask is not the model's for B lanes: a kernel would read beyond it."""
    r = model.recipe
    if len(masks.hidden) not in (0, r.layers):
        raise ValueError(f"Masks of h: {len(masks.hidden)}. Give one a layer, {r.layers}, or none.")
    if masks.embedding is not None and model.embedding is None:
        raise ValueError("There is a mask for the embedding, and the input is one-hot. Give None.")
    for name, mask, width in (
        ("embedding", masks.embedding, r.embedding),
        *(("hidden", mask, r.hidden) for mask in masks.hidden),
        ("output", masks.output, model.W_out.shape[1]),
    ):
        if mask is not None and mask.shape != (B, width):
            raise ValueError(f"The mask {name} is {tuple(mask.shape)}. Give {(B, width)}.")
