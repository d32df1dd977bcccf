"""Decodes EngineCoreOutputs into columns, without an object per request.

A message has a record for each request with output, one after another:

    array header | str header, id: 16 digits | array header, token, token… | all other fields

Ids begin with this attachment's tag, which is where records are found by array operations. In most records
the other fields are all empty, so these bytes are the same: they are learned from the first such record.
That a record ends where the next one begins is checked for every record, so what is found is what a parser
would find. Other records are decoded by msgspec, as are whole messages with few records, with foreign ids,
or with anything else that is unusual.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.engine.attach.request_ids import RequestIds
from penstock.wire.arrays import I32
from penstock.wire.vllm.messages import EngineCoreOutput, Outputs, VllmFinishReason

Slots = NDArray[np.intp]
Places = NDArray[np.intp]

FEW = 24
"""Records below which a message is decoded by msgspec: that takes about 1 microsecond each, and array
operations 40 in all."""
ID_BYTES = 16
_ID_HEADER = 0xA0 | ID_BYTES
_PADDING = 512
"""Bytes after a message that may be read beyond its end, before the ends are checked."""
_NOT_ASCII = np.uint64(0x8080808080808080)
_LEARN_FROM = 16
"""Records that are tried to learn the empty fields' bytes from."""
_INT_BYTES = np.zeros(256, np.intp)
"""Bytes of a non-negative integer by its first byte; 0: it is none."""
_INT_BYTES[:0x80] = 1
_INT_BYTES[[0xCC, 0xCD, 0xCE]] = 2, 3, 5
_INT_SHIFT = np.zeros(256, np.uint32)
"""By the first byte: how far the four bytes behind it are to be shifted."""
_INT_SHIFT[[0xCC, 0xCD]] = 24, 16


class UnreadableOutput(ValueError):
    """A message that is not vLLM's."""


@dataclass(slots=True)
class DecodedOutputs:
    """R requests with output, and T tokens."""

    slots: Slots
    """intp[R]: the slot of each."""
    tokens: I32
    """int32[T]: new tokens of each request, one after another."""
    count: Slots | None
    """intp[R]: tokens of each; None: one."""
    rest: Outputs
    """The message's other fields; its ``outputs`` mean nothing."""
    rare: list[tuple[int, EngineCoreOutput]] = field(default_factory=list)
    """(entry, output) of those with more than tokens."""
    foreign: list[str] = field(default_factory=list)
    """Ids of requests of an earlier attachment, which the engine still runs."""
    missing: list[EngineCoreOutput] = field(default_factory=list)
    """Answers to requests that the engine has not begun, as it lacks values of their pictures."""


