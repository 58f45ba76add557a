"""Checkpoints that are damaged, foreign or do not fit, and what is said of them."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mulstm import checkpoint, tensorfile
from mulstm.data import Alphabet
from mulstm.errors import BackendError, CheckpointError, RecipeError, RunError
from mulstm.nn.model import LanguageModel
from mulstm.recipe import DropoutRecipe, ModelRecipe, Recipe

ALPHABET = Alphabet(b"\n abcdefg")


@pytest.fixture
def model() -> LanguageModel:
    return LanguageModel(ModelRecipe(hidden=12, embedding=5, weight_norm=True), ALPHABET.size)


@pytest.fixture
def saved(model: LanguageModel, tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    checkpoint.save(path, model, ALPHABET, metrics={"update": 3})
    return path


def header_of(path: Path) -> tuple[dict, bytes]:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(path: Path, header: dict, body: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


@pytest.mark.parametrize("left", [0, 4, 9, 200, -1])
def test_truncated(saved: Path, left: int) -> None:
    saved.write_bytes(saved.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=r"cut short|damaged"):
        checkpoint.load(saved)


def test_more_than_there_should_be(saved: Path) -> None:
    size = saved.stat().st_size
    saved.write_bytes(saved.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match=f"has {size + 4:,} bytes and should have {size:,}"):
        tensorfile.read_meta(saved)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"just a text, not a model at all\n", "no safetensors file"),
        (b"PK\x03\x04 a zip as torch.save makes it", "run code"),
        (b"\x80\x04\x95 a pickle", "run code"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00[1, 2, 3, 4, 55]", "no safetensors file"),
    ],
)
def test_not_a_checkpoint(tmp_path: Path, data: bytes, match: str) -> None:
    path = tmp_path / "other"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=match):
        checkpoint.load(path)


def test_foreign(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="another program"):
        checkpoint.load(tmp_path / "other.safetensors")


def test_newer_format(saved: Path) -> None:
    header, body = header_of(saved)
    meta = json.loads(header["__metadata__"]["mulstm"])
    header["__metadata__"]["mulstm"] = json.dumps({**meta, "format": 99})
    with_header(saved, header, body)
    with pytest.raises(CheckpointError, match="newer"):
        checkpoint.load(saved)


def test_a_changed_weight(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    data[-40] ^= 1
    saved.write_bytes(data)
    with pytest.raises(CheckpointError, match="fingerprint"):
        checkpoint.load(saved)


def changed(meta: dict, what: str) -> dict:
    if what == "alphabet":
        symbols = bytes.fromhex(meta["alphabet"]["bytes"])
        meta["alphabet"]["bytes"] = (symbols[:-1] + b"z").hex()
    elif what == "unit":
        meta["recipe"]["model"]["unit"] = "initial-text"
    elif what == "recipe":
        meta["recipe"]["model"]["hiden"] = 3
    else:
        del meta["alphabet"]
    return meta


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("alphabet", "fingerprint"),
        ("unit", "fingerprint"),
        ("recipe", "hiden"),
        ("gone", "description"),
    ],
)
def test_changed_metadata(saved: Path, what: str, match: str) -> None:
    header, body = header_of(saved)
    meta = changed(json.loads(header["__metadata__"]["mulstm"]), what)
    header["__metadata__"]["mulstm"] = json.dumps(meta)
    with_header(saved, header, body)
    with pytest.raises(CheckpointError, match=match):
        checkpoint.load(saved)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("recipe", None, "None is no object"),
        ("source", "x", "'x' is no object"),
        ("metrics", [1], "is no object"),
        ("metrics", {"x": float("nan")}, "is damaged .NaN is no number"),
        ("metrics", {"x": 10**400}, "is damaged .1000"),
        ("deep", "[" * 100_000, "is damaged"),  # in place of all
    ],
)
def test_metadata_of_another_kind(saved: Path, key: str, value: object, match: str) -> None:
    header, body = header_of(saved)
    meta = json.loads(header["__metadata__"]["mulstm"])
    header["__metadata__"]["mulstm"] = value if key == "deep" else json.dumps(meta | {key: value})
    with_header(saved, header, body)
    with pytest.raises(CheckpointError, match=match):
        checkpoint.load(saved)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "F99"),
        ("dtype", "F16"),
        ("shape", [-1, 3]),
        ("shape", [2**62, 2**62]),
        ("shape", 5),
        ("data_offsets", [5, 2]),
        ("data_offsets", [0, 4]),
        ("data_offsets", [0, 1.5]),
        ("data_offsets", [0, [4]]),
        ("data_offsets", []),
        ("__metadata__", "x"),
        ("__metadata__", None),
        ("deep", "[" * 100_000),
    ],
)
def test_damaged_headers(saved: Path, key: str, value: object) -> None:
    header, body = header_of(saved)
    if key == "deep":
        text = str(value).encode()
        saved.write_bytes(struct.pack("<Q", len(text)) + text + body)
    else:
        (header if key == "__metadata__" else header["W_out"])[key] = value
        with_header(saved, header, body)
    with pytest.raises(CheckpointError, match=r"damaged|another program"):
        checkpoint.load(saved)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("layers", 10**9, "is not that of its"),
        ("hidden", 10**5, "12 float32 instead of 9x100000 float32"),
        ("hidden", 10**30, "is not that of its"),
        ("embedding", 10**12, "instead of"),
    ],
)
def test_a_recipe_takes_no_memory_that_the_file_does_not_fill(
    saved: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: int, match: str
) -> None:
    header, body = header_of(saved)
    meta = json.loads(header["__metadata__"]["mulstm"])
    meta["recipe"]["model"][key] = value
    header["__metadata__"]["mulstm"] = json.dumps(meta)
    with_header(saved, header, body)
    real = LanguageModel.__init__

    def made(self: LanguageModel, *given: object, **named: object) -> None:
        assert torch.get_default_device().type == "meta"
        real(self, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(LanguageModel, "__init__", made)
    with pytest.raises(CheckpointError, match=rf"{match}|model.{key}"):
        checkpoint.load(saved)


@pytest.mark.parametrize("storage", checkpoint.STORAGES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers(
    model: LanguageModel, saved: Path, storage: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        model.W_out[2, 3] = value
    before = saved.read_bytes()
    with pytest.raises(CheckpointError, match=rf"W_out hold .* not finite in {storage}, and are not written"):
        checkpoint.save(saved, model, ALPHABET, storage=storage)
    assert saved.read_bytes() == before
    with monkeypatch.context() as careless:
        careless.setattr(checkpoint, "_not_finite", lambda weights: None)
        checkpoint.save(saved, model, ALPHABET, storage=storage)
    with pytest.raises(CheckpointError, match=r"W_out in .* not finite\. Take an earlier checkpoint"):
        checkpoint.load(saved)


@pytest.mark.parametrize(("storage", "value"), [("bf16", 3.4e38), ("fp32", 1e300)])
def test_weights_that_storing_makes_no_numbers(saved: Path, storage: str, value: float) -> None:
    model = checkpoint.load(saved).model.double()
    with torch.no_grad():
        model.W_out[0, 0] = value
    with pytest.raises(CheckpointError, match=f"not finite in {storage}"):
        checkpoint.save(saved, model, ALPHABET, storage=storage)
    checkpoint.load(saved)


def test_a_recipe_that_could_not_be_read_again_is_not_written(model: LanguageModel, saved: Path) -> None:
    before = saved.read_bytes()
    recipe = Recipe(model=model.recipe, dropout=DropoutRecipe(embedding=0.2))
    with pytest.raises(RecipeError, match=r"dropout\.embedding needs model\.embedding above 0"):
        checkpoint.save(saved, model.folded(), ALPHABET, recipe=recipe)
    assert saved.read_bytes() == before


def test_a_gpu_where_there_is_none(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match=r"wanted on cuda:1 and there is no GPU here\. Load it on the CPU"):
        checkpoint.load(saved, "cuda:1")


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("less", "W_out is missing"),
        ("more", "extra is not known"),
        ("shape", "instead of"),
        ("dtype", "float16"),
    ],
)
def test_weights_that_do_not_fit(saved: Path, what: str, match: str) -> None:
    tensors = load_file(saved)
    text = header_of(saved)[0]["__metadata__"]
    if what == "less":
        del tensors["W_out"]
    elif what == "more":
        tensors["extra"] = torch.zeros(2)
    elif what == "shape":
        tensors["W_out"] = tensors["W_out"][:-1].contiguous()
    else:
        tensors["W_out"] = tensors["W_out"].half()
    save_file(tensors, saved, metadata=text)
    with pytest.raises(CheckpointError, match=match):
        checkpoint.load(saved)


def test_training_state_is_not_a_model(tmp_path: Path) -> None:
    path = tmp_path / "resume.safetensors"
    tensorfile.write(path, {"x": torch.zeros(2)}, {"format": tensorfile.FORMAT, "kind": "training state"})
    with pytest.raises(CheckpointError, match=r"last\.safetensors"):
        checkpoint.load(path)
    with pytest.raises(CheckpointError, match="training state"):
        tensorfile.read(path, "other")


def test_a_full_disk_leaves_the_old_file(
    model: LanguageModel, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()

    def full(tensors: object, path: Path, metadata: object) -> None:
        Path(path).write_bytes(b"half of it")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(tensorfile, "save_file", full)
    with pytest.raises(RunError, match="No space left"):
        checkpoint.save(saved, model, ALPHABET)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_a_name_that_is_no_utf8(model: LanguageModel, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff"))
    try:
        folder.mkdir()
    except OSError as fault:
        pytest.skip(f"this file system has no such names ({fault})")
    checkpoint.save(folder / "model.safetensors", model, ALPHABET)
    assert torch.equal(checkpoint.load(folder / "model.safetensors").model.W_out, model.W_out)


def test_a_model_that_is_saved_again_while_it_is_read(
    saved: Path, model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Description and weights are read one after the other; in between a run may have replaced both."""
    read, times = tensorfile.read_meta, []

    def interrupted(path: Path) -> dict:
        meta = read(path)
        times.append(1)
        if len(times) == 1:
            with torch.no_grad():
                model.W_out += 1
            checkpoint.save(saved, model, ALPHABET, metrics={"update": 4})
        return meta

    monkeypatch.setattr(tensorfile, "read_meta", interrupted)
    found = checkpoint.load(saved)
    assert (found.meta["metrics"], len(times)) == ({"update": 4}, 2)
    assert torch.equal(found.model.W_out, model.W_out)
