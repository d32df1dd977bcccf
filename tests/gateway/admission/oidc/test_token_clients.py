"""Tokens are checked once, in turns; keys are fetched when they are missing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.gateway.admission.budget_terms import PeriodTerms, SharedBudgets, TeamEntry
from penstock.gateway.admission.oidc import key_source, token_clients
from penstock.gateway.admission.oidc.issuer_entry import IssuerEntry
from penstock.gateway.admission.oidc.key_source import KeyFetchError, KeySource
from penstock.gateway.admission.oidc.token_clients import TokenClients
from penstock.gateway.admission.oidc.token_pending import TokenPending
from penstock.gateway.requests.caller import Budget, Caller
from penstock.http.errors import ApiError
from tests.gateway.token_issuer import OTHER_RSA, RSA, Issuer, issuer, public_jwk, signed


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy may take longer for keys than requests wait."""
    monkeypatch.setattr(token_clients, "WAIT_S", 90.0)


def entry(served: Issuer, authority: str, **fields: Any) -> IssuerEntry:
    said = {"issuer": served.url, "audience": "penstock", "ca-file": authority, **fields}
    return msgspec.convert(said, IssuerEntry)


class Clients(TokenClients):
    """Those of one issuer."""

    now = 0.0
    """Seconds that are added to the time."""

    def __init__(self) -> None:
        super().__init__(lambda: time.time() + self.now)

    def known(self, token: str) -> Caller | None:
        """Without a wait."""
        return self.find(sha256(token.encode()).digest(), token.encode())

    async def caller(self, token: str) -> Caller | None:
        try:
            return self.known(token)
        except TokenPending as pending:
            await pending.wait()
        return self.known(token)

    async def code(self, token: str) -> tuple[int, str]:
        """Of the refusal."""
        with pytest.raises(ApiError) as refusal:
            await self.caller(token)
        assert not isinstance(refusal.value, TokenPending)
        return refusal.value.status, str(refusal.value.code)


def with_issuer(directory: Path, run: Callable[[Clients, Issuer, str], Any]) -> None:
    async def main() -> None:
        clients = Clients()
        with issuer(directory) as (served, authority):
            try:
                await run(clients, served, authority)
            finally:
                served.gate.set()
                await clients.close()

    asyncio.run(main())


def test_a_token_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(clients: Clients, served: Issuer, authority: str) -> None:
        clients.configure([entry(served, authority)], frozenset())
        assert clients.known("sk-plain") is None
        assert clients.known("eyJ.x") is None
        token = served.token()
        alice = await clients.caller(token)  # waits for the first keys
        assert alice is not None
        assert served.asked == ["/.well-known/openid-configuration", "/keys"]
        monkeypatch.setattr(clients, "_check", None)
        assert clients.known(token) is alice
        clients.now = 660.0
        with pytest.raises(TokenPending):
            clients.known(token)

    with_issuer(tmp_path, run)


def test_rotated_keys_are_fetched_once_for_all_who_name_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(clients: Clients, served: Issuer, authority: str) -> None:
        clients.configure([entry(served, authority)], frozenset())
        before = served.token()
        assert await clients.caller(before)
        served.keys = {"second": OTHER_RSA}
        after = served.token("second")
        assert await clients.code(after) == (401, "token_unknown_key")  # it has just been asked
        assert len(served.asked) == 2
        clients.now = 6.0
        tokens = [served.token("second", sub=f"client {n}") for n in range(20)]
        callers = await asyncio.gather(*map(clients.caller, [after, *tokens]))
        assert [caller and caller.name for caller in callers] == [
            "alice",
            *(f"client {n}" for n in range(20)),
        ]
        assert len(served.asked) == 4
        assert await clients.code(before) == (401, "token_unknown_key")
        assert len(served.asked) == 4

    with_issuer(tmp_path, run)


