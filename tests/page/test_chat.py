"""The chat of the page, in a real browser with a real server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.integration.server import Server, wait_until
from tests.page.visit import KEY, Visit, delta

if TYPE_CHECKING:
    from playwright.sync_api import Browser

BEARER = {"Authorization": f"Bearer {KEY}"}
CHAT = "/v1/chat/completions"


def is_free(server: Server) -> bool:
    [engine] = server.get("/status", **BEARER).json()["engines"]
    return engine["running"] == 0 and engine["waiting"] == 0


def aborted(server: Server) -> int:
    count: int = server.get("/status", **BEARER).json()["requests"]["abort"]
    return count


def test_a_key_is_asked_for_checked_and_kept_in_the_tab(browser: Browser, server: Server) -> None:
    with Visit(browser, f"{server.url}/llm/") as visit:
        visit.wait_for("#key-dialog[open]")
        assert "penstock-demo" not in visit.page.content()
        visit.page.fill("#key-input", "nö key")
        visit.page.press("#key-input", "Enter")
        visit.wait_for("#key-error", "printable ASCII")
        visit.page.fill("#key-input", "wrong")
        visit.page.press("#key-input", "Enter")
        visit.wait_for("#health-text", "the key is not valid")
        visit.wait_for("#key-dialog[open]")
        visit.wait_for("#key-error", "does not take this key")
        visit.page.fill("#key-input", KEY)
        visit.page.press("#key-input", "Enter")
        visit.wait_ready()
        visit.wait_for_model("penstock-demo")
        visit.page.reload()
        visit.wait_ready()
        assert visit.page.evaluate("[localStorage.length, document.cookie, location.search]") == [0, "", ""]
        visit.page.click("#key-button")
        visit.page.click("#key-forget")
        visit.wait_for("#health-text", "an access key is needed")
        assert not visit.find("#key-dialog").is_visible()
        visit.open_view("status")
        assert "penstock-demo" not in visit.find("#status").inner_text()


def test_a_reply_streams_and_has_figures(visit: Visit) -> None:
    visit.wait_ready()
    visit.ask("Tell me about rivers.", max_tokens=60)
    visit.wait_for_text()
    early = len(visit.reply_text())
    visit.wait_for("#stop:visible")
    visit.wait_for_end()
    assert len(visit.reply_text()) > early
    stats = visit.wait_for(".message.assistant .stats:visible").inner_text()
    for part in ("TTFT", "tokens/s", "60 tokens", "cut at the maximum length"):
        assert part in stats
    visit.ask("And lakes?", max_tokens=5)
    visit.wait_for_end()
    assert visit.find(".message").count() == 4
    visit.page.click("#clear")
    visit.wait_for(".greeting")


def test_stop_frees_the_engine(visit: Visit, server: Server) -> None:
    before = aborted(server)
    visit.wait_ready()
    visit.ask("Go on for long.", max_tokens=1500)
    visit.wait_for_text()
    assert not is_free(server)
    visit.page.click("#stop")
    visit.wait_for(".problem", "Stopped.")
    wait_until(lambda: is_free(server) and aborted(server) == before + 1, 90, "the request's end")
    assert "tokens" in visit.find(".message.assistant .stats").inner_text()  # counted up to the stop
    visit.page.click("text=Try again")
    visit.wait_for_text()
    visit.page.click("#stop")
    assert visit.find(".message").count() == 2


def test_errors_have_the_words_of_the_server(visit: Visit) -> None:
    visit.wait_ready()
    visit.ask("hello", max_tokens=999999)
    assert "HTTP 400: max_tokens" in visit.wait_for(".problem.error").inner_text()
    visit.ask("hello", max_tokens=3, top_p=7)
    assert "Top p" in visit.wait_for("#settings-error").inner_text()
    visit.page.fill("[name=top_p]", "")
    visit.stream(CHAT, delta(content="so far"), {"error": {"message": "The engine was lost."}})
    visit.ask("hello")
    visit.wait_for(".problem.error", "The engine was lost.")
    assert visit.reply_text() == "so far"


def test_a_reload_during_a_stream(visit: Visit, server: Server) -> None:
    visit.wait_ready()
    visit.ask("Go on for long.", max_tokens=1500)
    visit.wait_for_text()
    visit.page.reload()
    visit.wait_for(".problem", "The page was reloaded")
    assert visit.find(".message.user .body").inner_text() == "Go on for long."
    assert visit.reply_text()
    assert visit.page.input_value("[name=max_tokens]") == "1500"
    assert visit.find("#send").is_visible()
    wait_until(lambda: is_free(server), 90, "the request's end")
    visit.wait_ready()
    visit.page.fill("[name=max_tokens]", "5")
    visit.page.click("text=Try again")
    visit.wait_for(".stats", "5 tokens")


HOSTILE = (
    "<img src=x onerror=window.pwned=1><script>window.pwned=1</script> [link](javascript:window.pwned=1)"
)


def test_a_hostile_model_writes_text_alone(visit: Visit) -> None:
    visit.answer("/v1/models", {"data": [{"id": HOSTILE}]})
    visit.stream(
        CHAT,
        delta(reasoning=HOSTILE),
        delta(content=f"{HOSTILE}\n\n# {HOSTILE}\n- {HOSTILE}\n\n```<script>\n{HOSTILE}\n```\n**{HOSTILE}**"),
        delta(tool_calls=[{"index": 0, "id": "1", "function": {"name": HOSTILE, "arguments": HOSTILE}}]),
    )
    visit.page.reload()
    visit.wait_for_model(HOSTILE)
    visit.ask("hello")
    visit.wait_for_end()
    visit.wait_for(".tool-results")
    assert visit.reply_text().count("<script>window.pwned=1</script>") == 5
    assert visit.page.evaluate("window.pwned") is None
    assert visit.find("main img, main script, main a[href^=javascript]").count() == 0
    visit.page.reload()
    visit.wait_for(".tool-results")
    assert visit.page.evaluate("window.pwned") is None


def test_reasoning_and_tool_calls(visit: Visit) -> None:
    call = {"index": 0, "id": "call-1", "function": {"name": "weather", "arguments": '{"city":'}}
    bodies = visit.stream(
        CHAT,
        delta(reasoning="It wants the weather."),
        delta(tool_calls=[call]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '"Oslo"}'}}]),
    )
    visit.wait_ready()
    tools = '[{"type": "function", "function": {"name": "weather"}}]'
    visit.ask("Rain in Oslo?", tools=tools, system="Be short.")
    visit.wait_for(".reasoning", "It wants the weather.")
    assert '"city": "Oslo"' in visit.wait_for(".calls pre").inner_text()
    visit.page.fill(".tool-results textarea", "rain")
    visit.page.click("text=Send results")
    visit.page.wait_for_function("() => document.querySelectorAll('.message.assistant').length === 2")
    visit.wait_for_end()
    first, second = bodies
    assert first["tools"][0]["function"]["name"] == "weather"
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "tool"]
    assert second["messages"][2]["tool_calls"][0]["function"]["arguments"] == '{"city":"Oslo"}'
    assert second["messages"][3] == {"role": "tool", "tool_call_id": "call-1", "content": "rain"}


def test_a_model_without_a_chat_template_continues_the_text(visit: Visit, server: Server) -> None:
    status = server.get("/status", **BEARER).json() | {"chat": False}
    visit.answer("/status", status)
    visit.wait_for("#chat-note", "no chat template")
    visit.ask("Once upon a time", max_tokens=5)
    visit.wait_for(".stats", "5 tokens")
    assert any(path.endswith("/v1/completions") for path in visit.asked)


def test_markdown_is_shown_as_elements(visit: Visit) -> None:
    code = "```python\nprint(1 < 2)\n```"
    text = f"## Steps\n1. open `main.py`\n2. **run** it\n\n{code}\n\n    x = 2 * 3 * 4\n\nf(*a), *b"
    visit.stream(CHAT, delta(content=text))
    visit.wait_ready()
    visit.ask("hello")
    visit.wait_for_end()
    assert visit.find(".body h4").inner_text() == "Steps"
    assert visit.find(".body ol li").all_inner_texts() == ["open main.py", "run it"]
    assert visit.find(".body pre").all_inner_texts() == ["print(1 < 2)", "x = 2 * 3 * 4"]
    assert visit.find(".assistant .body p").inner_text() == "f(*a), *b"
    assert visit.find(".body ul li strong, .body ol li strong").inner_text() == "run"
