"""The table of models in docs/models.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
COLUMNS = ["models", "example", "torch engine", "vLLM", "input", "tool calls", "reasoning"]


class Model(NamedTuple):
    name: str
    example: str
    torch: str
    vllm: str
    input: str
    tools: str
    reasoning: str

    def formats(self) -> tuple[set[str], set[str]]:
        """Names of formats of tool calls, and of reasoning."""
        return set(re.findall(r"`([^`]+)`", self.tools)), set(re.findall(r"`([^`]+)`", self.reasoning))


def read_encoders() -> dict[str, tuple[str, str]]:
    """The name of each encoder, and whether the torch engine runs it."""
    pattern = r"^\| `([\w-]+)` \| ([^|]*) \| [^|]* \| (yes|no:[^|]*) \| [^|]* \|$"
    rows = re.findall(pattern, PAGE.read_text(), re.MULTILINE)
    return {kind: (name, torch) for kind, name, torch in rows}


def read_models() -> dict[str, Model]:
    """By model_type, sorted."""
    pattern = r"^\| `(\w+)` \| " + r" \| ".join([r"(.*?)"] * len(COLUMNS)) + r" \|$"
    (_, *head), *rows = re.findall(pattern, PAGE.read_text(), re.MULTILINE)
    assert head == COLUMNS
    kinds = [kind for kind, *_ in rows]
    assert kinds == sorted(set(kinds))
    return {kind: Model(*cells) for kind, *cells in rows}
