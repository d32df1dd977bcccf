"""Budgets in the clients' file: of keys, teams and models."""

from __future__ import annotations

import pytest

from penstock.gateway.admission.clients_file import read_clients
from penstock.gateway.requests.caller import Budget, Caller

FILE = """
keys:
  - name: search
    key: sk-search-0123456789
    team: retrieval
    budgets: {cost-per-month: 12.5, requests-per-hour: 60, concurrent-requests: 3}
    model-budgets: {large: {cost-per-day: 1}}
  - {name: alone, key: sk-alone-0123456789}
teams:
  - name: retrieval
    budgets: {cost-per-month: 100}
    model-budgets: {"gpt-*": {tokens-per-day: 5}}
  - name: unused
model-budgets:
  "*": {requests-per-month: 1000}
"""


def callers(text: str) -> dict[str, Caller]:
    return {grant.caller.name: grant.caller for grant in read_clients(text).grants.values()}


def test_all_of_them() -> None:
    found = callers(FILE)
    everywhere = Budget("requests-per-month", 1000, 0.0, "\nmodel\n*", "*")
    assert found["search"].budgets == (
        Budget("requests-per-hour", 60, 3600.0),
        Budget("cost-per-month", 12_500_000_000, 0.0),
        Budget("cost-per-day", 10**9, 86_400.0, "search\nmodel\nlarge", "large"),
        Budget("cost-per-month", 100 * 10**9, 0.0, "\nteam\nretrieval"),
        Budget("tokens-per-day", 5, 86_400.0, "\nteam\nretrieval\nmodel\ngpt-*", "gpt-*"),
        everywhere,
    )
    assert found["search"].most_concurrent == 3
    assert found["alone"].budgets == (everywhere,)


@pytest.mark.parametrize(
    ("terms", "problem"),
    [
        ("budgets: {cost-per-day: 0}", r"keys\[0\].budgets: cost-per-day is 0; it takes .* above 0"),
        ("budgets: {cost-per-day: .inf}", "cost-per-day is Infinity"),
        ("budgets: {cost-per-day: 0.0000000001}", "nine decimals at most"),
        ("budgets: {cost-per-day: 9000001}", "up to 9000000"),
        ("budgets: {tokens-per-month: 1.5}", "Expected `int . null`"),
        ("budgets: {tokens-per-year: 1}", "`tokens-per-year`; it takes requests-per-minute"),
        ("model-budgets: {m: {concurrent-requests: 1}}", r"model-budgets.m: .*`concurrent-requests`"),
    ],
)
def test_mistakes(terms: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_clients(f"keys: [{{name: a, key: sk-0123456789abcdef, {terms}}}]")


def test_a_team_is_named_once() -> None:
    with pytest.raises(ValueError, match="the team 't' is given twice"):
        read_clients("keys: [{name: a, key: sk-0123456789abcdef}]\nteams: [{name: t}, {name: t}]")
