"""Compaction items: how they are made, and what the model reads of them."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from penstock.config.serve import ServeConfig
from penstock.dialects.responses.dialect import Compact, Responses, ResponsesTokenCounter
from penstock.generation.compaction.compaction import Compaction, summary_message
from penstock.generation.dialect import RequestInfo
from penstock.generation.plan import RequestPlan
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.store.response_store import ResponseStore
from penstock.wire.frames import FinishReason
from tests.dialects.responses.reading import events_of
from tests.dialects.responses.test_plans import FakeStore
from tests.dialects.responses.test_replies import AGENT_TEMPLATE, TOOLS, rows_of, tables
from tests.generation.planning import error_of, tiny_input_processor
from tests.generation.replying import Desk, in_loop

KEY, PROMPT = b"k" * 32, "Write the summary."
COMPACTION = Compaction(KEY, PROMPT)
CONFIG = ServeConfig()
PROCESSOR = tiny_input_processor(template=ChatTemplate({"default": AGENT_TEMPLATE}, {}))
DIALECT = Responses(CONFIG, PROCESSOR, None, COMPACTION)
COMPACT = Compact(CONFIG, PROCESSOR, None, COMPACTION)
MINE = RequestInfo(tenant="mine")
ITEMS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "First."},
    {"role": "assistant", "content": "Answer."},
    {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "Seen."},
    {"role": "user", "content": [{"type": "input_text", "text": "Second."}]},
]
TRIGGER = {"type": "compaction_trigger"}
SUMMARY = "All done."


def body(input: Any, **fields: Any) -> bytes:
    return json.dumps({"input": input} | fields).encode()


def sealed(text: str = SUMMARY, tenant: str = "mine") -> dict[str, Any]:
    return {"type": "compaction", "id": "cmp_1", "encrypted_content": COMPACTION.seals.seal(text, tenant)}


def prompt_of(plan: RequestPlan) -> str:
    [prompt] = plan.prompts
    return str(prompt)


def replied(
    api: Responses, text: str, finish: FinishReason = FinishReason.EOS, input: Any = None, **fields: Any
) -> Any:
    """The events of a compaction that the model answers so, or the whole reply."""

    def run() -> None:
        desk = Desk(tables())
        plan = api.plan(body(input or [*ITEMS, TRIGGER], **fields), MINE)
        format = api.reply_format(plan, "r")
        rows = rows_of(text, [5])
        if finish is FinishReason.EOS:
            rows.append([2])
        if plan.stream:
            _, sink = desk.streamed(plan, format=format)
            desk.deliver(desk.rows(0, rows, finish))
            found.extend(events_of(sink.data.decode()))
            return
        reply = desk.collected(plan, format=format)
        desk.deliver(desk.rows(0, rows, finish))
        assert format.keep(reply) is None
        found.append(json.loads(b"".join(format.whole(reply))))

    found: list[Any] = []
    in_loop(run)
    return found if fields.get("stream") else found[0]


def opened(item: dict[str, Any], tenant: str = "mine") -> str | None:
    assert set(item) == {"id", "type", "encrypted_content"}
    assert item["type"] == "compaction"
    return COMPACTION.seals.open(item["encrypted_content"], tenant)


# -- what the model reads


def test_a_summary_stands_for_all_but_instructions_and_what_the_user_said() -> None:
    after = [{"role": "assistant", "content": "I go on."}, {"role": "user", "content": "Third."}]
    prompt = prompt_of(DIALECT.plan(body([*ITEMS, sealed(), *after], instructions="Rules."), MINE))
    said = f"user: {summary_message(SUMMARY).content}\n"
    assert prompt == (
        "system: Rules.\nBe brief.\nuser: First.\nuser: Second.\n"
        f"{said}assistant: I go on.\nuser: Third.\nassistant:"
    )
    assert "Answer." not in prompt
    assert "Seen." not in prompt


def test_a_later_summary_replaces_an_earlier_one() -> None:
    prompt = prompt_of(DIALECT.plan(body([*ITEMS, sealed("Old."), sealed("New.")]), MINE))
    assert "New." in prompt
    assert "Old." not in prompt
    assert "First." in prompt


@pytest.mark.parametrize("name", ["compaction_summary", "context_compaction"])
def test_other_names_of_the_item(name: str) -> None:
    assert SUMMARY in prompt_of(DIALECT.plan(body([*ITEMS, sealed() | {"type": name}]), MINE))


def test_its_tokens_are_counted() -> None:
    counter = ResponsesTokenCounter(PROCESSOR, None, COMPACTION)
    items = [*ITEMS, sealed()]
    assert counter.prompt(body(items), MINE, None).prompt == prompt_of(DIALECT.plan(body(items), MINE))
    items.append(TRIGGER)
    assert counter.prompt(body(items), MINE, None).prompt == prompt_of(DIALECT.plan(body(items), MINE))


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (sealed(tenant="other"), "encrypted_content"),
        (sealed() | {"encrypted_content": "gAAAAA"}, "encrypted_content"),
        (sealed() | {"encrypted_content": sealed()["encrypted_content"][:-4] + "AAAA"}, "encrypted_content"),
        ({"type": "compaction"}, "encrypted_content"),
        (TRIGGER, "type"),
    ],
)
def test_what_does_not_open_is_named(item: dict[str, Any], field: str) -> None:
    given = body([item, *ITEMS])
    error = error_of(lambda data: DIALECT.plan(data, MINE), given)
    assert (error.status, error.param) == (400, f"input[0].{field}")


# -- the request for a summary


def test_the_summary_continues_the_conversation() -> None:
    """So its prompt begins with what the prefix cache has."""
    plan = DIALECT.plan(body([*ITEMS, TRIGGER], text={"format": {"type": "json_object"}}, stop=["."]), MINE)
    whole = prompt_of(DIALECT.plan(body(ITEMS), MINE))
    assert prompt_of(plan) == f"{whole.removesuffix('assistant:')}user: {PROMPT}\nassistant:"
    assert (plan.constraint, plan.stop) == (None, ())
    assert plan.base.max_tokens == PROCESSOR.max_total // 4


def test_a_conversation_beyond_the_context_is_shortened() -> None:
    long = {"type": "function_call_output", "call_id": "c", "output": "word " * 4 * PROCESSOR.max_total}
    items = [*ITEMS[:4], long, *ITEMS[5:]]
    prompt = prompt_of(DIALECT.plan(body([*items, TRIGGER]), MINE))
    assert "left out" in prompt
    assert "First." in prompt
    assert PROCESSOR.count_tokens(prompt, most=1 << 30) <= PROCESSOR.max_total * 3 // 4


# -- replies


def test_events() -> None:
    text = f"<think>Hm.</think>\n\n{SUMMARY}\n"
    events = replied(DIALECT, text, stream=True)
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.compaction.compacting",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(6))
    done, final = events[4], events[5]["response"]
    assert opened(done["item"]) == SUMMARY
    assert final["output"] == [done["item"]]
    assert events[3]["item_id"] == done["item"]["id"] == events[2]["item"]["id"]
    usage = final["usage"]
    assert usage["output_tokens"] > usage["output_tokens_details"]["reasoning_tokens"] > 0
    whole = replied(DIALECT, text)
    assert opened(whole["output"][0]) == SUMMARY
    assert whole["status"] == "completed"


def test_a_summary_that_is_cut_says_so() -> None:
    [item] = replied(DIALECT, SUMMARY, FinishReason.LENGTH)["output"]
    text = opened(item)
    assert text is not None
    assert text.startswith(f"{SUMMARY}\n\n[")


@pytest.mark.parametrize(
    "text", [" ", "<think>Only this.", '<tool_call>{"name": "look", "arguments": {}}</tool_call>']
)
def test_no_summary_is_a_failure(text: str) -> None:
    events = replied(DIALECT, text, FinishReason.LENGTH, stream=True, tools=TOOLS)
    assert events[-1]["type"] == "response.failed"
    assert "wrote no summary" in events[-1]["response"]["error"]["message"]
    assert error_of(lambda _: replied(DIALECT, text, FinishReason.LENGTH, tools=TOOLS), b"").status == 500
    assert error_of(lambda _: replied(COMPACT, text, FinishReason.LENGTH, tools=TOOLS), b"").status == 500


def test_the_compact_route() -> None:
    reply = replied(COMPACT, SUMMARY, input=ITEMS)
    assert reply["object"] == "response.compaction"
    assert set(reply) == {"id", "object", "created_at", "output", "usage"}
    *stay, item = reply["output"]
    assert [(each["role"], each["type"]) for each in stay] == [
        ("developer", "message"),
        ("user", "message"),
        ("user", "message"),
    ]
    assert all(each["id"] and each["status"] == "completed" for each in stay)
    assert stay[1]["content"] == [{"type": "input_text", "text": "First."}]
    assert opened(item) == SUMMARY
    again = prompt_of(DIALECT.plan(body(reply["output"]), MINE))
    assert again == prompt_of(DIALECT.plan(body([*ITEMS, item]), MINE))


def test_a_compacted_conversation_is_compacted_again() -> None:
    first = replied(COMPACT, SUMMARY, input=ITEMS)["output"]
    more = [*first, {"role": "assistant", "content": "More."}]
    assert SUMMARY in prompt_of(COMPACT.plan(body(more), MINE))
    second = replied(COMPACT, "Newer.", input=more)["output"]
    assert [each["type"] for each in second] == [*["message"] * 3, "compaction"]
    assert opened(second[-1]) == "Newer."


def test_stored_responses_are_compacted_with_the_rest() -> None:
    """A trigger's own item is not stored: the summary stands for what it asked to replace."""
    store = FakeStore([], {})
    keeping = Responses(CONFIG, PROCESSOR, cast("ResponseStore", store), COMPACTION)
    plan = keeping.plan(body([*ITEMS, TRIGGER]), MINE)
    stored = json.loads(plan.dialect_fields.response.input)
    assert [each["type"] for each in stored] == [each.get("type", "message") for each in ITEMS]
