"""Any recipe goes to TOML and comes back the same."""

import tomllib
from typing import Any, get_type_hints

from hypothesis import given
from hypothesis import strategies as st

from mulstm import recipe
from mulstm.errors import RecipeError
from mulstm.recipe import Recipe


def value_of(key: str, kind: type) -> st.SearchStrategy[Any]:
    """Values of the right type that no rule forbids."""
    basic: dict[type, st.SearchStrategy[Any]] = {
        str: st.text(max_size=12),
        bool: st.booleans(),
        int: st.integers(0, 10**9),
        float: st.floats(0, 1e9, allow_subnormal=True),
    }
    strategy = basic[kind]
    for keys, allowed, words in recipe.RULES:
        if key in keys.split():
            if words.startswith("one of"):
                names = [w.strip('"') for w in words.removeprefix("one of ").split(", ")]
                strategy = st.sampled_from(names)
            elif words == "in [0, 1)":
                strategy = st.floats(0, 1, exclude_max=True)
            elif words.startswith("three shares"):
                strategy = st.sampled_from(["", "90-5-5", "95-0-5", "99.5-0.25-0.25"])
            strategy = strategy.filter(allowed)
    return strategy


def section(name: str) -> st.SearchStrategy[Any]:
    kind = recipe.SECTIONS[name]
    return st.builds(kind, **{key: value_of(f"{name}.{key}", of) for key, of in get_type_hints(kind).items()})


recipes = st.builds(
    Recipe,
    **{key: value_of(key, kind) for key, kind in recipe.KEYS.items() if "." not in key},
    **{name: section(name) for name in recipe.SECTIONS},
)


@given(recipes)
def test_toml_and_back(one: Recipe) -> None:
    try:
        recipe.check(one)
    except RecipeError:
        return  # possible values that contradict one another
    assert recipe.from_dict(tomllib.loads(recipe.dumps(one))) == one
