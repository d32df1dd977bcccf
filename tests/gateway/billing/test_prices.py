"""Costs: exact to a billionth, at the price of the model that answered."""

from __future__ import annotations

import json
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.main import main
from penstock.gateway.billing.prices import MAX_COST, NANO, Prices, Pricing, as_decimal
from penstock.gateway.discovery.endpoints_file import read_endpoints
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.responses.response_observer import Observation
from penstock.gateway.responses.token_usage import MAX_TOKENS, ReportedUsage, UsageFields, read_usage
from tests.gateway.processes import Call, Upstream, gateway

prices = st.decimals(0, 10**4, allow_nan=False, places=6)
tokens = st.integers(0, 10**7)


def pricing(**named: dict[str, str]) -> Pricing:
    found = Pricing()
    found.update(
        "USD",
        {
            name: Prices(**{kind: Decimal(price) for kind, price in said.items()})
            for name, said in named.items()
        },
    )
    return found


def record(usage: ReportedUsage | None, model: str = "m", target: str = "", events: int = 0) -> RequestRecord:
    seen = Observation(stream=True, ended=usage is not None, usage=usage, token_events=events)
    return RequestRecord("/v1/completions", "r", "POST", model=model, target_model=target or model, seen=seen)


def cost(pricing: Pricing, record: RequestRecord) -> int | None:
    pricing.set_cost(record)
    return record.cost


@given(prices, prices, prices, prices, tokens, tokens, tokens, tokens)
def test_a_cost_is_exact(
    input: Decimal,
    output: Decimal,
    cached: Decimal,
    reasoning: Decimal,
    given: int,
    made: int,
    hit: int,
    thought: int,
) -> None:
    hit, thought = min(hit, given), min(thought, made)
    each = Pricing()
    each.update("EUR", {"m": Prices(input=input, output=output, cached=cached, reasoning=reasoning)})
    exact = (given - hit) * input + hit * cached + (made - thought) * output + thought * reasoning
    found = cost(each, record(ReportedUsage(given, made, hit, thought)))
    if given or made:
        assert found == min(int((exact * 1000).quantize(Decimal(1), ROUND_HALF_UP)), MAX_COST)
    else:
        assert found is None


@given(st.integers(0, MAX_COST))
def test_an_amount_is_written_exactly(billionths: int) -> None:
    assert Decimal(as_decimal(billionths)) * NANO == billionths


def test_kinds_without_a_price_cost_what_the_whole_costs() -> None:
    each = pricing(m={"input": "2", "output": "8"})
    assert cost(each, record(ReportedUsage(100, 50, 60, 20))) == 100 * 2000 + 50 * 8000
    assert cost(each, record(None, events=3)) == 3 * 8000, "an aborted stream: what came"
    assert cost(each, record(ReportedUsage(MAX_TOKENS, None, MAX_TOKENS))) == MAX_TOKENS * 2000
    less = pricing(m={"input": "2", "output": "8", "cached": "0.5", "reasoning": "4"})
    assert cost(less, record(ReportedUsage(10, 10, 99, 99))) == 10 * 500 + 10 * 4000, (
        "parts are never more than all"
    )


def test_the_model_that_answered_counts_then_the_name_that_was_asked() -> None:
    each = pricing(**{"small": {"input": "1", "output": "1"}, "l*": {"input": "9", "output": "9"}})
    usage = ReportedUsage(1, 1)
    assert cost(each, record(usage, "large", "small")) == 2000
    assert cost(each, record(usage, "small", "large")) == 18000
    assert cost(each, record(usage, "large", "unknown")) == 18000
    assert cost(each, record(usage, "x", "y")) is None
    nothing = record(usage)
    assert cost(Pricing(), nothing) is None
    assert nothing.currency == ""


def test_what_is_read_again_costs_nothing_again() -> None:
    replay = record(ReportedUsage(1, 1))
    replay.method = "GET"
    assert cost(pricing(m={"input": "1", "output": "1"}), replay) is None


def test_a_cost_stays_when_prices_change() -> None:
    each, ended = pricing(m={"input": "1", "output": "1"}), record(ReportedUsage(1, 1))
    assert cost(each, ended) == 2000
    each.update("EUR", {"m": Prices(input=Decimal(5), output=Decimal(5))})
    assert (cost(each, ended), ended.currency) == (2000, "USD")
    assert cost(each, record(ReportedUsage(1, 1))) == 10000


