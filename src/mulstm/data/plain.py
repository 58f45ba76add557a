"""Files that would be read as they stand though they are packed, or no text: known by how they begin."""

from __future__ import annotations

import codecs
import re
from typing import NamedTuple

HEAD = 10  # bytes that tell
NOT_READ = (".zst", ".7z", ".rar")  # packed in ways that nothing here unpacks
_PACKED = re.compile(rb"(?P<gz>\x1f\x8b)|(?P<bz2>BZh[1-9]1AY&SY)|(?P<xz>\xfd7zXZ\x00)")
_NO_TEXT = re.compile(
    rb"(?P<parquet>PAR1)|(?P<arrow>ARROW1)|(?P<zip>PK\x03\x04)|(?P<npy>\x93NUMPY)|(?P<zst>\x28\xb5\x2f\xfd)"
)

_MODEL = re.compile(rb"[\x00-\xff]{4}\x00{4}{\"")  # safetensors: the length of a table in JSON, and the table
ARCHIVE = b"\x89MUL\r\n\x1a\n"  # text-mode copying and 7-bit channels break it visibly


class Fault(NamedTuple):
    """What a file is instead of a plain text, and what to do, each to be said of its path."""

    what: str
    remedy: str
    is_packed: bool = False


def fault_of(head: bytes) -> Fault | None:
    """Why a file that begins so is not to be read as it stands; None where it may be."""
    if packed := _PACKED.match(head):
        ending = packed.lastgroup
        return Fault(
            f"is packed ({ending}), and does not say so", f"Give it the ending .{ending}, or unpack it", True
        )
    if other := _NO_TEXT.match(head):
        return Fault(f"is no text (but {other.lastgroup})", "Write what it holds as text, CSV or JSONL")
    if _MODEL.match(head):
        return Fault("is a model", 'Give a text; "mulstm train TEXT --from MODEL" goes on with a model')
    if head.startswith(ARCHIVE):
        return Fault("is an archive that mulstm wrote", "Give what mulstm decompress makes of it")
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return Fault("is written in UTF-32", "Save it as UTF-8")
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return Fault("is written in UTF-16", "Save it as UTF-8")
    return None
