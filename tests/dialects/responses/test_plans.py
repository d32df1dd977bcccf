"""Bodies of the Responses API: what the model reads of them, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterable
from typing import Any, cast

import pytest

from penstock.config.serve import ServeConfig
from penstock.dialects.responses.dialect import Responses, ResponsesTokenCounter
from penstock.dialects.responses.prompts import Found
from penstock.dialects.responses.reasoning_content import open_reasoning, seal_reasoning
from penstock.generation.dialect import RequestInfo
from penstock.generation.plan import RequestPlan
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.http.errors import ApiError
from penstock.store.response_store import ResponseStore
from penstock.store.stored_response import StoredResponse
from tests.generation.planning import error_of, tiny_input_processor, tiny_tokenizer

TEMPLATE = (
    "{{ tools | tojson if tools }}\n"
    "{% for message in messages %}<{{ message.role }}{% if message.name %} {{ message.name }}{% endif %}>"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ message.content }}"
    "{% for call in message.tool_calls %}[{{ call.id }} {{ call.function.name }} "
    "{{ call.function.arguments | tojson }}]{% endfor %}{{ '\n' }}"
    "{% endfor %}<assistant>{# <tool_call> #}"
)


class FakeStore:
    """What an earlier API server has stored."""

    def __init__(self, chain: list[StoredResponse], items: dict[str, bytes]) -> None:
        self._chain, self._items = chain, items

    def new_id(self) -> str:
        return "resp_0123456789ab" + 24 * "0"

    async def chain(self, id: str, tenant: str) -> list[StoredResponse]:
        if id != self._chain[-1].id or tenant != self._chain[-1].tenant:
            raise ApiError(404, "no such response", param="previous_response_id")
        return self._chain

    async def items(self, ids: Iterable[str], tenant: str) -> dict[str, bytes]:
        return {id: self._items[id] for id in ids if id in self._items}


def make_dialect(store: FakeStore | None = None, max_model_len: int = 2048, **options: Any) -> Responses:
    config, template = ServeConfig(**options), ChatTemplate({"default": TEMPLATE}, {})
    processor = tiny_input_processor(config, template, names=("m",), max_model_len=max_model_len)
    return Responses(config, processor, cast("ResponseStore | None", store))


DIALECT = make_dialect()


def body(input: Any = "Hi.", **fields: Any) -> bytes:
    return json.dumps({"input": input} | fields).encode()


def plan_of(input: Any = "Hi.", **fields: Any) -> RequestPlan:
    return DIALECT.plan(body(input, **fields))


def prompt_of(input: Any = "Hi.", **fields: Any) -> str:
    """The messages that the model reads."""
    [prompt] = plan_of(input, **fields).prompts
    assert isinstance(prompt, str)
    return prompt.partition("\n")[2].removesuffix("<assistant>")


def tools_of(plan: RequestPlan) -> list[dict[str, Any]]:
    [prompt] = plan.prompts
    assert isinstance(prompt, str)
    return [tool["function"] for tool in json.loads(prompt.partition("\n")[0] or "[]")]


def error(input: Any = "Hi.", **fields: Any) -> ApiError:
    return error_of(DIALECT.plan, body(input, **fields))


# -- items


def test_a_text_is_a_message_of_the_user() -> None:
    assert prompt_of("Hi.", instructions="Be kind.") == "<system>Be kind.\n<user>Hi.\n"


def test_a_whole_conversation() -> None:
    items = [
        {"role": "developer", "content": "Rules."},
        {
            "type": "message",
            "id": "msg_x-1",
            "role": "user",
            "content": [{"type": "input_text", "text": "Go."}],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}', "id": "fc_1"},
        {"type": "function_call", "call_id": "c2", "name": "run", "namespace": "sh", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "a tree"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]},
        {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": 'a "b"'},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "done"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    assert prompt_of(items).splitlines() == [
        "<system>Rules.",
        "<user>Go.",
        '<assistant>(hm)I look.[c1 look {"at": 1}][c2 sh__run {}]',
        "<tool look>a tree",
        "<tool sh__run>ok",
        '<assistant>[c3 patch {"input": "a \\"b\\""}]',
        "<tool patch>done",
        "<assistant>No.",
    ]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"content": [{"type": "reasoning_text", "text": "all"}], "encrypted_content": "x"}, "all"),
        ({"encrypted_content": seal_reasoning("sealed ü"), "summary": []}, "sealed ü"),
        ({"encrypted_content": "gAAAA", "summary": [{"type": "summary_text", "text": "short"}]}, "short"),
    ],
)
def test_reasoning_that_a_client_sends_back(item: dict[str, Any], text: str) -> None:
    items = [
        {"role": "user", "content": "Go."},
        {"type": "reasoning", **item},
        {"role": "user", "content": "?"},
    ]
    assert f"<assistant>({text})" in prompt_of(items)


def test_reasoning_of_others_is_not_opened() -> None:
    assert open_reasoning("penstock1.###") is None
    assert open_reasoning("penstock1._w==") is None
    assert open_reasoning("penstock1.ü") is None


@pytest.mark.parametrize(
    ("input", "param", "said"),
    [
        (None, "input", "a text, or a list of items"),
        ([], "input", "at least one item"),
        ([{"type": "web_search_call", "id": "ws_1"}], "input[0].type", "'web_search_call'"),
        ([{"role": "robot", "content": ""}], "input[0].role", "user, assistant, system, developer"),
        ([{"role": "user"}], "input[0].content", "missing"),
        ([{"role": "user", "content": [{"type": "hologram"}]}], "input[0].content[0].type", "'hologram'"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text", "missing"),
        ([{"type": "function_call", "call_id": "c"}], "input[0].name", "missing"),
        ([{"type": "function_call", "name": "f"}], "input[0].call_id", "missing"),
        ([{"type": "function_call_output", "call_id": "c"}], "input[0].output", "missing"),
        ([{"type": "item_reference"}], "input[0].id", "missing"),
        ([{"type": "reasoning", "content": [{"type": "text"}]}], "input[0].content[0].text", "missing"),
        ([{"type": "reasoning", "summary": [{"type": "x"}]}], "input[0].summary[0].type", "'x'"),
    ],
)
def test_items_that_are_refused(input: Any, param: str, said: str) -> None:
    found = error(input)
    assert (found.status, found.param) == (400, param)
    assert said in found.message


# -- tools


@pytest.mark.parametrize("kind", ["function", "custom", "namespace"])
def test_an_error_shows_how_a_tool_is_written(kind: str) -> None:
    """Clients of chat completions nest the name."""
    found = error(tools=[{"type": kind, kind: {"name": "f"}}])
    assert found.message == (
        f'tools[0].name is missing: here a tool is written {{"type": "{kind}", "name": …}}.'
    )


def test_tools_as_the_model_sees_them() -> None:
    plan = plan_of(
        tools=[
            {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}},
            {"type": "custom", "name": "patch", "description": "Patches."},
            {
                "type": "namespace",
                "name": "sh",
                "tools": [{"type": "function", "name": "run", "strict": False}],
            },
            {"type": "web_search", "external_web_access": True},
        ]
    )
    look, patch, run = tools_of(plan)
    assert look == {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    assert list(patch["parameters"]["properties"]) == ["input"]
    assert run["name"] == "sh__run"
    assert plan.warning is not None
    assert "web_search" in plan.warning
    assert [tool["name"] for tool in json.loads(first_object(plan))["tools"]] == ["look", "patch", "sh"]


def first_object(plan: RequestPlan) -> bytes:
    """The response object of the first event."""
    event = DIALECT.reply_format(plan, "r").first(0, None, None)
    return json.dumps(json.loads(event.split(b"\n")[1].removeprefix(b"data: "))["response"]).encode()


TWO_TOOLS = [{"type": "function", "name": "a"}, {"type": "custom", "name": "b"}]


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ("none", []),
        ("auto", ["a", "b"]),
        ("required", ["a", "b"]),
        ({"type": "custom", "name": "b"}, ["a", "b"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "a"}]}, ["a"]),
    ],
)
def test_tool_choice(choice: Any, shown: list[str]) -> None:
    plan = plan_of(tools=TWO_TOOLS, tool_choice=choice)
    assert [tool["name"] for tool in tools_of(plan)] == shown
    assert (plan.constraint is not None) == (choice == "required" or "name" in choice)


def test_errors_of_schemas_name_the_tool() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}
    inner = {"type": "function", "name": "f", "parameters": parameters, "strict": True}
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [inner]}]
    constraint = plan_of(tools=tools, tool_choice="required").constraint
    assert constraint is not None
    assert [part.field for part in constraint.parts] == ["tools[1].tools[0].parameters"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "magic"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "xml"}}]}, "tools[0].format.type"),
        (
            {"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "gbnf"}}]},
            "tools[0].format.syntax",
        ),
        (
            {"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": ["regex"]}}]},
            "tools[0].format.syntax",
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": TWO_TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": TWO_TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TWO_TOOLS, "tool_choice": {"type": "function", "name": "c"}}, "tool_choice"),
        ({"tools": TWO_TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
    ],
)
def test_tools_that_are_refused(fields: dict[str, Any], param: str) -> None:
    assert error(**fields).param == param


# -- other fields


def test_what_the_engine_gets() -> None:
    plan = plan_of(max_output_tokens=9, temperature=0.5, top_p=0.9, stream=True, prompt_cache_key="s")
    assert (plan.max_tokens, plan.base.max_tokens, plan.base.temperature, plan.base.top_p) == (9, 9, 0.5, 0.9)
    assert (plan.stream, plan.include_usage, plan.session) == (True, True, "s")
    assert plan_of(include=["message.output_text.logprobs"]).logprobs == 0
    assert plan_of(top_logprobs=3).logprobs == 3


def test_formats_of_text() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    plan = plan_of(text={"format": {"type": "json_schema", "name": "n", "schema": schema}})
    assert plan.constraint is not None
    assert plan.constraint.field == "text.format.schema"
    assert plan_of(text={"format": {"type": "json_object"}}).constraint is not None
    assert plan_of(text={"format": {"type": "text"}, "verbosity": "low"}).constraint is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"truncation": "middle"}, "truncation"),
        ({"include": ["everything"]}, "include[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"background": True}, "background"),
        ({"model": "other"}, "model"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any], param: str) -> None:
    assert error(**fields).param == param


def test_unknown_fields_are_tolerated_unless_strict() -> None:
    assert plan_of(client_metadata={"a": "b"}, invented=1).prompts
    strict = make_dialect(strict_requests=True)
    assert strict.plan(body(client_metadata={"a": "b"})).prompts
    assert error_of(strict.plan, body([{"role": "user", "content": "", "x": 1}])).param == "input[0].x"


def test_tools_that_agents_offer_have_no_unknown_fields() -> None:
    web = {
        "type": "web_search",
        "external_web_access": True,
        "filters": {"allowed_domains": []},
        "search_content_types": ["text"],
        "search_context_size": "low",
        "user_location": {"type": "approximate"},
    }
    look = {"type": "function", "name": "look", "defer_loading": True, "allowed_callers": ["direct"]}
    plan = make_dialect(strict_requests=True).plan(body(tools=[web, look]))
    assert [tool["name"] for tool in tools_of(plan)] == ["look"]


def test_a_prompt_beyond_the_context_has_the_code_by_which_clients_know_it() -> None:
    """Codex then compacts the conversation."""
    too_long = ApiError(400, "Too long.", param="input_tokens")
    found = json.loads(make_dialect().error_body(too_long, "r"))["error"]
    assert (found["code"], found["param"]) == ("context_length_exceeded", "input")
    other = ApiError(400, "No.", param="tools")
    assert json.loads(make_dialect().error_body(other, "r"))["error"]["code"] == 400


def test_what_a_template_refuses_is_in_the_input() -> None:
    template = ChatTemplate({"default": "{{ raise_exception('never') }}"}, {})
    strict = Responses(ServeConfig(), tiny_input_processor(template=template))
    found = error_of(strict.plan, body())
    assert (found.param, found.message) == ("input", "never")


def test_the_oldest_items_are_dropped() -> None:
    rounds = [
        {"role": role, "content": f"{role} {number} " + "def " * 5}
        for number in range(40)
        for role in ("user", "assistant")
    ]
    items = [{"role": "system", "content": "Rules."}, *rounds, {"role": "user", "content": "Last."}]
    dialect = make_dialect(max_model_len=300)
    [prompt] = dialect.plan(body(items, truncation="auto", max_output_tokens=20)).prompts
    assert isinstance(prompt, str)
    assert "<system>Rules." in prompt
    assert "<user>Last." in prompt
    assert "assistant 39" in prompt
    tokens = len(tiny_tokenizer().encode(prompt, False))
    assert 150 < tokens <= 280
    [whole] = dialect.plan(body(items)).prompts
    assert "user 0 " in str(whole)


# -- what is stored

ITEM = {
    "type": "message",
    "id": "msg_1",
    "role": "user",
    "content": [{"type": "input_text", "text": "First."}],
}
ANSWER = {
    "type": "message",
    "id": "msg_2",
    "status": "completed",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Answer.", "annotations": [], "logprobs": []}],
}
STORED = StoredResponse(
    id="resp_1",
    tenant="t",
    created_at=1.0,
    status="completed",
    body=json.dumps({"id": "resp_1", "output": [ANSWER], "model": "m"}).encode(),
    input=json.dumps([ITEM]).encode(),
    previous_id=None,
    model="m",
)
STORE = FakeStore([STORED], {"msg_1": json.dumps(ITEM).encode()})
OWNER = RequestInfo(tenant="t")


def looked_up(dialect: Responses, data: bytes, info: RequestInfo = OWNER) -> RequestPlan:
    looking = dialect.look_up(data, info)
    assert looking is not None

    return dialect.plan(data, info, asyncio.run(awaited(looking)))


async def awaited(looking: Awaitable[Found]) -> Found:
    return await looking


def test_a_response_is_continued() -> None:
    dialect = make_dialect(STORE)
    plan = looked_up(dialect, body("Second.", previous_response_id="resp_1", instructions="New."))
    assert str(plan.prompts[0]).splitlines()[1:4] == ["<system>New.", "<user>First.", "<assistant>Answer."]
    assert plan.dialect_fields.previous_id == "resp_1"
    assert [item["id"] for item in json.loads(plan.dialect_fields.input)] == [
        f"msg_0123456789ab{24 * '0'}i0000"
    ]


def test_an_item_is_referred_to() -> None:
    data = body([{"type": "item_reference", "id": "msg_1"}, {"role": "user", "content": "Again."}])
    assert "<user>First.\n<user>Again." in str(looked_up(make_dialect(STORE), data).prompts[0])
    unknown = body([{"type": "item_reference", "id": "msg_9"}])
    with pytest.raises(ApiError, match="msg_9") as raised:
        looked_up(make_dialect(STORE), unknown)
    assert (raised.value.status, raised.value.param) == (404, "input")


def test_items_that_are_referred_to_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time again: a short body may refer to one large item very often."""
    item = json.dumps(ITEM)
    monkeypatch.setattr("penstock.dialects.responses.prompts.MAX_REFERRED_BYTES", 10 * len(item))

    def find(count: int) -> Found:
        looking = make_dialect(STORE).look_up(
            body([{"type": "item_reference", "id": "msg_1"}] * count), OWNER
        )
        assert looking is not None
        return asyncio.run(awaited(looking))

    assert find(10).size == 10 * len(item)
    with pytest.raises(ApiError, match="refers to items of more than") as raised:
        find(11)
    assert (raised.value.status, raised.value.param) == (400, "input")


