"""Penstock's lists of vLLM's flags and variables are those of the installed vLLM."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from penstock.config.other_servers.vllm_names import vllm_names
from tests.engine.attach import known_names

HOW = "run: python -m tests.engine.attach.known_names"


def test_the_flags_are_those_of_its_parser() -> None:
    assert known_names.flags() == vllm_names().flags, HOW


def test_the_variables_are_those_that_it_reads() -> None:
    assert frozenset(known_names.variables()) == vllm_names().variables, HOW
