"""A picture and its two files: our style, and whether a file still shows its data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import getsourcefile
from pathlib import Path
from typing import Any

from mulstm import files
from mulstm.errors import RunError
from mulstm.report import paper

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#E69F00",
    "#CC79A7",
    "#56B4E9",
)
INK, FAINT = "#222222", "#8a8a8a"
STYLE = {
    "svg.hashsalt": "mulstm",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.parse_math": False,  # a dollar sign in a text is no formula
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 11,
    "axes.titlepad": 12,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 2.0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 3.0,
    "figure.facecolor": "white",
    "savefig.dpi": 160,
}
Painter = Callable[[Any, Any], None]  # (matplotlib figure, data)


@dataclass(frozen=True)
class Figure:
    """A picture that knows which data it shows, so that it can tell whether a file still shows them."""

    name: str
    data: Any  # as JSON has it
    paint: Painter
    size: tuple[float, float] = (7.6, 4.4)

    @property
    def fingerprint(self) -> str:
        """Of the data, what draws them and the paper's numbers: a change of any makes the file stale."""
        sources = [Path(__file__), Path(paper.__file__)]
        if source := getsourcefile(self.paint):
            sources.append(Path(source))
        content = json.dumps(self.data, sort_keys=True) + "".join(
            path.read_text(encoding="utf-8") for path in sources
        )
        return "mulstm figure " + hashlib.sha256(content.encode()).hexdigest()[:32]

    def is_stale(self, folder: Path) -> bool:
        """Whether the SVG or the PNG is missing or shows something else."""
        paths = [folder / f"{self.name}.{suffix}" for suffix in ("svg", "png")]
        return not all(f.is_file() and self.fingerprint.encode() in f.read_bytes() for f in paths)

    def draw(self, folder: Path) -> list[Path]:
        """Writes the SVG and the PNG."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{self.name}.{suffix}" for suffix in ("svg", "png")]
        with canvas(self.size) as picture:
            self.paint(picture, self.data)
            for path in paths:
                note = {"Date": None} if path.suffix == ".svg" else {"Software": None}
                with files.replacing(path) as temporary:
                    picture.savefig(
                        temporary,
                        format=path.suffix[1:],
                        metadata={**note, "Description": self.fingerprint},
                        bbox_inches="tight",
                        pad_inches=0.12,
                    )
        return paths


@contextmanager
def canvas(size: tuple[float, float]) -> Iterator[Any]:
    """An empty figure in our style, whatever the user's own settings are."""
    try:
        import matplotlib
    except ImportError:
        raise RunError("matplotlib, which draws figures, is missing. Run: pip install matplotlib") from None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        picture = Picture(figsize=size, layout="constrained")
        FigureCanvasAgg(picture)
        yield picture


def apart(levels: Mapping[str, float], gap: float) -> Iterator[tuple[str, float, float]]:
    """Names and levels from below, each with a height at which its name does not touch the one before."""
    height = float("-inf")
    for name, level in sorted(levels.items(), key=lambda item: item[1]):
        height = max(level, height + gap)
        yield name, level, height
