"""The files of the web page: types, caching, what they may load, and what they reveal."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from penstock.api.routes.page import INDEX, STATIC, Page, static_files
from tests.http.requests import http_request, replied

PAGE = Page("/a/llm")
HTML = "text/html,application/xhtml+xml,*/*;q=0.8"


class Reply:
    def __init__(self, path: str, **headers: str) -> None:
        sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        request = http_request(target=path.encode(), headers=sent)
        asyncio.run(PAGE.answer(request))
        sink = replied(request)
        self.status = sink.status
        self.headers = {name.decode(): value.decode() for name, value in sink.headers.items()}
        self.body = sink.body


def test_a_browser_gets_the_page_and_a_program_links() -> None:
    page = Reply("/", accept=HTML)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.body == (STATIC / INDEX).read_bytes()
    assert Reply("/docs").body == page.body
    for accept in ({}, {"accept": "*/*"}, {"accept": "application/json"}, {"accept": "text/html;q=0, */*"}):
        links = Reply("/", **accept)
        assert links.headers["content-type"] == "application/json"
        assert json.loads(links.body)["api"] == "v1/"
        assert links.headers["vary"] == page.headers["vary"] == "accept"


@pytest.mark.parametrize("name", [path.name for path in static_files()])
def test_files_are_cached_and_take_no_strangers(name: str) -> None:
    reply = Reply(f"/page/{name}")
    kinds = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}
    assert reply.headers["content-type"] == kinds[name.rpartition(".")[2]]
    assert reply.headers["x-content-type-options"] == "nosniff"
    policy = reply.headers["content-security-policy"]
    for rule in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "trusted-types 'none'"):
        assert rule in policy
    assert "unsafe" not in policy
    again = Reply(f"/page/{name}", if_none_match=f'"other", W/{reply.headers["etag"]}')
    assert (again.status, again.body) == (304, b"")
    assert again.headers["etag"] == reply.headers["etag"]
    assert Reply(f"/page/{name}", if_none_match='"other"').status == 200


def test_the_root_path_leads_to_the_page() -> None:
    for path, location in (("/a/llm", "llm/"), ("/docs/", "../docs")):
        reply = Reply(path)
        assert (reply.status, reply.headers["location"]) == (308, location)


def test_every_address_is_relative_and_exists() -> None:
    """A proxy may serve the page below a prefix; no other host is asked."""
    names = {path.name for path in static_files()}
    for path in [STATIC / INDEX, *static_files()]:
        text = path.read_text()
        found = re.findall(r"https?://[^\s\"')]*", text)
        assert set(found) <= {"http://www.w3.org/2000/svg"}, path.name
        for address in re.findall(r"(?:href|src)=\"([^\"#]+)\"", text):
            assert address.removeprefix("page/") in names
        for module in re.findall(r"from \"\./([^\"]+)\"", text):
            assert module in names


def test_no_file_has_a_script_or_style_of_its_own_or_parses_markup() -> None:
    index = (STATIC / INDEX).read_text()
    assert re.findall(r"<script(?![^>]*src=)|<style|style=|\bon\w+=\"", index) == []
    for path in static_files():
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", path.read_text()
        )
