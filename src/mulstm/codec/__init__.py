"""Compression that always decodes: an integer network, a range coder, an archive with checksums."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mulstm.codec.archive import Summary, compress, compress_path, decompress, decompress_path
    from mulstm.codec.integer import IntegerModel
    from mulstm.codec.network import Network
    from mulstm.codec.source import open_model, quantize_checkpoint

_HOME = {
    "IntegerModel": "integer",
    "Network": "network",
    "Summary": "archive",
    "compress": "archive",
    "compress_path": "archive",
    "decompress": "archive",
    "decompress_path": "archive",
    "open_model": "source",
    "quantize_checkpoint": "source",
}

__all__ = [
    "IntegerModel",
    "Network",
    "Summary",
    "compress",
    "compress_path",
    "decompress",
    "decompress_path",
    "open_model",
    "quantize_checkpoint",
]

if not TYPE_CHECKING:  # a type checker is to see the names above, and no others

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
