"""The text of /metrics, read back by prometheus_client."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from penstock.metrics import families as f
from penstock.metrics.exposition import SERIES_AT_ONCE, exposition, render
from penstock.metrics.families import LORA_REQUESTS, METRIC_FAMILIES, MetricKind
from penstock.metrics.snapshot import Distribution


def test_every_family_is_there_even_without_a_value() -> None:
    found = {
        family.name: family for family in text_string_to_metric_families(b"".join(exposition({})).decode())
    }
    assert set(found) == set(METRIC_FAMILIES)
    for name, family in METRIC_FAMILIES.items():
        assert (found[name].type, found[name].documentation) == (family.kind.value, family.help)


def test_values_and_labels() -> None:
    counts = (1, 2, *[0] * (len(f.ITL.bounds) - 2), 4)
    text = exposition(
        {
            f.SUCCESS.name: {("m", "0", "stop"): 5, ("m", "1", "stop"): 6},
            f.ITL.name: {("m", "0"): Distribution(counts, 7.5)},
            f.RUNNING.name: {("m", "0"): 3.0},
        }
    )
    lines = b"".join(text).decode().splitlines()
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 5.0' in lines
    assert 'vllm:request_success_total{engine="1",finished_reason="stop",model_name="m"} 6.0' in lines
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 3.0' in lines
    name = "vllm:inter_token_latency_seconds"
    assert f'{name}_bucket{{engine="0",le="0.01",model_name="m"}} 1.0' in lines
    assert f'{name}_bucket{{engine="0",le="0.025",model_name="m"}} 3.0' in lines
    assert f'{name}_bucket{{engine="0",le="80.0",model_name="m"}} 3.0' in lines
    assert f'{name}_bucket{{engine="0",le="+Inf",model_name="m"}} 7.0' in lines
    assert f'{name}_count{{engine="0",model_name="m"}} 7.0' in lines
    assert f'{name}_sum{{engine="0",model_name="m"}} 7.5' in lines


def test_the_table_of_families_is_sound() -> None:
    for family in METRIC_FAMILIES.values():
        assert family.name.startswith(("vllm:", "penstock:"))
        assert not (family.kind is MetricKind.COUNTER and family.name.endswith("_total"))
        assert bool(family.bounds) == (family.kind is MetricKind.HISTOGRAM)
        assert list(family.bounds) == sorted(set(family.bounds))
        assert family.help.endswith(".")
        if family.name.startswith("vllm:") and family is not LORA_REQUESTS:  # which vLLM says for all engines
            assert family.labels[:2] == ("model_name", "engine")


def test_a_piece_has_few_series() -> None:
    """However many there are; together they are what one piece would have been."""
    counts = tuple(range(len(f.ITL.bounds) + 1))
    values = {(f"m{number}", "0"): Distribution(counts, 7.5) for number in range(3 * SERIES_AT_ONCE + 1)}
    gauges = {("m", str(number)): float(number) for number in range(SERIES_AT_ONCE)}
    pieces = list(render([(f.ITL, values), (f.RUNNING, gauges), (f.WAITING, {})]))
    assert len(pieces) == 4 + 1 + 1
    names = (piece.count(b"_count{") for piece in pieces)
    assert list(names) == [SERIES_AT_ONCE] * 3 + [1, 0, 0]
    text = b"".join(pieces).decode()
    assert text.count("# HELP") == text.count("# TYPE") == 3
    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert len(found[f.ITL.name].samples) == len(values) * (len(counts) + 2)
    assert len(found[f.RUNNING.name].samples) == len(gauges)
