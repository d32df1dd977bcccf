"""docs/troubleshooting.md has every code of an error that clients can get, and no other."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"

ARGUMENTS = {
    "unavailable": 1,
    "gateway_error": 1,
    "refused_key": 1,
    "failure": 1,
    "fail": 1,
    "_fail": 3,
    "_busy": 0,
    "_reply_locally": 1,
    "RequestRejected": 1,
    "StreamFailure": 3,
    "RpcError": 1,
    "StreamError": 1,
    "TokenRefused": 0,
    "UnknownKeyError": 1,
    "NoEndpointError": 1,
    "without": 1,
}
"""Which argument of a call is a code, if it is not given by name."""
INTERNAL = {"prompt_gone", "unreadable"}
"""What processes tell each other alone, and another constant of a name that a code has."""
COMPUTED = {
    "key_revoked",
    "key_expired",
    "key_not_yet_valid",
    "invalid_prompt",
    "unavailable",
    "partial",
    "aborted",
    "refused",
    "unsupported",
}
"""Codes that no call spells: made of parts, of a table by status, handed on, or outcomes of operations."""


def trees() -> Iterator[ast.Module]:
    for path in (ROOT / "penstock").rglob("*.py"):
        if path.relative_to(ROOT / "penstock").parts[0] not in ("bench", "cli", "config"):
            yield ast.parse(path.read_text())


def said(value: ast.expr, constants: Mapping[str, set[object]]) -> Iterator[object]:
    """What an expression may be."""
    if isinstance(value, ast.Constant):
        yield value.value
    elif isinstance(value, ast.Name):
        yield from constants.get(value.id, ())
    elif isinstance(value, ast.IfExp | ast.BoolOp):
        parts = value.values if isinstance(value, ast.BoolOp) else [value.body, value.orelse]
        for part in parts:
            yield from said(part, constants)


def codes(trees: list[ast.Module]) -> set[str]:
    """What the calls of ARGUMENTS say, keywords and keys ``code``, and assignments to ``code``."""
    constants: dict[str, set[object]] = defaultdict(set)
    for tree in trees:
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                constants[ast.unparse(node.targets[0])].add(node.value.value)
    found: set[object] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        given: list[ast.expr] = []
        if isinstance(node, ast.Call):
            at = ARGUMENTS.get(ast.unparse(node.func).rpartition(".")[2], 99)
            given = [*node.args[at : at + 1], *(each.value for each in node.keywords if each.arg == "code")]
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            given = [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "code"]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "code":
            given = [node.value]
        found.update(word for value in given for word in said(value, constants))
    words = {word for word in found if isinstance(word, str)}
    return {word for word in words if re.fullmatch(r"[a-z]+(_[a-z]+)*", word)}


def test_the_page_has_every_code() -> None:
    table = PAGE.read_text().partition("\n## Error codes\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ((?:`[a-z_]+`(?:, )?)+)", table, re.MULTILINE)
    listed = [code for row in rows for code in re.findall(r"`([a-z_]+)`", row)]
    assert sorted(listed) == sorted(set(listed))
    assert set(listed) == (codes(list(trees())) | COMPUTED) - INTERNAL


def test_a_new_code_is_found() -> None:
    source = 'FULL = "full"\nraise ApiError(429, "m", code=FULL)\nunavailable("m", "a_b" if x else FULL)'
    assert codes([ast.parse(source)]) == {"full", "a_b"}
