"""Language models for tests: in float64, no parameter at its start."""

from __future__ import annotations

from typing import Any

import torch

from mulstm.nn import LanguageModel
from mulstm.recipe import ModelRecipe

BARE = {"output_bias": False}
# The authors' stacked LSTM; its width comes on top.
STACKED = {"cell": "lstm", "layers": 2, "skip": True, "unit": "initial", "learn_b_h": False, **BARE}


def make(recipe: ModelRecipe, alphabet: int = 9, **kwargs: Any) -> LanguageModel:
    torch.manual_seed(5)
    model = LanguageModel(recipe, alphabet, **kwargs).double()
    model.precision = "fp64"
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model
