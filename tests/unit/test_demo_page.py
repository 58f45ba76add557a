"""What the demo's page says and shows, played by Node with as much of a browser as the script touches."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from importlib.resources import files
from typing import Any

import pytest

PAGE = files("mulstm.demo")


@cache
def node() -> str:
    """Node's place; the tests are skipped where there is none that has what a browser has."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("Node is not installed")
    asked = [found, "-p", "typeof Response + typeof TextDecoderStream"]
    told = subprocess.run(asked, capture_output=True, encoding="utf-8", check=False).stdout.strip()
    if told != "functionfunction":
        pytest.skip("Node is too old: it has no Response or TextDecoderStream")
    return found


# Elements that hold what is put into them, and a server that gives `answers` in turn, the last for ever.
STAGE = """
class Classes extends Set {
  remove(name) { this.delete(name); }
}
class Made {
  children = []; dataset = {}; style = {}; value = ""; text = ""; heard = {}; classList = new Classes();
  get textContent() { return this.text; }
  set textContent(text) { this.text = text; }
  append(...parts) { this.children.push(...parts.flatMap((one) => (one.isLoose ? one.children : one))); }
  replaceChildren(...parts) { this.children = []; this.append(...parts); }
  addEventListener(name, listener) { this.heard[name] = listener; }
  matches() { return false; }
  scrollIntoView() {}
}
const all = {};
const document = {
  getElementById: (id) => (all[id] ??= new Made()),
  createElement: () => new Made(),
  createDocumentFragment: () => Object.assign(new Made(), { isLoose: true }),
  body: new Made(),
};
const fetch = async (path) => {
  const [status, body] = answers[path].length > 1 ? answers[path].shift() : answers[path][0];
  return new Response(typeof body === "string" ? body : JSON.stringify(body), { status });
};
const wait = (time) => new Promise((resolve) => setTimeout(resolve, time));
document.getElementById("detail").text = "Rest.";
const says = () => all.message.text;
const press = (key, more) => all.heat.heard.keydown({ key, preventDefault() {}, ...more });
const marked = () => all.heat.children.findIndex((one) => one.classList.has("here"));
"""
MODEL = {"name": "m", "cell": "mlstm", "hidden": 9, "layers": 1, "parameters": 1, "alphabet": 3}
FAULT = "There is no unit 99."


def reading(text: str, both: bool = False) -> dict[str, Any]:
    """What the server tells of a text."""
    one = {"bits": 0.5, "value": 0.25, "level": 3, "guesses": [["e", 0.5]]}
    scale = {"low": 0, "high": 8, "name": "h" if both else "bits", "both": both}
    characters = [one | {"text": c} for c in text]
    return {"bits": 1.0, "symbols": len(text), "characters": characters, "next": [["e", 0.5]], "scale": scale}


def play(script: str, **answers: list[tuple[int, Any]]) -> Any:
    """What `script` returns once the page has begun."""
    told = {"model": [(200, MODEL)], "read": [(200, reading("abc"))], **answers}
    page = PAGE.joinpath("page.js").read_text(encoding="utf-8")
    code = f"const answers = {json.dumps(told)};\n{STAGE}\n{page}\n"
    code += (
        f"wait(20).then(async () => {{\n{script}\n}}).then((found) => console.log(JSON.stringify(found)));\n"
    )
    done = subprocess.run([node(), "-"], input=code, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_message_of_a_failed_drawing_stays_until_something_is_done() -> None:
    script = """
        const found = [];
        for (const act of [goOn, read, later]) { await act(); await wait(20); found.push(says()); }
        clearTimeout(timer);
        return found;"""
    refused = play(script, **{"continue": [(400, {"error": "The length is -5."})]})
    assert refused == ["The length is -5.", "The length is -5.", ""]


def test_a_drawing_that_is_ended_by_a_fault_says_so_and_keeps_its_text() -> None:
    lines = '{"text": "a"}\n{"error": "The model gives no numbers."}\n'
    script = "await goOn(); await wait(20); return [says(), all.text.value];"
    assert play(script, **{"continue": [(200, lines)]}) == ["The model gives no numbers.", "a"]


@pytest.mark.parametrize("path", ["model", "read"])
def test_an_answer_that_is_no_json(path: str) -> None:
    failed = play("return says();", **{path: [(500, "Internal Server Error")]})
    assert failed == "The server failed. Its terminal says why."


def test_a_refused_reading_leaves_the_one_before_marked_as_old() -> None:
    script = """
        const found = [];
        for (let k = 0; k < 3; k++) {
          found.push([says(), document.body.classList.has("old"), all.summary.text.includes("earlier")]);
          found.push(all.heat.children.length);
          await read();
        }
        return found;"""
    answers = [(200, reading("abc")), (400, {"error": FAULT}), (200, reading("abcd"))]
    assert play(script, read=answers) == [
        ["", False, False],
        3,
        [FAULT, True, True],
        3,
        ["", False, False],
        4,
    ]
    nothing_yet = play("return all.summary.text;", read=[(400, {"error": FAULT})])
    assert nothing_yet == ""


def test_numbers_are_named_for_what_was_read() -> None:
    script = """
        const rest = () => all.heat.heard.pointerover({ target: all.heat.children[1] });
        const found = [];
        for (const unit of ["99", "3", ""]) {
          all.unit.value = unit; await read(); rest(); found.push(all.detail.text);
        }
        return found;"""
    answers = [
        (200, reading("abc")),
        (400, {"error": FAULT}),
        (200, reading("abc", True)),
        (200, reading("abc")),
    ]
    plain, by_unit = "b: 0.50 bits. Expected: e 50 %.", "b: 0.50 bits, h 0.250. Expected: e 50 %."
    assert play(script, read=answers) == [plain, by_unit, plain]


def test_the_numbers_are_reached_by_keys() -> None:
    (heat,) = re.findall(r'<pre id="heat"([^>]*)>', PAGE.joinpath("page.html").read_text(encoding="utf-8"))
    assert 'tabindex="0"' in heat
    assert "role=" in heat
    assert "aria-label=" in heat
    script = """
        all.heat.heard.focus();
        const found = [marked()];
        for (const key of ["ArrowRight", "End", "ArrowRight", "ArrowLeft", "Home", "ArrowLeft", "x"]) {
          press(key);
          found.push(marked());
        }
        press("ArrowRight", { altKey: true });  // the browser's own
        return [...found, marked(), all.detail.text];"""
    assert play(script) == [0, 1, 2, 2, 1, 0, 0, 0, 0, "a: 0.50 bits. Expected: e 50 %."]
    script = 'all.heat.heard.focus(); press("End"); return [marked(), all.detail.text];'
    assert play(script, read=[(200, reading(""))]) == [-1, "Rest."]


def test_what_was_told_of_a_character_goes_with_its_reading() -> None:
    script = """
        press("End"); await read();
        const left = [marked(), all.detail.text];
        all.heat.matches = () => true; press("End"); await read();
        return [left, [marked(), all.detail.text]];"""
    answers = [(200, reading("abc")), (200, reading("abcd")), (200, reading("xy"))]
    assert play(script, read=answers) == [[-1, "Rest."], [1, "y: 0.50 bits. Expected: e 50 %."]]
