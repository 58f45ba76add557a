"""Small models and texts for the tests of the codec: random weights that say something definite."""

from __future__ import annotations

import hashlib
import io
import math
import random
from functools import cache
from typing import Any

import numpy as np
import torch

from mulstm.codec import archive
from mulstm.codec.integer import IntegerModel
from mulstm.codec.network import Network
from mulstm.codec.quantize import quantize
from mulstm.data.alphabet import Alphabet
from mulstm.nn.model import LanguageModel
from mulstm.recipe import InitRecipe, ModelRecipe

TEXT = b"the multiplicative LSTM: m_t = (W_mx x_t) * (W_mh h_t-1). " * 40


def parent(
    alphabet: Alphabet | None = None, seed: int = 0, scale: float = 1.0, **wiring: object
) -> LanguageModel:
    """A float model that knows how often the bytes of TEXT occur, and is random otherwise."""
    alphabet = alphabet or Alphabet.bytes()
    recipe = ModelRecipe(**{"hidden": 12, "embedding": 5, "weight_norm": True} | wiring)  # type: ignore[arg-type]
    model = LanguageModel(recipe, alphabet.size, init=None)
    model.initialise(InitRecipe(), torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * scale * torch.randn(parameter.shape, generator=generator))
        if model.b_out is not None:
            for k, byte in enumerate(alphabet.symbols):
                model.b_out[k] += math.log(TEXT.count(byte) + 4)
    return model.eval()


@cache
def integer(alphabet: Alphabet | None = None, seed: int = 0, **wiring: object) -> IntegerModel:
    """The integer model of such a one."""
    model = parent(alphabet, seed, **wiring)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    return quantize(weights, model.recipe, alphabet or Alphabet.bytes(), "0" * 64)


def golden(size: int = 30, **wiring: object) -> IntegerModel:
    """A model whose weights are hash values: the same with every version of every library."""
    alphabet = Alphabet(bytes(range(10, 127)))
    recipe = ModelRecipe(**{"hidden": 9, "embedding": 4, "weight_norm": True} | wiring)  # type: ignore[arg-type]
    weights = {}
    for name, tensor in LanguageModel(recipe, alphabet.size, init=None).state_dict().items():
        drawn = hashlib.shake_128(name.encode()).digest(4 * tensor.numel())
        count = 2.0 ** (32 if name.endswith("out") else size)
        weights[name] = (np.frombuffer(drawn, "<i4") / count).astype(np.float32).reshape(tensor.shape)
    return quantize(weights, recipe, alphabet, "golden")


def mixed(n: int, seed: int = 0) -> bytes:
    """Repeated text with noise in it: what every part of the codec has something to do with."""
    rng = random.Random(seed)
    text = TEXT * (n // len(TEXT) + 1)
    return bytes(rng.randrange(256) if rng.random() < 0.05 else byte for byte in text[:n])


def packed(content: bytes, network: Network, **how: Any) -> bytes:
    """The archive of a text."""
    target = io.BytesIO()
    archive.compress(io.BytesIO(content), target, network, **{"verify": False} | how)
    return target.getvalue()


def unpacked(data: bytes, network: Network, **how: Any) -> bytes:
    """And back."""
    target = io.BytesIO()
    archive.decompress(io.BytesIO(data), target, network, **how)
    return target.getvalue()
