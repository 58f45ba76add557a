"""The multiplicative LSTM of Krause, Murray, Renals & Lu (2017)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mulstm.checkpoint import Checkpoint
    from mulstm.checkpoint import load as load_checkpoint
    from mulstm.checkpoint import save as save_checkpoint
    from mulstm.data import Alphabet
    from mulstm.data import load as load_corpus
    from mulstm.embedding import embed
    from mulstm.errors import MulstmError
    from mulstm.interop.hub import from_pretrained, save_pretrained
    from mulstm.nn import LanguageModel, MultiplicativeLSTM, MultiplicativeLSTMCell
    from mulstm.ops import recurrence
    from mulstm.predict import Predictor
    from mulstm.recipe import Recipe
    from mulstm.recipe import load as load_recipe
    from mulstm.scoring import score

# Resolved on first use: importing mulstm takes no time, and its ground floor works without torch.
_HOME = {
    "Alphabet": ("mulstm.data", "Alphabet"),
    "Checkpoint": ("mulstm.checkpoint", "Checkpoint"),
    "LanguageModel": ("mulstm.nn", "LanguageModel"),
    "MultiplicativeLSTM": ("mulstm.nn", "MultiplicativeLSTM"),
    "MultiplicativeLSTMCell": ("mulstm.nn", "MultiplicativeLSTMCell"),
    "MulstmError": ("mulstm.errors", "MulstmError"),
    "Predictor": ("mulstm.predict", "Predictor"),
    "Recipe": ("mulstm.recipe", "Recipe"),
    "embed": ("mulstm.embedding", "embed"),
    "from_pretrained": ("mulstm.interop.hub", "from_pretrained"),
    "load_checkpoint": ("mulstm.checkpoint", "load"),
    "load_corpus": ("mulstm.data", "load"),
    "load_recipe": ("mulstm.recipe", "load"),
    "recurrence": ("mulstm.ops", "recurrence"),
    "save_checkpoint": ("mulstm.checkpoint", "save"),
    "save_pretrained": ("mulstm.interop.hub", "save_pretrained"),
    "score": ("mulstm.scoring", "score"),
}

__all__ = [
    "Alphabet",
    "Checkpoint",
    "LanguageModel",
    "MulstmError",
    "MultiplicativeLSTM",
    "MultiplicativeLSTMCell",
    "Predictor",
    "Recipe",
    "__version__",
    "embed",
    "from_pretrained",
    "load_checkpoint",
    "load_corpus",
    "load_recipe",
    "recurrence",
    "save_checkpoint",
    "save_pretrained",
    "score",
]

if not TYPE_CHECKING:  # a type checker is to see the names above, and no others

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            module, own = _HOME[name]
            return getattr(import_module(module), own)
        if not name.startswith("_"):
            try:
                return import_module(f"mulstm.{name}")
            except ModuleNotFoundError as fault:
                if fault.name != f"mulstm.{name}":
                    raise
        raise AttributeError(f"module 'mulstm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
