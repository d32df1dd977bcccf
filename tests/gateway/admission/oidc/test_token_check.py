"""Tokens that are good, and those that attackers send."""

from __future__ import annotations

import base64
import hmac
import json
from typing import Any

import msgspec
import pytest

from penstock.gateway.admission.clients_file import read_clients
from penstock.gateway.admission.oidc.issuer_entry import IssuerEntry
from penstock.gateway.admission.oidc.signing_keys import SigningKeys
from penstock.gateway.admission.oidc.token_check import (
    MAX_TOKEN_BYTES,
    GoodToken,
    TokenCheck,
    TokenRefused,
)
from penstock.gateway.requests.caller import Budget
from tests.gateway.token_issuer import EC, ED, OTHER_RSA, RSA, public_jwk, signed

ISSUER = "https://issuer"
NOW = 1_900_000_000.0
PEM = "kid-of-rsa"
KEYS = [
    public_jwk(RSA, kid=PEM),
    public_jwk(EC, kid="ec", alg="ES256"),
    public_jwk(ED, kid="ed"),
    public_jwk(RSA, kid="for-encryption", use="enc"),
    {"kty": "oct", "kid": "shared", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3JldA", "alg": "HS256"},
    {"kty": "RSA", "kid": "broken", "n": "!", "e": "AQAB"},
]


def keys(listed: list[dict[str, Any]]) -> SigningKeys:
    return SigningKeys(msgspec.json.encode({"keys": listed}))


ALL = keys(KEYS)


def entry(**fields: Any) -> IssuerEntry:
    return msgspec.convert({"issuer": ISSUER, "audience": "penstock", **fields}, IssuerEntry)


def check(token: str | bytes, now: float = NOW, keys: SigningKeys | None = ALL, **fields: Any) -> GoodToken:
    checked = TokenCheck({ISSUER: entry(**fields)}, lambda issuer: keys, frozenset({"taken"}))
    return checked.check(token if isinstance(token, bytes) else token.encode(), now)


def refusal(token: str | bytes, **fields: Any) -> str:
    """The code."""
    with pytest.raises(TokenRefused) as refused:
        check(token, **fields)
    for secret in token.split(b"." if isinstance(token, bytes) else "."):  # type: ignore[arg-type]
        text = secret.decode("latin-1") if isinstance(secret, bytes) else secret
        assert len(text) < 8 or text not in refused.value.text
    return refused.value.code


def claims(**said: Any) -> dict[str, Any]:
    return {"iss": ISSUER, "aud": "penstock", "sub": "alice", "exp": int(NOW) + 60} | said


def part(value: Any) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def test_claims_and_groups_say_what_a_client_may() -> None:
    names = {
        "name": "preferred_username",
        "team": "org.team",
        "groups": "realm_access.roles",
        "models": "https://example.com/models",
        "priority": "priority",
        "budgets": "limits",
    }
    terms: list[dict[str, Any]] = [
        {"groups": ["admins"], "models": ["*"], "priority": 9},
        {"groups": ["staff", "guests"], "models": ["small"], "weight": 2, "team": "all"},
    ]
    settings = {"claims": names, "group-terms": terms, "prefix": "sso:", "team": "none", "priority": 1}
    said = claims(preferred_username="bob", realm_access={"roles": ["other", "staff"]})
    good = check(signed(said, kid=PEM), **settings)
    assert (good.caller.id, good.caller.name, good.caller.team) == ("sso:bob", "sso:bob", "all")
    assert (good.caller.models, good.caller.priority, good.caller.weight) == (("small",), 1, 2.0)
    assert good.expires == NOW + 60 + 30
    said |= {
        "org": {"team": "research team"},
        "https://example.com/models": "a b",
        "priority": -5,
        "limits": {"requests-per-minute": 3, "concurrent-requests": 2},
    }
    caller = check(signed(said, kid=PEM), **settings).caller
    assert (caller.team, caller.models, caller.priority) == ("research team", ("a", "b"), -5)
    assert caller.budgets == (Budget("requests-per-minute", 3, 60.0),)
    assert caller.most_concurrent == 2
    assert refusal(signed(said | {"realm_access": {"roles": ["strangers"]}}, kid=PEM), **settings) == (
        "token_groups"
    )


@pytest.mark.parametrize(
    ("key", "algorithm", "kid"),
    [
        (RSA, "RS256", PEM),
        (RSA, "RS512", PEM),
        (RSA, "PS256", PEM),
        (EC, "ES256", "ec"),
        (ED, "EdDSA", "ed"),
        (EC, "ES256", None),
    ],
)
def test_algorithms_with_public_keys(key: Any, algorithm: str, kid: str | None) -> None:
    header = {} if kid is None else {"kid": kid}
    assert check(signed(claims(), key, algorithm, **header)).caller.name == "alice"


def test_other_algorithms_are_refused() -> None:
    body = f"{part({'alg': 'none', 'kid': PEM})}.{part(claims())}."
    assert refusal(body) == "token_algorithm"
    for alg in ("None", "NONE", "nOnE", "HS256", "HS512", "ES256K", "RSA1_5", ""):
        assert refusal(f"{part({'alg': alg, 'kid': PEM})}.{part(claims())}.{part(b'x')}") == "token_algorithm"
    token = signed(claims(), RSA, "RS512", kid=PEM)
    assert refusal(token, algorithms=["RS256"]) == "token_algorithm"


@pytest.mark.parametrize("kid", [PEM, "shared", "ec"])
def test_the_public_key_is_no_secret(kid: str) -> None:
    """HS256 with the text of a public key, which whoever reads the set has."""
    jwk = json.dumps(KEYS[0]).encode()
    pem = RSA.public_key().public_bytes(*_pem_format())
    for secret in (jwk, pem, b"secret-secret-secret-secret-secret"):
        start = f"{part({'alg': 'HS256', 'typ': 'JWT', 'kid': kid})}.{part(claims())}"
        mac = hmac.digest(secret, start.encode(), "sha256")
        assert refusal(f"{start}.{part(mac)}") == "token_algorithm"
        lying = f"{part({'alg': 'RS256', 'typ': 'JWT', 'kid': kid})}.{part(claims())}"
        code = refusal(f"{lying}.{part(hmac.digest(secret, lying.encode(), 'sha256'))}")
        assert code == ("token_signature" if kid == PEM else "token_unknown_key")


def _pem_format() -> tuple[Any, Any]:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return Encoding.PEM, PublicFormat.SubjectPublicKeyInfo


@pytest.mark.parametrize(
    "header",
    [
        {"jwk": public_jwk(OTHER_RSA)},
        {"jku": "https://attacker/keys"},
        {"x5u": "https://attacker/certificate"},
        {"x5c": ["MIIB"]},
    ],
)
def test_keys_that_a_token_brings_are_not_used(header: dict[str, Any]) -> None:
    assert refusal(signed(claims(), OTHER_RSA, kid=PEM, **header)) == "token_signature"
    assert refusal(signed(claims(), OTHER_RSA, **header)) == "token_signature"
    assert check(signed(claims(), RSA, kid=PEM, **header)).caller.name == "alice"


@pytest.mark.parametrize(
    "kid",
    [
        "../../../dev/null",
        "/etc/passwd",
        "' OR 1=1 --",
        "a" * 4000,
        "",
        "\x00",
        "🔑",
        "for-encryption",
        "broken",
    ],
)
def test_other_key_ids(kid: str) -> None:
    assert refusal(signed(claims(), kid=kid)) == "token_unknown_key"


def test_a_key_is_for_its_own_algorithm() -> None:
    assert refusal(signed(claims(), RSA, "RS256", kid="ec")) == "token_unknown_key"
    assert refusal(signed(claims(), EC, "ES256", kid=PEM)) == "token_unknown_key"
    one = keys([public_jwk(RSA, kid="a", alg="RS256"), public_jwk(OTHER_RSA, kid="b")])
    assert refusal(signed(claims(), RSA, "PS256", kid="a"), keys=one) == "token_unknown_key"
    assert refusal(signed(claims(), RSA), keys=one) == "token_unknown_key"  # which of two, nobody says
    assert refusal(signed(claims(), RSA, kid=PEM), keys=None) == "token_keys_unavailable"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({"exp": int(NOW) - 31}, "token_expired"),
        ({"exp": NOW - 30}, "token_expired"),
        ({"nbf": NOW + 31}, "token_not_yet_valid"),
        ({"iat": NOW + 31}, "token_not_yet_valid"),
        ({"exp": str(int(NOW) + 60)}, "token_malformed"),
        ({"exp": None}, "token_malformed"),
        ({"exp": True}, "token_malformed"),
        ({"exp": [int(NOW) + 60]}, "token_malformed"),
        ({"exp": 10**30}, "token_claims"),
        ({"exp": -1}, "token_claims"),
        ({"exp": 1e300}, "token_claims"),
        ({"nbf": "0"}, "token_malformed"),
        ({"iss": "https://other"}, "token_issuer"),
        ({"iss": ISSUER + "/"}, "token_issuer"),
        ({"iss": [ISSUER]}, "token_malformed"),
        ({"aud": "other"}, "token_audience"),
        ({"aud": ["other", "penstock2"]}, "token_audience"),
        ({"aud": []}, "token_audience"),
        ({"aud": {"penstock": 1}}, "token_malformed"),
        ({"aud": None}, "token_malformed"),
        ({"sub": ""}, "token_claims"),
        ({"sub": 7}, "token_claims"),
        ({"sub": "a" * 129}, "token_claims"),
        ({"sub": "a\nkey: b"}, "token_claims"),
        ({"sub": "a\u202eb"}, "token_claims"),
        ({"sub": "taken"}, "token_claims"),
    ],
)
def test_claims_that_are_wrong(said: dict[str, Any], code: str) -> None:
    assert refusal(signed(claims(**said), kid=PEM)) == code


