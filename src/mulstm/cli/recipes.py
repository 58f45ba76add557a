"""`mulstm recipes`: what can be trained by name."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mulstm import console
from mulstm.cli._options import AsJson, Overrides

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    invoke_without_command=True,
    help="List the recipes, or show one.",
)


@app.callback()
def default(context: typer.Context) -> None:
    """List the recipes, or show one."""
    if context.invoked_subcommand is None:
        ls()


@app.command()
def ls(as_json: AsJson = False) -> None:
    """List the recipes."""
    from mulstm import recipe

    rows: list[dict[str, Any]] = []
    for name in recipe.names():
        found = recipe.load(name)
        rows.append({"name": name, "title": found.title, "kind": found.kind, "paper": found.paper or None})
    if as_json:
        console.result_json(rows)
    else:
        texts = [[r["name"], str(r["paper"] or ""), r["kind"], r["title"]] for r in rows]
        console.table(["recipe", "paper", "kind", "what it is"], texts)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A recipe's name or file.")], overrides: Overrides = None
) -> None:
    """Print a recipe, every key of it, as TOML.

    Comments say where a value is from, as far as its files note it.
    """
    from mulstm import recipe

    found = recipe.load(name, overrides or [])
    given = recipe.overridden(overrides or [])
    notes = {key: note for key, note in recipe.notes_of(name).items() if key not in given}
    console.result(recipe.dumps(found, notes).rstrip())
