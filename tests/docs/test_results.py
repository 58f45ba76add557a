"""Tables, figures and links: what is in the repository is what its records say."""

import re
from pathlib import Path

import pytest

from mulstm import report

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(p for name in ("docs", "models", "results") for p in (ROOT / name).glob("*.md")),
]


def test_tables_and_figures_are_those_of_the_records() -> None:
    assert report.stale(ROOT / "results", ROOT / "README.md") == []


def _anchors(page: Path) -> set[str]:
    """As the usual viewers make them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        place, _, anchor = link.partition("#")
        if "://" in place:
            continue
        target = page.parent / place if place else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_every_figure_is_shown_somewhere() -> None:
    shown = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [p.name for p in (ROOT / "results").glob("*.png") if p.name not in shown] == []
