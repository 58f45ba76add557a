"""The page shows what score, sample and neurons tell; its server answers this machine's own page alone."""

from __future__ import annotations

import http.client
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

import foreign
from mulstm import interop, neurons
from mulstm.checkpoint import Checkpoint
from mulstm.data.alphabet import Alphabet
from mulstm.errors import CheckpointError, DataError, MulstmError
from mulstm.heat import visible
from mulstm.interop import unirep
from mulstm.nn.model import LanguageModel
from mulstm.recipe import ModelRecipe, Recipe
from mulstm.records import Record
from mulstm.sample import Sampling, as_text, sample
from mulstm.scoring import score
from mulstm.units import bits

pytest.importorskip("starlette", reason="the demo extra is not installed")
pytest.importorskip("uvicorn", reason="the demo extra is not installed")

from mulstm.demo import app, reading
from mulstm.demo.reading import PIECE, Reader

TEXT = "A caf\u00e9,\nand more than one piece of it: " + "abc " * 20


@pytest.fixture
def loaded() -> Checkpoint:
    torch.manual_seed(0)
    model = LanguageModel(ModelRecipe(hidden=9, embedding=5, weight_norm=True), 256)
    with torch.no_grad():
        model.W_out.normal_(0, 1)
    return Checkpoint(model.eval(), Alphabet.bytes(), Recipe(), {})


def test_bits_are_those_of_scoring(loaded: Checkpoint) -> None:
    found = Reader(loaded).read(TEXT)
    (expected,) = score(loaded, TEXT, losses=True)
    assert expected.losses is not None
    assert found["symbols"] == expected.symbols - 1  # a text that is still being written has no end
    assert found["bits"] == pytest.approx(bits(float(expected.losses[:-1].sum())), rel=1e-5)
    assert "".join(one["text"] for one in found["characters"]) == TEXT
    accented = found["characters"][5]
    assert accented["text"] == "\u00e9"
    assert accented["bits"] == pytest.approx(bits(float(expected.losses[5:7].sum())), rel=1e-5)
    assert len(accented["guesses"]) == 3


def test_guesses_and_what_comes_next(loaded: Checkpoint) -> None:
    reader = Reader(loaded)
    (expected,) = score(loaded, "abc", following=10)
    likeliest = [(visible(name), pytest.approx(p, rel=1e-5)) for name, p in expected.following]
    assert reader.read("abc")["next"] == likeliest
    assert reader.read("abcd")["characters"][3]["guesses"] == likeliest[:3]
    empty = reader.read("")
    assert (empty["symbols"], empty["bits"], empty["characters"]) == (0, 0.0, [])
    assert len(empty["next"]) == 10


