"""A model sees symbols 0 ... N-1; an alphabet says which byte each of them stands for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mulstm.errors import DataError

Bytes = NDArray[np.uint8]
Raw = bytes  # inside the class, `bytes` is the alphabet of that name


@dataclass(frozen=True)
class Alphabet:
    """At most 256 distinct bytes; the symbol is the place in `symbols`.

    Foreign models have more: symbols that no byte stands for (`specials`, after the bytes), and bytes that
    share another's symbol (`aliases`: pairs of the byte and the one it is read as).
    """

    symbols: bytes
    specials: tuple[str, ...] = ()
    aliases: bytes = b""

    def __post_init__(self) -> None:
        if not self.symbols or len(set(self.symbols)) != len(self.symbols):
            raise DataError(
                f"An alphabet needs distinct bytes, at least one, and got {self.symbols[:20]!r}. "
                "Take the alphabet that was stored with the model."
            )
        new, known = self.aliases[::2], self.aliases[1::2]
        if len(new) != len(known) or set(new) & set(self.symbols) or set(known) - set(self.symbols):
            raise DataError(
                f"The aliases {self.aliases!r} are not pairs of a new byte and a known one. "
                "Take the alphabet that was stored with the model."
            )

    @classmethod
    def bytes(cls) -> Alphabet:
        """All 256 bytes, each its own symbol."""
        return cls(bytes(range(256)))

    @classmethod
    def distinct(cls, data: Raw | Bytes | Iterable[Raw | Bytes]) -> Alphabet:
        """The sorted distinct bytes of `data`, which may come in blocks."""
        seen = np.zeros(256, dtype=bool)
        for block in [data] if isinstance(data, (bytes, np.ndarray)) else data:
            seen |= np.bincount(_array(block), minlength=256) > 0
            if seen.all():
                break
        return cls(bytes(np.flatnonzero(seen).astype(np.uint8)))

    @property
    def size(self) -> int:
        """N."""
        return len(self.symbols) + len(self.specials)

    def special(self, name: str) -> int | None:
        """The symbol of that name, such as "start", where there is one."""
        return len(self.symbols) + self.specials.index(name) if name in self.specials else None

    @property
    def border(self) -> Raw:
        """What stands between two texts: a line's end where there is one, else a space, else nothing."""
        return next((b for b in (b"\n", b" ") if b in self.symbols), b"")

    def require_size(self, size: int) -> None:
        """Raises DataError where this cannot be the alphabet of a model of `size` symbols."""
        if self.size != size:
            raise DataError(
                f"The model has {size} symbols and the alphabet {self.size}: they do not belong together. "
                "Give the model's own alphabet, or a text encoded with it."
            )

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that differ when the alphabets do."""
        more = json.dumps([self.specials, self.aliases.hex()]) if self.specials or self.aliases else ""
        return hashlib.sha256(self.symbols + more.encode()).hexdigest()[:16]

    @cached_property
    def _symbol_of(self) -> NDArray[np.int16]:
        table = np.full(256, -1, dtype=np.int16)
        table[np.frombuffer(self.symbols, dtype=np.uint8)] = np.arange(len(self.symbols), dtype=np.int16)
        new, known = np.frombuffer(self.aliases, dtype=np.uint8).reshape(-1, 2).T
        table[new] = table[known]
        return table

    @cached_property
    def _byte_of(self) -> Bytes:
        return np.frombuffer(self.symbols, dtype=np.uint8)

    @cached_property
    def _is_all_bytes(self) -> bool:
        return self.symbols == bytes(range(256))

    def encode(self, data: Raw | Bytes, *, offset: int = 0) -> Bytes:
        """The symbols of `data`, in its shape; `offset` is where it stands in its file, for the error."""
        array = _array(data)
        if self._is_all_bytes:
            return array
        symbols = self._symbol_of[array]
        if symbols.size and symbols.min() < 0:
            place = int(np.flatnonzero(symbols.ravel() < 0)[0])
            byte = int(array.ravel()[place])
            raise DataError(
                f"Byte {_name(byte)} at offset {offset + place:,} is not in the alphabet of {self.size}. "
                'Take it out of the text, or use a model trained with data.alphabet = "bytes".'
            )
        return symbols.astype(np.uint8)

    def decode(self, symbols: Any) -> Raw:
        """The bytes of the symbols; a special symbol has none."""
        array = np.asarray(symbols)
        outside = array[(array < 0) | (array >= self.size)]
        if outside.size:
            raise DataError(
                f"Symbol {outside[0]} is outside the alphabet of {self.size}. "
                "Decode with the alphabet that encoded it."
            )
        return self._byte_of[array[array < len(self.symbols)].astype(np.intp)].tobytes()

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `bytes` holds the symbols as hexadecimal digits."""
        plain: dict[str, Any] = {"size": self.size, "bytes": self.symbols.hex()}
        if self.specials:
            plain["specials"] = list(self.specials)
        if self.aliases:
            plain["aliases"] = self.aliases.hex()
        return plain

    @classmethod
    def from_json(cls, value: Any) -> Alphabet:
        """The alphabet such an object describes."""
        try:
            symbols, size = bytes.fromhex(value["bytes"]), value["size"]
            specials = tuple(str(name) for name in value.get("specials", ()))
            alphabet = cls(symbols, specials, bytes.fromhex(value.get("aliases", "")))
        except (TypeError, KeyError, ValueError, AttributeError, DataError):
            size, alphabet = -1, None
        if alphabet is None or size != alphabet.size:
            raise DataError("This is not a stored alphabet. Take the file as mulstm wrote it.")
        return alphabet


def _array(data: bytes | Bytes) -> Bytes:
    return data if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)


def _name(byte: int) -> str:
    return f"0x{byte:02x} ({chr(byte)!r})" if 32 <= byte < 127 else f"0x{byte:02x}"
