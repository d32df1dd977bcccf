"""Keys with names: the file, who is found by a key, what happens when the file changes."""

from __future__ import annotations

import logging
import os
from hashlib import sha256
from pathlib import Path

import pytest

from penstock.config.errors import ConfigError
from penstock.gateway.admission.client_keys import ClientKeys
from penstock.gateway.admission.clients_file import clients_file, read_clients
from penstock.gateway.requests.caller import Budget, Caller
from penstock.http.errors import ApiError
from penstock.http.request import first_values

ALL = f"""
keys:
  - name: search
    key: sk-search
    priority: 2
    weight: 3.5
    models: [small, "qwen-*"]
    budgets:
      requests-per-minute: 60
      output-tokens-per-day: 1000000
      concurrent-requests: 4
  - name: nightly
    sha256: [{sha256(b"sk-1").hexdigest()}, {sha256(b"sk-2").hexdigest().upper()}]
    priority: -1
"""


class Keys:
    """Keys of a file, and the time."""

    def __init__(self, path: Path, text: str, plain: tuple[str, ...] = ()) -> None:
        self.path = path
        self.now = 0.0
        self.write(text)
        self.file = clients_file(str(path))
        self.keys = ClientKeys(plain, self.file, lambda: self.now)

    def write(self, text: str) -> None:
        self.path.write_text(text)
        self.path.chmod(0o600)
        os.utime(self.path, (self.now, self.now))

    def caller(self, key: str) -> Caller:
        self.keys.take_over(self.file.latest())
        caller = self.keys.check("/v1/models", {b"authorization": b"Bearer " + key.encode()})
        assert caller is not None
        return caller

    def refusal(self, key: str) -> str:
        """The code of the refusal."""
        with pytest.raises(ApiError) as refusal:
            self.caller(key)
        assert refusal.value.status == 401
        return str(refusal.value.code)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def test_clients_are_found_by_their_keys(path: Path) -> None:
    keys = Keys(path, ALL)
    search = keys.caller("sk-search")
    assert (search.id, search.name, search.priority, search.weight) == ("search", "search", 2, 3.5)
    assert search.budgets == (
        Budget("requests-per-minute", 60, 60.0),
        Budget("output-tokens-per-day", 1_000_000, 86_400.0),
    )
    assert [each.unit for each in search.budgets] == ["requests", "output-tokens"]
    assert (search.most_concurrent, search.is_limited) == (4, True)
    assert [search.may_use(model) for model in ("small", "qwen-7b", "large", "")] == [
        True,
        True,
        False,
        False,
    ]
    assert keys.caller("sk-1") is keys.caller("sk-2")
    assert keys.caller("sk-1").may_use("large")
    assert not keys.caller("sk-1").is_limited
    assert keys.caller("sk-1").name == "nightly"


@pytest.mark.parametrize(
    ("granted", "asked", "priority"),
    [(None, 5, 0), (None, -3, -3), (2, 0, 2), (2, 1, 1), (2, 9, 2), (2, -1, -1), (-1, 0, -1), (-1, 5, -1)],
)
def test_requests_may_lower_their_priority(granted: int | None, asked: int, priority: int) -> None:
    assert Caller(priority=granted).priority_of(asked) == priority


def test_other_keys_are_refused(path: Path) -> None:
    keys = Keys(path, ALL)
    for headers in ([], [(b"authorization", b"Basic sk-search")], [(b"x-api-key", b"sk-3")]):
        with pytest.raises(ApiError) as refusal:
            keys.keys.check("/v1/models", first_values(headers))
        assert refusal.value.status == 401
    assert keys.keys.check("/health", {}) is None


def test_keys_without_names_stay_what_they_were(path: Path) -> None:
    keys = Keys(path, ALL, plain=("plain",))
    assert (len(keys.caller("plain").id), keys.caller("plain").name) == (32, "")
    alone = ClientKeys(["plain"], None, lambda: 0.0)
    assert alone.check("/v1/models", {b"x-api-key": b"plain"}) == Caller()
    assert ClientKeys([], None, lambda: 0.0).check("/v1/models", {}) is None