@pytest.mark.parametrize(
    "said",
    [{"aud": ["x", "penstock"]}, {"exp": NOW + 0.5}, {"exp": NOW - 29}, {"nbf": NOW + 29}, {"sub": "Zoë 🦊"}],
)
def test_claims_that_are_good(said: dict[str, Any]) -> None:
    check(signed(claims(**said), kid=PEM))


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ({"m": []}, {"models": "m"}),
        ({"m": [1]}, {"models": "m"}),
        ({"m": {"a": 1}}, {"models": "m"}),
        ({"m": ["a"] * 65}, {"models": "m"}),
        ({"p": "5"}, {"priority": "p"}),
        ({"p": 1000}, {"priority": "p"}),
        ({"p": True}, {"priority": "p"}),
        ({"b": {"tokens": 1}}, {"budgets": "b"}),
        ({"b": {"tokens-per-day": -1}}, {"budgets": "b"}),
        ({"t": ["a"]}, {"team": "t"}),
    ],
)
def test_a_claim_that_cannot_be_used_grants_nothing(said: dict[str, Any], names: dict[str, str]) -> None:
    """Not less than it says, and not what tokens without it get."""
    assert refusal(signed(claims(**said), kid=PEM), claims=names) == "token_claims"


@pytest.mark.parametrize(
    "added",
    [
        b'"sub": "bob"',
        b'"s\\u0075b": "bob"',
        b'"org": {"team": "a", "team": "b"}',
        b'"org": {"x": 1, "unit": {"team": "a", "t\\u0065am": "b"}}',
    ],
)
def test_a_claim_that_is_given_twice(added: bytes) -> None:
    payload = json.dumps(claims()).encode()[:-1] + b", " + added + b"}"
    names = {"team": "org.team", "groups": "org.unit.team"}
    check(signed(claims(org={"team": "a", "unit": {"team": "b"}}), kid=PEM), claims=names)
    assert refusal(signed(payload, kid=PEM), claims=names) == "token_claims"