def test_reasoning_tokens_are_read_in_both_shapes() -> None:
    chat = UsageFields(
        prompt_tokens=3, completion_tokens=9, completion_tokens_details={"reasoning_tokens": 7}
    )
    responses = UsageFields(input_tokens=3, output_tokens=9, output_tokens_details={"reasoning_tokens": 7})
    for usage in (chat, responses):
        assert read_usage(usage) == ReportedUsage(3, 9, None, 7)
    assert read_usage(
        UsageFields(prompt_tokens=3, completion_tokens=9, completion_tokens_details="7")
    ) == ReportedUsage(3, 9)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("models: {a: {prices: {input: 1, output: 1}}}", "currency: it is missing"),
        ("currency: usd", "currency: .*regex"),
        ("currency: USD\nmodels: {a: {prices: {input: 1}}}", "models.a.prices: .*`output`"),
        (
            "currency: USD\nmodels: {a: {prices: {input: -1, output: 1}}}",
            "models.a.prices.input: -1 is not allowed",
        ),
        (
            "currency: USD\nmodels: {a: {prices: {input: 1, output: 0.0000001}}}",
            "prices.output: 1E-7 .* 6 decimals",
        ),
        ("currency: USD\nmodels: {a: {prices: {input: 1, output: .inf}}}", "output: Infinity is not allowed"),
        (
            "currency: USD\nmodels: {a: {prices: {input: 1, output: 2, cache: 1}}}",
            "models.a.prices: .*`cache`; it takes input, output, cached, reasoning",
        ),
    ],
)
def test_bad_prices(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_endpoints(text)


def test_a_price_makes_no_route() -> None:
    document = read_endpoints("currency: USD\nmodels: {a: {prices: {input: 0.15, output: '0.6'}}, b: {}}")
    assert document.prices == {"a": Prices(input=Decimal("0.15"), output=Decimal("0.6"))}
    assert list(document.routes) == ["b"]


def _answer(call: Call) -> None:
    usage = {"prompt_tokens": 1000, "completion_tokens": 100, "prompt_tokens_details": {"cached_tokens": 400}}
    usage["completion_tokens_details"] = {"reasoning_tokens": 30}
    call.reply(200, json.dumps({"choices": [{"text": "x"}], "usage": usage}).encode())


def test_costs_of_a_gateway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen in the access log, in the metrics over all workers, and by `penstock status`."""
    log, file, keys = tmp_path / "access.jsonl", tmp_path / "endpoints.yaml", tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: search, key: sk-search-0123456789}]")
    with Upstream(_answer) as server:
        file.write_text(
            f"endpoints: [{server.url}]\ncurrency: USD\nmodels:\n  chat: {{targets: small}}\n"
            "  small: {prices: {input: 1, cached: 0.1, output: 2, reasoning: 4}}\n"
        )
        options = ("--endpoints-file", str(file), "--workers", "2", "--access-log-file", str(log))
        with gateway(options=(*options, "--client-keys-file", str(keys))) as front:
            front.client.headers["authorization"] = "Bearer sk-search-0123456789"
            for _ in range(4):
                assert front.complete(stream=False, model="chat").status_code == 200
            each = 0.0006 + 0.00004 + 0.00014 + 0.00012
            assert front.counts("cost_total") == pytest.approx({"USD": 4 * each})
            assert front.counts("key_cost_total") == pytest.approx({"USD,search,": 4 * each})
            reads = ["status", "--url", front.url, "--json", "--interval", "0", "--api-key"]
            assert main([*reads, "sk-search-0123456789"]) == 0
            found = json.loads(capsys.readouterr().out)
    assert found["costs"] == [{"model": "small", "pool": "penstock", "currency": "USD", "cost": 0.0036}]
    assert found["key_costs"] == [{"key": "search", "team": "", "currency": "USD", "cost": 0.0036}]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["cost"], line["currency"], line["reasoning_tokens"]) for line in lines] == [
        (0.0009, "USD", 30)
    ] * 4
