"""What engines are told of limits of reasoning, by model format, API and effort."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from penstock.config.serve import ServeConfig
from penstock.dialects.chat.dialect import ChatCompletions
from penstock.dialects.completions.dialect import Completions
from penstock.dialects.messages.dialect import Messages
from penstock.dialects.responses.dialect import Responses
from penstock.dialects.tokens.dialect import TokensInOut
from penstock.generation.input_processor import InputProcessor
from penstock.generation.model_info import ModelInfo
from penstock.generation.plan import RequestPlan
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.prompt.tokenizer import Tokenizer
from penstock.wire.messages import ThinkingLimit
from tests.generation.planning import TINY_LLAMA, error_of, registry_of

ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|start|>", "<|end|>", "<|message|>"]
ADDED += ["<|channel|>", "<|call|>", "<|return|>", "<|constrain|>"]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{{ end }} {{ reasoning_effort }}"
THINKS = TEMPLATE + "<think>\n"
USER = {"messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("thinker")
    shutil.copytree(TINY_LLAMA, directory, dirs_exist_ok=True)
    raw = RawTokenizer.from_file(str(directory / "tokenizer.json"))
    raw.add_tokens([AddedToken(text, special=False) for text in ADDED])
    raw.save(str(directory / "tokenizer.json"))
    return Tokenizer.load(directory)


def processor(
    tokenizer: Tokenizer, reasoning: str = "think", template: str = TEMPLATE, **options: Any
) -> InputProcessor:
    config = ServeConfig(reasoning_parser=reasoning, **options)  # type: ignore[arg-type]
    info = ModelInfo(names=("m",), max_model_len=2048, vocab_size=16400, eos_token_ids=(1,))
    return InputProcessor(config, info, tokenizer, ChatTemplate({"default": template}, {}), registry_of(()))


def chat(made: InputProcessor, **fields: Any) -> RequestPlan:
    return ChatCompletions(ServeConfig(), made).plan(json.dumps(USER | fields).encode())


def ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, False))


def test_the_marks_are_those_of_the_format(tokenizer: Tokenizer) -> None:
    opens, closes, calls = (ids(tokenizer, text) for text in ("<think>", "</think>", "<tool_call>"))
    limit = chat(processor(tokenizer), thinking_token_budget=7).base.thinking
    assert limit == ThinkingLimit(7, (opens,), (closes,), closes, closes, opened=False)
    made = processor(tokenizer, template=THINKS, tool_call_parser="hermes")
    limit = chat(made, thinking_token_budget=0, tools=[TOOL]).base.thinking
    assert limit == ThinkingLimit(0, (opens,), (closes, calls), closes, closes, opened=True)
    limit = chat(made, thinking_token_budget=0, tools=[TOOL], tool_choice="none").base.thinking
    assert limit is not None
    assert limit.ends == (closes,)


def test_harmony_goes_on_with_the_answer(tokenizer: Tokenizer) -> None:
    made = processor(tokenizer, "openai_gptoss")
    answer = ids(tokenizer, "<|end|><|start|>assistant<|channel|>final<|message|>")
    limit = chat(made, thinking_token_budget=7).base.thinking
    assert limit is not None
    assert limit.starts == (ids(tokenizer, "<|channel|>analysis<|message|>"),)
    assert (limit.forced, limit.again) == (answer, answer)
    limit = chat(made, thinking_token_budget=7, tools=[TOOL]).base.thinking
    assert limit is not None
    assert (limit.forced, limit.again) == (ids(tokenizer, "<|end|><|start|>assistant"), answer)


@pytest.mark.parametrize("reasoning", ["none", "granite", "mistral"])
def test_a_format_without_tokens_of_its_own_refuses_the_field(tokenizer: Tokenizer, reasoning: str) -> None:
    made = processor(tokenizer, reasoning)
    error = error_of(lambda: chat(made, thinking_token_budget=7))
    assert (error.status, error.param) == (400, "thinking_token_budget")
    assert "--reasoning-parser" in error.message
    assert chat(made, thinking_token_budget=-1).base.thinking is None
    thinking = {"type": "enabled", "budget_tokens": 5}
    plan = messages(made, thinking=thinking)
    assert plan.base.thinking is None
    assert "thinking.budget_tokens is not applied" in str(plan.warning)


def test_vllm_has_to_know_the_marks(tokenizer: Tokenizer) -> None:
    made = processor(tokenizer, engine="vllm")
    assert "--reasoning-config" in error_of(lambda: chat(made, thinking_token_budget=7)).message
    made = processor(tokenizer, engine="vllm", engine_args=["--reasoning-config", "{}"])
    assert chat(made, thinking_token_budget=7).base.thinking is not None


def test_negative_budgets_are_refused(tokenizer: Tokenizer) -> None:
    error = error_of(lambda: chat(processor(tokenizer), thinking_token_budget=-2))
    assert (error.status, error.param) == (400, "thinking_token_budget")
    assert "or -1 for unlimited" in error.message


def messages(made: InputProcessor, **fields: Any) -> RequestPlan:
    return Messages(ServeConfig(), made).plan(json.dumps(USER | {"max_tokens": 100} | fields).encode())


def test_every_api_has_a_budget(tokenizer: Tokenizer) -> None:
    made = processor(tokenizer, reasoning_effort_map='{"low": 11, "high": "max", "max": 13}')
    config = ServeConfig()

    def budget(plan: RequestPlan) -> int | None:
        return None if plan.base.thinking is None else plan.base.thinking.budget

    def low(plan: RequestPlan) -> bool:
        return str(plan.prompts[0]).endswith(" low")

    completions, tokens = Completions(config, made), TokensInOut(config, made)
    assert budget(completions.plan(b'{"prompt": "a", "thinking_token_budget": 5}')) == 5
    sampling = b'{"token_ids": [3], "sampling_params": {"thinking_token_budget": 5}}'
    assert budget(tokens.plan(sampling)) == 5
    assert budget(messages(made, thinking={"type": "enabled", "budget_tokens": 5})) == 5
    effort = {"output_config": {"effort": "low"}}
    plan = messages(made, thinking={"type": "adaptive"}, **effort)
    assert (budget(plan), low(plan)) == (11, True)
    assert budget(messages(made, thinking={"type": "enabled", "budget_tokens": 5}, **effort)) == 5
    assert budget(messages(made, thinking={"type": "disabled"}, **effort)) is None
    plan = chat(made, reasoning_effort="low")
    assert (budget(plan), low(plan)) == (11, True)
    assert budget(chat(made, reasoning_effort="low", thinking_token_budget=3)) == 3
    assert budget(chat(made, reasoning_effort="low", thinking_token_budget=-1)) is None
    plan = chat(made, reasoning_effort="high")
    assert (budget(plan), str(plan.prompts[0])[-4:]) == (None, " max")
    responses = Responses(config, made)
    plan = responses.plan(b'{"input": "a", "reasoning": {"effort": "low"}}')
    assert (budget(plan), low(plan)) == (11, True)
    assert budget(responses.plan(b'{"input": "a", "thinking_token_budget": 4}')) == 4


@pytest.mark.parametrize("text", ["x", "[]", '{"some": 1}', '{"low": -1}', '{"low": null}'])
def test_an_effort_map_is_checked(text: str) -> None:
    with pytest.raises(ValueError, match="--reasoning-effort-map"):
        ServeConfig(reasoning_effort_map=text)
