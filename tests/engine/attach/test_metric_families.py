"""The metric families of vLLM that are served, against ours and, where it is installed, vLLM itself."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.metrics import families as f
from penstock.metrics.families import METRIC_FAMILIES
from tests.engine.attach.metric_families import NOT_SERVED, SERVED, SPECULATION

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_they_are_served_with_their_labels() -> None:
    for name, labels in (SERVED | SPECULATION).items():
        assert set(labels) <= set(METRIC_FAMILIES[name].labels), name
    own = {name for name in METRIC_FAMILIES if name.startswith("vllm:")}
    assert own == SERVED.keys() | SPECULATION.keys()
    assert not NOT_SERVED.keys() & METRIC_FAMILIES.keys()


def test_the_page_names_those_that_are_not() -> None:
    page = PAGE.read_text()
    for name in NOT_SERVED:
        assert f"`{name}`" in page


def test_vllm_has_no_others() -> None:
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("make test-vllm makes an environment with vLLM")
    sources = Path(vllm.origin).parent / "v1"
    source = (sources / "metrics" / "loggers.py").read_text()
    assert set(re.findall(r'name\s*=\s*"(vllm:\w+)"', source)) == SERVED.keys() | NOT_SERVED.keys()
    source = (sources / "spec_decode" / "metrics.py").read_text()
    assert set(re.findall(r'"(vllm:spec\w+)"', source)) == SPECULATION.keys()
    assert '+ ["position"]' in source


def test_buckets_and_values_of_labels() -> None:
    buckets = pytest.importorskip("vllm.v1.metrics.buckets", reason="make test-vllm")
    from vllm.v1.metrics.stats import PromptTokenStats

    for family, key in (
        (f.ITERATION_TOKENS, "iteration_tokens"),
        (f.TTFT, "time_to_first_token"),
        (f.ITL, "inter_token_latency"),
        (f.TPOT, "inter_token_latency"),
        (f.E2E, "request_latency"),
        (f.QUEUE_TIME, "request_latency"),
        (f.PARAMS_N, "request_params_n"),
        (f.REQUEST_PREEMPTIONS, "request_num_preemptions"),
    ):
        assert list(family.bounds) == buckets.histogram_buckets(key), family.name
    most = int(f.PROMPT_LENGTH.bounds[-1])
    assert list(f.PROMPT_LENGTH.bounds) == buckets.histogram_buckets("request_tokens", max_model_len=most)
    assert all(source in f.PROMPT_TOKENS_BY_SOURCE.help for source in PromptTokenStats.ALL_SOURCES)
