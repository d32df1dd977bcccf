"""Recorded requests with vLLM 0.32's replies: the model they ran on, and how a reply differs from its record.

The model's weights are the ones transformers draws for its configuration at seed 0, so they need not be
kept. Differences that are meant stand in a table of docs/compatibility.md, which is read here.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.golden_replies import DATA, Case

ROOT = Path(__file__).parent.parent.parent
WEIGHTS_SHA256 = "427bd5070a04085c33945c0906ae5497dd3e40453ac5a9dbfff14864379397d4"
"""Of model.safetensors, as it was when the replies were recorded."""

VARIES = frozenset(
    (
        "id",
        "created",
        "system_fingerprint",
        "data[].created",
        "data[].id",
        "data[].permission[].id",
        "data[].permission[].created",
    )
)
"""Paths whose values differ from reply to reply; their types do not."""
ALWAYS_SENT = frozenset(
    (
        "choices[].finish_reason",
        "choices[].logprobs",
        "choices[].message.content",
        "choices[].message.refusal",
        "error.param",
        "error.code",
    )
)
"""Paths of events that OpenAI's own API sends even where they are null."""
TEXTS = frozenset(("content", "text", "reasoning", "arguments"))
"""Fields of events whose values are pieces of one text."""
ABSENT = object()


def write_model(directory: Path) -> None:
    """The model of the recordings: configuration and tokenizer from the test data, weights drawn anew."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    for path in DATA.glob("*.json"):
        (directory / path.name).write_bytes(path.read_bytes())
    (directory / "tokenizer.json").write_bytes(gzip.decompress((DATA / "tokenizer.json.gz").read_bytes()))
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(directory))
    config = (directory / "config.json").read_bytes()
    model.save_pretrained(directory)
    (directory / "config.json").write_bytes(config)
    digest = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    assert digest == WEIGHTS_SHA256, (
        "torch or transformers draw other weights: the replies cannot be compared"
    )


# -- a reply against its record


@dataclass(frozen=True)
class Difference:
    case: str
    where: str
    """``status``, ``content-type``, ``text`` (a body that is not JSON), or a path of the JSON body."""
    theirs: Any
    ours: Any

    def __str__(self) -> str:
        ours = "nothing" if self.ours is ABSENT else json.dumps(self.ours)[:200]
        theirs = "nothing" if self.theirs is ABSENT else json.dumps(self.theirs)[:200]
        return f"{self.case}: {self.where}: recorded {theirs}, got {ours}"


def differences(case: Case, reply: httpx.Response) -> list[Difference]:
    """How ``reply`` differs from the record, except in what varies and in how streams are cut."""
    name = case["name"]
    found = []
    if reply.status_code != case["status"]:
        found.append(Difference(name, "status", case["status"], reply.status_code))
    kind = reply.headers.get("content-type")
    if kind != case["response_content_type"]:
        found.append(Difference(name, "content-type", case["response_content_type"], kind))
    theirs, ours = _parsed(case["response_body"]), _parsed(reply.text)
    if isinstance(theirs, str) or isinstance(ours, str):
        return found if theirs == ours else [*found, Difference(name, "text", theirs, ours)]
    whole = not case["response_body"].startswith("data: ")
    return found + [Difference(name, *each) for each in _compare(theirs, ours, "", whole=whole)]


def _parsed(body: str) -> Any:
    """JSON, the events of a stream put together, or text."""
    if body.startswith("data: "):
        return _joined(body)
    try:
        return json.loads(body)
    except ValueError:
        return body


def _joined(body: str) -> dict[str, Any]:
    """A stream: its fields event by event as one, its choices put together, and how it ends."""
    *events, last = [event.removeprefix("data: ") for event in body.strip().split("\n\n")]
    whole: dict[str, Any] = {"choices": [], "end": last}
    choices: dict[int, dict[str, Any]] = {}
    for event in map(json.loads, events):
        for choice in event.pop("choices"):
            _add(choices.setdefault(choice["index"], {}), choice)
        _add(whole, event)
    whole["choices"] = [choices[index] for index in sorted(choices)]
    return whole


def _add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Text and lists are appended, objects merged, anything else is replaced by what is not null."""
    for key, value in part.items():
        have = whole.get(key)
        if isinstance(have, list if key not in TEXTS else (list, str)) and value is not None:
            whole[key] = have + value
        elif isinstance(have, dict) and isinstance(value, dict):
            _add(have, value)
        elif have is None or value is not None:
            whole[key] = value


def _compare(theirs: Any, ours: Any, path: str, *, whole: bool) -> Iterator[tuple[str, Any, Any]]:
    """``whole``: they are no events, which omit fields that are null."""
    if theirs is None and ours is ABSENT and not whole and path not in ALWAYS_SENT:
        return
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in theirs | ours:
            inner = f"{path}.{key}" if path else key
            yield from _compare(theirs.get(key, ABSENT), ours.get(key, ABSENT), inner, whole=whole)
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for their_item, our_item in zip(theirs, ours, strict=True):
            yield from _compare(their_item, our_item, f"{path}[]", whole=whole)
    elif path in VARIES and type(theirs) is type(ours):
        return
    elif not _equal(theirs, ours):
        yield path, theirs, ours


def _equal(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, float) and isinstance(ours, float):
        return abs(theirs - ours) < 1e-3  # logprobs in float32, summed in another order
    return type(theirs) is type(ours) and bool(theirs == ours)


# -- differences that are meant


@dataclass(frozen=True)
class Allowed:
    """A row of the table. In patterns ``*`` stands for any text."""

    cases: list[str]
    where: list[str]

    def covers(self, difference: Difference) -> bool:
        return _matches(self.cases, difference.case) and _matches(self.where, difference.where)

    def parts(self) -> Iterator[Allowed]:
        """Rows of one pattern of this one; each of them is to cover something."""
        yield from (Allowed([case], self.where) for case in self.cases)
        yield from (Allowed(self.cases, [where]) for where in self.where)


def _matches(patterns: list[str], text: str) -> bool:
    return any(re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), text, re.DOTALL) for pattern in patterns)


def allowed_differences() -> list[Allowed]:
    """The rows below the heading "In recorded replies" of docs/compatibility.md."""
    page = (ROOT / "docs" / "compatibility.md").read_text()
    section = page.partition("\n## In recorded replies\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    assert rows, "docs/compatibility.md has no table of differences in recorded replies"
    for row in rows:
        assert len(row) == 3, f"a row needs cases, where and why: {row}"
        assert row[2].strip(), f"a row needs a reason: {row}"
    return [Allowed(re.findall("`(.+?)`", row[0]), re.findall("`(.+?)`", row[1])) for row in rows]
