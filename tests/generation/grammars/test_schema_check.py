"""JSON schemas as programs write them: what is enforced, what is ignored, and which part an error names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import Base64Bytes, BaseModel, DirectoryPath, Json, SecretStr

from penstock.generation.grammars import schema_check
from penstock.generation.grammars.checker import GrammarChecker
from penstock.generation.grammars.schema_check import check_schema
from penstock.generation.request.structured_output import Constraint
from penstock.http.errors import ApiError
from tests.generation.planning import chat_body, planners

PLANNER = planners()
TEXT = {"type": "string"}
UNENFORCED: dict[str, Any] = {
    "contains": {"type": "string"},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "not": {"required": ["a", "b"]},
    "propertyNames": {"pattern": "^a", "maxLength": 5},
    "uniqueItems": True,
}
LOOK_AHEAD = {"type": "string", "format": "email", "pattern": r"^[^@]+@(?!x)[a-z.]+$"}


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker()
    yield made
    made.close()


def tool(name: str, parameters: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def schema_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def planned(**fields: Any) -> Constraint:
    plan = PLANNER.chat(chat_body(**fields))
    assert plan.constraint is not None
    return plan.constraint


def formatted(schema: dict[str, Any], **fields: Any) -> Constraint:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}
    return planned(response_format=wanted)


def accepted(checker: GrammarChecker, constraint: Constraint, text: str) -> bool:
    """Whether the checked grammar allows ``text`` as a whole."""
    grammar = asyncio.run(checker.check_grammar(constraint)).grammar
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    return matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()


def refused(checker: GrammarChecker, constraint: Constraint) -> tuple[str | None, str]:
    """The field that the error names, and its message."""
    with pytest.raises(ApiError) as error:
        asyncio.run(checker.check_grammar(constraint))
    assert error.value.status == 400
    return error.value.param, error.value.message


class Upload(BaseModel):
    folder: DirectoryPath
    key: SecretStr
    data: Base64Bytes
    raw: bytes
    options: Json[dict[str, int]]


def test_formats_that_are_not_known_are_annotations(checker: GrammarChecker) -> None:
    schema = Upload.model_json_schema()
    formats = {each["format"] for each in schema["properties"].values() if "format" in each}
    assert formats >= {"directory-path", "password", "base64", "binary"}
    value = json.dumps(dict.fromkeys(schema["properties"], "x"))
    assert accepted(checker, formatted(schema, strict=True), value)
    strict = tool("upload", schema, strict=True)
    assert accepted(checker, planned(tools=[strict], tool_choice={"function": {"name": "upload"}}), value)


def test_formats_that_are_known_are_enforced(checker: GrammarChecker) -> None:
    schema = formatted({"type": "string", "format": "date"})
    assert accepted(checker, schema, '"2024-02-29"')
    assert not accepted(checker, schema, '"soon"')


@pytest.mark.parametrize("keyword", UNENFORCED)
def test_a_keyword_that_cannot_be_enforced_is_named_with_its_property(
    keyword: str, checker: GrammarChecker
) -> None:
    schema = schema_of(name=TEXT, tags={"type": "array", "items": {keyword: UNENFORCED[keyword]}})
    field, message = refused(checker, formatted(schema))
    assert field == "response_format.json_schema.schema.properties.tags.items"
    problem = f"the keyword '{keyword}' cannot be enforced"
    assert message == f'{field} is not valid: {problem}; "strict": false drops it'
    assert accepted(checker, formatted(schema, strict=False), '{"name": "a", "tags": []}')


def test_an_error_names_the_function(checker: GrammarChecker) -> None:
    tools = [
        tool("list", schema_of(path=TEXT)),
        tool("read", schema_of(path=TEXT, parts={"type": "array", "uniqueItems": True}), strict=True),
    ]
    for choice in ("required", {"type": "function", "function": {"name": "read"}}):
        field, message = refused(checker, planned(tools=tools, tool_choice=choice))
        assert field == "tools[1].function.parameters.properties.parts"
        assert message.startswith(f"{field} (of the function 'read') is not valid: the keyword 'uniqueItems'")


def test_what_is_wrong_is_an_error_for_all_tools(checker: GrammarChecker) -> None:
    tools = [tool("a", schema_of(x={"anyOf": [TEXT, {"type": "any"}]})), tool("b", schema_of(y=TEXT))]
    field, message = refused(checker, planned(tools=tools, tool_choice="required"))
    assert field == "tools[0].function.parameters.properties.x.anyOf[1]"
    assert message.endswith("Invalid type: any")


def test_tools_that_are_not_strict_lose_what_cannot_be_enforced(checker: GrammarChecker) -> None:
    """The rest of the schema holds, and a strict tool beside it is strict."""
    loose = schema_of(to=LOOK_AHEAD, tags={"type": "array", "items": TEXT, "uniqueItems": True})
    mail = tool("mail", loose | {"not": {"required": ["x"]}})
    other = tool("other", schema_of(x=TEXT), strict=True)
    forced = planned(tools=[mail, other], tool_choice="required")
    call = '[{"name": "mail", "parameters": {"to": "a@b.c", "tags": ["x", "x"]}}]'
    assert accepted(checker, forced, call)
    assert not accepted(checker, forced, call.replace("a@b.c", "nobody"))
    assert accepted(checker, forced, '[{"name": "other", "parameters": {"x": "y"}}]')
    strict = planned(
        tools=[mail, tool("other", schema_of(x=LOOK_AHEAD), strict=True)], tool_choice="required"
    )
    assert refused(checker, strict)[0] == "tools[1].function.parameters.properties.x"


def test_a_loose_schema_that_passed_is_no_strict_one(checker: GrammarChecker) -> None:
    schema = schema_of(x={"not": {}})
    loose, strict = formatted(schema, strict=False), formatted(schema)
    assert loose.grammar == strict.grammar
    asyncio.run(checker.check_grammar(loose))
    assert refused(checker, strict)[0] == "response_format.json_schema.schema.properties.x"


def test_a_fault_behind_a_reference_is_named_where_it_is(checker: GrammarChecker) -> None:
    tags = {"type": "array", "items": {"$ref": "#/$defs/T/properties/inner"}}
    inner = {"type": "object", "properties": {"a~b": {"$ref": "#/$defs/T"}, "bad": {"type": "strin"}}}
    schema = schema_of(name=TEXT, tags=tags) | {"$defs": {"T": schema_of(inner=inner)}}
    field, message = refused(checker, formatted(schema))
    assert field == "response_format.json_schema.schema.$defs.T.properties.inner.properties.bad"
    assert message.endswith("Invalid type: strin")
    missing = formatted(schema_of(a=TEXT, b={"$ref": "#/$defs/none"}))
    assert refused(checker, missing)[0] == "response_format.json_schema.schema.properties.b"


def test_words_of_json_schema_may_be_names_and_values(checker: GrammarChecker) -> None:
    schema = schema_of(
        format={"type": "string", "default": {"pattern": "a(?!a)"}},
        pattern={"const": {"pattern": "a(?!a)", "not": 1}},
        properties=LOOK_AHEAD,
    )
    value = '{"format": "x", "pattern": {"pattern": "a(?!a)", "not": 1}, "properties": "a@b.c"}'
    assert accepted(checker, formatted(schema, strict=False), value)


def test_parts_that_only_contradict_each_other_are_named_together(checker: GrammarChecker) -> None:
    both = {"allOf": [{"type": "string", "pattern": "^a$"}, {"type": "string", "pattern": "^b$"}]}
    field, _ = refused(checker, formatted(schema_of(a=TEXT, b=both)))
    assert field == "response_format.json_schema.schema.properties.b"


def test_a_place_is_quoted_in_few_characters(checker: GrammarChecker) -> None:
    field, message = refused(checker, formatted(schema_of(**{"long" * 1000: {"not": {}}})))
    assert field is not None
    assert field.startswith("response_format.json_schema.schema.properties.longlong")
    assert len(message) < 300


def test_a_fault_deep_inside_is_found(checker: GrammarChecker) -> None:
    schema: dict[str, Any] = {"type": "strin"}
    for _ in range(40):
        schema = schema_of(x=schema)
    field, message = refused(checker, formatted(schema))
    assert str(field).count(".properties.x") > 2
    assert message.endswith("Invalid type: strin")


def test_the_search_for_the_place_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_check, "SEARCH_S", -1.0)
    constraint = formatted(schema_of(a={"not": {}}))
    verdict = check_schema(constraint.grammar, ())
    assert (verdict.problem, verdict.path) == ("the keyword 'not' cannot be enforced", ())
