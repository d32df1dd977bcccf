"""What tests of the request side share: a small model's facts, tokenizer and template."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from penstock.api.byte_budget import ByteBudget
from penstock.api.routes.tokenize import TokenizeRoutes
from penstock.config.serve import ServeConfig
from penstock.dialects.chat.dialect import ChatCompletions
from penstock.dialects.completions.dialect import Completions
from penstock.dispatch.adapter_registry import AdapterRegistry
from penstock.generation.grammars.checker import GrammarChecker
from penstock.generation.input_processor import InputProcessor
from penstock.generation.model_info import ModelInfo, SamplingDefaults
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.prompt.prompt_encoder import PromptEncoder
from penstock.generation.prompt.tokenizer import Tokenizer
from penstock.http.errors import ApiError
from penstock.wire.adapter_list import ADAPTERS, AdapterList
from penstock.wire.messages import Adapter, DesiredState

DATA = Path(__file__).parent.parent / "data"
TINY_LLAMA = DATA / "tiny_llama"


class Planners:
    """Every API's way from a body to a plan."""

    def __init__(self, config: ServeConfig, processor: InputProcessor) -> None:
        tokenize = TokenizeRoutes(
            processor, PromptEncoder(tiny_tokenizer(), None), config, ByteBudget(1 << 20)
        )
        self.completion = Completions(config, processor).plan
        self.chat = ChatCompletions(config, processor).plan
        self.tokenize = tokenize.tokenize_plan
        self.detokenize = tokenize.detokenize_plan
        self.unknown_fields = processor.unknown_fields


@cache
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY_LLAMA)


@cache
def tiny_template() -> ChatTemplate:
    template = ChatTemplate.load(TINY_LLAMA)
    assert template is not None
    return template


def tiny_input_processor(
    config: ServeConfig | None = None,
    template: ChatTemplate | None = None,
    adapters: Sequence[Adapter] = (),
    **facts: Any,
) -> InputProcessor:
    """For the model of the recorded replies: 2,048 tokens of context, 16,384 entries. ``facts``: of the
    model's :class:`ModelInfo`, in place of these."""
    usual: dict[str, Any] = {
        "names": ("tiny-llama",),
        "max_model_len": 2048,
        "vocab_size": 16384,
        "eos_token_ids": (1,),
    }
    info = ModelInfo(**(usual | facts))
    return InputProcessor(
        config or ServeConfig(), info, tiny_tokenizer(), template or tiny_template(), registry_of(adapters)
    )


def registry_of(adapters: Sequence[Adapter]) -> AdapterRegistry:
    """The registry of a desired list."""
    registry = AdapterRegistry()
    listed = msgspec.to_builtins(AdapterList(list(adapters)))
    registry.desire(DesiredState(ADAPTERS, 1, listed, settled=True))
    registry.assume_observed()
    return registry


def planners(
    config: ServeConfig | None = None,
    *,
    template: ChatTemplate | None = None,
    defaults: SamplingDefaults | None = None,
    adapters: tuple[Adapter, ...] = (),
    transfers_kv: bool = False,
) -> Planners:
    """For the model of :func:`tiny_input_processor`."""
    config = config or ServeConfig()
    facts = {"transfers_kv": transfers_kv, "defaults": defaults or SamplingDefaults()}
    return Planners(config, tiny_input_processor(config, template, adapters, **facts))


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "def main():\n"} | fields).encode()


def chat_body(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Say hi"}]} | fields).encode()


def error_or_none(plan: Callable[..., object], *arguments: object) -> ApiError | None:
    """The error that ``plan(*arguments)`` raises, None when it raises none. Other exceptions pass."""
    try:
        plan(*arguments)
    except ApiError as error:
        return error
    return None


def refusal_of(plan_of: Callable[[bytes], Any], made: bytes) -> ApiError:
    """The error of a request that is refused when it is planned, or when its grammar is checked."""
    checker = GrammarChecker()
    try:
        asyncio.run(checker.check_grammar(plan_of(made).constraint))
    except ApiError as error:
        return error
    finally:
        checker.close()
    raise AssertionError("the request is not refused")


def error_of(plan: Callable[..., object], *arguments: object) -> ApiError:
    """The error that ``plan(*arguments)`` raises."""
    error = error_or_none(plan, *arguments)
    assert error is not None, "no error was raised"
    return error
