"""What a text costs under an integer model and under its parent: the price of whole numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mulstm.checkpoint import Checkpoint
from mulstm.codec.integer import IntegerModel
from mulstm.codec.network import Network
from mulstm.codec.session import Spelling, cut
from mulstm.codec.tables import TOTAL_BITS
from mulstm.errors import DataError
from mulstm.nn.packed import check_kernels
from mulstm.units import bits

_LANES, _CHUNK = 50, 100


def compare(loaded: Checkpoint, made: IntegerModel, file: Path, symbols: int) -> dict[str, Any]:
    """Bits/char of both on the start of a file, in the same lanes; bytes without a symbol are left out."""
    with file.open("rb") as stream:
        content = stream.read(min(symbols, file.stat().st_size))
    every = Spelling.of(made.alphabet).symbol_of[np.frombuffer(content, dtype=np.uint8)]
    x = every[every >= 0]
    if not content:
        raise DataError(f"{file} is empty. Give a text like those the model was trained on.")
    if not len(x):
        raise DataError(
            f"{file} has no byte of the model's alphabet. Give a text like those it was trained on."
        )
    B, L, _ = cut(len(x), _LANES)
    B = B if len(x) == B * L else B - 1  # without a last lane that is shorter
    text = torch.from_numpy(x[: B * L].astype(np.int64)).view(B, -1)
    mine, parents = integer_bits(Network(made), text), _parent_bits(loaded, text)
    return {
        "symbols": text.numel(),
        "unknown_bytes": len(every) - len(x),
        "bits_per_char": mine / text.numel(),
        "parent_bits_per_char": parents / text.numel(),
        "cost_bits_per_char": (mine - parents) / text.numel(),
    }


@torch.inference_mode()
def integer_bits(network: Network, text: Tensor) -> float:
    """The integer model's own cross-entropy on lanes of symbols (B, L), in bits."""
    state, total = network.start(len(text)), 0.0
    begins = torch.zeros(
        len(text), network.model.alphabet.size + 1, dtype=torch.float64, device=network.device
    )
    for x in text.T.to(network.device).contiguous():
        network.tables(network.output(state), None, None, begins)
        share = begins.gather(1, x[:, None] + 1) - begins.gather(1, x[:, None])
        total += float((TOTAL_BITS - torch.log2(share)).sum())
        network.step(x, state)
    return total


@torch.inference_mode()
def _parent_bits(loaded: Checkpoint, text: Tensor) -> float:
    """The same of the checkpoint; the output bias alone predicts the first symbol, as in the codec."""
    model, nats = loaded.model, 0.0
    if model.b_out is None:
        nats += text.shape[0] * math.log(model.alphabet_size)
    else:
        first = model.b_out.expand(len(text), -1).float()
        nats += float(torch.nn.functional.cross_entropy(first, text[:, 0], reduction="sum"))
    state = None
    for low in range(0, text.shape[1] - 1, _CHUNK):
        x = text[:, low : low + _CHUNK + 1]
        logits, state = model(x[:, :-1], state)
        nats += float(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="sum")
        )
    check_kernels(text.device)
    return bits(nats)
