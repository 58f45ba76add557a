"""Checkpoints: what is saved comes back, and is found."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn.utils import prune

import mulstm
from mulstm import checkpoint, tensorfile
from mulstm.data import Alphabet
from mulstm.errors import CheckpointError, DataError
from mulstm.nn.model import LanguageModel
from mulstm.recipe import ModelRecipe, Recipe
from mulstm.runs import Run

ALPHABET = Alphabet(b"\n abcdefg")


@pytest.fixture
def model() -> LanguageModel:
    return LanguageModel(ModelRecipe(hidden=12, embedding=5, weight_norm=True), ALPHABET.size)


def test_round_trip(model: LanguageModel, tmp_path: Path) -> None:
    recipe = Recipe(name="mine", title="a title", model=model.recipe)
    path = tmp_path / "model.safetensors"
    fingerprint = checkpoint.save(
        path, model, ALPHABET, recipe=recipe, metrics={"bits": 1.5}, source={"licence": "none"}
    )
    loaded = checkpoint.load(path)
    assert loaded.recipe == recipe
    assert loaded.alphabet == ALPHABET
    assert loaded.meta["metrics"] == {"bits": 1.5}
    assert loaded.meta["source"] == {"licence": "none"}
    assert loaded.meta["version"] == mulstm.__version__
    assert not loaded.model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    assert fingerprint == loaded.meta["fingerprint"] == checkpoint.fingerprint(loaded.model, loaded.alphabet)


@pytest.mark.parametrize(
    ("name", "corpus", "tells"), [("", {}, False), ("mine", {}, True), ("", {"symbols": [9]}, True)]
)
def test_a_model_with_a_name_or_a_text_tells_its_training(
    model: LanguageModel, tmp_path: Path, name: str, corpus: dict[str, list[int]], tells: bool
) -> None:
    recipe = Recipe(name=name, model=model.recipe)
    checkpoint.save(tmp_path / "m.safetensors", model, ALPHABET, recipe=recipe, corpus=corpus)
    assert checkpoint.load(tmp_path / "m.safetensors").tells_its_training is tells


def test_one_metadata_key_and_equal_bytes_each_time(model: LanguageModel, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path, metrics in zip(paths, [{"b": 1, "a": 2}, {"a": 2, "b": 1}], strict=True):
        checkpoint.save(path, model, ALPHABET, metrics=metrics)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    with safe_open(paths[0], "pt") as file:
        assert list(file.metadata()) == ["mulstm"]


def test_float64_stays_float64(tmp_path: Path) -> None:
    model = LanguageModel(ModelRecipe(hidden=6), ALPHABET.size).double()
    checkpoint.save(tmp_path / "m.safetensors", model, ALPHABET)
    loaded = checkpoint.load(tmp_path / "m.safetensors").model
    assert torch.equal(loaded.W_out, model.W_out)
    mixed = LanguageModel(ModelRecipe(hidden=6), ALPHABET.size)
    mixed.W_out = torch.nn.Parameter(torch.rand_like(model.W_out))
    checkpoint.save(tmp_path / "m.safetensors", mixed, ALPHABET)
    assert torch.equal(checkpoint.load(tmp_path / "m.safetensors").model.W_out, mixed.W_out)


@pytest.mark.parametrize(("storage", "limit"), [("bf16", 4e-3), ("int8", 1e-2)])
def test_smaller_storage(model: LanguageModel, tmp_path: Path, storage: str, limit: float) -> None:
    path = tmp_path / "small.safetensors"
    checkpoint.save(path, model, ALPHABET, storage=storage)
    W_mh = load_file(path)["layers.0.W_mh"]
    assert W_mh.dtype == {"bf16": torch.bfloat16, "int8": torch.int8}[storage]
    loaded = checkpoint.load(path).model
    for name, tensor in model.state_dict().items():
        error = (loaded.state_dict()[name] - tensor).square().mean().sqrt()
        assert error <= limit * tensor.square().mean().sqrt(), name
        assert loaded.state_dict()[name].dtype == torch.float32
    gain = "layers.0.g_mh"  # vectors are kept as they are
    assert torch.equal(loaded.state_dict()[gain], model.state_dict()[gain])


@pytest.mark.parametrize("storage", checkpoint.STORAGES)
def test_a_model_knows_whether_it_is_still_that_of_its_file(
    model: LanguageModel, tmp_path: Path, storage: str
) -> None:
    checkpoint.save(tmp_path / "m.safetensors", model, ALPHABET, storage=storage)
    loaded = checkpoint.load(tmp_path / "m.safetensors")
    assert checkpoint.storage_of(loaded) == storage
    with torch.no_grad():
        loaded.model.W_out += 0.1
    assert checkpoint.storage_of(loaded) is None
    assert checkpoint.storage_of(checkpoint.Checkpoint(model, ALPHABET, Recipe(), {})) is None


def test_an_alphabet_that_does_not_fit_is_not_saved(model: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="9 symbols and the alphabet 256"):
        checkpoint.save(tmp_path / "m.safetensors", model, Alphabet.bytes())
    assert not (tmp_path / "m.safetensors").exists()


def test_int8_rows_of_zeros_stay_zeros(model: LanguageModel, tmp_path: Path) -> None:
    with torch.no_grad():
        model.W_out[2] = 0.0
    checkpoint.save(tmp_path / "m.safetensors", model, ALPHABET, storage="int8")
    assert torch.equal(checkpoint.load(tmp_path / "m.safetensors").model.W_out[2], torch.zeros(12))
    assert bool((load_file(tmp_path / "m.safetensors")["W_out.scale"] > 0).all())  # nothing divides by zero


def test_what_a_fingerprint_is_made_of() -> None:
    # Only what differs from the defaults counts: keys added to recipes later leave old fingerprints alone.
    model = LanguageModel(ModelRecipe(cell="rnn", hidden=2, output_bias=False), 3, init=None)
    alphabet = Alphabet(b"abc")
    wiring = {"cell": "rnn", "hidden": 2, "output_bias": False}
    digest = hashlib.sha256(json.dumps([wiring, alphabet.to_json()], sort_keys=True).encode())
    for name, shape in {
        "W_out": (3, 2),
        "layers.0.W_zm": (2, 2),
        "layers.0.W_zx": (2, 3),
        "layers.0.b_z": (2,),
    }.items():
        digest.update(f"\n{name} torch.float32 {shape}\n".encode() + bytes(4 * math.prod(shape)))
    assert checkpoint.fingerprint(model, alphabet) == digest.hexdigest()


@pytest.mark.parametrize("name", ["text", "hutter/mlstm-fast", "hutter/size/mlstm-3m"])
def test_a_folder_of_runs_stands_for_its_newest_with_a_model(
    name: str, model: LanguageModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for age, day in enumerate(("03", "02", "01")):  # the newest has been killed before its first checkpoint
        folder = tmp_path / "runs" / name / f"2026-01-{day}-seed1"
        folder.mkdir(parents=True)
        (folder / "recipe.toml").touch()
        os.utime(folder / "recipe.toml", (1e9 - age, 1e9 - age))
        if age:
            checkpoint.save(folder / "last.safetensors", model, ALPHABET)
    newest = tmp_path / "runs" / name / "2026-01-02-seed1" / "last.safetensors"
    assert checkpoint.find(tmp_path / "runs" / name) == checkpoint.find(tmp_path / "runs") == newest
    told = r"2026-01-03-seed1 ended before its first model: .*2026-01-02-seed1 is taken instead\n"
    assert re.fullmatch(f"(.*{told}){{2}}", capsys.readouterr().err)
    with pytest.raises(CheckpointError, match="The model's name is empty"):
        checkpoint.find("")
    with Run(tmp_path / "runs" / name / "2026-01-03-seed1"):  # not killed: it has just begun
        for folder in (tmp_path / "runs" / name, tmp_path / "runs"):
            with pytest.raises(CheckpointError, match="2026-01-03-seed1, has just begun and kept no model"):
                checkpoint.find(folder)
    (tmp_path / "empty").mkdir()
    (tmp_path / "diverged").mkdir()
    (tmp_path / "diverged" / "recipe.toml").touch()
    with pytest.raises(CheckpointError, match=r"has kept no model: .*\. Wait for it, or train again"):
        checkpoint.find(tmp_path / "diverged")
    with pytest.raises(CheckpointError, match="no checkpoint in the folder"):
        checkpoint.find(tmp_path / "empty")


@pytest.mark.parametrize("start", [b"\x80\x04", b"\x80\x05", b"PK"])
def test_a_header_whose_length_looks_like_a_pickle(
    start: bytes, model: LanguageModel, tmp_path: Path
) -> None:
    path = tmp_path / "m.safetensors"
    wanted = int.from_bytes(start, "little")
    while wanted < 3_000:  # the same two bytes, in a longer header
        wanted += 1 << 16
    checkpoint.save(path, model, ALPHABET)
    missing = wanted - struct.unpack("<Q", path.read_bytes()[:8])[0]
    for more in range(missing - 60, missing):  # the note's name and its quotes take room too
        checkpoint.save(path, model, ALPHABET, source={"note": "x" * more})
        if struct.unpack("<Q", path.read_bytes()[:8])[0] == wanted:
            break
    assert path.read_bytes()[:2] == start
    assert checkpoint.load(path).source["note"]


def test_unknown_storage(model: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="int4"):
        checkpoint.save(tmp_path / "m.safetensors", model, ALPHABET, storage="int4")


def test_a_folder_stands_for_its_best_model(model: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoint.load(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoint.load(tmp_path / "nowhere.safetensors")
    for name in ("last", "best"):
        checkpoint.save(tmp_path / f"{name}.safetensors", model, ALPHABET, metrics={"which": name})
        assert checkpoint.load(tmp_path).meta["metrics"] == {"which": name}


def test_the_file_can_be_read_by_others(model: LanguageModel, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "m.safetensors", model, ALPHABET)
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "m.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_released_model_is_found_by_name(
    model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    checkpoint.save(folder / "tiny.safetensors", model, ALPHABET, storage="int8")
    monkeypatch.setenv("MULSTM_MODELS", str(folder))
    monkeypatch.chdir(tmp_path)
    assert checkpoint.find("tiny") == folder / "tiny.safetensors"
    assert checkpoint.load("tiny").meta["storage"] == "int8"
    monkeypatch.delenv("MULSTM_MODELS")
    assert checkpoint.find("tiny").resolve() == folder / "tiny.safetensors"  # ./models
    (tmp_path / "tiny").write_bytes(b"a file of that name comes first")
    assert checkpoint.find("tiny") == Path("tiny")
    with pytest.raises(CheckpointError, match=r"by name: .*tiny"):
        checkpoint.find("tinny")


def test_what_no_file_can_hold_is_not_saved(model: LanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    checkpoint.save(path, torch.compile(model, backend="eager"), ALPHABET)
    assert same_weights(checkpoint.load(path).model, model)
    with pytest.raises(CheckpointError, match=r"cannot be written .* Give names and finite numbers"):
        checkpoint.save(path, model, ALPHABET, metrics={"bits": float("nan")})
    prune.l1_unstructured(model.layers[0], "W_zm", 0.5)
    with pytest.raises(CheckpointError, match=r"is pruned \(.*W_zm.*\), which no file holds"):
        checkpoint.save(path, model, ALPHABET)
    prune.remove(model.layers[0], "W_zm")
    checkpoint.save(path, model, ALPHABET)
    assert same_weights(checkpoint.load(path).model, model)
    model.register_buffer("more", torch.zeros(3))
    with pytest.raises(CheckpointError, match=r"\(more\), which no file holds"):
        checkpoint.save(path, model, ALPHABET)


def test_tensors_that_share_their_memory(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    tensorfile.write(tmp_path / "m", {"all": whole, "part": whole[2:4], "same": whole}, {"kind": "x"})
    found, _ = tensorfile.read(tmp_path / "m", "x")
    assert found["all"].equal(whole)
    assert found["same"].equal(whole)
    assert found["part"].equal(whole[2:4])


def test_the_type_that_is_usual_elsewhere_is_not_loaded(
    model: LanguageModel, tmp_path: Path, usual: AbstractContextManager[None]
) -> None:
    checkpoint.save(tmp_path / "m.safetensors", model, ALPHABET)
    with usual:
        found = checkpoint.load(tmp_path / "m.safetensors").model
    assert same_weights(found, model)


def test_the_device_that_is_usual_elsewhere_is_not_taken(model: LanguageModel, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "m.safetensors", model, ALPHABET)
    with torch.device("meta"):
        found = checkpoint.load(tmp_path / "m.safetensors").model
    assert same_weights(found, model)


def same_weights(a: LanguageModel, b: LanguageModel) -> bool:
    mine, its = a.state_dict(), b.state_dict()
    return mine.keys() == its.keys() and all(
        its[name].dtype == x.dtype and its[name].equal(x) for name, x in mine.items()
    )
