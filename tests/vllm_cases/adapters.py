"""A pytest plugin: vLLM's tests of parsers run with Penstock's in place of vLLM's.

Cases that use vLLM's internals are skipped. What Penstock reads otherwise is in the table ``DIFFERENCES``:
such a case must fail, and every other one pass.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from differences import DIFFERENCES
from stubs import (
    PACKAGES,
    DeltaMessage,
    Internal,
    Record,
    Request,
    Tokenizer,
    Tool,
    ToolCall,
    constants,
    detokenize_incrementally,
    internal,
)

from penstock.generation.parsers.delta import Delta
from penstock.generation.parsers.formats import REASONING_FORMATS
from penstock.generation.parsers.message import MessageFormat, MessageParser
from penstock.generation.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, output_format
from penstock.generation.parsers.value_types import Parameters

SOURCES = Path.cwd()
PARSERS = {
    kind: {
        name: options[1] for name, options in constants(SOURCES / f"vllm/{kind}/__init__.py")[table].items()
    }
    for kind, table in (
        ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
        ("reasoning", "_REASONING_PARSERS_TO_REGISTER"),
    )
}
"""The names of vLLM's classes, by the formats'."""


class _Adapter:
    format = ""

    def __init__(self, tokenizer: Any = None, tools: Any = None, **options: Any) -> None:
        self.model_tokenizer = tokenizer
        self.vocab = tokenizer.get_vocab() if tokenizer is not None else {}
        self._tools = tools
        self._options = options
        self._parser: MessageParser | None = None

    def __getattr__(self, name: str) -> Any:
        raise Internal(name)


class ToolParser(_Adapter):
    def adjust_request(self, request: Any) -> Any:
        request.skip_special_tokens = False
        return request

    def _new(self, request: Any) -> MessageParser:
        if self.format not in TOOL_PARSERS:
            raise Internal(self.format)
        tools = self._tools or getattr(request, "tools", None)
        listed = tools if isinstance(tools, list) else []
        functions = [getattr(each, "function", None) or each for each in listed]
        known = output_format(self.format, "none", "")
        parameters = Parameters({each.name: each.parameters for each in functions})
        reasoning = known.reasoning_parser("", calls=True)
        return MessageParser(MessageFormat(reasoning, known.call_parser(parameters)))

    def extract_tool_calls(self, model_output: str, request: Any = None) -> Record:
        delta = self._new(request).push(model_output, last=True)
        calls: list[Any] = []
        for each in delta.calls:
            if each.index == len(calls):
                calls.append(ToolCall(id=each.id, function=Record(name=each.name, arguments="")))
            calls[-1].function.arguments += each.arguments
        return Record(tools_called=bool(calls), tool_calls=calls, content=delta.content or None)

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *tokens: object, **more: Any
    ) -> Record | None:
        if self._parser is None or (not previous_text and current_text == delta_text):
            self._parser = self._new(more.get("request", tokens[-1] if tokens else None))
        return _message(self._parser.push(delta_text, last=False))

    def finish(self) -> Record | None:
        """The last message of a stream: vLLM's parsers are not told of its end."""
        return _message(self._parser.push("", last=True)) if self._parser else None


class ReasoningParser(_Adapter):
    def _new(self, text: str) -> MessageParser:
        """The prompt has opened the reasoning, unless ``text``, with which the output begins, does."""
        if self.format not in REASONING_PARSERS:
            raise Internal(self.format)
        known = output_format(CALLS.get(self.format, "none"), self.format, "")
        template = self._options.get("chat_template_kwargs") or {}
        off = False in (template.get("thinking"), template.get("enable_thinking"))
        asked = not OPENING.isdisjoint(each for each in template.values() if isinstance(each, str))
        prompt = ""
        if known.reasoning and (self.format in OPENED or asked) and not off:
            prompt = "" if text.lstrip().startswith(known.reasoning.opens) else known.reasoning.opens[0]
        tags = known.reasoning.tags if known.reasoning else ()
        return MessageParser(MessageFormat(known.reasoning_parser(prompt, calls=True), tags=tags))

    def extract_reasoning(self, model_output: str, request: Any = None) -> tuple[str | None, str | None]:
        delta = self._new(model_output).push(model_output, last=True)
        return delta.reasoning or None, delta.content or None

    extract_reasoning_content = extract_reasoning

    def extract_reasoning_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *tokens: object, **more: object
    ) -> Record | None:
        if not previous_text:
            self._parser = None
        if self._parser is None:
            known = REASONING_FORMATS.get(self.format)
            begun = current_text.lstrip()
            if known and any(each.startswith(begun) and each != begun for each in known.opens):
                return None
            self._parser = self._new(current_text)
            delta_text = current_text
        return _message(self._parser.push(delta_text, last=False))


