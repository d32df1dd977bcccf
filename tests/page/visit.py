"""A tab with the page, whose end checks that nothing went wrong in it unseen."""

from __future__ import annotations

import json
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Route

KEY = "key-of-the-page"
WAIT_MS = 60_000


class Visit:
    """Use it as a context. No script may fail, no policy be violated, and no other host be asked."""

    def __init__(
        self, browser: Browser, url: str, *, key: str = "", scheme: Any = "light", width: int = 1200
    ) -> None:
        self.url = url
        self._context = browser.new_context(
            color_scheme=scheme, viewport={"width": width, "height": 780}, reduced_motion="reduce"
        )
        self._context.set_default_timeout(WAIT_MS)
        if key:  # once: a page that forgets it does not get it again
            self._context.add_init_script(
                "if (!sessionStorage.getItem('given')) {"
                f" sessionStorage.setItem('penstock.key', {json.dumps(json.dumps(key))});"
                " sessionStorage.setItem('given', '1') }"
            )
        self.page: Page = self._context.new_page()
        self.hosts: set[str] = set()
        self.asked: list[str] = []
        """Paths of all requests."""
        self._problems: list[str] = []
        self.page.on("console", lambda message: self._on_console(message.type, message.text))
        self.page.on("pageerror", lambda error: self._problems.append(str(error)))
        self.page.on("request", lambda request: self._on_request(request.url))

    def _on_console(self, kind: str, text: str) -> None:
        # The browser itself logs every reply with an error status, those that a test wants included.
        if kind in ("error", "warning") and not text.startswith("Failed to load resource"):
            self._problems.append(text)

    def _on_request(self, url: str) -> None:
        parts = urlsplit(url)
        self.hosts.add(parts.netloc)
        self.asked.append(parts.path)

    def __enter__(self) -> Self:
        self.page.goto(self.url)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.close()
        if error is None:
            assert self._problems == []
            assert self.hosts == {urlsplit(self.url).netloc}

    # -- what a visitor does and sees

    def find(self, selector: str) -> Locator:
        return self.page.locator(selector)

    def wait_for(self, selector: str, text: str = "") -> Locator:
        found = self.page.locator(selector, has_text=text) if text else self.page.locator(selector)
        found.first.wait_for()
        return found.first

    def wait_ready(self) -> None:
        self.wait_for("#health[data-state=ready]")

    def wait_for_model(self, name: str) -> None:
        self.page.wait_for_function(
            "(name) => document.querySelector('[name=model]').value === name", arg=name
        )

    def open_view(self, name: str) -> None:
        self.page.click(f"[data-view={name}]")

    def ask(self, text: str, **settings: object) -> None:
        """Send a message; ``settings``: values of the form's fields."""
        for name, value in settings.items():
            self.page.fill(f"#settings-form [name={name}]", str(value))
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def reply_text(self) -> str:
        return self.page.locator(".message.assistant .body").last.inner_text()

    def wait_for_text(self) -> None:
        """Until the last reply has begun."""
        self.page.wait_for_function(
            "() => [...document.querySelectorAll('.message.assistant .body')].at(-1)?.textContent.length > 0"
        )

    def wait_for_end(self) -> None:
        """Until no reply streams."""
        self.wait_for("#send:visible")

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return int(
            self.page.evaluate(
                "Math.max(...[document.documentElement, document.querySelector('main')]"
                ".map((one) => one.scrollWidth - one.clientWidth))"
            )
        )

    # -- replies of other servers than the real one

    def answer(self, path: str, body: Any, status: int = 200) -> None:
        """Have a path answer with JSON."""

        def fulfil(route: Route) -> None:
            route.fulfill(status=status, content_type="application/json", body=json.dumps(body))

        self.page.route(f"**{path}", fulfil)

    def stream(self, path: str, *events: Any) -> list[Any]:
        """Have a path answer with these events; returns the bodies of the requests, as they come."""
        bodies: list[Any] = []

        def fulfil(route: Route) -> None:
            bodies.append(route.request.post_data_json)
            text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
            route.fulfill(content_type="text/event-stream", body=text + "data: [DONE]\n\n")

        self.page.route(f"**{path}", fulfil)
        return bodies


def delta(**fields: Any) -> dict[str, Any]:
    """An event of a streamed chat."""
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}
