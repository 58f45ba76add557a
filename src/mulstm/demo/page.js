"use strict";
// All that comes from a text or a model enters the page as text, never as markup.

const $ = (id) => document.getElementById(id);
const WAIT = 250; // milliseconds without a key before the text is read
const PATIENCE = 700; // milliseconds of reading before the page says so
const HINT = $("detail").textContent;
const told = { reading: "", drawing: "" }; // how each of them last failed
let shown = { characters: [], scale: null }; // the last reading
let here = 0; // the place of the character that is marked
let asked = 0; // readings asked for: an answer to an older one is dropped
let reading = null; // what breaks off the reading that is under way
let timer = 0;
let drawing = null; // what stops the drawing that is under way

function element(name, text, className) {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function named(symbol) {
  return { " ": "space", "\n": "line end", "\t": "tab", "\r": "return" }[symbol] ?? symbol;
}

function put(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text; // what is put anew is read out anew
}

const percent = (p) => `${(100 * p).toFixed(p < 0.1 ? 1 : 0)} %`;

async function ask(path, options) {
  const answer = await fetch(path, options);
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({}));
  throw new Error(error ?? "The server failed. Its terminal says why.");
}

function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return ask(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

function tell(work, fault) {
  const away = fault instanceof TypeError; // how fetch says that nobody answers
  told[work] = away ? "The server has ended. Start mulstm demo again." : (fault?.message ?? "");
  put("message", [...new Set(Object.values(told))].join(" ").trim());
}

async function read() {
  const mine = ++asked;
  reading?.abort();
  reading = new AbortController();
  const slow = setTimeout(() => ($("summary").textContent = "Reading \u2026"), PATIENCE);
  const unit = $("unit").value === "" ? null : Number($("unit").value);
  try {
    const found = await (await post("read", { text: $("text").value, unit }, reading.signal)).json();
    if (mine !== asked) return;
    tell("reading", null);
    show(found);
  } catch (fault) {
    if (mine !== asked) return;
    document.body.classList.add("old");
    $("summary").textContent = shown.scale ? "This is an earlier reading." : "";
    tell("reading", fault);
  } finally {
    clearTimeout(slow);
  }
}

function show(found) {
  const letter = found.scale.both ? "d" : "c";
  const body = document.createDocumentFragment();
  shown = found;
  shown.characters.forEach((one, k) => {
    const spot = element("i", one.text === "\n" ? "\u21b5\n" : one.text, letter + one.level);
    spot.dataset.place = k;
    body.append(spot);
  });
  $("heat").replaceChildren(body);
  document.body.classList.remove("old");
  if ($("heat").matches(":hover, :focus")) mark(here);
  else put("detail", HINT);
  const cost = found.symbols ? `, ${found.bits.toFixed(1)} bits, ${(found.bits / found.symbols).toFixed(3)} each` : "";
  $("summary").textContent = `${found.symbols.toLocaleString("en")} symbols${cost}`;
  const { low, high, name } = found.scale;
  const steps = Array.from({ length: 16 }, (_, k) => element("i", "\u00a0", letter + k));
  const digits = found.scale.both ? 2 : 0;
  $("legend").replaceChildren(low.toFixed(digits) + " ", ...steps, ` ${high.toFixed(digits)} ${name}`);
  const top = found.next.length ? found.next[0][1] : 1;
  $("next").replaceChildren(
    ...found.next.map(([symbol, p]) => {
      const row = document.createElement("li");
      const bar = document.createElement("span");
      bar.style.width = `${(100 * p) / top}%`;
      row.append(element("b", named(symbol)), bar, element("em", percent(p)));
      return row;
    }),
  );
}

function detail(one) {
  const guesses = one.guesses.map(([symbol, p]) => `${named(symbol)} ${percent(p)}`).join(", ");
  const unit = shown.scale.both ? `, h ${one.value.toFixed(3)}` : "";
  return `${named(one.text)}: ${one.bits.toFixed(2)} bits${unit}. Expected: ${guesses}.`;
}

function mark(place) {
  const spots = $("heat").children;
  spots[here]?.classList.remove("here");
  here = Math.max(0, Math.min(place, spots.length - 1));
  spots[here]?.classList.add("here");
  put("detail", spots.length ? detail(shown.characters[here]) : HINT);
}

function step(event) {
  const place = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: Infinity }[event.key];
  if (place === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  mark(place);
  $("heat").children[here]?.scrollIntoView({ block: "nearest" });
}

async function goOn() {
  const stop = new AbortController();
  drawing?.abort();
  drawing = stop;
  $("stop").disabled = false;
  tell("drawing", null);
  const options = { temperature: Number($("temperature").value), length: Number($("length").value) };
  options.seed = Math.floor(Math.random() * 1e9);
  try {
    const answer = await post("continue", { text: $("text").value, ...options }, stop.signal);
    const lines = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    let last = performance.now();
    for (let part = await lines.read(); !part.done; part = await lines.read()) {
      const whole = (rest + part.value).split("\n");
      rest = whole.pop();
      for (const line of whole) {
        const { text, error } = JSON.parse(line);
        if (error) throw new Error(error);
        $("text").value += text;
      }
      $("text").scrollTop = $("text").scrollHeight;
      if (performance.now() - last > 1000) {
        last = performance.now();
        read();
      }
    }
  } catch (fault) {
    if (fault.name !== "AbortError") tell("drawing", fault);
  }
  if (drawing === stop) {
    drawing = null;
    $("stop").disabled = true;
  }
  read();
}

function later() {
  tell("drawing", null);
  clearTimeout(timer);
  timer = setTimeout(read, WAIT);
}

async function begin() {
  try {
    const model = await (await ask("model")).json();
    $("name").textContent = model.name;
    document.title = `mulstm: ${model.name}`;
    const size = `${model.layers > 1 ? model.layers + " x " : ""}${model.hidden.toLocaleString("en")} units`;
    const score = model.bits_per_char ? `, ${model.bits_per_char.toFixed(3)} bits/char on its ${model.measured_on} text` : "";
    const count = model.parameters.toLocaleString("en");
    $("about").textContent = `${model.cell}, ${size}, ${count} parameters, ${model.alphabet} symbols${score}`;
    $("unit").max = model.hidden - 1;
  } catch (fault) {
    return tell("reading", fault);
  }
  read();
}

$("text").addEventListener("input", later);
$("unit").addEventListener("input", later);
$("go").addEventListener("click", goOn);
$("stop").addEventListener("click", () => drawing?.abort());
$("heat").addEventListener("pointerover", ({ target }) => target.dataset.place && mark(Number(target.dataset.place)));
$("heat").addEventListener("focus", () => mark(here));
$("heat").addEventListener("keydown", step);
$("temperature").addEventListener("input", () => {
  $("warmth").textContent = Number($("temperature").value).toFixed(2);
});
begin();
