"""The multiplicative LSTM of Krause, Murray, Renals & Lu (2017)."""

__version__ = "0.1.0"
