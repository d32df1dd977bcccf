"""Finds a flag of another server by any of its spellings."""

from __future__ import annotations

import re
from functools import cache

import msgspec

from penstock.config.other_servers import sglang_advice, vllm_advice
from penstock.config.other_servers.known_flag import KnownFlag
from penstock.config.other_servers.vllm_names import vllm_names

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


def names() -> list[str]:
    """The long names of all flags."""
    return [name for name in _flags() if name.startswith("--")]


@cache
def _flags() -> dict[str, KnownFlag]:
    """Known flags by name, long and short. vLLM's names win over its earlier ones, and those over
    SGLang's."""
    flags = {
        name: KnownFlag("SGLang", name, values, advice=advice)
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
