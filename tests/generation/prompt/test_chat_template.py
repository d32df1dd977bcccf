"""Templates as models ship them: where they are found, what they see, how they fail."""

from __future__ import annotations

import gc
import json
import os
import weakref
from pathlib import Path
from typing import Any

import jinja2.sandbox
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.generation.prompt.chat_template import DEFAULT, MAX_REMEMBERED, ChatTemplate
from penstock.http.errors import ApiError
from tests.generation.planning import error_of, tiny_template

USER = {"role": "user", "content": "hi"}


def template(source: str, **tokens: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, tokens)


def rendered(source: str, *messages: dict[str, Any], **how: Any) -> str:
    return template(source).render([dict(message) for message in messages or (USER,)], **how)


# -- where templates are found


def config(directory: Path, **fields: Any) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))


def test_a_directory_without_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    config(tmp_path, bos_token="<s>")
    assert ChatTemplate.load(tmp_path) is None


def test_the_configurations_template(tmp_path: Path) -> None:
    config(tmp_path, chat_template="{{ bos_token }}A", bos_token={"content": "<s>"}, add_bos_token=True)
    assert load(tmp_path).render([USER]) == "<s>A"


def test_a_file_wins_over_the_configuration(tmp_path: Path) -> None:
    config(tmp_path, chat_template="A", eos_token="</s>")
    (tmp_path / "chat_template.jinja").write_text("B{{ eos_token }}")
    assert load(tmp_path).render([USER]) == "B</s>"


def test_a_processors_template_is_the_last_resort(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "C"}))
    assert load(tmp_path).render([USER]) == "C"


def test_special_tokens_of_the_map_are_known(tmp_path: Path) -> None:
    config(tmp_path, chat_template="{{ bos_token }}{{ eos_token }}{{ nope_token }}", eos_token="E2")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "B", "eos_token": "E1"}))
    assert load(tmp_path).render([USER]) == "BE2"


def test_the_operators_file_wins(tmp_path: Path) -> None:
    config(tmp_path, chat_template="A", bos_token="<s>")
    (tmp_path / "mine").write_text("D{{ bos_token }}")
    mine = ChatTemplate.load(tmp_path, tmp_path / "mine")
    assert mine is not None
    assert mine.render([USER]) == "D<s>"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    config(tmp_path, chat_template=named)
    loaded = load(tmp_path)
    assert loaded.render([USER]) == "plain"
    assert loaded.render([USER], tools=[{"type": "function"}]) == "tools"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"chat_template": "{% for %}"}, "tokenizer_config.json: line 1"),
        ({"chat_template": 5}, "tokenizer_config.json: chat_template must be"),
        ({"chat_template": [{"name": "x"}]}, "missing required field `template`"),
    ],
)
def test_broken_templates_name_their_file(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    config(tmp_path, **fields)
    with pytest.raises(ValueError, match=problem):
        ChatTemplate.load(tmp_path)


def test_a_missing_file_of_the_operators_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        ChatTemplate.load(tmp_path, tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"chat template .*/pipe: it is a pipe, not a file"):
        ChatTemplate.load(tmp_path, tmp_path / "pipe")


def load(directory: Path) -> ChatTemplate:
    loaded = ChatTemplate.load(directory)
    assert loaded is not None
    return loaded


# -- what templates see


def test_the_recorded_models_template() -> None:
    messages = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Say hi"}]
    assert tiny_template().render(messages) == (
        "<s><|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nSay hi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tiny_template().render(messages, add_generation_prompt=False).endswith("Say hi<|im_end|>\n")


def test_blocks_are_trimmed_as_transformers_does() -> None:
    source = (
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m.content }}]\n  {% endif %}\n{% endfor %}"
    )
    assert rendered(source) == "[hi]\n"


def test_tojson_keeps_characters_and_order() -> None:
    source = "{{ messages[0] | tojson }}{{ messages[0].content | tojson(indent=2) }}"
    message = {"role": "user", "content": '<é & "q">'}
    assert rendered(source, message) == '{"role": "user", "content": "<é & \\"q\\">"}"<é & \\"q\\">"'


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    SCALARS | TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=8
)


@given(st.dictionaries(TEXTS, SCALARS | TEXTS) | JSON)
@example({str(number): chr(number) for number in range(0x120)})
@example({"large": 1 << 80, "schema": {"type": "number", "maximum": 1e16}})
@example({"schema": {"text": "x" * MAX_REMEMBERED}})
def test_tojson_writes_what_json_does(value: Any) -> None:
    for _ in range(2):  # the second one may be remembered
        text = _TOJSON.render([USER], variables={"value": value})
        assert text == json.dumps(value, ensure_ascii=False)


_TOJSON = template("{{ value | tojson }}")


def test_tojson_refuses_what_is_not_json() -> None:
    with pytest.raises(ApiError, match="not JSON serializable"):
        rendered("{{ {'a': missing} | tojson }}")


