"""What docs/serving.md shows works as it stands there."""

from __future__ import annotations

import contextlib
import io
import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest

from tests.integration.server import SYNTHETIC, Server, wait_until
from tests.integration.test_overload import check_refused

PAGE = (Path(__file__).parent.parent.parent / "docs" / "serving.md").read_text()


def block(kind: str) -> str:
    """The page's block of code of that kind; it has one."""
    [text] = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return str(text)


@pytest.fixture
def files(tmp_path: Path) -> str:
    """The page's option file, with the directories of a test."""
    (tmp_path / "keys").write_text("# a team\nsecret\n")
    (tmp_path / "keys").chmod(0o600)
    options = re.sub(r"/(run|etc)/penstock/", f"{tmp_path}/", block("yaml"))
    path = tmp_path / "penstock.yaml"
    path.write_text(options)
    return str(path)


def test_the_option_file_and_the_client_work_together(files: str, tmp_path: Path) -> None:
    options = (*SYNTHETIC, "--config", files, "--uds", f"{tmp_path}/penstock.sock")
    with Server(*options, directory=tmp_path) as server:
        transport = httpx.HTTPTransport(uds=f"{tmp_path}/penstock.sock")
        # nginx's part: the connection to the socket
        with httpx.Client(transport=transport, timeout=60) as through:
            connected = partial(openai.OpenAI, http_client=through)
            names = {"openai": SimpleNamespace(OpenAI=connected), "origin": "http://x", "key": "secret"}
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown):
                exec(block("python"), names | {"model": "m"})
            assert shown.getvalue().strip()
            bad = through.get("http://x/llm/v1/models", headers={"x-request-id": "7"})
            assert bad.status_code == 401
            assert bad.headers["x-request-id"] == "7"
        wait_until(lambda: "status=401" in server.log, 60, "the line in the log")
    [line] = re.findall(r"INFO +api-server 0 +(.*status=401.*)", server.log)
    [example] = re.findall(r"INFO +api-server 0 +(.*)", PAGE)
    assert fields(line) == fields(example)[: len(fields(line))]


def fields(line: str) -> list[str]:
    return [part.partition("=")[0] for part in line.split()]


def test_a_refusal_looks_as_shown() -> None:
    head, _, body = block("http").partition("\n\n")
    shown = httpx.Response(
        int(head.split()[1]),
        headers=[line.split(": ") for line in head.splitlines()[1:]],
        json=json.loads(body),
    )
    check_refused(shown)