def test_an_issuer_that_does_not_answer_holds_up_only_those_who_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(clients: Clients, served: Issuer, authority: str) -> None:
        clients.configure([entry(served, authority)], frozenset())
        token = served.token()
        assert await clients.caller(token)
        monkeypatch.setattr(token_clients, "WAIT_S", 0.2)
        clients.now = 6.0
        served.gate.clear()
        unknown = [signed(served.claims(), OTHER_RSA, kid=f"kid {n}") for n in range(5)]
        waiting = [asyncio.ensure_future(clients.code(each)) for each in unknown]
        await asyncio.sleep(0)
        assert clients.known(token)
        assert await clients.caller(served.token(sub="bob"))
        assert set(await asyncio.gather(*waiting)) == {(401, "token_unknown_key")}

    with_issuer(tmp_path, run)


def test_keys_of_an_issuer_that_is_down_stay_for_a_day(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(clients: Clients, served: Issuer, authority: str) -> None:
        monkeypatch.setattr(token_clients, "WAIT_S", 0.2)
        served.down = True
        clients.configure([entry(served, authority)], frozenset())
        assert await clients.code(served.token()) == (503, "token_keys_unavailable")
        async with asyncio.timeout(90.0):
            while "openid-configuration: status 503; its tokens are refused" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await clients.close()
        served.down = False
        monkeypatch.setattr(token_clients, "WAIT_S", 90.0)
        again = Clients()
        again.configure([entry(served, authority)], frozenset())
        long = served.token(exp=int(time.time()) + 10**6)
        assert await again.caller(long)
        served.down = True
        monkeypatch.setattr(token_clients, "WAIT_S", 0.2)
        await again.close()
        again.now = key_source.MAX_AGE_S - 60
        assert again.known(long)
        again.now = key_source.MAX_AGE_S + 60
        again._refused.clear()
        assert await again.code(long) == (503, "token_keys_unavailable")

    with_issuer(tmp_path, run)


def test_a_flood_of_bad_tokens_leaves_turns_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_clients, "TURN_S", 0.0)

    async def run(clients: Clients, served: Issuer, authority: str) -> None:
        clients.configure([entry(served, authority)], frozenset())
        good = served.token()
        assert await clients.caller(good)
        flood = [signed(served.claims(jti=n), OTHER_RSA, kid="first") for n in range(30)]
        codes = asyncio.gather(*map(clients.code, flood))
        turns = 0
        while not codes.done():
            await asyncio.sleep(0)
            turns += 1
            assert clients.known(good)
        assert set(await codes) == {(401, "token_signature")}
        assert turns >= 30
        monkeypatch.setattr(token_clients, "MAX_WAITING", 3)
        pending = []
        for n in range(4):
            with pytest.raises(ApiError) as refusal:
                clients.known(served.token(jti=n))
            pending.append((refusal.value.status, refusal.value.code))
        assert pending == [(401, "token_pending")] * 3 + [(503, "too_many_tokens")]
        assert clients.known(good)

    with_issuer(tmp_path, run)


