"""The chat of the page, in a real browser with a real server."""

from __future__ import annotations

import json
from pathlib import Path
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
    visit.page.keyboard.press("Escape")
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


def titles(visit: Visit) -> list[str]:
    return visit.find("#conversations .title").all_inner_texts()


def test_conversations_are_kept_opened_renamed_and_deleted(visit: Visit) -> None:
    visit.wait_ready()
    visit.stream(CHAT, delta(content="yes"))
    for text in ("first one", "second\none"):
        visit.page.click("#history-new")
        visit.ask(text)
        visit.wait_for(".after button")
    assert titles(visit) == ["second one", "first one"]
    visit.page.click("#conversations .title >> text=first one")
    assert visit.find(".message.user .body").all_inner_texts() == ["first one"]
    visit.page.click("#conversations >> text=Rename")
    visit.page.fill("#conversations input", HOSTILE)
    visit.page.press("#conversations input", "Enter")
    assert titles(visit) == ["second one", HOSTILE[:80].strip()]
    visit.page.reload()
    visit.wait_for(".message.user .body", "first one")
    assert titles(visit) == ["second one", HOSTILE[:80].strip()]
    assert visit.page.evaluate("window.pwned") is None
    assert KEY not in visit.page.evaluate("JSON.stringify(localStorage)")
    visit.page.click("#conversations >> text=Delete")
    visit.wait_for(".greeting")
    assert titles(visit) == ["second one"]
    visit.page.click("#history-note >> text=Undo")
    visit.wait_for(".message.user .body", "first one")
    assert titles(visit) == [HOSTILE[:80].strip(), "second one"]
    visit.page.click("#conversations [aria-label='More: second one']")
    visit.page.click("#conversations [aria-label='Delete: second one']")
    assert titles(visit) == [HOSTILE[:80].strip()]
    assert visit.find(".message.user .body").inner_text() == "first one"
    visit.page.keyboard.press("Enter")  # Undo has the focus
    assert titles(visit) == ["second one", HOSTILE[:80].strip()]
    visit.page.click("#conversations >> text=Delete")
    assert titles(visit) == ["second one"]
    visit.page.unroute(f"**{CHAT}")
    visit.ask("Go on for long.", max_tokens=1500)
    visit.wait_for_text()
    visit.wait_for("#conversations .title", "Go on")
    visit.page.click("#conversations >> text=Delete")
    visit.wait_for_end()
    visit.page.reload()
    visit.wait_for(".greeting")
    assert titles(visit) == ["second one"]


def test_a_message_is_edited_and_sent_again(visit: Visit) -> None:
    visit.wait_ready()
    bodies = visit.stream(CHAT, delta(content="yes"))
    for count, text in enumerate(("one", "two"), start=1):
        visit.ask(text)
        visit.page.wait_for_function(
            "(count) => document.querySelectorAll('.stats:not([hidden])').length === count", arg=count
        )
        visit.wait_for(".after button")
    visit.find(".edit").first.click()
    visit.page.keyboard.press("Escape")
    assert visit.find(".message").count() == 4
    visit.find(".edit").first.click()
    visit.page.fill(".editor textarea", "three")
    visit.page.press(".editor textarea", "Enter")
    visit.wait_for(".message.user .body", "three")
    visit.wait_for_end()
    assert visit.find(".message").count() == 2
    assert bodies[-1]["messages"] == [{"role": "user", "content": "three"}]


def test_an_export_is_read_again(visit: Visit, tmp_path: Path) -> None:
    visit.wait_ready()
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    visit.stream(CHAT, delta(reasoning="hm"), delta(content="**yes**"), delta(tool_calls=[call]))
    visit.ask("one", system="Be short.")
    visit.wait_for(".tool-results")
    files = {}
    for kind in ("Markdown", "JSON"):
        with visit.page.expect_download() as download:
            visit.page.click(f"#conversations >> text={kind}")
        files[kind] = tmp_path / download.value.suggested_filename
        download.value.save_as(files[kind])
    assert {name: file.name for name, file in files.items()} == {"Markdown": "one.md", "JSON": "one.json"}
    assert "**Model**\n\n> hm\n\n**yes**" in files["Markdown"].read_text()
    exported = json.loads(files["JSON"].read_text())
    assert [message["role"] for message in exported["messages"]] == ["system", "user", "assistant"]
    assert exported["messages"][2]["reasoning"] == "hm"
    assert KEY not in files["JSON"].read_text()
    visit.page.fill("[name=system]", "")
    visit.page.set_input_files("#history-file", files["JSON"])
    visit.wait_for("#conversations li:nth-child(2) .title")
    visit.wait_for(".tool-results")
    visit.wait_for(".reasoning", "hm")
    assert visit.page.input_value("[name=system]") == "Be short."
    files["JSON"].write_text('{"messages": [{"role": "king"}]}')
    visit.page.set_input_files("#history-file", files["JSON"])
    visit.wait_for("#history-note", 'messages[0].role is "king", allowed are user, assistant')


