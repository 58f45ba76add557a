"""Recipes: loading, inheritance, overrides, and every fault told at once."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from mulstm import recipe
from mulstm.errors import RecipeError
from mulstm.recipe import Recipe


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_all_faults_are_told_together(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "bad.toml",
        """
        titel = "x"
        optimiser = 3
        [model]
        hiden = 3
        cell = "gru"
        layers = 0
        [train]
        lanes = 2.5
        seed = true
        precision = "fp4"
        rate = 1e-3
        epochs = inf
        [dropout]
        hidden = 1.0
        [data]
        split = "90-5-6"
        """,
    )
    with pytest.raises(RecipeError) as caught:
        recipe.load(path)
    message = str(caught.value)
    for part in [
        "12 faults",
        "unknown key titel: did you mean title?",
        "optimiser = 3 must be a table",
        "unknown key model.hiden: did you mean model.hidden?",
        'model.cell = "gru" must be one of rnn,',
        "model.layers = 0 must be 1 to 1,000",
        "train.lanes = 2.5 must be a whole number",
        "train.seed = true must be a whole number",
        'train.precision = "fp4" must be one of fp32, bf16, fp8',
        "unknown key train.rate: did you mean optimiser.rate or dynamic.rate?",
        "train.epochs = inf must be a finite number",
        "dropout.hidden = 1.0 must be in [0, 1)",
        'data.split = "90-5-6" must be three shares of 100',
    ]:
        assert part in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["dropout.embedding=0.2", "model.embedding=0"], "needs model.embedding above 0"),
        (["model.skip=true"], "needs model.layers of 2 or more"),
        (["train.block=100"], "must hold 32 lanes of 100 symbols"),
        (["train.block=100000", "train.rotate=true"], "do not go together"),
        (["data.split=95-0-5"], 'data.split = "95-0-5" has none'),
        (["optimiser.floor=1.0"], "must not be above optimiser.rate"),
        (["optimiser.name=rmsprop-normalised"], "must be 0 for rmsprop-normalised"),
        (["model.cell=mrnn", "model.unit=initial"], "must stay standard for mrnn"),
    ],
)
def test_values_that_contradict_each_other(overrides: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words.replace("(", r"\(")):
        recipe.load("text", overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.lanes=4", "train.chunk=10", "train.block=40", "train.rotate=false"],
        ["optimiser.rate=1e-3", "optimiser.floor=1e-3"],
    ],
)
def test_values_that_just_go_together(overrides: list[str]) -> None:
    recipe.load("text", overrides)


@pytest.mark.parametrize("key", ["train.ema", "train.ema_start", "train.drop_state", "optimiser.beta2"])
def test_a_share_is_less_than_all(key: str) -> None:
    with pytest.raises(RecipeError, match=rf"{key} = 1\.0 must be in \[0, 1\)"):
        recipe.load("text", [f"{key}=1"])


def test_a_rate_that_decays_does_not_grow() -> None:
    recipe.load("text", ["optimiser.decay_factor=1"])
    for factor in (0, 1.5):
        with pytest.raises(RecipeError, match=r"optimiser\.decay_factor = .* must be above 0 and at most 1"):
            recipe.load("text", [f"optimiser.decay_factor={factor}"])


def test_a_split_leaves_something_to_train_on() -> None:
    assert recipe.parse_split("0-50-50") is None
    assert recipe.parse_split("100-0-0") == (1, 0, 0)


def test_a_value_said_anew_has_no_old_note(tmp_path: Path) -> None:
    write(tmp_path, "base.toml", "[train]\nlanes = 4  # of the paper\nchunk = 9  # ours\n")
    child = write(tmp_path, "child.toml", 'like = "base.toml"\n[train]\nlanes = 8\n')
    assert recipe.notes_of(child) == {"train.chunk": "ours"}


def test_inheritance_gives_only_what_differs(tmp_path: Path) -> None:
    write(
        tmp_path,
        "base.toml",
        'like = "text"\nname = "other"\ntitle = "base"\n[model]\nhidden = 64\n[train]\nlanes = 4\n',
    )
    path = write(tmp_path, "child.toml", 'like = "base.toml"\n[train]\nchunk = 7\n')
    child = recipe.load(path)
    assert (child.name, child.title) == ("child", "base")
    assert (child.model.hidden, child.train.lanes, child.train.chunk) == (64, 4, 7)
    assert child.model.embedding == recipe.load("text").model.embedding


def test_a_circle_of_recipes(tmp_path: Path) -> None:
    write(tmp_path, "a.toml", 'like = "b.toml"\n')
    write(tmp_path, "b.toml", 'like = "a.toml"\n')
    with pytest.raises(RecipeError, match="in a circle: a -> b -> a"):
        recipe.load(tmp_path / "a.toml")
    itself = write(tmp_path, "c.toml", f'like = "../{tmp_path.name}/c.toml"\n')
    with pytest.raises(RecipeError, match="in a circle: c -> c"):
        recipe.load(itself)


def test_a_long_chain_of_recipes(tmp_path: Path) -> None:
    write(tmp_path, "0.toml", "[train]\nlanes = 3\n")
    for k in range(1, 1200):
        write(tmp_path, f"{k}.toml", f'like = "{k - 1}.toml"\n')
    assert recipe.load(tmp_path / "49.toml").train.lanes == 3
    for k in (50, 1199):
        with pytest.raises(
            RecipeError, match=r"is like more than 50 recipes, .*\. Write some of them in one\."
        ):
            recipe.load(tmp_path / f"{k}.toml")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimiser.rate=1" + "0" * 400, "must be a finite number"),
        ("optimiser.rate=1" + "0" * 5000, "must be a number"),
        ("optimiser.rate=1e300", "at most 1e30"),
        ("optimiser.epsilon=0", "must be above 0"),
        ("train.seed=18446744073709551616", "below 2"),
        ("train.seed=0x" + "f" * 9999, "below 2"),
        ("model.hidden=1048577", "1 to 1,048,576"),
        ("model.embedding=1048577", "0 to 1,048,576"),
        ("model.layers=1001", "1 to 1,000"),
        ("model.hidden=" + "[" * 9999, "a whole number"),
        ("data.split=" + "9" * 200_000 + "-5-5", "three shares"),
        ("data.corpus=n\udcff.txt", "must be UTF-8"),
    ],
)
def test_values_far_out_are_told_in_short(override: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe.load("text", [override])
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300
    key, _, value = override.partition("=")
    section, _, name = key.partition(".")
    file = tmp_path / "far.toml"
    value = f'"{value}"' if section == "data" else value
    file.write_bytes(f"[{section}]\n{name} = {value}\n".encode(errors="surrogateescape"))
    with pytest.raises(RecipeError, match=rf"{words}|is not TOML|is not written in UTF-8"):
        recipe.load(file)


def test_a_file_as_editors_write_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b'\xef\xbb\xbflike = "text"\r\n[model]\r\nhidden = 8  # small\r\n')
    assert recipe.load(path).model.hidden == 8
    assert recipe.notes_of(path)["model.hidden"] == "small"
    path.write_bytes('like = "text"\n'.encode("utf-16"))
    with pytest.raises(RecipeError, match=r"mine\.toml is not written in UTF-8 \(.*\)\. Save it so"):
        recipe.load(path)


def test_missing_recipes_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"Did you mean .*hutter/mlstm-emb-wn-vd-large"):
        recipe.load("hutter/mlstm-emb-wn-large")
    with pytest.raises(RecipeError, match="no recipe file"):
        recipe.load(tmp_path / "none.toml")
    with pytest.raises(RecipeError, match="is not TOML"):
        recipe.load(write(tmp_path, "broken.toml", "[model\n"))
    with pytest.raises(RecipeError, match="must be a recipe's name"):
        recipe.load(write(tmp_path, "like.toml", "like = 3\n"))


@pytest.mark.parametrize("key", ["name", "title"])
def test_names_that_would_command_a_terminal(key: str) -> None:
    for text in ("\x1b]0;PWN\x07x", "a\nb", "a\0b", "\x7f", "\x9b2J"):
        with pytest.raises(RecipeError, match=f"{key} = .* must be free of control characters"):
            recipe.from_dict({key: text})
    assert getattr(recipe.from_dict({key: "caf\u00e9\u00a0[2J"}), key) == "caf\u00e9\u00a0[2J"


def test_names_so_deep_that_their_runs_would_not_be_found() -> None:
    recipe.check(Recipe(name="a/b/c"))
    with pytest.raises(RecipeError, match="must be a name of at most 3 parts"):
        recipe.check(Recipe(name="a/b/c/d"))


@pytest.mark.parametrize("name", ["/etc", "..", "../x", "a/../../x", "a/."])
def test_names_that_would_leave_the_runs_folder(name: str) -> None:
    with pytest.raises(RecipeError, match="must be a name that can name a folder"):
        recipe.check(Recipe(name=name))


def test_overrides_take_toml_or_bare_words() -> None:
    got = recipe.load(
        "text",
        ["train.lanes = 8", "data.corpus=1984", "optimiser.rate=1", 'title="a = b"', "train.rotate=false"],
    )
    assert (got.train.lanes, got.data.corpus, got.optimiser.rate, got.title) == (8, "1984", 1.0, "a = b")
    assert got.train.rotate is False
    with pytest.raises(RecipeError, match=r"section\.key=value"):
        recipe.load("text", ["lanes"])
    with pytest.raises(RecipeError, match=r"did you mean train\.lanes or evaluate.lanes"):
        recipe.load("text", ["lanes=3"])


def test_toml_and_json_round_trips(tmp_path: Path) -> None:
    one = recipe.load("hutter/lstm-stacked-rmsprop", ['row="é \\" \\\\ \\u007f"'])
    assert recipe.load(write(tmp_path, "copy.toml", recipe.dumps(one))) == one
    assert recipe.from_dict(json.loads(json.dumps(recipe.as_dict(one)))) == one


def test_every_number_and_choice_has_a_rule() -> None:
    free = {"row", "data.protocol", "init.forget_bias", "init.output_gate_bias"}
    free |= {"init.alpha", "init.beta", "data.column"}
    ruled = {key for keys, _, _ in recipe.RULES for key in keys.split()}
    assert ruled <= set(recipe.KEYS)
    assert {key for key, kind in recipe.KEYS.items() if kind is not bool} - ruled == free


def test_check_looks_at_a_recipe_made_by_hand() -> None:
    recipe.check(Recipe())
    with pytest.raises(RecipeError, match=r"train\.lanes = 0 must be 1 or more"):
        recipe.check(Recipe(name="x", train=recipe.TrainRecipe(lanes=0)))


@pytest.mark.parametrize("symbols", [1, 7, 8, 100, 799, 5_000, 25_600, 10**6, 10**9])
def test_the_recipe_suits_texts_of_any_length(symbols: int) -> None:
    start = recipe.load("text")
    got = recipe.fit(start, symbols)
    recipe.check(got)
    train = got.train
    assert 1 <= train.lanes <= start.train.lanes
    assert 1 <= train.chunk <= start.train.chunk
    assert train.lanes * train.chunk <= symbols
    if symbols >= 8 * start.train.lanes * start.train.chunk:
        assert (train.lanes, train.chunk) == (start.train.lanes, start.train.chunk)
    if train.lanes < start.train.lanes and symbols >= 8:
        assert symbols // (train.lanes * train.chunk) >= 8
    updates = symbols // (train.lanes * train.chunk) * train.epochs
    assert updates <= 50_000
    assert updates >= 1_999 or train.epochs == 4 * start.train.epochs
    assert train.epochs <= 4 * start.train.epochs
    assert got.optimiser.warmup == min(start.optimiser.warmup, int(updates) // 10)


@pytest.mark.parametrize(
    ("valid", "lanes", "final"),
    [
        (0, 100, 10),
        (1, 1, 1),
        (499, 1, 1),
        (3_000, 6, 6),
        (49_999, 99, 10),
        (50_000, 100, 10),
        (10**9, 100, 10),
    ],
)
def test_a_short_validation_part_is_read_in_few_lanes(valid: int, lanes: int, final: int) -> None:
    """Each lane starts cold, so a lane of a few symbols says little of the model."""
    start = recipe.load("text")
    got = recipe.fit(start, 10**6, valid=valid)
    assert got.evaluate == replace(start.evaluate, lanes=lanes, final_lanes=final)
    recipe.check(got)


def test_validation_lanes_suit_what_is_read_of_the_part() -> None:
    overrides = ["evaluate.symbols=5_000"]
    assert recipe.fit(recipe.load("text", overrides), 10**6, overrides, valid=10**6).evaluate.lanes == 10
    overrides = ["evaluate.lanes=90"]
    assert recipe.fit(recipe.load("text", overrides), 10**6, overrides, valid=100).evaluate.lanes == 90


def test_final_lanes_that_were_asked_for_stay() -> None:
    given = ["evaluate.final_lanes=7"]
    assert recipe.fit(recipe.load("text", given), 10**6, given, valid=100).evaluate.final_lanes == 7


@pytest.mark.parametrize(("symbols", "processes", "lanes"), [(12_500, 2, 14), (12_500, 1, 15), (100, 3, 3)])
def test_lanes_can_be_shared_by_the_processes(symbols: int, processes: int, lanes: int) -> None:
    start = recipe.load("text", ["train.chunk=100"])
    assert recipe.fit(start, symbols, ["train.chunk=100"], processes=processes).train.lanes == lanes


@pytest.mark.parametrize(("text", "number"), [(".5", 0.5), ("5.", 5.0), ("-.5e0", -0.5)])
def test_numbers_that_toml_does_not_know(text: str, number: float) -> None:
    assert recipe.load("text", [f"init.forget_bias={text}"]).init.forget_bias == number


@pytest.mark.parametrize("text", [".", "inf", "one", ""])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(RecipeError, match=r"init\.forget_bias"):
        recipe.load("text", [f"init.forget_bias={text}"])


@pytest.mark.parametrize(
    ("length", "warmup"), [("train.updates=30", 3), ("train.epochs=0.5", 15), ("train.updates=5000", 100)]
)
def test_the_rate_rises_for_a_tenth_of_a_run_at_most(length: str, warmup: int) -> None:
    # A million symbols are 312 updates of 32 lanes of 100.
    assert recipe.fit(recipe.load("text", [length]), 10**6, [length]).optimiser.warmup == warmup


def test_what_the_user_says_is_not_fitted() -> None:
    overrides = ["train.lanes = 64", "train.chunk=100", "train.epochs=3", "optimiser.warmup=7"]
    start = recipe.load("text", overrides)
    assert recipe.fit(start, 1_000, overrides) == start
    assert recipe.fit(start, 1_000, ["train.updates=5"]).train.epochs == 3


@pytest.mark.parametrize(
    ("given", "lanes", "chunk"),
    [("train.chunk=100", 1, 100), ("train.lanes=5", 5, 25), ("train.seed=2", 1, 100)],
)
def test_what_the_user_does_not_say_is_fitted_to_what_he_says(given: str, lanes: int, chunk: int) -> None:
    found = recipe.fit(recipe.load("text", [given]), 1_000, [given]).train
    assert (found.lanes, found.chunk) == (lanes, chunk)


def test_the_page_explains_every_key_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    told = re.findall(r"^\| `([a-z_0-9.]+)` \| (.*?) \|", page, flags=re.M)
    told = [(key, default) for key, default in told if key in recipe.KEYS]
    assert [key for key, _ in told] == list(recipe.KEYS)
    defaults = {
        key: value
        for key, value in tomllib.loads(recipe.dumps(Recipe())).items()
        if key not in recipe.SECTIONS
    }
    for section, table in tomllib.loads(recipe.dumps(Recipe())).items():
        if section in recipe.SECTIONS:
            defaults |= {f"{section}.{key}": value for key, value in table.items()}
    for key, default in told:
        if key != "name":
            assert tomllib.loads(f"v = {default.strip('`')}")["v"] == defaults[key], key


def test_the_example_on_that_page_is_a_recipe(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    (example,) = re.findall(r"^```toml\n(.*?)^```", page, flags=re.M | re.S)
    got = recipe.load(write(tmp_path, "mine.toml", example))
    assert (got.title, got.data.corpus, got.model.hidden) == ("My letters", "letters/", 1024)
