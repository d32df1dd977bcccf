"""Header blocks of HTTP/2: HPACK (RFC 7541), within limits, for servers and clients alike.

Decoding keeps the dynamic table of one connection. Encoding keeps no state: fields are entries of the static
table or literals without indexing, so the encoding of a constant field is constant.

Most fields of most requests are one index into the dynamic table: they were decoded and checked when they
entered it. Huffman's code is the library's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, TypeAlias

from hpack.exceptions import HPACKError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from penstock.http.http2.faults import ConnectionFault, ErrorCode

Field: TypeAlias = tuple[bytes, bytes]
"""Name in lower case, and value."""

TABLE_SIZE: Final = 4096
"""Maximum size of the dynamic table, the default of SETTINGS_HEADER_TABLE_SIZE."""
ENTRY_BYTES: Final = 32
"""What a field counts beyond its name and value (RFC 7541 §4.1, RFC 9113 §6.5.2)."""
MAX_DECODED_FIELDS: Final = 1024
"""Fields of one block that are decoded at all: an index takes one byte, and names a field of up to 4 KiB."""
MALFORMED: Final = b""
"""Name of a field that was malformed; its value says why."""

_STATIC_TABLE: Final = tuple(enumerate(HeaderTable.STATIC_TABLE, 1))
_STATIC: Final = tuple((field, len(field[0]) + len(field[1]) + ENTRY_BYTES) for _, field in _STATIC_TABLE)
_STATIC_FIELDS: Final = {field: bytes([0x80 | index]) for index, field in _STATIC_TABLE}
_STATIC_NAMES: Final = {name: index for index, (name, _) in reversed(_STATIC_TABLE)}

_NAME_BYTES: Final = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz"
_VALUE_BYTES: Final = bytes({*range(256)} - {*range(32), 127} | {*b"\t"})
MAX_REPEATED: Final = 256
"""Bytes of values whose encodings are kept,"""
MAX_ENCODED: Final = 1024
"""and fields."""
_encoded = dict(_STATIC_FIELDS)
"""Encodings of fields; those of the static table always."""
_NOT_INDEXED: Final = 0x00
_NEVER_INDEXED: Final = 0x10
_SECRET: Final = frozenset((b"authorization", b"api-key", b"cookie", b"set-cookie", b"x-api-key"))


class _Malformed(tuple[bytes, bytes]):
    """A malformed field as an entry of the table."""

    given_name: bytes


class HeaderListTooLarge(Exception):
    """A header list exceeds the limit. Its block was decoded, so the connection goes on."""


class HeaderDecoder:
    """Decodes the header blocks that one connection receives, in their order."""

    __slots__ = ("_entries", "_limit", "_size")

    def __init__(self) -> None:
        self._entries = deque[tuple[Field, int]]()
        """The dynamic table, the latest field first, with sizes."""
        self._size = 0
        self._limit = TABLE_SIZE
        """Maximum size of the dynamic table, which the peer may lower."""

    def decode(self, block: bytes, max_size: int, max_fields: int) -> list[Field]:
        """The fields of a block. A malformed one (RFC 9113 §8.2.1) is named :data:`MALFORMED`.

        ``max_size`` is the maximum size of the list as RFC 9113 §6.5.2 counts it. Raises HeaderListTooLarge
        beyond it and beyond ``max_fields``, and ConnectionFault for a block that is not HPACK.
        """
        try:
            return self._decode(block, max_size, max_fields)
        except (HPACKError, IndexError) as error:
            text = str(error) if isinstance(error, HPACKError) else "a field is truncated, or has no entry"
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, f"a header block: {text}") from error

    def _decode(self, block: bytes, max_size: int, max_fields: int) -> list[Field]:
        fields: list[Field] = []
        entries = self._entries
        size = position = count = 0
        end = len(block)
        while position < end:
            first = block[position]
            if first >= 0x80:
                index = first & 0x7F
                position += 1
                if index == 0x7F:
                    index, position = _long_integer(block, position, 0x7F)
                if index > 61:
                    field, field_size = entries[index - 62]
                elif index:
                    field, field_size = _STATIC[index - 1]
                else:
                    raise HPACKError("the index 0")
            elif first >= 0x40:
                field, field_size, position = self._literal(block, position, 0x3F)
                self._add(field, field_size)
            elif first >= 0x20:
                if count:
                    raise HPACKError("a change of the table's size behind a field")
                position = self._resize(block, position)
                continue
            else:
                field, field_size, position = self._literal(block, position, 0x0F)
            count += 1
            size += field_size
            if size <= max_size and count <= max_fields:
                fields.append(field)
            elif count > MAX_DECODED_FIELDS:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a header block has too many fields")
        if size > max_size or count > max_fields:
            raise HeaderListTooLarge
        return fields

    def _literal(self, block: bytes, position: int, mask: int) -> tuple[Field, int, int]:
        """The literal field at ``position``, its size as an entry, and where the next one begins."""
        index = block[position] & mask
        position += 1
        if not index:
            name, position = _string(block, position)
        else:
            if index == mask:
                index, position = _long_integer(block, position, mask)
            name = _STATIC[index - 1][0][0] if index < 62 else _name(self._entries[index - 62][0])
        value, position = _string(block, position)
        size = len(name) + len(value) + ENTRY_BYTES
        fault = (_repeated_fault if size <= MAX_REPEATED else _fault)(name, value)
        if not fault:
            return (name, value), size, position
        malformed = _Malformed((MALFORMED, fault))
        malformed.given_name = name
        return malformed, size, position

    def _add(self, field: Field, size: int) -> None:
        self._entries.appendleft((field, size))
        self._size += size
        self._evict()

    def _evict(self) -> None:
        while self._size > self._limit:
            self._size -= self._entries.pop()[1]

    def _resize(self, block: bytes, position: int) -> int:
        limit = block[position] & 0x1F
        position += 1
        if limit == 0x1F:
            limit, position = _long_integer(block, position, 0x1F)
        if limit > TABLE_SIZE:
            raise HPACKError(f"a table of {limit} bytes, of {TABLE_SIZE} allowed")
        self._limit = limit
        self._evict()
        return position


def _name(entry: Field) -> bytes:
    """The name of an entry, which other fields may refer to also if its value is malformed."""
    return entry.given_name if isinstance(entry, _Malformed) else entry[0]


def _long_integer(block: bytes, position: int, prefix: int) -> tuple[int, int]:
    """The integer whose prefix is full, and what follows it; below 2**28 (RFC 7541 §5.1)."""
    shift = 0
    while shift < 28:
        byte = block[position]
        position += 1
        prefix += (byte & 0x7F) << shift
        if byte < 0x80:
            return prefix, position
        shift += 7
    raise HPACKError("an integer of more than four bytes")


def _string(block: bytes, position: int) -> tuple[bytes, int]:
    first = block[position]
    length = first & 0x7F
    position += 1
    if length == 0x7F:
        length, position = _long_integer(block, position, 0x7F)
    end = position + length
    if end > len(block):
        raise HPACKError("a string is longer than its block")
    text = block[position:end]
    if first >= 0x80:
        text = _short_text(text) if length <= _SHORT else decode_huffman(text)
    return text, end


_SHORT: Final = 24
_short_text = lru_cache(maxsize=1024)(decode_huffman)
"""Names, dates and lengths repeat; the library takes 0.3 microseconds per byte."""


def _fault(name: bytes, value: bytes) -> bytes:
    """Why a field is malformed; empty if it is not."""
    bare = name[1:] if name.startswith(b":") else name
    if not bare or bare.translate(None, _NAME_BYTES):
        return b"The name of a header has upper-case letters or characters that no name may have."
    if value.translate(None, _VALUE_BYTES) or value != value.strip():
        return b"The value of the header %b has control characters, or spaces around it." % name[:40]
    return b""


_repeated_fault = lru_cache(maxsize=1024)(_fault)

# -- encoding

NO_TABLE: Final = b"\x20"
"""Starts the blocks to a peer whose SETTINGS_HEADER_TABLE_SIZE is below the default: its table has size 0, as
the encoding uses none. Decoders insist on being told (RFC 7541 §4.2)."""


def encode_status(status: int) -> bytes:
    """The field ``:status``."""
    return encode_fields([(b":status", b"%d" % status)])


def encode_fields(fields: Iterable[Field]) -> bytes:
    """The block of fields, whose names are in lower case; pseudo-header fields come first."""
    return b"".join([_encoded.get(field) or _encode(field) for field in fields])


def _encode(field: Field) -> bytes:
    """Most fields of most messages repeat, and a literal takes 3 microseconds to encode."""
    encoded = _encode_literal(*field)
    if len(field[1]) <= MAX_REPEATED:
        if len(_encoded) >= MAX_ENCODED:
            _encoded.clear()
            _encoded.update(_STATIC_FIELDS)
        _encoded[field] = encoded
    return encoded


def _encode_literal(name: bytes, value: bytes) -> bytes:
    """Without indexing; a secret never becomes an entry of a table on its way (RFC 7541 §7.1.3)."""
    kind = _NEVER_INDEXED if name in _SECRET else _NOT_INDEXED
    index = _STATIC_NAMES.get(name)
    if index is None:
        return b"".join(
            (bytes((kind,)), _integer(len(name), 0x7F, 0), name, _integer(len(value), 0x7F, 0), value)
        )
    return b"".join((_integer(index, 0x0F, kind), _integer(len(value), 0x7F, 0), value))


def _integer(number: int, prefix: int, bits: int) -> bytes:
    """``bits``: those before the prefix, whose maximum value is ``prefix``."""
    if number < prefix:
        return bytes((bits | number,))
    encoded = bytearray((bits | prefix,))
    number -= prefix
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
