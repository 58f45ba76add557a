"""Language models for tests."""

from __future__ import annotations

from typing import Any

import torch

from mulstm.checkpoint import Checkpoint
from mulstm.data.alphabet import Alphabet
from mulstm.nn import LanguageModel
from mulstm.recipe import ModelRecipe, Recipe

BARE = {"output_bias": False}
# The authors' stacked LSTM; its width comes on top.
STACKED = {"cell": "lstm", "layers": 2, "skip": True, "unit": "initial", "learn_b_h": False, **BARE}


def make(recipe: ModelRecipe, alphabet: int = 9, **kwargs: Any) -> LanguageModel:
    """In float64, no parameter at its start."""
    torch.manual_seed(5)
    model = LanguageModel(recipe, alphabet, **kwargs).double()
    model.precision = "fp64"
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def of_bytes() -> Checkpoint:
    """In float32, with guesses that differ."""
    torch.manual_seed(0)
    model = LanguageModel(ModelRecipe(hidden=9, embedding=5, weight_norm=True), 256)
    with torch.no_grad():
        model.W_out.normal_(0, 1)
    return Checkpoint(model.eval(), Alphabet.bytes(), Recipe(), {})
