"""The rest of a body that is only relayed: when all of it has been read."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from penstock.gateway.requests.body_rest import BodyRest
from penstock.gateway.requests.byte_rounds import ByteRounds
from penstock.http.request import HttpRequest


class FakeRequest:
    """A request whose body comes in these parts."""

    def __init__(self, *parts: bytes) -> None:
        self.sink = self
        self._parts = iter(parts)

    def release(self, kept: int = 0) -> None: ...

    async def read_part(self) -> bytes:
        return next(self._parts, b"")


@pytest.mark.parametrize("left", [5, None])
def test_a_body_is_complete_with_its_last_byte_if_its_length_is_known(left: int | None) -> None:
    async def main() -> None:
        rest = BodyRest(cast(HttpRequest, FakeRequest(b"abc", b"de")), left, 100, ByteRounds())
        assert await rest.read() == b"abc"
        assert not rest.complete
        assert await rest.read() == b"de"
        assert rest.complete is (left is not None), "the server may answer before the end is read"
        assert await rest.read() == b""
        assert rest.complete

    asyncio.run(main())
