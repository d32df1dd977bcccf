"""A real Chromium for the tests of the web page: Debian's, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.integration.server import Server
from tests.page.visit import KEY, Visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")
NEEDED = bool(os.environ.get("REQUIRE_BROWSER"))
"""Continuous integration sets it: there these tests fail without a browser."""


def find_browser() -> str:
    found = next(filter(None, map(shutil.which, (os.environ.get("CHROMIUM", ""), *NAMES))), None)
    if found is None:
        reason = "no Chromium: install it (Debian: apt-get install chromium), or name one in CHROMIUM"
        pytest.fail(reason) if NEEDED else pytest.skip(reason)
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Ends with the module: Playwright's event loop is in the way of tests that have their own."""
    path = find_browser()
    if NEEDED:
        import playwright.sync_api as api
    else:
        api = pytest.importorskip("playwright.sync_api", reason="no Playwright: make test installs it")
    arguments = ["--no-sandbox", "--disable-dev-shm-usage"]  # the tests may run as root, in a container
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Needs a key, and serves below a prefix."""
    options = ("--engine", "synthetic", "--synthetic-step-ms", "10", "--api-key", KEY, "--root-path", "/llm")
    with Server(*options, directory=tmp_path_factory.mktemp("page")) as running:
        yield running


@pytest.fixture
def visit(browser: Browser, server: Server) -> Iterator[Visit]:
    """The page of ``server``, below its prefix, for someone who has given the key."""
    with Visit(browser, f"{server.url}/llm/", key=KEY) as opened:
        yield opened
