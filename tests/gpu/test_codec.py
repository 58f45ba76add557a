"""The codec on a graphics card: the same bytes as on a CPU, and fast."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from codec_models import integer, mixed, packed, unpacked
from mulstm.codec.network import Network
from mulstm.codec.products import KINDS
from mulstm.codec.quantize import quantize
from mulstm.data.alphabet import Alphabet
from mulstm.recipe import ModelRecipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
WIRINGS: list[dict[str, Any]] = [
    {},
    {"hidden": 61, "layers": 2, "skip": True, "unit": "initial"},
    {"hidden": 40, "cell": "lstm"},
    {"hidden": 33, "cell": "milstm"},
]


@pytest.mark.parametrize("wiring", WIRINGS, ids=str)
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("lanes", [1, 30, 200])
def test_the_same_bytes(wiring: dict[str, Any], adaptive: bool, lanes: int) -> None:
    model, content = integer(Alphabet(bytes(range(32, 127))), **wiring), mixed(60 * lanes)
    on_cpu, on_gpu = Network(model), Network(model, "cuda")
    assert on_gpu.products.kind == "int8"
    data = packed(content, on_cpu, lanes=lanes, adaptive=adaptive)
    assert packed(content, on_gpu, lanes=lanes, adaptive=adaptive) == data
    assert unpacked(data, on_gpu) == content
    assert unpacked(data, on_cpu) == content


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_recorded_step_gives_the_same(adaptive: bool) -> None:
    """Long enough to be recorded twice: the last lane ends 350 steps before the others."""
    model, content = integer(Alphabet(bytes(range(32, 127)))), mixed(400 * 600 - 350)
    on_gpu = Network(model, "cuda")
    data = packed(content, Network(model), lanes=400, adaptive=adaptive)
    assert packed(content, on_gpu, lanes=400, adaptive=adaptive) == data
    assert unpacked(data, on_gpu) == content


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_exact(kind: str) -> None:
    content = mixed(3_000)
    data = packed(content, Network(integer(hidden=50)), lanes=40)
    assert packed(content, Network(integer(hidden=50), "cuda", kind), lanes=40) == data


def test_speed_at_the_papers_size(record_property: Any) -> None:
    """Random weights of the paper's 1900 units: 300 kB/s each way are wanted."""
    rng, H, E = np.random.default_rng(0), 1900, 400
    weights = {
        "embedding": rng.normal(0, 0.1, (256, E)),
        "layers.0.W_mx": rng.normal(0, 0.3, (H, E)),
        "layers.0.W_mh": rng.normal(0, H**-0.5, (H, H)),
        "layers.0.W_zx": rng.normal(0, 0.3, (4 * H, E)),
        "layers.0.W_zm": rng.normal(0, H**-0.5, (4 * H, H)),
        "layers.0.b_z": np.zeros(4 * H),
        "W_out": rng.normal(0, 0.05, (256, H)),
        "b_out": np.zeros(256),
    }
    model = quantize(weights, ModelRecipe(hidden=H, embedding=E), Alphabet.bytes(), "")
    network = Network(model, "cuda")
    speeds: dict[str, float] = {}
    for lanes in (64, 512, 1024):
        for adaptive in (False, True):
            content = mixed(600 * lanes)
            packed(content[: 250 * lanes], network, lanes=lanes, adaptive=adaptive)
            start = time.perf_counter()
            data = packed(content, network, lanes=lanes, adaptive=adaptive)
            between = time.perf_counter()
            assert unpacked(data, network) == content
            name = f"{lanes} lanes {'adaptive' if adaptive else 'static'}"
            speeds[f"{name} to"] = len(content) / 1e3 / (between - start)
            speeds[f"{name} from"] = len(content) / 1e3 / (time.perf_counter() - between)
    for name, speed in speeds.items():
        record_property(name, speed)
        print(f"{name}: {speed:.0f} kB/s")
    assert min(speeds["1024 lanes static to"], speeds["1024 lanes static from"]) > 300
