"""Finds a flag of another server by any of its spellings."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from pathlib import Path

import msgspec

from penstock.config.other_servers import sglang_advice, tei_advice, vllm_advice
from penstock.config.other_servers.known_flag import Advice, EngineFlag, KnownFlag
from penstock.config.other_servers.vllm_names import vllm_names

_SGLANG = Path(__file__).with_name("sglang_names.json")
MIN_ABBREVIATION = 7
"""Characters, dashes included: of less a typing error is as likely."""
_LEVEL = re.compile(r"-O=?([a-z0-9]*)")
"""``-O3`` is short for ``--optimization-level 3``."""


class Spelling(msgspec.Struct, frozen=True):
    """A flag as it was written: ``--no-x``, and ``value`` of ``--x=value`` or ``-O3``."""

    flag: KnownFlag
    negated: bool = False
    value: str | None = None


def find(token: str) -> Spelling | None:
    """The flag of a token of a command line: ``--max_model_len``, ``-tp``, ``--no-enforce-eager``, ``-O3``,
    ``--compilation-config.mode=3``. None for any other token."""
    level = _LEVEL.fullmatch(token)
    if level is not None:
        return Spelling(_flags()["--optimization-level"], value=level[1] or None)
    name, equals, value = token.partition("=")
    name = name.partition(".")[0]
    if name == "-O":  # -O.mode=3, of earlier versions
        name = "--compilation-config"
    if name.startswith("--"):
        name = name.replace("_", "-")
    negated = name not in _flags() and name.startswith("--no-")
    flag = _flags().get(name.replace("--no-", "--", 1) if negated else name)
    if flag is None or (negated and flag.values != "0"):
        return None
    return Spelling(flag, negated, value if equals else None)


def find_abbreviated(token: str, own: Collection[str]) -> Spelling | None:
    """The flag that ``token`` begins, as argparse lets operators write it, if it begins no other and none of
    ``own``."""
    name, equals, value = token.partition("=")
    name = name.replace("_", "-")
    if (
        len(name) < MIN_ABBREVIATION
        or not name.startswith("--")
        or any(each.startswith(name) for each in own)
    ):
        return None
    begun = {flag.name: flag for each, flag in _flags().items() if each.startswith(name)}
    return Spelling(begun.popitem()[1], value=value if equals else None) if len(begun) == 1 else None


def names() -> list[str]:
    """The long names of all flags."""
    return [name for name in _flags() if name.startswith("--")]


def sglang_names() -> dict[str, list[str]]:
    """SGLang's flags without advice, many in a text, by the number of their values."""
    return msgspec.json.decode(_SGLANG.read_bytes(), type=_SglangNames).flags


class _SglangNames(msgspec.Struct, frozen=True):
    """What ``version`` of SGLang has."""

    version: str
    flags: dict[str, list[str]]


def _default(advice: Advice | None) -> str | None:
    return advice.default if isinstance(advice, EngineFlag) else None


@cache
def _flags() -> dict[str, KnownFlag]:
    """Known flags by name, long and short. vLLM's names win over its earlier ones, those over
    SGLang's, and these over those of Text Embeddings Inference."""
    flags = {
        name: KnownFlag("TEI", name, values, advice=advice)
        for name, (values, advice) in tei_advice.ADVICE.items()
    }
    flags |= {
        f"--{name}": KnownFlag("SGLang", f"--{name}", values)
        for values, lines in sglang_names().items()
        for line in lines
        for name in line.split()
    }
    flags |= {
        name: KnownFlag("SGLang", name, values, _default(advice), advice=advice)
        for name, (values, advice) in sglang_advice.ADVICE.items()
    }
    flags |= {
        name: KnownFlag("vLLM", name, values, advice=advice)
        for name, (values, advice) in vllm_advice.EARLIER.items()
    }
    for name, (values, advice) in vllm_advice.LATER.items():
        flags[name] = KnownFlag("vLLM", name, values, engine=advice is None, advice=advice)
    for name, (values, default, of_engine, others) in vllm_names().flags.items():
        engine = of_engine and name not in vllm_advice.OF_THE_SERVER
        flag = KnownFlag("vLLM", name, values, default, engine, vllm_advice.ADVICE.get(name))
        flags |= dict.fromkeys((name, *others), flag)
    return flags
