"""Outputs as columns: the same as decoded record by record, also of strange and broken messages."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.engine.attach.output_decoder import FEW, DecodedOutputs, OutputDecoder, UnreadableOutput
from penstock.engine.attach.request_ids import RequestIds

EMPTY_FIELDS = {14: [None] * 11 + [0], 16: [None] * 11 + [0] + [None] * 2}
EMPTY_FIELDS |= {
    size: [None] * 11 + [0] + [None] * (size - 14) for size in (17, 18, 19)
}  # as vLLM 0.27 to 0.33 have them
PLUGIN = [None] * 11 + [0] + [None] * 4 + [{"plugin": "field"}, [1.5, "x"]]
LENGTH, STOP = 1, 0


def encode(records: list[list[Any]], rest: list[Any] | None = None, rank: int = 0) -> memoryview:
    rest = [None, 12.5, None, None, None, None, None] if rest is None else rest
    return memoryview(msgspec.msgpack.encode([rank, records, *rest]))


class Requests:
    """Ids of running requests, and records of theirs."""

    def __init__(self, slots: int = 300) -> None:
        self.ids = RequestIds(2 * slots)
        self.names = [self.ids.assign(slot) for slot in range(slots)]
        self.decoder = OutputDecoder(self.ids)

    def record(self, slot: int, tokens: list[int], fields: list[Any], finish: int | None = None) -> list[Any]:
        made = [self.names[slot], tokens, *fields]
        made[5] = finish
        return made


def check_same(requests: Requests, message: memoryview) -> DecodedOutputs:
    """Decodes a message in both ways, and by columns at all."""
    before = requests.decoder.by_columns
    found = requests.decoder.decode(message)
    assert requests.decoder.by_columns == before + 1
    expected = requests.decoder._by_records(message)
    assert found.slots.tolist() == expected.slots.tolist()
    assert found.tokens.tolist() == expected.tokens.tolist()
    ones = [1] * len(found.slots)
    assert (ones if found.count is None else found.count.tolist()) == (
        ones if expected.count is None else expected.count.tolist()
    )
    assert found.rare == expected.rare
    assert found.rest.scheduler_stats == expected.rest.scheduler_stats
    assert found.rest.timestamp == expected.rest.timestamp
    assert found.foreign == expected.foreign == []
    return found


def learn(requests: Requests, fields: list[Any]) -> None:
    """A first message, of which the decoder learns what empty fields look like."""
    requests.decoder.decode(encode([requests.record(slot, [1], fields) for slot in range(FEW)]))


TOKENS = [0, 1, 127, 128, 176, 255, 256, 45232, 65535, 65536, 152063, (1 << 31) - 1]
"""At the bounds of their encodings; 176 and 45232 contain the byte that an id begins with."""


@pytest.mark.parametrize("fields", [*EMPTY_FIELDS.values(), PLUGIN], ids=[*map(str, EMPTY_FIELDS), "plugin"])
@pytest.mark.parametrize("number", [1, 3], ids=["one-token", "several-tokens"])
def test_columns_are_what_records_hold(fields: list[Any], number: int) -> None:
    requests = Requests()
    chance = random.Random(number)
    learn(requests, fields)
    for _ in range(20):
        slots = chance.sample(range(300), chance.randint(FEW, 300))
        records = []
        for slot in slots:
            tokens = chance.choices(TOKENS, k=1 if number == 1 else chance.randint(0, 15))
            finish = chance.choice([None] * 12 + [STOP, LENGTH])
            records.append(requests.record(slot, tokens, fields, finish))
        stats = {"num_running_reqs": 7, "kv_cache_usage": 0.5, "unknown": [1, {"b": 2}]}
        check_same(requests, encode(records, [stats, 1.5, None, None, None, None]))


@pytest.mark.parametrize("rank", [0, 5, 200, 1000])
def test_any_rank(rank: int) -> None:
    requests = Requests()
    learn(requests, EMPTY_FIELDS[18])
    records = [requests.record(slot, [slot], EMPTY_FIELDS[18]) for slot in range(50)]
    check_same(requests, encode(records, rank=rank))


@pytest.mark.parametrize("place", [0, 30, 59], ids=["first", "middle", "last"])
def test_rare_fields_anywhere(place: int) -> None:
    requests = Requests()
    learn(requests, EMPTY_FIELDS[18])
    records = [requests.record(slot, [slot], EMPTY_FIELDS[18]) for slot in range(60)]
    records[place][7] = [{"type": 1, "timestamp": 1.0}, {"type": 2, "timestamp": 2.0}]
    records[place][11] = {"num_cached_tokens": 3, "later": True}
    found = check_same(requests, encode(records))
    ((entry, output),) = found.rare
    assert entry == place
    assert output.prefill_stats is not None
    assert output.prefill_stats.num_cached_tokens == 3


def test_an_id_within_other_fields_is_no_record() -> None:
    """Connectors tell ids of requests, also of those of the same engine."""
    requests = Requests()
    learn(requests, EMPTY_FIELDS[18])
    records = [requests.record(slot, [slot], EMPTY_FIELDS[18]) for slot in range(60)]
    told = {"remote_request_id": requests.names[9], "ids": [requests.names[3]]}
    records[7][5], records[7][8] = LENGTH, told
    found = requests.decoder.decode(encode(records))
    assert found.slots.tolist() == found.tokens.tolist() == list(range(60))
    ((entry, output),) = found.rare
    assert entry == 7
    assert output.kv_transfer_params == told


def test_requests_that_have_ended_here_are_left_out() -> None:
    requests = Requests()
    learn(requests, EMPTY_FIELDS[18])
    records = [
        requests.record(slot, [slot, 9], EMPTY_FIELDS[18], LENGTH if slot == 8 else None)
        for slot in range(40)
    ]
    for slot in (0, 7, 39):
        requests.ids.forget(slot)
    found = requests.decoder.decode(encode(records))
    assert found.slots.tolist() == [slot for slot in range(40) if slot not in (0, 7, 39)]
    assert found.tokens.tolist() == [token for slot in found.slots for token in (slot, 9)]
    assert [(found.slots[entry], output.finish_reason) for entry, output in found.rare] == [(8, LENGTH)]
    assert found.foreign == []


def test_a_slots_next_request_does_not_get_the_last_ones_tokens() -> None:
    requests = Requests()
    learn(requests, EMPTY_FIELDS[18])
    records = [requests.record(slot, [slot], EMPTY_FIELDS[18]) for slot in range(30)]
    requests.ids.forget(3)
    requests.ids.assign(3)
    assert 3 not in requests.decoder.decode(encode(records)).slots


def test_requests_of_an_earlier_attachment_are_told() -> None:
    requests, earlier = Requests(), Requests()
    learn(requests, EMPTY_FIELDS[18])
    records = [requests.record(slot, [slot], EMPTY_FIELDS[18]) for slot in range(30)]
    records[4:4] = [earlier.record(0, [1], EMPTY_FIELDS[18]), earlier.record(1, [1], EMPTY_FIELDS[18], STOP)]
    records.append(["chosen by somebody else", [5], *EMPTY_FIELDS[18]])
    found = requests.decoder.decode(encode(records))
    assert found.slots.tolist() == list(range(30))
    assert found.foreign == [earlier.names[0], "chosen by somebody else"]  # the other one has ended


def test_a_request_has_one_output_in_a_message() -> None:
    requests = Requests()
    learn(requests, EMPTY_FIELDS[18])
    for number in (2, 40):
        records = [requests.record(slot, [slot], EMPTY_FIELDS[18]) for slot in range(number)]
        records[-1] = requests.record(0, [1], EMPTY_FIELDS[18])
        with pytest.raises(UnreadableOutput, match="two outputs"):
            requests.decoder.decode(encode(records))


def test_lists_of_many_tokens() -> None:
    requests = Requests()
    learn(requests, EMPTY_FIELDS[18])
    records = [requests.record(slot, list(range(slot)), EMPTY_FIELDS[18]) for slot in range(40)]
    found = requests.decoder.decode(encode(records))
    assert found.count is not None
    assert found.count.tolist() == list(range(40))
    assert found.tokens.tolist() == [token for slot in range(40) for token in range(slot)]


def broken(message: memoryview, chance: random.Random) -> bytes:
    """The message cut, or with bytes that are changed, removed, repeated or swapped."""
    data = bytearray(message)
    match chance.randrange(5):
        case 0:
            del data[chance.randrange(len(data)) :]
        case 1:
            for _ in range(chance.randint(1, 4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
        case 2:
            start = chance.randrange(len(data))
            del data[start : start + chance.randint(1, 60)]
        case 3:
            start = chance.randrange(len(data))
            data[start:start] = data[start : start + chance.randint(1, 60)]
        case _:
            first, second = sorted(chance.sample(range(len(data) - 40), 2))
            data[first : first + 8], data[second : second + 8] = (
                data[second : second + 8],
                data[first : first + 8],
            )
    return bytes(data)


def test_broken_messages_are_refused_or_what_they_say() -> None:
    """Whatever is decoded by columns is what a parser finds in the same bytes."""
    requests = Requests()
    learn(requests, EMPTY_FIELDS[18])
    chance = random.Random(12)
    refused = columns = 0
    for _ in range(3000):
        number = chance.choice([3, 40, 60])
        records = [
            requests.record(slot, chance.choices(TOKENS, k=1), EMPTY_FIELDS[18], STOP if slot == 5 else None)
            for slot in range(number)
        ]
        message = memoryview(broken(encode(records), chance))
        before = requests.decoder.by_columns
        try:
            found = requests.decoder.decode(message)
        except UnreadableOutput:
            refused += 1
            continue
        if requests.decoder.by_columns > before:
            columns += 1
            expected = requests.decoder._by_records(message)
            assert found.slots.tolist() == expected.slots.tolist()
            assert found.tokens.tolist() == expected.tokens.tolist()
            assert found.rare == expected.rare
    assert refused > 500
    assert columns > 50


def test_deep_nesting_and_large_numbers_are_refused() -> None:
    requests = Requests()
    for message in (
        b"\x91" * 100_000 + b"\x00",
        msgspec.msgpack.encode([0, [["x", [1 << 40]]]]),
        msgspec.msgpack.encode([0, [["x", [-1]]]]),
        msgspec.msgpack.encode([0, "outputs"]),
        msgspec.msgpack.encode([0, [["x"]]]),
        b"\xc1",
        b"",
    ):
        with pytest.raises(UnreadableOutput):
            requests.decoder.decode(memoryview(message))


def test_no_object_per_request() -> None:
    """Garbage collection is not made due by a step of 1,024 requests."""
    import gc

    requests = Requests(1024)
    message = encode([requests.record(slot, [slot], EMPTY_FIELDS[18]) for slot in range(1024)])
    requests.decoder.decode(message)
    gc.collect()
    gc.disable()
    try:
        before = gc.get_count()[0]
        found = requests.decoder.decode(message)
        assert gc.get_count()[0] - before < 50
    finally:
        gc.enable()
    assert np.array_equal(found.slots, np.arange(1024))
