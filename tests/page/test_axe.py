"""The page by axe's rules of accessibility, which ``make test-page`` installs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.server import Server
from tests.page.visit import KEY, Visit, delta

if TYPE_CHECKING:
    from playwright.sync_api import Browser

AXE = Path(__file__).parent / "node/node_modules/axe-core/axe.min.js"
RUN = """
() => axe.run(document, {resultTypes: ["violations"]}).then((found) => found.violations.map(
  (rule) => `${rule.id}: ${rule.nodes.map((node) => `${node.target} ${node.failureSummary}`).join("; ")}`))
"""
REPLY = """#### Deep
# Title
### Skipped a level
- ###### In a list
[link](https://example.org) and [no link](/v1/models), *text* `code`

| a | b |
|---|--:|
| 1 | 2 |

```python
# comment
@meta
def f(x: int = 1) -> str:
    return "text"
```
```diff
+ added
- removed
```
> quote

- [x] done
- [ ] open

"""

pytestmark = pytest.mark.skipif(not AXE.exists(), reason="make test-page installs axe")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing(browser: Browser, server: Server, width: int, scheme: str) -> None:
    found: dict[str, list[str]] = {}

    def judge(name: str) -> None:
        if violations := visit.page.evaluate(RUN):
            found[name] = violations

    with Visit(browser, f"{server.url}/llm/", key=KEY, scheme=scheme, width=width) as visit:
        visit.page.evaluate(AXE.read_text())
        visit.wait_ready()
        judge("empty")
        call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
        visit.stream(
            "/v1/chat/completions",
            delta(reasoning="why"),
            delta(content=REPLY * 20),
            delta(tool_calls=[call]),
        )
        visit.ask("hello")
        visit.wait_for(".tool-results")
        judge("chat")
        for part in ("settings", "history") if width < 800 else ():
            visit.page.click(f"#{part} > summary")
            judge(part)
        visit.page.click("#conversations >> text=Rename")
        judge("rename")
        visit.page.keyboard.press("Escape")
        visit.find(".edit").first.click()
        judge("edit")
        visit.open_view("status")
        visit.wait_for("#status tbody tr")
        judge("status")
        visit.open_view("api")
        visit.page.click("details.route:has(> summary code:text-is('/v1/chat/completions')) > summary")
        visit.wait_for(".route[open] .request")
        judge("api")
        visit.page.click("#key-button")
        judge("key")
    assert found == {}
