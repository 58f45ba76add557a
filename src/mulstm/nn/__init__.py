"""Modules: the layer in the manner of torch.nn.LSTM, and the language model of the paper."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mulstm.nn.cell import MultiplicativeLSTM, MultiplicativeLSTMCell
    from mulstm.nn.layer import Layer
    from mulstm.nn.model import LanguageModel, Masks

_HOME = {
    "LanguageModel": "mulstm.nn.model",
    "Layer": "mulstm.nn.layer",
    "Masks": "mulstm.nn.model",
    "MultiplicativeLSTM": "mulstm.nn.cell",
    "MultiplicativeLSTMCell": "mulstm.nn.cell",
}

__all__ = ["LanguageModel", "Layer", "Masks", "MultiplicativeLSTM", "MultiplicativeLSTMCell"]

if not TYPE_CHECKING:  # a type checker is to see the names above, and no others

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOME[name]), name)