def test_a_hostile_file_is_refused_or_cut(visit: Visit, tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    for text, problem in {
        '{"messages": [null]}': "messages[0].role is undefined",
        json.dumps({"messages": [{"role": ["x" * 100_000]}]}): 'messages[0].role is ["xxx',
        '{"messages": {"length": 1e9}}': "messages is not a list",
        " " * 8_000_001: "more than 8 MB",
    }.items():
        file.write_text(text)
        visit.page.set_input_files("#history-file", file)
        assert len(visit.wait_for("#history-note", problem).inner_text()) < 300
    messages = [{"role": "assistant", "content": "a", "__proto__": {"x": 1}, "tool_calls": [None, 1]}]
    file.write_text(json.dumps({"title": "t" * 5_000_000, "messages": messages}))
    visit.page.set_input_files("#history-file", file)
    visit.wait_for("#conversations .title", "tttt")
    assert titles(visit) == ["t" * 80]
    visit.page.reload()
    visit.wait_for(".message.assistant .body", "a")


def test_tool_calls_are_bounded(visit: Visit) -> None:
    visit.wait_ready()
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    visit.stream(CHAT, delta(tool_calls=[call | {"index": index} for index in (1_000_000, "__proto__")]))
    visit.ask("one")
    visit.wait_for(".tool-results")
    visit.page.reload()
    assert visit.wait_for(".tool-results").locator("textarea").count() == 2
    assert visit.page.evaluate("[[].name, {}.name, [].id]") == [None, None, None]
    visit.wait_ready()
    visit.page.unroute(f"**{CHAT}")
    visit.stream(CHAT, delta(tool_calls=[call | {"index": index} for index in range(129)]))
    visit.page.click("text=Regenerate")
    visit.wait_for(".problem.error", "The reply has more than 128 tool calls.")


def test_the_link_that_skips_the_bar_stays_in_its_view(visit: Visit) -> None:
    visit.wait_ready()
    visit.open_view("status")
    visit.wait_for("#status:visible")
    visit.page.focus(".skip")
    visit.page.keyboard.press("Enter")
    visit.page.wait_for_function("() => location.hash === '#main'")
    assert visit.find("#status").is_visible()


def test_without_storage_a_conversation_can_be_exported(browser: Browser, server: Server) -> None:
    forbid = "for (const name of ['localStorage', 'sessionStorage'])"
    forbid += (
        " Object.defineProperty(window, name, { get() { throw new DOMException('no', 'SecurityError') } })"
    )
    with Visit(browser, f"{server.url}/llm/") as visit:
        visit.page.add_init_script(forbid)
        visit.page.reload()
        visit.wait_for("#key-dialog[open]")
        visit.page.fill("#key-input", KEY)
        visit.page.press("#key-input", "Enter")
        visit.wait_ready()
        visit.stream(CHAT, delta(content="yes"))
        visit.ask("one")
        visit.wait_for("#history-note", "or is switched off")
        with visit.page.expect_download() as download:
            visit.page.click("#conversations >> text=JSON")
        assert download.value.suggested_filename == "one.json"


def test_two_tabs_with_one_conversation(visit: Visit) -> None:
    visit.wait_ready()
    visit.stream(CHAT, delta(content="yes"))
    visit.ask("one")
    visit.wait_for(".after button")
    page = visit.page
    other = page.context.new_page()
    other.goto(visit.url)
    other.locator("#conversations .title").click()
    other.click("#conversations >> text=Rename")
    other.fill("#conversations input", "half a ti")
    visit.ask("two")
    page.wait_for_function("() => document.querySelectorAll('.stats:not([hidden])').length === 2")
    other.wait_for_function("() => document.querySelectorAll('.message').length === 4")
    assert other.input_value("#conversations input") == "half a ti"
    other.press("#conversations input", "Enter")
    visit.wait_for("#conversations .title", "half a ti")
    visit.ask("three")
    page.wait_for_function("() => document.querySelectorAll('.stats:not([hidden])').length === 3")
    assert titles(visit) == ["half a ti"]


KEEP = """
async (count) => {
  const { keep, keptList, keptMessages } = await import(new URL("page/history.js", document.baseURI));
  const said = (id, size) => keep({ id, title: id, messages: [{ role: "user", text: "x".repeat(size) }] });
  const dropped = [];
  for (let index = 0; index < count; index += 1) dropped.push(said(`c${index}`, 1000).dropped);
  const kept = keptList().length;
  const large = said("large", 1_000_000);
  const larger = said("larger", 2_900_000);
  const too = said("too", 4_000_000);
  const ids = keptList().map(({ id }) => id);
  return [
    Math.max(...dropped), dropped.at(-1), kept, large, larger.kept, too, ids.slice(0, 2), ids.length,
    Object.keys(localStorage).length, keptMessages("c0"), keptMessages("large")[0].text.length,
  ];
}
"""


def test_the_oldest_conversations_make_room(visit: Visit) -> None:
    most, last, kept, large, larger, too, first, left, keys, oldest, size = visit.page.evaluate(KEEP, 205)
    assert (most, last, kept) == (1, 1, 200)
    settings = visit.find("#settings").bounding_box()
    assert settings
    assert settings["height"] > 200  # many conversations leave room for them
    assert large == {"kept": True, "dropped": 1}
    assert larger
    assert too == {"kept": False, "dropped": 0}
    assert first == ["larger", "large"]
    assert left < 200
    assert keys == left + 1
    assert oldest == []
    assert size == 1_000_000


def test_thinking_is_switched_where_the_template_reads_it(visit: Visit, server: Server) -> None:
    status = server.get("/status", **BEARER).json()
    assert status["thinking"] == []
    visit.wait_ready()
    assert not visit.find("#thinking").is_visible()
    visit.answer("/status", status | {"thinking": ["enable_thinking", "reasoning_effort"]})
    visit.wait_for("#thinking")
    bodies = visit.stream(CHAT, delta(content="yes"))
    for value in ("off", "high", ""):
        visit.page.select_option("[name=thinking]", value)
        visit.ask("one")
        visit.page.wait_for_function("() => document.querySelector('#stop').hidden")
        visit.wait_for(".after button")
    assert bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert bodies[1]["reasoning_effort"] == "high"
    assert not {"chat_template_kwargs", "reasoning_effort"} & bodies[2].keys()


def test_copy_without_a_secure_context(visit: Visit) -> None:
    visit.wait_ready()
    visit.stream(CHAT, delta(content="```\na <b>\n```"))
    visit.ask("one")
    visit.wait_for_end()
    visit.page.evaluate(
        """() => {
          Object.defineProperty(navigator, "clipboard", { value: undefined });
          document.addEventListener("copy", () => {
            window.copied = document.activeElement.value;
          });
        }"""
    )
    visit.page.click(".code-head .copy")
    visit.wait_for(".code-head .copy", "Copied")
    assert visit.page.evaluate("window.copied") == "a <b>"


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


def test_a_model_of_vectors_offers_no_chat(visit: Visit, server: Server) -> None:
    [model] = server.get("/v1/models", **BEARER).json()["data"]
    visit.answer("/v1/models", {"object": "list", "data": [model | {"tasks": ["embed", "token_embed"]}]})
    visit.page.reload()  # it may have read the list before
    visit.wait_for("#chat-note", "makes vectors, scores or labels and no text")
    assert visit.find("#send").is_disabled()
    assert visit.find("#prompt").is_disabled()
    assert visit.find(".greeting").inner_text() == ""


def test_markdown_is_shown_as_elements(visit: Visit) -> None:
    code = "```python\nprint(1 < 2)\n```"
    text = f"## Steps\n1. open `main.py`\n2. **run** it\n\n{code}\n\n    x = 2 * 3 * 4\n\nf(*a), *b"
    visit.stream(CHAT, delta(content=text))
    visit.wait_ready()
    visit.ask("hello")
    visit.wait_for_end()
    assert visit.find(".body h3.level-2").inner_text() == "Steps"
    assert visit.find(".body ol li").all_inner_texts() == ["open main.py", "run it"]
    assert visit.find(".body pre").all_inner_texts() == ["print(1 < 2)", "x = 2 * 3 * 4"]
    assert visit.find(".assistant .body p").inner_text() == "f(*a), *b"
    assert visit.find(".body ul li strong, .body ol li strong").inner_text() == "run"
