"""Compression that always decodes: an integer network, a range coder, an archive with checksums."""

from mulstm.codec.archive import Summary, compress, compress_path, decompress, decompress_path
from mulstm.codec.integer import IntegerModel
from mulstm.codec.network import Network
from mulstm.codec.source import open_model, quantize_checkpoint

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
