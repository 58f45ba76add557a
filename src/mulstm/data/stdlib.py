"""The corpus that needs no download: the source text of the running Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np

from mulstm.data.alphabet import Bytes
from mulstm.errors import DataError

# Left out: what is not of the standard library or differs between installations of one Python version;
# tests; generated tables (encodings, pydoc_data); and the parts that some distributions pack apart.
LEFT_OUT = frozenset(
    (
        *("site-packages", "dist-packages", "sitecustomize.py", "usercustomize.py", "lib-dynload"),
        *("__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"),
        *("idlelib", "tkinter", "turtledemo", "turtle.py", "lib2to3", "distutils", "ensurepip", "venv"),
    )
)


def sources() -> Bytes:
    """All those .py files in the order of their relative paths, each as it stands."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {p.relative_to(root).as_posix(): p for p in root.rglob("*.py")}
    texts = [files[name].read_bytes() for name in sorted(files) if _belongs(name)]
    joined = b"".join(text for text in texts if text)
    if len(joined) < 1_000_000:
        raise DataError(
            f"This Python has only {len(joined):,} bytes of standard library as .py files. "
            "Give a text of your own: mulstm train FILE."
        )
    return np.frombuffer(joined, dtype=np.uint8)


def _belongs(name: str) -> bool:
    parts = name.split("/")
    return LEFT_OUT.isdisjoint(parts) and not parts[0].startswith(("config-", "_sysconfigdata"))
