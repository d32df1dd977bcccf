"""The API reference of the page, and how the page looks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from tests.integration.server import Server
from tests.page.visit import KEY, Visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser


UNNAMED = """
[...document.querySelectorAll("input, textarea, select, button")]
  .filter((one) => !(one.labels?.length || one.textContent.trim() || one.ariaLabel))
  .map((one) => one.outerHTML)
"""
FOCUSED = """
(() => {
  const one = document.activeElement;
  return one.id || one.name || one.dataset.view || one.className;
})()
"""


def open_route(visit: Visit, method: str, path: str) -> None:
    visit.page.click(
        f"details.route:has(> summary .{method}):has(> summary code:text-is('{path}')) > summary"
    )


def test_docs_lead_to_a_form_that_sends(browser: Browser, server: Server) -> None:
    with Visit(browser, f"{server.url}/docs", key=KEY) as visit:
        open_route(visit, "post", "/tokenize")
        form = ".route[open] .request"
        visit.page.fill(f"{form} textarea", '{"prompt": "it\'s"}')
        visit.page.click(f"{form} details summary")
        curl = visit.wait_for(f"{form} details pre").inner_text()
        assert f"curl '{server.url}/tokenize'" in curl
        assert """-d '{"prompt":"it'\\''s"}'""" in curl
        assert KEY not in curl
        visit.page.click(f"{form} button[type=submit]")
        visit.wait_for(".reply-head", "HTTP 200")
        assert '"count": ' in visit.find(".reply").inner_text()
        assert "add_special_tokens" in visit.find(".route[open] .fields").first.inner_text()
        visit.page.fill(f"{form} textarea", '{"prompt": 7}')
        visit.page.click(f"{form} button[type=submit]")
        visit.wait_for(".reply-head", "HTTP 400")
        assert "prompt" in visit.find(".reply").inner_text()


def test_a_streamed_reply_is_shown_as_it_comes_and_can_be_stopped(visit: Visit) -> None:
    visit.open_view("api")
    open_route(visit, "post", "/v1/chat/completions")
    form = ".route[open] .request"
    visit.page.check(f"{form} input[type=checkbox]")
    assert '"stream": true' in visit.page.input_value(f"{form} textarea")
    visit.page.click(f"{form} button[type=submit]")
    visit.wait_for(".reply", "[DONE]")
    body = '{"messages": [{"role": "user", "content": "x"}], "stream": true, "max_tokens": 1500}'
    visit.page.fill(f"{form} textarea", body)
    visit.page.click(f"{form} button[type=submit]")
    visit.wait_for(".reply", "data:")
    visit.page.click(f"{form} >> text=Stop")
    visit.wait_for(".reply-head", "stopped")


def test_parameters_of_a_path_are_asked_for(visit: Visit) -> None:
    visit.open_view("api")
    open_route(visit, "get", "/v1/models/{model}")
    visit.page.click(".route[open] button[type=submit]")
    visit.wait_for(".field-error", "model is needed")
    visit.page.fill(".route[open] input[name=model]", "a b/../c")
    visit.page.click(".route[open] button[type=submit]")
    visit.wait_for(".reply-head", "HTTP 404")
    assert "/llm/v1/models/a%20b%2F..%2Fc" in visit.asked


def test_routes_are_found_by_their_fields(visit: Visit) -> None:
    visit.open_view("api")
    visit.wait_for(".route")
    visit.page.fill("input[type=search]", "repetition_penalty")
    visible = visit.find(".route:visible > summary code").all_inner_texts()
    assert {"/v1/completions", "/v1/chat/completions"} <= set(visible)
    assert "/metrics" not in visible


@pytest.mark.parametrize("view", ["chat", "status", "api"])
def test_light_and_dark_and_a_narrow_window(browser: Browser, server: Server, view: str) -> None:
    shots = []
    for scheme in ("light", "dark"):
        url = f"{server.url}/#{view}"
        with Visit(browser, url, key=KEY, scheme=scheme, width=390) as visit:
            visit.wait_ready()
            if view == "api":
                open_route(visit, "post", "/v1/chat/completions")
            assert visit.overflow() == 0
            shots.append(visit.page.evaluate("getComputedStyle(document.body).backgroundColor"))
            shots.append(visit.page.screenshot())
    light, light_shot, dark, dark_shot = shots
    assert light != dark
    assert light_shot != dark_shot


def test_the_keyboard_reaches_everything(visit: Visit) -> None:
    visit.wait_ready()
    seen = []
    for _ in range(24):
        visit.page.keyboard.press("Tab")
        seen.append(visit.page.evaluate(FOCUSED))
    assert {"skip", "chat", "status", "api", "key-button", "model", "system", "prompt", "send"} <= set(seen)
    unnamed = visit.page.evaluate(UNNAMED)
    assert unnamed == []


def test_files_over_the_wire(server: Server) -> None:
    """Without the key, and below the prefix or not."""
    for prefix in ("", "/llm"):
        page = server.get(f"{prefix}/", accept="text/html")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        script = server.get(f"{prefix}/page/main.js")
        again = server.get(f"{prefix}/page/main.js", **{"if-none-match": script.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    head = httpx.head(f"{server.url}/docs", timeout=60)
    assert head.headers["content-length"] == str(len(page.content))
    html = {"accept": "text/html"}
    moved = httpx.get(f"{server.url}/llm", follow_redirects=True, headers=html, timeout=60)
    assert str(moved.url) == f"{server.url}/llm/"
    assert moved.content == page.content
    assert server.post("/", {}).status_code == 405
    assert server.get("/page/../page/main.py").status_code == 401
