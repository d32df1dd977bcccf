"""The flags and variables of one version of vLLM, read from ``vllm_names.json`` beside this module.

``python -m tests.engine.attach.known_names`` writes the file where vLLM is installed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.config.other_servers.known_flag import Default

FILE = Path(__file__).with_name("vllm_names.json")


class VllmFlag(NamedTuple):
    """A flag of ``vllm serve``: the number of its values (0, 1, ? or +), its default, whether vLLM's engine
    takes it, and its other names."""

    values: str
    default: Default
    of_engine: bool
    others: tuple[str, ...]


class VllmNames(msgspec.Struct, frozen=True):
    """What ``version`` of vLLM knows: flags by their long names, and environment variables."""

    version: str
    flags: dict[str, VllmFlag]
    variables: frozenset[str]


@cache
def vllm_names() -> VllmNames:
    """Read the file, once in a process."""
    return msgspec.json.decode(FILE.read_bytes(), type=VllmNames)
