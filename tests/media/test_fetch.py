"""Fetches from a hostile host of this process."""

from __future__ import annotations

import asyncio
import gzip
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.config.rules.allowed_hosts import AllowedHosts
from penstock.media import fetch as fetching
from penstock.media.fetch import FetchPolicy, fetch
from penstock.media.refused import Refused
from tests import certificates

Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]
PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8


def reply(body: bytes, *fields: bytes, status: bytes = b"200 OK", length: int | None = None) -> bytes:
    head = [b"HTTP/1.1 " + status, b"Content-Length: %d" % (len(body) if length is None else length), *fields]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def redirect(target: str) -> bytes:
    return reply(b"", b"Location: " + target.encode(), status=b"302 Found")


class Host:
    """Answers each path; counts connections and keeps the heads."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.answers = answers
        self.connections = 0
        self.heads: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head)
            answer = self.answers[head.split()[1].decode()]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def host(answers: dict[str, Answer], tls: ssl.SSLContext | None = None) -> AsyncIterator[Host]:
    served = Host(answers)
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        served.port = server.sockets[0].getsockname()[1]
        yield served


def policy(served: Host, *entries: str, max_bytes: int = 1 << 16, seconds: float = 20.0) -> FetchPolicy:
    allowed = [f"127.0.0.1:{served.port}", f"images.test:{served.port}", *entries]
    return FetchPolicy(AllowedHosts(allowed), max_bytes=max_bytes, seconds=seconds)


async def here(name: str, port: int) -> list[str]:
    return ["127.0.0.1"]


async def refusal(url: str, rules: FetchPolicy, resolve: fetching.Resolve = here) -> str:
    with pytest.raises(Refused) as error:
        await fetch(url, rules, resolve)
    assert "token" not in error.value.message
    return f"{error.value.code}: {error.value.message}"


def test_a_picture_comes_as_it_is() -> None:
    async def run() -> None:
        chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunked += (
            b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (PICTURE[:9], PICTURE[9:]))
            + b"0\r\n\r\n"
        )
        until_closed = b"HTTP/1.0 200 OK\r\n\r\n" + PICTURE
        answers: dict[str, Answer] = {"/": reply(PICTURE), "/chunked": chunked, "/closed": until_closed}
        answers["/to"] = redirect("/chunked#part")
        answers["/query?token=1"] = reply(PICTURE)
        async with host(answers) as served:
            rules = policy(served)
            for path in ("/", "/chunked", "/closed", "/to", "/query?token=1#part"):
                assert await fetch(f"HTTP://Images.Test:{served.port}{path}", rules, here) == PICTURE
            assert await fetch(f"http://127.0.0.1:{served.port}", rules) == PICTURE
            lines = served.heads[0].split(b"\r\n")
            assert lines[:2] == [b"GET / HTTP/1.1", b"Host: images.test:%d" % served.port]
            assert {line.split(b":")[0] for line in lines[2:] if line} == {
                *(b"User-Agent", b"Accept", b"Accept-Encoding", b"Connection")
            }

    asyncio.run(run())


def test_nothing_is_fetched_unless_allowed() -> None:
    async def run() -> None:
        async with host({}) as served:
            at = f"127.0.0.1:{served.port}"
            off = FetchPolicy()
            assert (await refusal(f"http://{at}/", off)).startswith(
                "forbidden: pictures are fetched only with --allowed-"
            )
            assert (await refusal("file:///etc/passwd", off)).startswith(
                "forbidden: file: URLs need --allowed-local"
            )
            rules = policy(served)
            said = await refusal("https://other.test/a?token", rules)
            assert said.startswith(
                "forbidden: the URL is at https://other.test, which is not one of --allowed-media"
            )
            for url in (
                *(
                    f"http://user:token@{at}/",
                    f"http://token@{at}/",
                    f"http://images.test:{served.port}\\@other.test/",
                ),
                *(
                    f"ftp://{at}/",
                    "gopher://x",
                    "//images.test/",
                    "/etc/passwd",
                    "",
                    "http://",
                    "http:///a",
                    "x" * 70_000,
                ),
                *(
                    f"http://images.test:{served.port}x/",
                    f"http://{at}/\r\nX: y",
                    f"http://{at}/\0",
                    "http://[::1",
                    "data:,",
                ),
            ):
                assert (await refusal(url, rules)).startswith("invalid: "), url
            for url in (
                *(
                    "http://images.test/",
                    f"https://images.test:{served.port + 1}/",
                    f"http://x.images.test:{served.port}/",
                ),
                *(
                    f"http://images.test.evil.test:{served.port}/",
                    f"http://0x7f.1:{served.port}/",
                    "http://2130706433/",
                ),
                *(
                    f"http://127.1:{served.port}/",
                    f"http://[::ffff:127.0.0.1]:{served.port + 1}/",
                    "http://localhost/",
                ),
                *(
                    "http://images%2etest/",
                    f"http://evil.test:{served.port}/?http://images.test",
                    "http://169.254.169.254/",
                ),
            ):
                assert (await refusal(url, rules)).startswith("forbidden: "), url
            assert served.connections == 0

    asyncio.run(run())


def test_every_redirect_is_checked() -> None:
    async def run() -> None:
        async with host({"/ok": reply(PICTURE)}) as served:
            rules = policy(served, "public.test")
            at = f"http://images.test:{served.port}"
            for target, said in {
                "http://169.254.169.254/?token": "forbidden: http://images.test:PORT redirects to a URL",
                "http://127.0.0.1:1/": "forbidden: ",
                "http://public.test/": "forbidden: http://public.test has an address that is not public",
                "//evil.test/": "forbidden: ",
                "file:///etc/passwd": "invalid: http://images.test:PORT redirects to a URL that is none of",
                "data:image/png;base64,AAAA": "invalid: ",
                f"http://token:x@images.test:{served.port}/ok": "invalid: ",
                "http://[::1": "invalid: http://images.test:PORT redirects to a URL that cannot be read",
                "/loop": "unreachable: http://images.test:PORT redirects more than 5 times",
            }.items():
                served.answers["/loop"] = redirect(target)
                served.connections = 0
                assert (
                    (await refusal(f"{at}/loop", rules)).replace(str(served.port), "PORT").startswith(said)
                ), target
                assert served.connections == (6 if target == "/loop" else 1)
            for number in range(5):
                served.answers[f"/{number}"] = redirect(f"/{number + 1}" if number < 4 else "ok")
            assert await fetch(f"{at}/0", rules, here) == PICTURE
            served.answers["/none"] = reply(b"", status=b"302 Found")
            assert (await refusal(f"{at}/none", rules)).endswith("answers with status 302")

    asyncio.run(run())


def test_the_address_that_is_checked_is_the_one_that_is_connected_to() -> None:
    async def run() -> None:
        async with host({"/": reply(PICTURE), "/again": redirect("/")}) as served:
            rules = FetchPolicy(AllowedHosts([f"images.test:{served.port}"]), seconds=20.0)
            url = f"http://images.test:{served.port}/"
            answers = iter(
                [["93.184.215.14", "127.0.0.1"], ["::ffff:127.0.0.1"], ["127.0.0.1"], ["fe80::1%1"]]
            )

            async def changing(name: str, port: int) -> list[str]:
                assert (name, port) == ("images.test", served.port)
                return next(answers)

            for _ in range(4):
                said = await refusal(url, rules, changing)
                assert said == f"forbidden: {url[:-1]} has an address that is not public"
            assert served.connections == 0
            # Asked once for each connection; the second answer is for the redirect, and checked as the first.
            answers = iter([["127.0.0.1"], ["10.0.0.1"]])
            rules = policy(served)
            assert (await refusal(url + "again", rules, changing)).startswith("forbidden: ")
            assert served.connections == 1
            answers = iter([["127.0.0.1"] * 3, [], [f"93.184.0.{at}" for at in range(65)]])
            assert await fetch(url, rules, changing) == PICTURE
            assert (await refusal(url, rules, changing)).startswith("unreachable: ")
            assert (await refusal(url, rules, changing)).startswith("unreachable: ")

    asyncio.run(run())


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def run() -> None:
        async with host({"/": reply(PICTURE)}) as served:
            assert await fetch(f"http://127.0.0.1:{served.port}/", policy(served)) == PICTURE

    asyncio.run(run())


async def endless(writer: asyncio.StreamWriter, piece: bytes) -> None:
    while True:
        writer.write(piece)
        await writer.drain()


ENDLESS = {
    "body": (
        b"HTTP/1.1 200 OK\r\n\r\n",
        bytes(4096),
        "too_large: http://127.0.0.1:PORT sends more than the 65,536 bytes that a picture may have",
    ),
    "chunks": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"1;" + b"x" * 4000 + b"\r\ny\r\n",
        "too_large: ",
    ),
    "head": (b"HTTP/1.1 200 OK\r\n", b"X: " + b"y" * 4000 + b"\r\n", "unreachable: "),
    "first line": (b"", b"x" * 4096, "unreachable: "),
    "informational": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 99, "too_large: "),
    "trailers": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
        b"X: y\r\n" * 99,
        "unreachable: ",
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_host_without_end(name: str) -> None:
    first, piece, said = ENDLESS[name]

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        await endless(writer, piece)

    async def run() -> None:
        async with host({"/": answer}) as served:
            found = await refusal(f"http://127.0.0.1:{served.port}/", policy(served))
            assert found.replace(str(served.port), "PORT").startswith(said)

    asyncio.run(run())


def test_lengths_and_encodings() -> None:
    bomb = gzip.compress(bytes(10 << 20))
    answers: dict[str, tuple[bytes, str]] = {
        "/announced": (
            reply(b"", length=65_537),
            "too_large: http://127.0.0.1:PORT sends more than the 65,536 bytes that a picture may have",
        ),
        "/astronomic": (reply(b"", length=10**18), "too_large: "),
        "/short": (reply(b"x" * 10, length=20), "unreachable: "),
        "/negative": (reply(b"x", length=-1), "unreachable: "),
        "/twice": (reply(b"x", b"Content-Length: 2"), "unreachable: "),
        "/gzip": (
            reply(bomb, b"Content-Encoding: gzip"),
            "invalid: http://127.0.0.1:PORT sends a compressed body",
        ),
        "/gzip2": (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
            "unreachable: ",
        ),
        "/missing": (
            reply(b"", status=b"404 Not Found"),
            "unreachable: http://127.0.0.1:PORT answers with status 404",
        ),
        "/nothing": (b"", "unreachable: "),
        "/no-http": (
            b"220 smtp.example ESMTP\r\n",
            "unreachable: http://127.0.0.1:PORT does not answer as HTTP",
        ),
        "/upgrade": (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", "unreachable: "),
    }

    async def run() -> None:
        async with host({path: answer for path, (answer, _) in answers.items()}) as served:
            for path, (_, said) in answers.items():
                found = await refusal(f"http://127.0.0.1:{served.port}{path}?token"[:-6], policy(served))
                assert found.replace(str(served.port), "PORT").startswith(said), path
            longer = reply(PICTURE + b"more", length=len(PICTURE))
            served.answers["/longer"] = longer
            assert await fetch(f"http://127.0.0.1:{served.port}/longer", policy(served)) == PICTURE

    asyncio.run(run())


@pytest.mark.parametrize("place", ["name", "silence", "head", "body", "redirects"])
def test_the_time_is_for_all_of_it(place: str) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        if place == "redirects":
            writer.write(redirect("/"))
            return
        writer.write(b"" if place == "silence" else b"HTTP/1.1 200 OK\r\n" + b"\r\n" * (place == "body"))
        while True:
            await asyncio.sleep(0.01)
            if place in ("head", "body"):
                writer.write(b"x")
                await writer.drain()

    async def slow(name: str, port: int) -> list[str]:
        if place in ("name", "redirects"):
            await asyncio.sleep(60 if place == "name" else 0.05)
        return ["127.0.0.1"]

    async def run() -> None:
        async with host({"/": drip}) as served:
            said = await refusal(f"http://images.test:{served.port}/", policy(served, seconds=0.2), slow)
            assert said == "timeout: the picture did not come within 0.2 s"

    asyncio.run(run())


def test_nobody_at_an_address() -> None:
    async def run() -> None:
        async with host({"/": reply(PICTURE)}) as served:
            pass
        said = await refusal(f"http://127.0.0.1:{served.port}/", policy(served))
        assert said == f"unreachable: http://127.0.0.1:{served.port} cannot be reached: no connection"

        async def fails(name: str, port: int) -> list[str]:
            raise OSError("no such host")

        assert (await refusal(f"http://images.test:{served.port}/", policy(served), fails)).startswith(
            "unreachable: "
        )

    asyncio.run(run())


def test_a_second_address_is_tried() -> None:
    async def run() -> None:
        async with host({"/": reply(PICTURE)}) as served:

            async def two(name: str, port: int) -> list[str]:
                return ["127.0.0.2", "127.0.0.1"]

            rules = policy(served, "127.0.0.0/8")
            assert await fetch(f"http://images.test:{served.port}/", rules, two) == PICTURE

    asyncio.run(run())


def test_tls_is_of_the_hosts_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = certificates.make(tmp_path, "images.test")
    monkeypatch.setenv("SSL_CERT_FILE", made.authority)
    fetching._tls.cache_clear()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made.both)

    async def run() -> None:
        async with host({"/": reply(PICTURE)}, context) as served, host({}) as plain:
            entries = [f"other.test:{served.port}", f"images.test:{plain.port}", "127.0.0.0/8"]
            rules = policy(served, *entries)
            at = f"https://images.test:{served.port}"
            assert await fetch(f"{at}/", rules, here) == PICTURE
            served.answers["/down"] = redirect(f"http://images.test:{plain.port}/")
            assert await refusal(f"{at}/down", rules) == f"forbidden: {at} redirects from https to http"
            for url in (f"https://other.test:{served.port}/", f"https://127.0.0.1:{served.port}/"):
                assert (await refusal(url, rules)).endswith("its certificate or TLS is not accepted")
            plain.answers["/up"] = redirect(f"{at}/")
            assert await fetch(f"http://images.test:{plain.port}/up", rules, here) == PICTURE

    try:
        asyncio.run(run())
    finally:
        fetching._tls.cache_clear()


def test_files_by_the_same_call(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PICTURE)
    rules = FetchPolicy(local_path=str(tmp_path), max_bytes=len(PICTURE))
    assert asyncio.run(fetch(f"file://{tmp_path}/a.png", rules)) == PICTURE
