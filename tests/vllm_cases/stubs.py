"""What vLLM's tests import: names for which Penstock has nothing stand for vLLM's internals."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, ClassVar, Self

from penstock.generation.parsers.message import new_call_id

PACKAGES = ("vllm", "transformers", "xgrammar", "mistral_common", "openai", "partial_json_parser")


class Internal(AttributeError):
    """A case asks for what only vLLM's parsers have: it is not one of outputs and what they say."""


class Record:
    """A message of vLLM's; fields that are not given are None."""

    optional = frozenset(
        ("arguments", "content", "description", "function", "id", "index", "name", "parameters", "reasoning")
    )
    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update({**self.defaults, **fields})

    def __getattr__(self, name: str) -> Any:
        if name in self.optional:
            return None
        raise Internal(name)

    def __class_getitem__(cls, item: object) -> type[Self]:
        return cls

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def model_validate(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields)


class ToolCall(Record):
    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"id": new_call_id(), "type": "function", **fields})


class DeltaMessage(Record):
    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"tool_calls": [], **fields})


class Tool(Record):
    """A tool in the form of chat completions, or of Responses."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        if isinstance(self.function, dict):
            self.function = Record(**self.function)


class Request(Record):
    defaults: ClassVar[dict[str, Any]] = {"skip_special_tokens": True, "tool_choice": "auto"}

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        tools = fields.get("tools") or []
        self.tools = [Tool(**each) if isinstance(each, dict) else each for each in tools]


class _Vocabulary(dict[str, int]):
    """Has a number for every text."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> int:
        self[key] = len(self) + 1
        return self[key]

    def get(self, key: str, default: object = None) -> int:
        return self[key]


class Tokenizer:
    """Tokens are markers, words and characters."""

    _PIECE = re.compile(r"<[^<>\s]{1,40}>|\[[A-Z_]+\]|\s?\w{1,4}|.", re.DOTALL)

    def __init__(self) -> None:
        self.vocab = _Vocabulary()

    def __getattr__(self, name: str) -> Any:
        raise Internal(name)

    @classmethod
    def from_pretrained(cls, *names: str, **options: object) -> Self:
        return cls()

    def get_vocab(self) -> dict[str, int]:
        return self.vocab

    def tokenize(self, text: str, **options: object) -> list[str]:
        return self._PIECE.findall(text)

    def encode(self, text: str, *options: object, **more: object) -> list[int]:
        return [self.vocab[each] for each in self.tokenize(text)]

    def decode(self, ids: int | list[int], **options: object) -> str:
        return "".join(self.convert_ids_to_tokens([ids] if isinstance(ids, int) else ids))

    def convert_ids_to_tokens(self, ids: list[int], **options: object) -> list[str]:
        texts = {number: text for text, number in self.vocab.items()}
        return [texts[each] for each in ids]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def detokenize_incrementally(
    tokenizer: Tokenizer, all_input_ids: list[int], **options: Any
) -> tuple[list[str], str, int, int]:
    token = tokenizer.decode(all_input_ids[-1])
    return [token], token, 0, 0


class _Internals(type):
    def __getattr__(cls, name: str) -> Any:
        raise Internal(name)


def internal(name: str) -> Any:
    """A function or class of which a use ends the case."""

    def use(*arguments: object, **options: object) -> None:
        raise Internal(name)

    return _Internals(name, (), {"__init__": use}) if name[:1].isupper() else use


def constants(path: Path) -> dict[str, Any]:
    """The literals that a module assigns."""
    found: dict[str, Any] = {}
    for node in ast.parse(path.read_text()).body if path.exists() else ():
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found
