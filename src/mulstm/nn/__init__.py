"""Modules: the layer in the manner of torch.nn.LSTM, and the language model of the paper."""

from mulstm.nn.cell import MultiplicativeLSTM, MultiplicativeLSTMCell
from mulstm.nn.layer import Layer
from mulstm.nn.masks import Masks
from mulstm.nn.model import LanguageModel

__all__ = ["LanguageModel", "Layer", "Masks", "MultiplicativeLSTM", "MultiplicativeLSTMCell"]
