"""Rewrites the JSON schemas within a grammar for llguidance: what follows ``%json`` in Lark.

Schemas of tools carry llguidance's options, from which also follows whether they are strict; those that a
client wrote into a grammar of its own do not, and keep their objects as they are.
"""

from __future__ import annotations

import json
import re
from typing import Any

from penstock.generation.grammars.equivalent_schema import Unfit, rewrite

_SKIPPED_OR_JSON = re.compile(
    r"""
    //[^\n]*|\#[^\n]*
    |"(?:[^"\\\n]|\\.)*"
    |/(?!/)(?:[^/\\\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/
    |%json\s*(?P<json>\{)
    """,
    re.VERBOSE,
)
_decoder = json.JSONDecoder()


def rewritten_grammar(grammar: str) -> str:
    """``grammar``, of llguidance, with its schemas rewritten. Raises ValueError for one that is not JSON, or
    cannot be enforced."""
    if "%json" not in grammar and "json_schema" not in grammar:
        return grammar
    if not grammar.lstrip().startswith("{"):
        return _with_schemas(grammar)
    document = json.loads(grammar)
    grammars = document.get("grammars")
    for each in grammars if isinstance(grammars, list) else ():
        if isinstance(each, dict) and isinstance(each.get("lark_grammar"), str):
            each["lark_grammar"] = _with_schemas(each["lark_grammar"])
        if isinstance(each, dict) and isinstance(each.get("json_schema"), dict):
            each["json_schema"] = _rewritten(each["json_schema"])
    return json.dumps(document, ensure_ascii=False)


def _with_schemas(lark: str) -> str:
    pieces = []
    end = place = 0
    while (match := _SKIPPED_OR_JSON.search(lark, place)) is not None:
        place = match.end()
        start = match.start("json")
        if start >= 0:
            schema, place = _decoder.raw_decode(lark, start)
            pieces += [lark[end:start], json.dumps(_rewritten(schema), ensure_ascii=False)]
            end = place
    return "".join([*pieces, lark[end:]])


def _rewritten(schema: dict[str, Any]) -> dict[str, Any]:
    options = schema.get("x-guidance")
    lenient = isinstance(options, dict) and options.get("lenient") is True
    try:
        rewrite(schema, lambda _: lenient, close=options is not None)
    except Unfit as unfit:
        where = ".".join(map(str, unfit.path))
        raise ValueError(f"{where}: {unfit}" if where else str(unfit)) from None
    return schema
