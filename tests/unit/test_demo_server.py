"""The demo's server answers this machine's own page alone."""

from __future__ import annotations

import http.client
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from mulstm.checkpoint import Checkpoint
from mulstm.errors import CheckpointError, MulstmError
from mulstm.sample import Sampling
from nn_models import of_bytes

pytest.importorskip("starlette", reason="the demo extra is not installed")
pytest.importorskip("uvicorn", reason="the demo extra is not installed")

from mulstm.demo import app, reading
from mulstm.demo.reading import Reader

TEXT = "A caf\u00e9,\nand more than one piece of it: " + "abc " * 20


@pytest.fixture
def loaded() -> Checkpoint:
    return of_bytes()


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
        assert (told["name"], told["bits_per_char"], told["measured_on"]) == ("runs/caf\ufffd", None, None)
        json.dumps(told, ensure_ascii=False, allow_nan=False).encode()
    assert app.facts(replace(loaded, meta={"metrics": [1]}), name)["bits_per_char"] is None


def test_facts_of_a_released_model_and_of_a_run(loaded: Checkpoint) -> None:
    for metrics, told in (
        ({"test_bits_per_char": 1.25, "valid_bits_per_char": 1.5}, ("test", 1.25)),
        ({"valid_bits_per_char": 1.5}, ("validation", 1.5)),
    ):
        about = app.facts(replace(loaded, meta={"metrics": metrics}), Path("m"))
        assert (about["measured_on"], about["bits_per_char"]) == told


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
