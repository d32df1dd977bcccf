"""Hostile pictures through a whole server: clear errors in bounded time and memory; other streams go on."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from PIL import Image

from tests.hostile.bystander import Bystander
from tests.hostile.memory_watch import MemoryWatch
from tests.integration.server import SYNTHETIC, TLS, Server
from tests.media import picture_files as files
from tests.media.test_fetch import Answer, Host, redirect, reply

LONGEST_DELAY_S = 0.2
"""Of an event, beside what the machine delays a process that does nothing."""
MOST_MB = 150
"""A process may grow by; the pictures of these attacks would be 100 megapixels."""
MINE = {"Authorization": "Bearer mine"}
THEIRS = {"Authorization": "Bearer theirs"}
SECRET = "s3cr3t-t0ken"


class LocalHost:
    """A hostile host in a thread of its own."""

    def __init__(self) -> None:
        self.host = Host({})
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Host:
        self._thread.start()
        self._started.wait()
        return self.host

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _run(self) -> None:
        async def serve() -> None:
            self._over = asyncio.Event()
            server = await asyncio.start_server(self.host.serve, "127.0.0.1", 0)
            self.host.port = server.sockets[0].getsockname()[1]
            self._started.set()
            await self._over.wait()
            server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._loop.run_until_complete(serve())
        self._loop.close()


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with LocalHost() as running:
        yield running


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pictures")
    (directory / "a.png").write_bytes(files.encoded(files.picture(), "PNG"))
    (directory.parent / "secret.png").write_bytes(files.encoded(files.picture(), "PNG"))
    (directory / "out.png").symlink_to("../secret.png")
    return directory


@pytest.fixture(scope="module")
def server(host: Host, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    allowed = (f"127.0.0.1:{host.port}", "localhost")
    options = ("--media-workers", "2", "--media-fetch-timeout", "1", "--api-key", "mine", "theirs")
    options += ("--allowed-media-domains", *allowed, "--allowed-local-media-path", str(pictures))
    options += ("--media-max-pixels", "16000000", "--synthetic-image-tokens", "64")
    with Server(*SYNTHETIC, *options, directory=tmp_path_factory.mktemp("hostile")) as running:
        yield running


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def chat(url: str) -> dict[str, Any]:
    content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4}


def post(server: Server, path: str, body: dict[str, Any], headers: dict[str, str] = MINE) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60, verify=TLS)


def ask(server: Server, url: str, headers: dict[str, str] = MINE) -> httpx.Response:
    return post(server, "/v1/chat/completions", chat(url), headers)


def refused(server: Server, url: str) -> str:
    response = ask(server, url)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "messages[0].content[1].image_url.url"
    assert SECRET not in response.text
    message: str = error["message"]
    assert message.startswith("messages[0].content[1].image_url.url")
    return message


def png() -> bytes:
    return files.encoded(files.picture(), "PNG")


ATTACKS: dict[str, tuple[Callable[[], bytes], str]] = {
    "100 megapixels": (lambda: files.png(10_000, 10_000), "the picture has 10000 x 10000 pixels"),
    "10,000 frames": (lambda: files.gif(10_000), "the picture has 10,000 frames"),
    "a cut JPEG": (
        lambda: files.encoded(files.picture(400, 400), "JPEG")[:900],
        "the picture's JPEG file is damaged",
    ),
    "SVG": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>', "the picture is an SVG"),
    "HTML": (lambda: b"<!DOCTYPE html>", "the picture is an HTML page"),
    "nothing": (lambda: b"", "has no base64 of an image"),
    "scans": (
        lambda: files.scans(files.encoded(Image.new("L", (3000, 3000)), "JPEG", progressive=True), 2000),
        "the JPEG has 2,006 scans",
    ),
    "chunks": (
        lambda: files.png(1, 1, *[files.chunk(b"tEXt", b"")] * 140_000),
        "the picture's file has more than",
    ),
}


async def drip(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"\x89")
        await writer.drain()
        await asyncio.sleep(0.05)


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(bytes(1 << 16))
        await writer.drain()


HOSTED: dict[str, tuple[Answer, str]] = {
    "/private": (
        redirect("http://169.254.169.254/latest/meta-data"),
        "redirects to a URL that is at http://169",
    ),
    "/loopback": (redirect("http://127.0.0.1:1/"), "redirects to a URL that is at http://127.0.0.1:1"),
    "/file": (redirect("file:///etc/passwd"), "redirects to a URL that is none of"),
    "/loop": (redirect("/loop"), "redirects more than 5 times"),
    "/slow": (drip, "did not come within 1 s"),
    "/endless": (endless, "sends more than the 33,554,432 bytes"),
    "/long": (reply(b"", length=1 << 40), "sends more than the 33,554,432 bytes"),
    "/gzip": (reply(png(), b"Content-Encoding: gzip"), "sends a compressed body"),
    "/missing": (reply(b"", status=b"404 Not Found"), "answers with status 404"),
    "/html": (reply(b"<html>" + SECRET.encode()), "the picture is an HTML page"),
}


def test_attacks_are_clear_errors_and_delay_nobody(server: Server, host: Host, pictures: Path) -> None:
    processes = {role: server.children(role) for role in ("api-server", "engine", "media-worker")}
    assert len(processes["media-worker"]) == 2
    host.answers |= {path: answer for path, (answer, _) in HOSTED.items()}
    at = f"http://127.0.0.1:{host.port}"
    attacks = {data_url(make()): said for make, said in ATTACKS.values()}
    attacks |= {f"{at}{path}#{SECRET}": said for path, (_, said) in HOSTED.items()}
    attacks |= {
        "data:image/png,abc": "must be a data: URL with base64",
        "data:image/png;base64,!!!": "has no base64 of an image",
        "data:image/png;base64,AAAA": "its bytes are no picture",
        f"http://user:{SECRET}@127.0.0.1:{host.port}/": "has credentials",
        f"http://evil.test/{SECRET}?{SECRET}": "is at http://evil.test, which is not one of --allowed-media-",
        f"http://[::ffff:169.254.169.254]/{SECRET}": "which is not one of",
        "http://2130706433/": "which is not one of",
        f"http://localhost/{SECRET}": "http://localhost has an address that is not public",
        f"ftp://user:{SECRET}@127.0.0.1/": "must be a data: URL",
        "picture": "must be a data: URL",
        "": "must be a data: URL",
        "file:///etc/passwd": "is not in the directory of --allowed-local-media-path",
        f"file://{pictures}/../secret.png": "is not in the directory",
        f"file://{pictures}/out.png": "is not in the directory",
        f"file://{pictures}/b.png": "has no such file",
    }
    watched = [process for each in processes.values() for process in each]
    streaming = processes["api-server"] + processes["engine"]
    with MemoryWatch(watched) as memory, Bystander(server.url, streaming, "mine") as bystander:
        for url, said in attacks.items():
            assert said in refused(server, url), url[:80]
    assert bystander.gaps.broken == []
    assert bystander.gaps.worst - bystander.gaps.lateness < LONGEST_DELAY_S, bystander.gaps
    assert max(memory.grown_mib.values()) < MOST_MB, memory.grown_mib
    assert server.children("media-worker") == processes["media-worker"], "none has ended"
    assert SECRET not in server.log
    assert ask(server, f"file://{pictures}/a.png").status_code == 200
    host.answers[f"/a.png?{SECRET}"] = reply(png())
    assert ask(server, f"{at}/a.png?{SECRET}").status_code == 200
    assert SECRET not in server.log


def test_other_apis_name_their_own_field(server: Server) -> None:
    bad = data_url(b"<svg/>")
    source = {"type": "base64", "media_type": "image/png", "data": bad.partition(",")[2]}
    message = {"role": "user", "content": [{"type": "image", "source": source}]}
    found = post(server, "/v1/messages", {"model": "m", "max_tokens": 4, "messages": [message]})
    assert found.status_code == 400
    assert found.json()["type"] == "error"
    assert found.json()["error"]["type"] == "invalid_request_error"
    assert "messages[0].content[0].source" in found.json()["error"]["message"]
    assert "the picture is an SVG" in found.json()["error"]["message"]
    part = {"type": "input_image", "image_url": bad}
    found = post(
        server, "/v1/responses", {"input": [{"role": "user", "content": [part]}], "max_output_tokens": 4}
    )
    assert found.status_code == 400
    assert found.json()["error"]["param"] == "input[0].content[0].image_url"


QUOTED = "data:image/png;base64," + "QUJD" * 12_000


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": QUOTED, "content": "x"}]}),
        ("/v1/chat/completions", {"messages": QUOTED}),
        ("/v1/responses", {"input": "x", "previous_response_id": QUOTED}),
        ("/v1/responses", {"input": "x", "truncation": QUOTED}),
        ("/v1/messages", {"max_tokens": 4, "messages": [{"role": QUOTED, "content": "x"}]}),
        ("/api/chat", {"messages": [{"role": QUOTED, "content": "x"}]}),
        ("/v1beta/models/m:generateContent", {"contents": [{"role": QUOTED, "parts": [{"text": "x"}]}]}),
        ("/v1/chat/completions", {"model": QUOTED, "messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_an_error_quotes_what_the_client_sent(server: Server, path: str, fields: dict[str, Any]) -> None:
    found = post(server, path, {"model": "m", **fields})
    assert 400 <= found.status_code < 500
    assert "penstockPart" not in found.text
    assert ";base64," not in found.text or ";base64,QUJD" in found.text


def counts(server: Server) -> dict[str, float]:
    """Pictures by outcome, of all API servers."""
    text = httpx.get(f"{server.url}/metrics", headers=MINE, timeout=60, verify=TLS).text
    found: dict[str, float] = {}
    for outcome, value in re.findall(
        r'^penstock:media_images_total\{.*outcome="(\w+)".*\} (\S+)$', text, re.M
    ):
        found[outcome] = found.get(outcome, 0) + float(value)
    return found


def test_the_picture_of_another_key_is_not_shared(server: Server) -> None:
    picture = data_url(files.encoded(files.picture(33, 44), "PNG"))
    made = []
    for headers in (THEIRS, THEIRS, MINE, MINE):
        before = counts(server)
        assert ask(server, picture, headers).status_code == 200
        after = counts(server)
        made.append([outcome for outcome in after if after[outcome] != before[outcome]])
    assert made == [["decoded"], ["remembered"]] * 2


def test_a_picture_whose_worker_is_killed_is_prepared_by_another(server: Server, host: Host) -> None:
    killed: list[int] = []

    async def kill(writer: asyncio.StreamWriter) -> None:
        """Kill the worker that asks, the first time."""
        port = writer.get_extra_info("peername")[1]
        for process in server.children("media-worker"):
            with contextlib.suppress(psutil.Error):
                if not killed and any(each.laddr.port == port for each in process.net_connections("tcp")):
                    killed.append(process.pid)
                    os.kill(process.pid, signal.SIGKILL)
                    return
        writer.write(reply(png()))
        await writer.drain()

    host.answers["/killer"] = kill
    assert ask(server, f"http://127.0.0.1:{host.port}/killer").status_code == 200
    assert len(killed) == 1