def test_a_text_that_grows_is_not_read_again(loaded: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, read = Reader(loaded), []
    call = reader.memory.call
    monkeypatch.setattr(reader.memory, "call", lambda x, state: (read.append(x.shape[1]), call(x, state))[1])
    reader.read(TEXT)
    size = 1 + len(TEXT.encode())  # and the line's end before it
    assert sum(read) == size
    read.clear()
    grown = reader.read(TEXT + "x")
    assert sum(read) == (size + 1) % PIECE
    fresh = Reader(loaded).read(TEXT + "x")
    assert grown["bits"] == pytest.approx(fresh["bits"], rel=1e-6)
    for other in (TEXT[:40] + "!" + TEXT[41:], TEXT[:50], "", "Another text", TEXT):
        assert reader.read(other)["bits"] == pytest.approx(Reader(loaded).read(other)["bits"], rel=1e-6)


def test_a_reading_that_is_broken_off_leaves_nothing_wrong(
    loaded: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, left = Reader(loaded), [2]
    call = reader.memory.call

    def failing(x: torch.Tensor, state: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError
        return call(x, state)

    reader.read("x" * 90)
    monkeypatch.setattr(reader.memory, "call", failing)
    with pytest.raises(MemoryError):
        reader.read(TEXT)
    assert reader.read("x" * 90)["bits"] == pytest.approx(Reader(loaded).read("x" * 90)["bits"], rel=1e-6)


def test_what_was_read_before_a_reading_was_broken_off_stays(
    loaded: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, read, left = Reader(loaded), [], [2]
    call = reader.memory.call
    monkeypatch.setattr(reader.memory, "call", lambda x, state: (read.append(x.shape[1]), call(x, state))[1])

    def is_over() -> bool:
        left[0] -= 1
        return left[0] < 0

    with pytest.raises(reading.BrokenOffError):
        reader.read("x" * 200, is_over=is_over)
    assert read == [PIECE, PIECE]
    expected = Reader(loaded).read("x" * 200)["bits"]
    assert reader.read("x" * 200)["bits"] == pytest.approx(expected, rel=1e-6)
    assert sum(read) == 201
    reader.close()
    for work in (lambda: reader.read("y" * 90), lambda: reader.go_on("y" * 90, Sampling())):
        with pytest.raises(reading.BrokenOffError):
            work()


def test_a_character_that_is_not_whole_is_not_given(
    loaded: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pieces, text in (
        ([b"a", b"\xd0"], "a"),
        ([b"\xd0", b"\xb0"], "\u0430"),
        ([b"\xd0", b"a"], "\ufffda"),
    ):
        monkeypatch.setattr(reading, "go_on", lambda *_, given=pieces, **__: iter([piece] for piece in given))
        assert "".join(Reader(loaded).go_on("x", Sampling())) == text


def test_reviews_are_gone_on_with_as_they_stand(loaded: Checkpoint) -> None:
    reader = Reader(replace(loaded, meta={"source": {"convention": "openai-review"}}))
    how = Sampling(length=20, seed=3)
    assert reader.read("I am ")["symbols"] == 4
    expected = b"".join(row[0] for row in sample(loaded.model, loaded.alphabet, b"\n I am ", how))
    assert "".join(reader.go_on("I am ", how)) == "".join(as_text([expected], ends=False))


def test_a_unit_is_not_copied_with_all_others(loaded: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    joined, cat = [], torch.cat

    def watched(pieces: list[torch.Tensor]) -> torch.Tensor:
        joined.append(cat(pieces))
        return joined[-1]

    monkeypatch.setattr(torch, "cat", watched)
    Reader(loaded).read(TEXT, unit=4)
    assert [one.shape[1:] for one in joined] == [(256,), ()]


def test_a_model_that_gives_no_number(loaded: Checkpoint) -> None:
    with torch.no_grad():
        loaded.model.W_out.mul_(1e39)
    with pytest.raises(CheckpointError, match=r"gives no number for this text: its weights are too large"):
        Reader(loaded).read("abc")


def test_costs_and_a_unit_are_read_in_one_pass(loaded: Checkpoint) -> None:
    reader, steps, size = Reader(loaded), [], 1 + len(TEXT.encode())
    layer = reader.predictor.model.layers[0]
    layer.register_forward_pre_hook(lambda _, given: steps.append(given[2].shape[0]))
    for unit, read in ((4, size), (3, size % PIECE), (None, size % PIECE)):
        reader.read(TEXT, unit)
        assert sum(steps) == read
        steps.clear()


def test_units_are_those_of_neurons_after_a_line_end(loaded: Checkpoint) -> None:
    found = Reader(loaded).read("\u00e9a", unit=4)
    traced = neurons.trace(loaded, Record("1", "\n\u00e9a".encode()), [4]).values[1:, 0]
    assert [one["value"] for one in found["characters"]] == pytest.approx([traced[1], traced[2]], rel=1e-5)
    assert found["scale"]["both"]
    assert {one["level"] for one in found["characters"]} & {0, 15}
    with pytest.raises(DataError, match=r"no unit 9: the model has 9"):
        Reader(loaded).read("a", unit=9)


def test_going_on_draws_what_sample_draws_after_a_line_end(loaded: Checkpoint) -> None:
    how = Sampling(length=50, temperature=0.7, seed=3)
    drawn = b"".join(row[0] for row in sample(loaded.model, loaded.alphabet, b"\n" + TEXT.encode(), how))
    reader = Reader(loaded)
    assert "".join(reader.go_on(TEXT, how)) == "".join(as_text([drawn], ends=False))
    with pytest.raises(MulstmError, match=r"length of -1"):
        reader.go_on(TEXT, Sampling(length=-1))


def test_a_later_turn_ends_the_one_before(loaded: Checkpoint) -> None:
    reader = Reader(loaded)
    first = reader.go_on("ab", Sampling(length=500))
    next(first)
    expected = "".join(Reader(loaded).go_on("cd", Sampling(length=30)))
    second = reader.go_on("cd", Sampling(length=30))
    assert len(list(first)) <= 1  # what was held back of a character
    assert "".join(second) == expected


def test_texts_that_cannot_be_read(loaded: Checkpoint) -> None:
    reader = Reader(loaded)
    with pytest.raises(DataError, match="half a character"):
        reader.read("a\ud800")
    with pytest.raises(DataError, match=r"20,002 bytes. Give at most 20,000"):
        reader.read("\u00e9" * 10_001)
    hidden = reader.read("a\u202eb\x00")["characters"]
    assert [one["text"] for one in hidden] == ["a", "U+202E", "b", "\u2400"]


def test_proteins_and_models_without_a_head() -> None:
    weights = unirep.from_arrays(foreign.unirep(H=7).arrays, "unirep", "w")
    loaded = interop.to_checkpoint(weights)
    found = Reader(loaded).read("mkta\nYIAKQR ")
    (expected,) = score(loaded, "MKTAYIAKQR", losses=True)
    assert expected.losses is not None
    assert found["bits"] == pytest.approx(bits(float(expected.losses[:-1].sum())), rel=1e-5)
    with pytest.raises(DataError, match="which is no residue"):
        Reader(loaded).read("MK1")
    for read in (Reader(loaded).read, partial(score, loaded)):  # neither of them costs a gap
        with pytest.raises(DataError, match=r"has '-' at position 3, which .* has no class for. Take it out"):
            read("MK-TA")
    headless = Checkpoint(
        loaded.model, loaded.alphabet, Recipe(), {"source": weights.source | {"head": False}}
    )
    with pytest.raises(CheckpointError, match="without its output layer"):
        Reader(headless)


@pytest.fixture
def port(loaded: Checkpoint) -> Iterator[int]:
    """A server that runs while a test does."""
    import uvicorn

    made = app.make(Reader(loaded), app.facts(loaded, Path("runs/some")))
    server = uvicorn.Server(uvicorn.Config(made, log_level="error"))
    with app.listening(0) as here:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [here]})
        thread.start()
        yield here.getsockname()[1]
        server.should_exit = True
        thread.join()


def ask(port: int, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes, Any]:
    connection = http.client.HTTPConnection(app.ADDRESS, port, timeout=60)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    told = {"Content-Type": "application/json"} if data is not None else {}
    connection.request(method, path, data, told | {k.replace("_", "-"): v for k, v in headers.items()})
    answer = connection.getresponse()
    found = answer.status, answer.read(), answer.headers
    connection.close()
    return found


def test_the_page_needs_nothing_from_elsewhere(port: int) -> None:
    status, page, headers = ask(port, "GET", "/")
    assert status == 200
    assert headers["Content-Security-Policy"].startswith("default-src 'self'")
    links = re.findall(r'(?:src|href)="([^"]*)"', page.decode())
    assert set(links) == {"favicon.ico", "colours.css", "page.css", "page.js"}
    for link in links:
        status, body, headers = ask(port, "GET", f"/{link}")
        assert (status, headers["X-Content-Type-Options"]) == (200, "nosniff")
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", body.decode())
    assert "innerHTML" not in files("mulstm.demo").joinpath("page.js").read_text()
    status, body, _ = ask(port, "GET", "/model")
    assert json.loads(body)["name"] == "runs/some"


def test_reading_and_going_on_by_the_server(port: int, loaded: Checkpoint) -> None:
    json_type = "Application/JSON ;charset=utf-8"  # as another client may spell it
    status, body, _ = ask(port, "POST", "/read", {"text": TEXT, "unit": 2}, Content_Type=json_type)
    expected = Reader(loaded).read(TEXT, 2)
    assert status == 200
    assert json.loads(body)["bits"] == pytest.approx(expected["bits"], rel=1e-6)
    status, body, _ = ask(
        port, "POST", "/continue", {"text": "ab", "length": 40, "seed": 5, "temperature": 0.5}
    )
    lines = [json.loads(line)["text"] for line in body.splitlines()]
    how = Sampling(length=40, temperature=0.5, seed=5)
    assert (status, "".join(lines)) == (200, "".join(Reader(loaded).go_on("ab", how)))


def test_going_on_tells_what_ended_it(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverging(*_: object, **__: object) -> Iterator[list[bytes]]:
        yield [b"a"]
        raise CheckpointError("The model gives no numbers.")

    monkeypatch.setattr(reading, "go_on", diverging)
    status, body, _ = ask(port, "POST", "/continue", {"text": "ab"})
    lines = [json.loads(line) for line in body.splitlines()]
    assert (status, lines) == (200, [{"text": "a"}, {"error": "The model gives no numbers."}])


def test_facts_that_json_has_no_word_for(loaded: Checkpoint) -> None:
    name = Path(os.fsdecode(b"runs/caf\xe9"))
    for found in (float("nan"), float("inf"), 10**400, "1.2", None):
        told = app.facts(replace(loaded, meta={"metrics": {"test_bits_per_char": found}}), name)
        assert (told["name"], told["test_bits_per_char"]) == ("runs/caf\ufffd", None)
        json.dumps(told, ensure_ascii=False, allow_nan=False).encode()
    assert app.facts(replace(loaded, meta={"metrics": [1]}), name)["test_bits_per_char"] is None
    measured = {"metrics": {"test_bits_per_char": 1.25}}
    assert app.facts(replace(loaded, meta=measured), name)["test_bits_per_char"] == 1.25


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "sentence"),
    [
        ("/read", {"text": "a", "unit": 99}, {}, 400, "There is no unit 99"),
        ("/read", {"text": 3}, {}, 400, "The text must be a string"),
        ("/read", {"text": "a", "unit": "x"}, {}, 400, "unit must be a number"),
        ("/read", b"[1]", {}, 400, "Send a JSON object"),
        ("/read", b"{", {}, 400, "Send a JSON object"),
        ("/read", b"[" * 100_000, {}, 400, "Send a JSON object"),
        ("/read", b" " * (app.BODY + 1), {}, 413, "The text is too long"),
        ("/read", {"text": "a"}, {"Content_Type": "text/plain"}, 415, "Send JSON"),
        ("/read", {"text": "a"}, {"Host": "elsewhere.example"}, 400, "Invalid host"),
        ("/continue", {"text": "a", "temperature": -1}, {}, 400, "temperature must be a number"),
        ("/continue", {"text": "a", "top_p": 2}, {}, 400, "top-p 2 is not a share"),
        ("/nothing", {}, {}, 404, "Not Found"),
        ("/model", {}, {}, 405, "Method Not Allowed"),
    ],
)
def test_what_the_server_refuses(
    port: int, path: str, body: Any, headers: dict[str, str], status: int, sentence: str
) -> None:
    found, answer, told = ask(port, "POST", path, body, **headers)
    assert found == status
    assert answer.decode().startswith((f'{{"error":"{sentence}', sentence))
    assert all(told[name] == value for name, value in app.HEADERS.items())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://127.0.0.1:{port}", "Sec_Fetch_Site": "same-origin"}, 200),
        ({"Host": "localhost:{port}", "Origin": "http://localhost:{port}"}, 200),
        ({"Sec_Fetch_Site": "none"}, 200),
        ({"Origin": "https://elsewhere.example"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "https://127.0.0.1:{port}"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}, 200),  # a link to the page
    ],
)
def test_pages_from_elsewhere_are_refused(port: int, headers: dict[str, str], status: int) -> None:
    sent = {name: value.format(port=port) for name, value in headers.items()}
    for method, path, body in (("POST", "/read", {"text": "a"}), ("GET", "/model", None), ("GET", "/", None)):
        found, answer, told = ask(port, method, path, body, **sent)
        assert found == status
        assert all(told[name] == value for name, value in app.HEADERS.items())
        assert told["Cross-Origin-Resource-Policy"] == "same-origin"
        assert status == 200 or "Open the page" in json.loads(answer)["error"]


def test_a_fault_of_ours_has_the_headers_too(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Reader, "read", fail)
    status, _, told = ask(port, "POST", "/read", {"text": "a"})
    assert status == 500
    assert all(told[name] == value for name, value in app.HEADERS.items())


def test_only_this_machine_is_answered_and_one_port_serves_one(port: int) -> None:
    with app.listening(0) as here:
        assert here.getsockname()[0] == "127.0.0.1"
    with pytest.raises(MulstmError, match=rf"Port {port} cannot be had .* Give another with --port"):
        app.listening(port)


def test_no_more_is_drawn_than_allowed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "LONGEST", 7)
    _, body, _ = ask(port, "POST", "/continue", {"text": "ab", "length": 500})
    assert len(body.splitlines()) <= 8


def test_a_reading_that_nobody_waits_for_is_broken_off(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def read(self: Reader, text: str, unit: int | None, is_over: reading.Over) -> None:
        begun.set()
        for _ in range(1000):
            if is_over():
                ended.set()
                raise reading.BrokenOffError
            time.sleep(0.01)

    monkeypatch.setattr(Reader, "read", read)
    connection = http.client.HTTPConnection(app.ADDRESS, port, timeout=60)
    connection.request("POST", "/read", b'{"text": "abc"}', {"Content-Type": "application/json"})
    assert begun.wait(10)
    connection.close()
    assert ended.wait(5)