OPENED = REASONING_FORMATS.keys() - {
    *("cohere_command3", "cohere_command4", "gemma4", "granite", "hunyuan_a13b", "hy_v3", "minimax_m3"),
    "mistral",
}
"""Formats of models whose template opens the reasoning."""
CALLS = {"qwen3": "qwen3_coder"}
"""The formats of calls that end reasoning, in vLLM's cases of it."""
OPENING = frozenset(("enabled", "high", "low"))
"""Values of a template's variables that make it open the reasoning."""


def _message(delta: Delta) -> Record | None:
    if not delta:
        return None
    calls = [
        Record(
            index=each.index,
            id=each.id,
            type=None if each.name is None else "function",
            function=Record(name=each.name, arguments=each.arguments),
        )
        for each in delta.calls
    ]
    return DeltaMessage(content=delta.content or None, reasoning=delta.reasoning or None, tool_calls=calls)


def _adapter(kind: str, base: type[_Adapter]) -> dict[str, type]:
    return {cls: type(cls, (base,), {"format": name}) for name, cls in PARSERS[kind].items()}


CLASSES: dict[str, Any] = {
    **_adapter("tool_parsers", ToolParser),
    **_adapter("reasoning", ReasoningParser),
    "ToolParser": ToolParser,
    "ReasoningParser": ReasoningParser,
    "ChatCompletionRequest": type("ChatCompletionRequest", (Request,), {}),
    "ResponsesRequest": type("ResponsesRequest", (Request,), {}),
    **dict.fromkeys(("ChatCompletionToolsParam", "FunctionTool"), Tool),
    "ToolCall": ToolCall,
    "DeltaMessage": DeltaMessage,
    **dict.fromkeys(("FunctionCall", "FunctionDefinition", "DeltaFunctionCall", "DeltaToolCall"), Record),
    "ExtractedToolCallInformation": Record,
    "AutoTokenizer": Tokenizer,
    "get_tokenizer": Tokenizer.from_pretrained,
    "detokenize_incrementally": detokenize_incrementally,
}
CLASSES["ToolParserManager"] = type(
    "ToolParserManager",
    (),
    {"get_tool_parser": staticmethod(lambda name: CLASSES[PARSERS["tool_parsers"][name]])},
)
CLASSES["ReasoningParserManager"] = type(
    "ReasoningParserManager",
    (),
    {"get_reasoning_parser": staticmethod(lambda name: CLASSES[PARSERS["reasoning"][name]])},
)


class _Module(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = constants(SOURCES / f"{self.__name__.replace('.', '/')}.py")
        value = found[name] if name in found else CLASSES.get(name) or internal(name)
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        known = fullname.partition(".")[0] in PACKAGES
        return ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
utils: Any = importlib.import_module("tests.tool_parsers.utils")
_run = utils.run_tool_extraction_streaming


def _run_to_the_end(tool_parser: Any, *arguments: Any, **options: Any) -> Any:
    reconstructor = _run(tool_parser, *arguments, **options)
    message = tool_parser.finish()
    if message is not None:
        reconstructor.append_delta(message)
    return reconstructor


utils.run_tool_extraction_streaming = _run_to_the_end


def _reason(nodeid: str) -> str | None:
    case = nodeid.split("/", 2)[2]
    for reason, patterns in DIFFERENCES.items():
        if any(fnmatchcase(case, pattern.replace("[", "[[]")) for pattern in patterns):
            return reason
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    failed = report.failed
    if failed and isinstance(report.longrepr, str) and report.longrepr.startswith("[XPASS(strict)]"):
        report.outcome, failed = "passed", False  # vLLM fails here, and tells so
    if call.excinfo and (
        call.excinfo.errisinstance(Internal) or "does not have the attribute" in str(call.excinfo.value)
    ):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, "vLLM's internals")
    elif call.when == "call" and report.outcome != "skipped":
        reason = _reason(item.nodeid)
        if reason and failed:
            report.outcome, report.wasxfail = "skipped", reason
        elif reason:
            report.outcome, report.longrepr = "failed", f"is listed as a difference ({reason}), but passes"
    return report
