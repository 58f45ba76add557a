"""bits/char of a committed model, computed again from its file in plain numpy: no torch, no code of ours."""

import dataclasses
import itertools
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from mulstm import checkpoint
from mulstm.data import corpus
from mulstm.evaluate import evaluate

FILE = Path(__file__).parents[1] / "data" / "small.safetensors"
TEXT = b"the dog sat on the cat and a rat ran to the mat\n" * 7


def read(path: Path) -> tuple[dict[str, np.ndarray], dict]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    meta = json.loads(header.pop("__metadata__")["mulstm"])
    arrays = {}
    for name, entry in header.items():
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        assert entry["dtype"] == "F32"
        arrays[name] = np.frombuffer(data[start:stop], "<f4").reshape(entry["shape"]).astype(np.float64)
    return arrays, meta


def bits_by_hand(w: dict[str, np.ndarray], symbols: list[int]) -> float:
    """The paper's equations and weight norm, one symbol after another."""

    def matrix(name: str) -> np.ndarray:
        V, g = w[f"layers.0.W_{name}"], w[f"layers.0.g_{name}"]
        return V * (g / np.sqrt((V**2).sum(axis=1)))[:, None]

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    W_mx, W_mh, W_zx, W_zm = (matrix(name) for name in ("mx", "mh", "zx", "zm"))
    H = W_mh.shape[0]
    h, c, bits = np.zeros(H), np.zeros(H), 0.0
    for now, after in itertools.pairwise(symbols):
        x = w["embedding"][now]
        z = W_zx @ x + W_zm @ ((W_mx @ x) * (W_mh @ h)) + w["layers.0.b_z"]
        h_hat, i, o, f = z[:H], sigmoid(z[H : 2 * H]), sigmoid(z[2 * H : 3 * H]), sigmoid(z[3 * H :])
        c = f * c + i * np.tanh(h_hat)
        h = np.tanh(c) * o
        logits = w["W_out"] @ h + w["b_out"]
        bits -= (logits[after] - logits.max() - np.log(np.exp(logits - logits.max()).sum())) / np.log(2)
    return bits / (len(symbols) - 1)


def test_evaluate_agrees_with_numpy(tmp_path: Path) -> None:
    arrays, meta = read(FILE)
    known = sorted(b" abcdefghijklmnopqrstuvwxyz\n")
    assert len(known) == arrays["embedding"].shape[0]
    (tmp_path / "text").write_bytes(TEXT)
    loaded = checkpoint.load(FILE)
    assert loaded.meta["fingerprint"] == meta["fingerprint"]
    split = corpus.load(str(tmp_path / "text"), split="100-0-0").split("train")
    split = dataclasses.replace(split, alphabet=loaded.alphabet)
    found = evaluate(loaded.model, split, lanes=1)
    assert found.symbols == len(TEXT) - 1
    by_hand = bits_by_hand(arrays, [known.index(byte) for byte in TEXT])
    assert found.bits_per_char == pytest.approx(by_hand, abs=1e-5)
    assert by_hand < np.log2(len(known)) - 1  # it has learnt something: the agreement is not that of noise
