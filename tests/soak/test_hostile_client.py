"""What a hostile client takes for a defect of the server."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.integration.server import SYNTHETIC, Server
from tests.soak import hostile_client
from tests.soak.hostile_client import Attacker, HostileAct, HostileClient
from tests.soak.hostile_http2 import HostileHttp2Act, HostileHttp2Client

TIMES = 8
FAULTY = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def attack(url: str, *acts: str, kind: type[Attacker] = HostileClient) -> tuple[list[str], list[int]]:
    """Defects found, and the tokens that were asked for."""
    found: list[str] = []
    tokens: list[int] = []
    client = kind(
        url, random.Random(1), lambda kind, text: found.append(text), tokens.append, lambda attempt: False
    )

    async def run() -> None:
        await asyncio.gather(*(client.once(act) for act in acts for _ in range(TIMES)))

    asyncio.run(run())
    return found, tokens


def test_a_server_withstands_every_act(tmp_path: Path) -> None:
    with Server(*SYNTHETIC, directory=tmp_path) as server:
        for act in HostileAct:
            found, tokens = attack(server.url, act)
            assert not found, act
            assert any(tokens) == (act in (HostileAct.CANCELLED, HostileAct.HALF_CLOSED))
        found, _ = attack(server.url, *HostileHttp2Act, kind=HostileHttp2Client)
        assert not found
        assert server.complete(max_tokens=2)["choices"]


@pytest.mark.parametrize("act", [HostileAct.MALFORMED, HostileAct.BAD_HEADERS, HostileAct.HALF_CLOSED])
def test_an_error_500_and_no_reply_are_defects(monkeypatch: pytest.MonkeyPatch, act: HostileAct) -> None:
    monkeypatch.setattr(hostile_client, "REPLY_S", 2.0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(FAULTY)
        await writer.drain()
        writer.close()

    async def run() -> list[str]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            found, _ = await asyncio.to_thread(attack, f"http://127.0.0.1:{port}", act)
        return found

    assert asyncio.run(run())