def test_claims_that_are_not_utf8() -> None:
    payload = json.dumps(claims(sub="alic!", other="!")).encode()
    check(signed(payload, kid=PEM))
    for wrong in (payload.replace(b"alic!", b"alic\xff"), payload.replace(b'"!"', b'"\xff"')):
        assert refusal(signed(wrong, kid=PEM)) == "token_malformed"


def test_text_that_is_no_token() -> None:
    good = signed(claims(), kid=PEM)
    start, body, signature = good.split(".")
    nested = b'{"alg":"RS256","x":' + b"[" * 6000 + b"]" * 6000 + b"}"
    for token in (
        f"{start}.{body}",
        f"{good}.{signature}",
        f"{part(nested)}.{body}.{signature}",
        f"{start}.{part(b'[' * 9000)}.{signature}",
        f"{part(b'null')}.{body}.{signature}",
        f"{part([])}.{body}.{signature}",
        f"{part({'alg': ['RS256']})}.{body}.{signature}",
        f"{part({'alg': 'RS256', 'kid': 7})}.{body}.{signature}",
        f"{part(b'{')}.{body}.{signature}",
        f"{part(bytes([0xFF]) * 9)}.{body}.{signature}",
        f"{start}.{body}.!!!!",
        f"{start}.{body}. ",
        f"{start}.{part(claims()) + 'A' * MAX_TOKEN_BYTES}.{signature}",
        signed(claims(), kid=PEM, crit=["exp"]),
        signed(claims(), kid=PEM, typ="logout+jwt"),
        b"eyJ\xff.\xff.\xff",
    ):
        assert refusal(token) == "token_malformed", token
    for wrong in (f"{start}.{part(claims(sub='admin'))}.{signature}", f"{start}.{body}.{part(b'a' * 256)}"):
        assert refusal(wrong) == "token_signature"
    twice = json.dumps(claims()).encode()[:-1] + b', "sub": "admin"}'
    assert refusal(signed(twice, kid=PEM)) == "token_claims"
    assert check(signed(claims(), kid=PEM, typ="at+JWT")).caller.name == "alice"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x", "it is not JSON"),
        ("[" * 5000, "it is not JSON"),
        ("[]", "it is no JSON Web Key Set"),
        ('{"keys": {}}', "it is no JSON Web Key Set"),
        ('{"keys": []}', "it has no key that can check a signature"),
        ('{"keys": [1, {"kty": "RSA"}, {"kty": "OKP", "crv": "X25519", "x": ""}]}', "it has no key"),
        (json.dumps({"keys": [KEYS[4]]}), "it has no key"),
        (json.dumps({"keys": [{}] * 101}), "more than 100 keys"),
    ],
)
def test_sets_without_keys(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        SigningKeys(text.encode())


@pytest.mark.parametrize(
    ("issuers", "problem"),
    [
        ("[{issuer: 'https://a'}]", r"issuers\[0\]: Object missing required field `audience`"),
        ("[]", "issuers: Expected `array"),
        ("[{issuer: 'http://a.example', audience: x}]", r"issuers\[0\]: it takes https://: over http://"),
        ("[{issuer: 'https://u:p@a', audience: x}]", r"issuers\[0\]: its URL has credentials"),
        ("[{issuer: a, audience: x}]", r"issuers\[0\]: it takes a URL"),
        ("[{issuer: a, audience: x, jwks: 'http://10.0.0.1/k'}]", r"issuers\[0\]: it takes https://"),
        (
            "[{issuer: a, audience: x, jwks: /k, algorithms: [HS256]}]",
            "'HS256'; it takes RS256",
        ),
        ("[{issuer: a, audience: x, jwks: /k, claims: {nam: x}}]", "`nam`; it takes name, team, groups"),
        ("[{issuer: a, audience: x, jwks: /k, group-terms: [{groups: [g]}]}]", "group-terms needs claims"),
        ("[{issuer: a, audience: x, jwks: /k}, {issuer: a, audience: y, jwks: /k}]", "is that of issuers"),
        (
            "[{issuer: a, audience: x, jwks: /k, prefix: a}, {issuer: b, audience: y, jwks: /k, prefix: ab}]",
            r"issuers\[1\].prefix: begins as that of issuers\[0\]",
        ),
    ],
)
def test_mistakes_in_the_file_are_named(issuers: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_clients(f"issuers: {issuers}")


def test_the_file_may_have_issuers_alone() -> None:
    known = read_clients("issuers: [{issuer: 'http://127.0.0.1:1', audience: [x, y]}]")
    assert (known.issuers[0].audiences, str(known)) == (["x", "y"], "0 keys and 1 issuers")
    with pytest.raises(ValueError, match="the file: it needs keys, or issuers"):
        read_clients("{}")
