"""Translates llguidance grammars to what vLLM's own llguidance backend takes.

API servers send llguidance's own format: Lark, or JSON with a list of grammars that refer to one another by
name. vLLM takes a JSON schema or Lark alone, so that a list becomes one Lark grammar: ``@name`` is replaced
by ``%json {…}`` or ``%lark {…}``.
"""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from penstock.engine.base import RequestRejected

BACKEND = "guidance"
"""vLLM's name for llguidance."""
_REFERENCE = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|@([A-Za-z_][\w-]*)')
"""Strings and regexes, which are skipped, and references to grammars."""
MAX_DEPTH = 8
"""Grammars within one another; API servers nest three."""


def structured_outputs(grammar: str) -> dict[str, Any]:
    """The fields of vLLM's StructuredOutputsParams for ``grammar``. Raises RequestRejected for one that
    cannot be translated."""
    params: dict[str, Any] = {"_backend": BACKEND}
    if not grammar.lstrip().startswith("{"):
        return params | {"grammar": _checked(grammar)}
    grammars = json.loads(grammar).get("grammars") or [{}]
    first = grammars[0]
    if len(grammars) == 1 and first.get("json_schema") is not None:
        return params | {"json": json.dumps(first["json_schema"])}
    named = {each["name"]: each for each in grammars if each.get("name")}
    return params | {"grammar": _checked(_joined(first, named, 0))}


def _joined(grammar: dict[str, Any], named: dict[str, dict[str, Any]], depth: int) -> str:
    """The Lark text of ``grammar``, with those that it refers to in place of their names."""
    if depth > MAX_DEPTH:
        raise RequestRejected(
            "structured_outputs: grammars refer to one another too deeply for vLLM's engine"
        )
    if grammar.get("json_schema") is not None:
        return f"start: %json {json.dumps(grammar['json_schema'])}"

    def replaced(match: re.Match[str]) -> str:
        other = named.get(match[1]) if match[1] else None
        if other is None:
            return match[0]
        if other.get("json_schema") is not None:
            return f"%json {json.dumps(other['json_schema'])}"
        return f"%lark {{\n{_joined(other, named, depth + 1)}\n}}"

    lark = str(grammar.get("lark_grammar") or "")
    return _REFERENCE.sub(replaced, lark) if "@" in lark else lark


def _checked(lark: str) -> str:
    """Raises RequestRejected for Lark that vLLM would take for GBNF, and rewrite."""
    try:
        unchanged = any_to_lark(lark) == lark
    except Exception:  # noqa: BLE001 - the translator raises Exception itself
        unchanged = False
    if not unchanged:
        raise RequestRejected(
            "structured_outputs: vLLM's engine would take this grammar for GBNF: it has ::="
        )
    return lark
