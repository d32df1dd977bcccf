"""Writes of one loop iteration are made at its end, in order, and not to clients that have disconnected."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.gateway.relay.write_batch import WriteBatch

Log = list[tuple[str, bytes]]
"""What was written in which order, over all connections."""


class Connection:
    write_target = None

    def __init__(self, log: Log, name: str) -> None:
        self._log, self._name = log, name
        self.sink: Any = self
        self.streamed = True

    def write_body(self, data: bytes) -> None:
        self._log.append((self._name, data))


def two_pieces() -> tuple[WriteBatch, Connection, Connection, Log]:
    """A batch with 1 for the first connection and 2 for the second."""
    log: Log = []
    batch, first, second = WriteBatch(), Connection(log, "first"), Connection(log, "second")
    batch.write(first, b"1")
    batch.write(second, b"2")
    return batch, first, second, log


def test_a_turn_s_pieces_are_written_at_its_end() -> None:
    async def turn() -> None:
        batch, first, second, log = two_pieces()
        batch.write(first, b"3")
        assert log == []
        await asyncio.sleep(0)
        assert log == [("first", b"13"), ("second", b"2")]
        batch.write(first, b"4")
        batch.write(second, b"5")
        batch.flush_client(second)
        assert log[2:] == [("second", b"5")]
        await asyncio.sleep(0)
        assert log[3:] == [("first", b"4")]

    asyncio.run(turn())


def test_who_has_left_is_not_written_to() -> None:
    async def turn() -> None:
        batch, first, _, log = two_pieces()
        batch.forget(first)
        await asyncio.sleep(0)
        assert log == [("second", b"2")]

    asyncio.run(turn())


def test_what_is_written_while_writing_comes_next() -> None:
    async def turn() -> None:
        log: Log = []
        batch = WriteBatch()
        echo = Connection(log, "echo")

        class Answering(Connection):
            def write_body(self, data: bytes) -> None:
                super().write_body(data)
                batch.write(echo, data)

        batch.write(Answering(log, "asked"), b"1")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert log == [("asked", b"1"), ("echo", b"1")]

    asyncio.run(turn())