class OutputDecoder:
    """Decodes the messages of one engine."""

    def __init__(self, ids: RequestIds) -> None:
        self._ids = ids
        self._decoder = msgspec.msgpack.Decoder(Outputs)
        self._record_decoder = msgspec.msgpack.Decoder(EngineCoreOutput)
        self._scratch = bytearray(1 << 16)
        self._empty_fields = b""
        """Bytes of the fields behind the tokens in a record without others; empty: not known yet."""
        self.by_columns = 0
        """Messages that were decoded by array operations."""

    def decode(self, message: memoryview) -> DecodedOutputs:
        """Raises UnreadableOutput."""
        try:
            decoded = self._by_columns(message) or self._by_records(message)
            return _without_missing(decoded) if decoded.rare else decoded
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            raise UnreadableOutput(f"{len(message)} bytes that are no EngineCoreOutputs: {error}") from None

    # -- record by record

    def _by_records(self, message: memoryview) -> DecodedOutputs:
        rest = self._decoder.decode(message)
        entries: list[int] = []
        tokens: list[int] = []
        count: list[int] = []
        rare: list[tuple[int, EngineCoreOutput]] = []
        foreign: list[str] = []
        missing: list[EngineCoreOutput] = []
        for output in rest.outputs:
            slot = self._ids.slot_of(output.request_id)
            if slot is None:
                if _is_missing(output):
                    missing.append(output)
                if not output.request_id.startswith(self._ids.tag) and output.finish_reason is None:
                    foreign.append(output.request_id)
                continue
            if not output.is_plain:
                rare.append((len(entries), output))
            entries.append(slot)
            count.append(len(output.new_token_ids))
            tokens += output.new_token_ids
        slots = np.array(entries, np.intp)
        _check_unique(slots)
        ones = all(number == 1 for number in count)
        return DecodedOutputs(
            slots,
            np.array(tokens, np.int32),
            None if ones else np.array(count, np.intp),
            rest,
            rare,
            foreign,
            missing,
        )

    # -- by columns

    def _by_columns(self, message: memoryview) -> DecodedOutputs | None:
        """None: the message is to be decoded record by record. Raises msgspec.MsgspecError."""
        head = _read_head(message)
        if head is None:
            return None
        start, records = head
        size = len(message)
        if records < FEW or size > (1 << 31):
            return None
        if len(self._scratch) < size + _PADDING:
            self._scratch = bytearray(2 * size + _PADDING)
        scratch = self._scratch
        scratch[:size] = message
        data = np.frombuffer(scratch, np.uint8)
        words = _overlapping(scratch, "<u8")
        places = np.flatnonzero(data[start:size] == _ID_HEADER) + start
        places = places[words[places + 1] == self._ids.tag_word]
        if len(places) != records:
            return None
        tokens = _Tokens(data, _overlapping(scratch, ">u4"), places + (1 + ID_BYTES))
        header = int(places[0]) - start
        if not tokens.valid or header not in (1, 3):
            return None
        starts = places - header
        if not self._empty_fields and not self._learn(message, starts, tokens.ends):
            return None
        if int(tokens.ends[-1]) + len(self._empty_fields) > size:
            return None  # also those before end within the message: each is followed by a record
        plain = self._are_plain(scratch, starts, header, tokens.ends)
        unusual = np.flatnonzero(~plain)
        if len(unusual) > records // 2:
            return None
        rest = self._rest(message, start, starts, tokens.ends, last_plain=bool(plain[-1]))
        if rest is None:
            return None
        keys = words[places + (1 + ID_BYTES // 2)]
        slots = self._ids.slots_of(keys)
        rare = self._rare(message, starts, unusual, rest) if len(unusual) else []
        if np.count_nonzero(slots < 0):
            if np.count_nonzero(keys & _NOT_ASCII):
                return None
            self.by_columns += 1
            return _known_only(slots, tokens, rest, rare)
        self.by_columns += 1
        _check_unique(slots)
        return DecodedOutputs(slots, tokens.values, tokens.count, rest, rare)

    def _learn(self, message: memoryview, starts: Places, ends: Places) -> bool:
        """Find the bytes of empty fields in one of the first records. Returns whether one has these."""
        for index in range(min(_LEARN_FROM, len(starts) - 1)):
            end = int(starts[index + 1])
            if self._record_decoder.decode(message[int(starts[index]) : end]).is_plain:
                self._empty_fields = bytes(message[int(ends[index]) : end])
                return len(self._empty_fields) >= 8
        return False

    def _are_plain(self, scratch: bytearray, starts: Places, header: int, ends: Places) -> NDArray[np.bool_]:
        """bool[R]: the records that have nothing but tokens. That one ends where the next one begins is part
        of it."""
        empty, words = self._empty_fields, _overlapping(scratch, "<u8")
        length = len(empty)
        # With the header of the id, which places have in common.
        heads = _overlapping(scratch, "<u4" if header == 3 else "<u2")[starts]
        plain: NDArray[np.bool_] = heads == heads[0]
        for offset in [*range(0, length - 8, 8), length - 8]:
            expected = np.frombuffer(empty[offset : offset + 8], "<u8")[0]
            plain &= words[ends + offset] == expected
        plain[:-1] &= ends[:-1] + length == starts[1:]
        return plain

    def _rest(
        self, message: memoryview, start: int, starts: Places, ends: Places, *, last_plain: bool
    ) -> Outputs | None:
        """The fields behind the records; in its outputs the last record, unless that is plain."""
        before = bytes(message[:1]) + _ENGINE_0
        if last_plain:
            behind = int(ends[-1]) + len(self._empty_fields)
            if behind > len(message):
                return None
            return self._decoder.decode(before + b"\x90" + bytes(message[behind:]))
        return self._decoder.decode(before + b"\x91" + bytes(message[int(starts[-1]) :]))

    def _rare(
        self, message: memoryview, starts: Places, unusual: Places, rest: Outputs
    ) -> list[tuple[int, EngineCoreOutput]]:
        """Decode those of the ``unusual`` records that have more than tokens. Each must be one value, from
        its place to the next one."""
        decode, last = self._record_decoder.decode, len(starts) - 1
        rare = []
        for index in unusual.tolist():
            if index == last:
                output = rest.outputs[0]
            else:
                output = decode(message[int(starts[index]) : int(starts[index + 1])])
            if not output.is_plain:
                rare.append((index, output))
        return rare


_ENGINE_0 = b"\x00"


class _Tokens:
    """The token lists of the records, which begin at ``places``."""

    def __init__(self, data: NDArray[np.uint8], following: NDArray[np.uint32], places: Places) -> None:
        """``following``: the four bytes at each place, as a number."""
        headers = data[places]
        single = not np.count_nonzero(headers != 0x91)
        self.valid = single or not np.count_nonzero(headers >> 4 != 9)
        """Whether all are lists of at most 15 non-negative numbers."""
        self.count: Slots | None = None
        """intp[R]: tokens of each list; None: one."""
        self.ends = places + 1
        """intp[R]: where the lists end."""
        self.values = np.zeros(0, np.int32)
        if not self.valid:
            return
        if single:
            self.values = self._next(data, following, slice(None))
            return
        count = self.count = (headers & 15).astype(np.intp)
        behind = count.cumsum() - count
        self.values = np.zeros(int(count.sum()), np.int32)
        for index in range(int(count.max(initial=0))):
            some = np.flatnonzero(count > index)
            self.values[behind[some] + index] = self._next(data, following, some)

    def _next(
        self, data: NDArray[np.uint8], following: NDArray[np.uint32], some: Places | slice
    ) -> NDArray[np.int32]:
        """Read a number at ``ends`` of ``some`` lists, and advance these."""
        ends = self.ends[some]
        if len(ends) and int(ends[-1]) + 5 >= len(data):
            self.valid = False
            return np.zeros(len(ends), np.int32)
        first = data[ends]
        size = _INT_BYTES[first]
        wide = following[ends + 1].astype(np.uint32) >> _INT_SHIFT[first]
        values = np.where(size == 1, first, wide).astype(np.uint32, copy=False)
        self.valid = self.valid and np.count_nonzero(size) == len(size)
        self.ends[some] = ends + size
        tokens: I32 = values.view(np.int32)
        if np.count_nonzero(tokens < 0):  # above the largest int32
            self.valid = False
        return tokens


def _known_only(
    slots: Slots, tokens: _Tokens, rest: Outputs, rare: list[tuple[int, EngineCoreOutput]]
) -> DecodedOutputs:
    """Without the requests that have ended here, as after an abort."""
    decoded = _selected(DecodedOutputs(slots, tokens.values, tokens.count, rest, rare), slots >= 0)
    _check_unique(decoded.slots)
    return decoded


def _without_missing(decoded: DecodedOutputs) -> DecodedOutputs:
    """With the answers that name missing values apart."""
    missing = {entry: output for entry, output in decoded.rare if _is_missing(output)}
    if not missing:
        return decoded
    chosen = np.ones(len(decoded.slots), np.bool_)
    chosen[list(missing)] = False
    selected = _selected(decoded, chosen)
    selected.missing = [*decoded.missing, *missing.values()]
    return selected


def _is_missing(output: EngineCoreOutput) -> bool:
    return output.finish_reason == VllmFinishReason.ERROR and isinstance(output.mm_cache_miss_hashes, list)


def _selected(decoded: DecodedOutputs, chosen: NDArray[np.bool_]) -> DecodedOutputs:
    """Some of the requests. ``chosen``: bool[R]."""
    place = np.cumsum(chosen) - 1
    rare = [(int(place[entry]), output) for entry, output in decoded.rare if chosen[entry]]
    count, slots = decoded.count, decoded.slots[chosen]
    values = decoded.tokens[chosen if count is None else chosen.repeat(count)]
    return DecodedOutputs(
        slots, values, None if count is None else count[chosen], decoded.rest, rare, decoded.foreign
    )


def _check_unique(slots: Slots) -> None:
    """Raises UnreadableOutput for a request with two outputs in a message."""
    if len(slots) > 1 and np.count_nonzero(np.bincount(slots) > 1):
        raise UnreadableOutput("a message has two outputs of a request")


def _overlapping(buffer: bytearray, dtype: str) -> NDArray[Any]:
    """The number at every place of ``buffer``, as a view."""
    size = np.dtype(dtype).itemsize
    return np.ndarray((len(buffer) - size + 1,), dtype, buffer, strides=(1,))


def _read_head(message: memoryview) -> tuple[int, int] | None:
    """Where the records begin, and their number; None: the message does not begin as vLLM's do."""
    if len(message) < 8 or message[0] >> 4 != 9:
        return None
    place = 1 + int(_INT_BYTES[message[1]])
    if place == 1 or len(message) < place + 8:
        return None
    header = message[place]
    if header >> 4 == 9:
        return place + 1, header & 15
    if header == 0xDC:
        return place + 3, int.from_bytes(message[place + 1 : place + 3], "big")
    return None