def test_nothing_is_looked_up_without_need() -> None:
    dialect = make_dialect(STORE)
    for data in (
        body(),
        body(previous_response_id=None),
        body("previous_response_id"),
        b"{previous_response_id",
    ):
        assert dialect.look_up(data, OWNER) is None


def test_without_a_store_nothing_can_be_continued() -> None:
    with pytest.raises(ApiError, match="keeps no responses") as raised:
        DIALECT.look_up(body(previous_response_id="resp_1"), OWNER)
    assert raised.value.param == "previous_response_id"


def test_input_tokens_are_those_of_the_prompt() -> None:
    dialect = make_dialect(STORE)
    counter = ResponsesTokenCounter(dialect._processor, cast("ResponseStore", STORE))
    data = body("Second.", previous_response_id="resp_1", tools=TWO_TOOLS)
    looking = counter.look_up(data, OWNER)
    assert looking is not None
    found = asyncio.run(awaited(looking))
    assert [counter.prompt(data, OWNER, found).prompt] == dialect.plan(data, OWNER, found).prompts
    assert json.loads(counter.reply(5)) == {"object": "response.input_tokens", "input_tokens": 5}


def test_what_is_stored() -> None:
    dialect = make_dialect(STORE)
    assert dialect.plan(body(), OWNER).dialect_fields.stored
    assert not dialect.plan(body(store=False), OWNER).dialect_fields.stored
    entry = dialect.reply_format(dialect.plan(body(background=True), OWNER), "r").background_entry()
    assert entry is not None
    assert entry.status == "queued"
    assert dialect.reply_format(dialect.plan(body(), OWNER), "r").background_entry() is None
    assert error_of(dialect.plan, body(background=True, store=False)).param == "background"
