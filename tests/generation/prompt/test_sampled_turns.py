"""The next turn begins with the ids that were sampled."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from penstock.generation.plan import RequestPlan
from penstock.generation.prompt.chat_template import ChatTemplate
from tests.generation.planning import error_of, planners, tiny_tokenizer

_HEAD = "{% for message in messages %}<|im_start|>{{ message.role }}\n"
_NEXT = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
_CALLS = (
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
)
CHATML = _HEAD + _CALLS + "<|im_end|>\n" + _NEXT + "{% endif %}"
THINKING = (
    _HEAD
    + "{% if message.role == 'assistant' and not loop.last %}{% if loop.revindex0 == 1 %}"
    + "<think>\n{{ message.reasoning_content }}\n</think>\n{% endif %}{% endif %}"
    + _CALLS
    + "<|im_end|>\n"
    + _NEXT
    + "<think>\n{% endif %}"
)
ROLE_MARKS = (
    "{% for message in messages %}{{ '<s>' if message.role == 'user' else '<|im_start|>' }}"
    "{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
END, EOS, USER = 4, 1, 0
"""<|im_end|>, </s>, and <s>, which begins the user's turn in ROLE_MARKS."""
BEFORE = [3, 300, 301]
SAMPLED = [700, 12, 701]
QUESTION = {"role": "user", "content": "How are you?"}
FOLLOWS = {"role": "user", "content": "And now?"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def plan_of(template: str, answer: dict[str, Any], *after: dict[str, Any], **fields: Any) -> RequestPlan:
    messages = [QUESTION, {"role": "assistant", **answer}, *after]
    chat = planners(template=ChatTemplate({"default": template}, {})).chat
    return chat(json.dumps({"messages": messages} | fields).encode())


def answer(*end: int, **fields: Any) -> dict[str, Any]:
    return {"content": "Well.", "token_ids": [*SAMPLED, *end], "prompt_token_ids": BEFORE} | fields


def ids_of(plan: RequestPlan) -> list[int]:
    [text] = plan.prompts
    assert isinstance(text, str)
    prefix = np.frombuffer(plan.prefix, "<i4").tolist()
    return [*prefix, *tiny_tokenizer().encode(text, plan.add_special_tokens)]


@pytest.mark.parametrize("template", [CHATML, THINKING])
@pytest.mark.parametrize("end", [(END,), ()])
def test_the_prompt_is_what_was_sampled_and_what_follows(template: str, end: tuple[int, ...]) -> None:
    opened = "<think>\n" if template is THINKING else ""
    rest = f"<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n{opened}"
    made = ids_of(plan_of(template, answer(*end, reasoning_content="Hm."), FOLLOWS, add_special_tokens=True))
    assert made == [*BEFORE, *SAMPLED, *tiny_tokenizer().encode(rest, False)]


def test_a_token_that_opens_the_next_turn_may_end_the_output() -> None:
    made = ids_of(plan_of(ROLE_MARKS, answer(USER), FOLLOWS))
    assert made == [*BEFORE, *SAMPLED, *tiny_tokenizer().encode("<s>And now?<|im_start|>", False)]


def test_another_end_than_the_templates_stays() -> None:
    made = ids_of(plan_of(CHATML, answer(EOS), FOLLOWS))
    assert made[:7] == [*BEFORE, *SAMPLED, EOS]
    assert made[7] == END


def test_results_follow_their_calls() -> None:
    calls = [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "f", "arguments": '{"x": 2}'}},
    ]
    results = [{"role": "tool", "tool_call_id": each["id"], "content": f"is {each['id']}"} for each in calls]
    made = plan_of(CHATML, answer(END, content=None, tool_calls=calls), *results, tools=[TOOL])
    rest = "<|im_end|>\n" + "".join(f"<|im_start|>tool\nis {name}<|im_end|>\n" for name in "ab")
    assert made.prompts == [f"{rest}<|im_start|>assistant\n"]
    assert np.frombuffer(made.prefix, "<i4").tolist() == [*BEFORE, *SAMPLED]


def test_the_latest_answer_with_ids_counts() -> None:
    after = [
        FOLLOWS,
        {"role": "assistant"} | answer(END, token_ids=[5, 6, END], prompt_token_ids=[1, 2]),
        FOLLOWS,
    ]
    assert np.frombuffer(plan_of(CHATML, answer(END), *after).prefix, "<i4").tolist() == [1, 2, 5, 6]


def test_turns_grow_by_what_is_new_alone() -> None:
    """The prompt of every turn begins with the prompt and the output of the one before."""
    chat = planners(template=ChatTemplate({"default": CHATML}, {})).chat
    messages: list[dict[str, Any]] = [QUESTION]
    known: list[int] = []
    for turn in range(4):
        plan = chat(json.dumps({"messages": messages}).encode())
        prompt = ids_of(plan)
        assert prompt[: len(known)] == known
        sampled = [900 + turn, 12, 13, END]  # two tokens that are one in the tokenizer's own spelling
        known = [*prompt, *sampled]
        reply = {"role": "assistant", "content": "?", "token_ids": sampled, "prompt_token_ids": prompt}
        messages += [reply, FOLLOWS]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "messages[1].token_ids"),
        ({"token_ids": [16384]}, "messages[1].token_ids"),
        ({"token_ids": [-1]}, "body.messages.1.token_ids.0"),
        ({"prompt_token_ids": None}, "messages[1].prompt_token_ids"),
        ({"role": "user"}, "messages[1].token_ids"),
    ],
)
def test_ids_that_cannot_be_are_refused(fields: dict[str, Any], param: str) -> None:
    messages = [QUESTION, {"role": "assistant"} | answer(END) | fields, FOLLOWS]
    made = json.dumps({"messages": messages}).encode()
    assert error_of(planners().chat, made).param == param


def test_an_answer_that_the_template_does_not_show_is_refused() -> None:
    hides = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
    chat = planners(template=ChatTemplate({"default": hides}, {})).chat
    made = json.dumps({"messages": [QUESTION, {"role": "assistant"} | answer(END), FOLLOWS]}).encode()
    assert "does not show" in error_of(chat, made).message


def test_an_answer_with_ids_is_not_continued() -> None:
    messages = [QUESTION, {"role": "assistant"} | answer()]
    made = json.dumps({"messages": messages, "continue_final_message": True}).encode()
    assert error_of(planners().chat, made).param == "messages[1].token_ids"


def test_tokenize_counts_the_same_ids() -> None:
    messages = [QUESTION, {"role": "assistant"} | answer(END), FOLLOWS]
    made = json.dumps({"messages": messages}).encode()
    plan = planners(template=ChatTemplate({"default": CHATML}, {})).tokenize(made)
    assert np.frombuffer(plan.prefix, "<i4").tolist() == [*BEFORE, *SAMPLED]