def test_a_fault_is_one_token_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others that wait with it are checked."""

    async def run(clients: Clients, served: Issuer, authority: str) -> None:
        clients.configure([entry(served, authority)], frozenset())
        assert await clients.caller(served.token())
        usual = IssuerEntry.caller

        def caller(self: IssuerEntry, claims: dict[str, Any]) -> Caller | None:
            assert claims["sub"] != "bad"
            return usual(self, claims)

        monkeypatch.setattr(IssuerEntry, "caller", caller)
        tokens = [served.token(sub=name) for name in ("a", "bad", "b")]
        a, bad, b = await asyncio.gather(*map(clients.caller, tokens), return_exceptions=True)
        assert getattr(bad, "code", None) == "token_malformed"
        assert [getattr(each, "name", None) for each in (a, b)] == ["a", "b"]

    with_issuer(tmp_path, run)


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_clients, "MAX_CACHED_BYTES", 10_000)
    monkeypatch.setattr(token_clients, "MAX_REFUSED", 5)
    monkeypatch.setattr(token_clients, "MAX_LABELS", 2)

    async def run(clients: Clients, served: Issuer, authority: str) -> None:
        clients.configure([entry(served, authority)], frozenset())
        callers = [await clients.caller(served.token(sub=f"client {n}")) for n in range(20)]
        assert [caller and caller.label for caller in callers] == ["", "", *["other"] * 18]
        assert 3 <= len(clients._good) <= 9
        assert clients._cached_bytes == sum(each.weight for each in clients._good.values()) <= 10_000
        for n in range(20):
            await clients.code(served.token(aud="x", jti=n))
        assert len(clients._refused) == 5
        assert not clients._waiting

    with_issuer(tmp_path, run)


def test_settings_that_change_forget_what_they_granted(tmp_path: Path) -> None:
    async def run(clients: Clients, served: Issuer, authority: str) -> None:
        clients.configure([entry(served, authority)], frozenset())
        token = served.token()
        assert (await clients.caller(token) or Caller()).models == ()
        clients.configure([entry(served, authority, models=["m"])], frozenset())
        assert (await clients.caller(token) or Caller()).models == ("m",)
        assert len(served.asked) == 2
        clients.configure([entry(served, authority)], frozenset({"alice"}))
        assert await clients.code(token) == (401, "token_claims")
        clients.configure([], frozenset())
        assert await clients.code(token) == (401, "token_issuer")

    with_issuer(tmp_path, run)


def test_clients_of_tokens_have_the_budgets_of_their_team(tmp_path: Path) -> None:
    """Once, also when a token is checked again."""

    async def run(clients: Clients, served: Issuer, authority: str) -> None:
        issuers = [entry(served, authority, team="t", budgets={"cost-per-day": 1.5})]
        own = Budget.named("cost-per-day", 1_500_000_000)
        clients.configure(issuers, frozenset())
        token = served.token()
        assert (await clients.caller(token) or Caller()).budgets == (own,)
        shared = SharedBudgets.read([TeamEntry("t", PeriodTerms(cost_per_month=Decimal(9)))], {})
        for _ in range(2):
            clients.configure(issuers, frozenset(), shared)
            found = (await clients.caller(token) or Caller()).budgets
            assert [(each.name, each.owner) for each in found] == [
                ("cost-per-day", ""),
                ("cost-per-month", "\nteam\nt"),
            ]
            clients.now += 10_000.0
            token = served.token(exp=time.time() + 20_000)

    with_issuer(tmp_path, run)


def test_keys_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [public_jwk(RSA, kid="first")]}))
    said = {"issuer": "anyone", "audience": "penstock", "jwks": str(path)}
    source = KeySource(msgspec.convert(said, IssuerEntry), time.time)
    assert asyncio.run(source.read())
    assert not asyncio.run(source.read())
    keys = source.current()
    path.write_text("{")
    with pytest.raises(KeyFetchError, match="it is not JSON"):
        asyncio.run(source.read())
    assert source.current() is keys
    assert not source.want()


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"/keys": (302, b"")}, "/keys: status 302"),
        ({"/keys": (200, b" " * (1 << 20) + b"{}")}, "/keys: longer than 1048576 bytes"),
        ({"/.well-known/openid-configuration": (200, b"[]")}, "jwks_uri: Expected `object`"),
        (
            {
                "/.well-known/openid-configuration": (
                    200,
                    b'{"issuer": "x", "jwks_uri": "https://127.0.0.1/k"}',
                )
            },
            "tells of another issuer",
        ),
        (
            {
                "/.well-known/openid-configuration": (
                    200,
                    b'{"issuer": "x", "jwks_uri": "file:///etc/passwd"}',
                )
            },
            "jwks_uri: it takes a URL",
        ),
        (None, "certificate verify failed"),
    ],
)
def test_answers_that_are_no_keys(
    tmp_path: Path, fault: dict[str, tuple[int, bytes]] | None, problem: str
) -> None:
    with issuer(tmp_path) as (served, authority):
        usual = served.reply
        served.reply = lambda path: (fault or {}).get(path) or usual(path)  # type: ignore[method-assign]
        given = {} if fault is None else {"ca-file": authority}
        source = KeySource(
            msgspec.convert({"issuer": served.url, "audience": "a", **given}, IssuerEntry), time.time
        )
        with pytest.raises(KeyFetchError, match=problem):
            asyncio.run(source.read())