def test_loop_controls_and_generation_blocks() -> None:
    source = (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert rendered(source, USER, USER) == "hi"


def test_strftime_now() -> None:
    year = rendered("{{ strftime_now('%Y') }}")
    assert year.isdigit()
    assert int(year) > 2000


def test_text_is_not_escaped() -> None:
    assert (
        rendered("{{ messages[0].content }}", {"role": "user", "content": "<a> & {{ x }}"}) == "<a> & {{ x }}"
    )


@pytest.mark.parametrize(
    "read",
    [
        *(
            "m.role",
            "m.content.upper()",
            "m.absent",
            "m.absent is defined",
            "m.items() | list",
            "m.get('role')",
        ),
        *("m.keys", "m.x.y", "m.x.absent", "m.x", "m.pop", "m.update({})", "m.__class__", "m.absent.deeper"),
    ],
)
def test_fields_of_dictionaries_are_read_as_jinjas_sandbox_reads_them(read: str) -> None:
    message = {"role": "user", "content": "hi", "keys": "own", "x": {"y": [1]}}
    source = "{%- for m in messages -%}{{ " + read + " }}{%- endfor -%}"
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment()
    problem = expected = ""
    try:
        expected = sandbox.from_string(source).render(messages=[message])
    except jinja2.TemplateError as error:
        problem = str(error)
    if problem:
        assert problem in error_of(rendered, source, message).message
    else:
        found = rendered(source, message)
        assert found == expected or " object at 0x" in expected


def test_variables_of_the_request() -> None:
    assert rendered("{{ enable_thinking }}", variables={"enable_thinking": False}) == "False"


# -- continuing the final message

TRIMS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>\n{% endfor %}"
KEEPS = TRIMS.replace(" | trim", "")


@pytest.mark.parametrize(
    ("source", "content", "end"),
    [
        (KEEPS, "b", "<assistant>b"),
        (KEEPS, " b \n", "<assistant> b \n"),
        (TRIMS, " b \n", "<assistant>b"),
        (KEEPS, "hi</user>", "<assistant>hi</user>"),
        (KEEPS, "", "<assistant>"),
    ],
)
def test_a_continued_message_ends_the_prompt(source: str, content: str, end: str) -> None:
    last = {"role": "assistant", "content": content}
    text = rendered(source, USER, last, add_generation_prompt=False, continue_final_message=True)
    assert text == f"<user>hi</user>\n{end}"


def test_a_continued_message_in_parts() -> None:
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}!{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    last = {"role": "assistant", "content": parts}
    assert rendered(source, last, continue_final_message=True) == "ab"


@pytest.mark.parametrize(
    ("source", "content"),
    [("{{ messages[0].role }}", "b"), ("{% for p in messages[0].content %}{% endfor %}", [])],
)
def test_a_message_that_cannot_be_continued_is_refused(source: str, content: Any) -> None:
    last = {"role": "assistant", "content": content}
    error = error_of(lambda: rendered(source, last, continue_final_message=True))
    assert (error.status, error.param) == (400, "continue_final_message")


# -- failures


def test_what_a_template_raises_reaches_the_client() -> None:
    error = error_of(rendered, "{{ raise_exception('Roles must alternate') }}")
    assert (error.status, error.message, error.param) == (400, "Roles must alternate", "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content }}",
        "{{ 'a' + messages[0].missing }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ undefined_function() }}",
        "{{ messages[0] | tojson(indent={}) }}",
        "{{ messages.insert(0, 1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ range(10 ** 9) | list }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_a_failing_template_is_the_requests_error(source: str) -> None:
    error = error_of(rendered, source)
    assert (error.status, error.param) == (400, "messages")
    assert error.message.startswith("The chat template failed on these messages: ")


def test_a_rendering_leaves_no_messages_to_the_garbage_collector() -> None:
    class Text(str):
        """A message's, whose end can be seen."""

    source = (
        "{% set all = messages %}{% macro show(m) %}{{ m.content + tail }}{% endmacro %}{{ show(all[0]) }}"
    )
    template = ChatTemplate({DEFAULT: source}, {})
    text = Text("a long history")
    ended = weakref.ref(text)
    gc.disable()
    try:
        prompt = template.render([{"role": "user", "content": text}], variables={"tail": "!"})
        del text
        assert prompt == "a long history!"
        assert ended() is None
    finally:
        gc.enable()


def test_what_a_template_reads_of_thinking() -> None:
    assert template("{{ messages[0].content }}").thinking_variables() == []
    both = "{% if enable_thinking is defined and not enable_thinking %}x{% endif %}{{ reasoning_effort }}"
    assert template(both).thinking_variables() == ["enable_thinking", "reasoning_effort"]
    preset = "{% if thinking is not defined %}{% set thinking = false %}{% endif %}{{ thinking }}"
    assert template(preset).thinking_variables() == ["thinking"]
