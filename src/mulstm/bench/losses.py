"""Trains a model briefly by the fastest backend and by `reference` in fp32: do the losses agree within noise?

Both start from the same weights, read the same text in the same order and drop the same units. What noise is,
further runs show: the fastest backend again, with other masks and the text begun elsewhere.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mulstm import update
from mulstm.bench.layers import E
from mulstm.bench.timing import Session
from mulstm.data import corpus
from mulstm.data.lanes import Lanes
from mulstm.errors import DataError
from mulstm.nn.model import LanguageModel
from mulstm.optim import rate_at
from mulstm.recipe import DropoutRecipe, InitRecipe, ModelRecipe, OptimiserRecipe, Recipe, TrainRecipe
from mulstm.units import bits

LAST = 50  # updates whose mean is compared
SEEDS = 3


@dataclass(frozen=True)
class Size:
    """Of the short run."""

    hidden: int = 1900
    lanes: int = 128
    chunk: int = 50
    updates: int = 300
    embedding: int = E
    held_out: int = 20  # chunks of the validation part that are scored after the training


def text() -> corpus.Corpus:
    """enwik8 where $MULSTM_DATA has a copy; else the text that is always there, Python's own sources."""
    folder = os.environ.get("MULSTM_DATA")
    if folder and any(Path(folder).glob("enwik8*")):  # nothing is downloaded for a benchmark
        return corpus.load("enwik8")
    return corpus.load("python")


def compare(session: Session, size: Size, data: corpus.Corpus | None = None) -> dict[str, Any]:
    """Everything that results/bench/losses-<machine>.json holds."""
    data = data or text()
    how = Recipe(
        model=ModelRecipe(hidden=size.hidden, embedding=size.embedding, weight_norm=True),
        init=InitRecipe(),
        dropout=DropoutRecipe(embedding=0.2, hidden=0.2),
        optimiser=OptimiserRecipe(rate=1e-3, warmup=min(50, size.updates // 4), decay="linear", clip=1.0),
        train=TrainRecipe(lanes=size.lanes, chunk=size.chunk, updates=size.updates, precision="bf16"),
    )
    plain = replace(how, train=replace(how.train, precision="fp32", backend="reference"))
    # The weights are drawn once: every run starts from a copy.
    torch.manual_seed(1)
    start = LanguageModel(how.model, data.alphabet.size, how.init).state_dict()
    curves = []
    runs = [("reference, fp32", plain, 1)]
    runs += [("fastest backend, bf16", how, seed) for seed in range(1, SEEDS + 1)]
    for name, recipe, seed in runs:
        curve = _train(session, recipe, start, data, seed, size)
        session.say(
            f"{name}, seed {seed}: {curve['held_out_bits']:.4f} bits/char held out, {curve['seconds']:.1f} s"
        )
        curves.append({"name": name, "precision": recipe.train.precision, "seed": seed} | curve)
    return {
        "model": {"cell": "mlstm", **vars(size)},
        "text": data.name,
        "curves": curves,
        "agreement": agreement(curves),
    }


def _train(
    session: Session, how: Recipe, start: dict[str, Any], data: corpus.Corpus, seed: int, size: Size
) -> dict[str, Any]:
    model = LanguageModel(how.model, data.alphabet.size, init=None).to(session.device)
    model.load_state_dict(start)
    model.precision, model.backend = how.train.precision, how.train.backend
    work = update.make(model, how, torch.Generator(session.device).manual_seed(seed))
    split = data.split("train")
    offset = (seed - 1) * (split.symbols_count // SEEDS)
    lanes = Lanes(split, size.lanes, size.chunk, trim=True, offset=offset)
    if len(lanes) < size.updates:
        raise DataError(
            f"{data.name} has {len(lanes)} chunks of {size.lanes} x {size.chunk}, fewer than "
            f"{size.updates}. Give a longer text."
        )
    nats = torch.zeros(size.updates, device=session.device)
    begin = time.perf_counter()
    for k in range(size.updates):
        x, y = lanes.chunk_at(k)
        nats[k] = work(x, y, rate_at(how.optimiser, k, size.updates))
    session.wait()
    seconds = time.perf_counter() - begin
    model.forget()  # a replayed graph has changed the weights behind its back
    return {
        "seconds": round(seconds, 2),
        "bits": [round(bits(value), 5) for value in nats.tolist()],
        "held_out_bits": round(_held_out(model, data, size, session.device), 5),
    }


@torch.no_grad()
def _held_out(model: LanguageModel, data: corpus.Corpus, size: Size, device: str) -> float:
    model.eval()
    lanes = Lanes(data.split("valid"), size.lanes, size.chunk, trim=True)
    state, total, chunks = None, 0.0, min(size.held_out, len(lanes))
    for k in range(chunks):
        x, y = (torch.from_numpy(np.asarray(part)).long().to(device) for part in lanes.chunk_at(k))
        nats, state = model.losses(x, y, state)
        total += float(nats.mean())
    return bits(total / chunks)


def agreement(curves: list[dict[str, Any]]) -> dict[str, Any]:
    """How far the fastest backend is from `reference` with the same seed, and from itself with others."""
    plain, *fast = curves
    held_out = [float(curve["held_out_bits"]) for curve in fast]
    noise = max(held_out) - min(held_out)
    apart = held_out[0] - float(plain["held_out_bits"])
    last = [float(np.mean(curve["bits"][-LAST:])) for curve in (fast[0], plain)]
    return {
        "held_out_difference_bits": round(apart, 5),
        "held_out_range_of_seeds_bits": round(noise, 5),
        "difference_of_the_last_updates_bits": round(last[0] - last[1], 5),
        "within_noise": abs(apart) <= noise,
    }