def test_the_file_is_read_again_when_it_has_changed(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = Keys(path, ALL)
    keys.now = 5.0
    keys.write("keys: [{name: other, key: sk-other}]")
    with caplog.at_level(logging.INFO):
        assert keys.caller("sk-other").name == "other"
    assert "1 keys are in effect" in caplog.text
    with pytest.raises(ApiError):
        keys.caller("sk-search")


TIMES = f"""
keys:
  - name: trial
    team: research
    key: sk-trial
    not-before: 1970-01-01T00:01:40Z
    expires: 1970-01-01T01:05:00+01:00
    previous:
      - {{sha256: {sha256(b"sk-before").hexdigest()}, expires: 1970-01-01T00:03:20Z}}
  - {{name: gone, key: sk-gone, revoked: true, expires: 1970-01-01T00:00:01Z}}
"""


def test_keys_begin_and_expire_to_the_second(path: Path) -> None:
    keys = Keys(path, TIMES)
    codes = {}
    for now in (99.0, 100.0, 199.0, 200.0, 299.0, 300.0):
        keys.now = now
        for key in ("sk-trial", "sk-before"):
            keys.keys.take_over(keys.file.latest())
            try:
                assert keys.caller(key).team == "research"
                codes[now, key] = ""
            except ApiError as error:
                codes[now, key] = str(error.code)
        assert keys.refusal("sk-gone") == "key_revoked"
    early, late = "key_not_yet_valid", "key_expired"
    assert [codes[each, "sk-trial"] for each in (99.0, 100.0, 200.0, 299.0, 300.0)] == [
        early,
        "",
        "",
        "",
        late,
    ]
    assert [codes[each, "sk-before"] for each in (99.0, 199.0, 200.0, 300.0)] == [early, "", late, late]


def test_a_gateway_all_of_whose_keys_are_bad_is_not_open(path: Path) -> None:
    keys = Keys(path, "keys: [{name: gone, key: sk-gone, revoked: true}]")
    with pytest.raises(ApiError) as refusal:
        keys.keys.check("/v1/models", {})
    assert (refusal.value.status, refusal.value.code) == (401, "invalid_api_key")
    assert keys.keys.guards("/metrics")
    with pytest.raises(ApiError) as refusal:
        keys.keys.check("/v1/models", {b"x-api-key": b"sk-gone"})
    challenge = b'Bearer error="invalid_token", error_description="The API key has been revoked."'
    assert dict(refusal.value.headers)[b"www-authenticate"] == challenge


def test_a_file_that_has_become_invalid_changes_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = Keys(path, ALL)
    for _ in range(3):
        keys.now += 5.0
        keys.write("keys: [{name: search, key: sk-secret, prio: 1}]")
        assert keys.caller("sk-search").priority == 2
    assert caplog.text.count("3 keys stay in effect") == 1
    assert "sk-secret" not in caplog.text
    path.unlink()
    keys.now += 5.0
    assert keys.caller("sk-search").priority == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file: Expected `object`, got `null`"),
        ("keys: [", r"line \d: not valid YAML"),
        ("keys: []", "keys: Expected `array"),
        ("names: []", "the file: Object contains unknown field `names`"),
        ("keys: [{key: a}]", r"keys\[0\]: Object missing required field `name`"),
        ("keys: [{name: a b, key: a}]", r"keys\[0\].name: Expected `str` matching regex"),
        ("keys: [{name: a}]", "a: there is no key; it needs key, or sha256"),
        ("keys: [{name: a, key: a b}]", r"keys\[0\].key: Expected `str` matching regex"),
        ("keys: [{name: a, sha256: abc}]", r"keys\[0\].sha256: Expected `str` matching regex"),
        (
            "keys:\n- name: a\n  key: a\n  models: [m]\n  models: [n]",
            "line 5: the key 'models' is given twice, first in line 4",
        ),
        ("keys: [{name: a, key: &sk-secret &sk-secret}]", "not valid YAML"),
        ("keys: [{name: a, key: !sk-secret x}]", "not valid YAML"),
        ("keys: [{name: a, key: a}, {name: a, key: b}]", "the name 'a' is given twice"),
        ("keys: [{name: a, key: a}, {name: b, key: a}]", "a and b have the same key"),
        (
            "keys: [{name: a, key: a, previous: [{expires: 2030-01-01T00:00:00Z, sha256: "
            + f"{sha256(b'a').hexdigest()}}}]}}]",
            "a has the same key twice",
        ),
        (
            "keys: [{name: a, key: a, previous: [{expires: 2030-01-01T00:00:00Z}]}]",
            r"keys\[0\].previous\[0\]: Object missing required field `sha256`",
        ),
        (
            "keys: [{name: a, key: a, expires: 2030-01-01}]",
            r"keys\[0\].expires: Expected `datetime \| null`, got `date`; it takes a time with its zone",
        ),
        (
            "keys: [{name: a, key: a, expires: 2030-01-01 00:00:00}]",
            r"expires: .*timezone.*; it takes a time",
        ),
        (
            "keys: [{name: a, key: a, not-before: 2030-01-01T00:00:00Z, expires: 2030-01-01T00:00:00Z}]",
            "a: expires is not after not-before",
        ),
        ("keys: [{name: a, key: a, weight: 0}]", r"keys\[0\].weight: Expected `float` > 0"),
        (
            "keys: [{name: a, key: a, budgets: {tokens: 1}}]",
            r"keys\[0\].budgets: .* `tokens`; it takes requests-per-minute, .*, concurrent-requests",
        ),
        ("keys: [{name: a, key: a, budgets: {tokens-per-day: 0}}]", r"tokens-per-day: Expected `int` >= 1"),
    ],
)
def test_mistakes_are_named(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as refusal:
        read_clients(text)
    assert "sk-secret" not in str(refusal.value)


def test_a_file_that_is_invalid_at_the_start(path: Path) -> None:
    path.write_text("keys: []")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=rf"--client-keys-file {path}: keys: Expected"):
        clients_file(str(path))
    with pytest.raises(ConfigError, match="No such file"):
        clients_file(str(path) + ".none")
