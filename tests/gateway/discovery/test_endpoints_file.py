"""Endpoints, pools and routes in files that change."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import pytest

from penstock.config.errors import ConfigError
from penstock.config.gateway import GatewayConfig
from penstock.gateway.discovery.endpoints_file import (
    EndpointsDocument,
    EndpointSource,
    endpoints_file,
    read_endpoints,
)
from penstock.gateway.models.model_routes import ModelRoute, read_routes
from penstock.gateway.models.pools import Pool
from penstock.gateway.routing.endpoint_discovery import ResolvedEndpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool
from tests.gateway.behaviours import good
from tests.gateway.processes import Upstream, eventually, gateway

FILE = """
# a fleet
endpoints: [http://a:8000/]
pools:
- name: large
  endpoints: [http://b:8000, https://c/]
  models: [large, "claude-*"]
  fallback: [small, spare]
- name: spare
  role: decode
models:
  chat:
    targets: {small: 9, large: 1}   # a canary
    fallback: [spare]
  cheap: {targets: small}
  large:
    shadow: {next: 0.1}
"""


def test_pools_and_routes() -> None:
    document = read_endpoints(FILE)
    large = Pool(
        name="large",
        endpoints=["http://b:8000", "https://c"],
        models=["large", "claude-*"],
        fallback=["small", "spare"],
    )
    assert document == EndpointsDocument(
        endpoints=("http://a:8000",),
        pools=(large, Pool(name="spare", role="decode")),
        routes={
            "chat": ModelRoute(targets={"small": 9, "large": 1}, fallback=("spare",)),
            "cheap": ModelRoute(targets={"small": 1}),
            "large": ModelRoute(shadow={"next": 0.1}),
        },
    )
    assert list(document.urls()) == ["http://a:8000", "http://b:8000", "https://c"]
    assert document.pool_of() == {"http://b:8000": large, "https://c": large}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("pools: [{name: a}, {name: a}]", "pool 'a' is given twice"),
        ("pools: [{name: a b}]", "matching regex"),
        ("pools: [{name: a, fallback: [a]}]", "pool 'a': its fallback is itself"),
        ("pools: [{name: a, role: cook}]", r"pools\[0\].role: .* 'cook'; it takes both, prefill, decode"),
        (
            "pools: [{name: a, model: m}]",
            r"pools\[0\]: .* `model`; it takes name, endpoints, models, fallback",
        ),
        ("pool: []", "the file: .* unknown field `pool`; it takes endpoints, pools, models"),
        (
            "models: {a: {}, m.n: {targets: {b: 1, c: x}}}",
            "models.m.n.targets.c: Expected `float`, got `str`",
        ),
        ("models: {3: {}}", "a key of models: Expected `str`, got `int`"),
        ("models: {m: small}", "models.m: Expected `object`, got `str`"),
        ("pools: [{name: a, endpoints: [b:1]}]", "'b:1' is not http://HOST:PORT"),
        (
            "endpoints: [http://a]\npools: [{name: a, endpoints: [http://a/]}]",
            "endpoint 'http://a' is given twice",
        ),
        ("models: {m: {targets: {a: 0}}}", "models: m: all weights are 0"),
        ("models: {m: {targets: a}, m: {targets: b}}", "line 1: the key 'm' is given twice, first in line 1"),
        (
            "pools: [{name: a}]\nmodels: {}\npools: [{name: b}]",
            "line 3: the key 'pools' is given twice, first in line 1",
        ),
        ("models: {m: &m {targets: a}, n: {<<: *m, targets: b}, o: {<<: *m, <<: *m}}", "the key '<<' is"),
        ("models: {m: {targets: {a: -1}}}", "models: m: the weight -1 of a is not allowed"),
        ("models: {m: {targets: {a: .inf}}}", "must be finite and at least 0"),
        ("models: {m: {fallback: [m]}}", "models: m: its fallback is itself"),
        ("models: {m: {shadow: {a: 2}}}", "Expected `float` <= 1"),
        ("models: {m: {shadow: {a: 0.6, b: 0.6}}}", "models: m: the shares are more than 1 together"),
    ],
)
def test_files_that_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_endpoints(text)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"hosted": True}, "pool a: a hosted API needs key"),
        ({"key": {}}, "pool a: key needs either file or env"),
        ({"key": {"file": "f", "env": "e"}}, "pool a: key needs either file or env"),
        ({"key": {"file": "/absent"}}, "pool a: key.file /absent: No such file"),
        ({"key": {"env": "ABSENT_KEY"}}, "pool a: key.env ABSENT_KEY: it has no key"),
        ({"key": {"env": "TWO_WORDS"}}, "pool a: key.env TWO_WORDS: its key has other characters than"),
        (
            {"key": "sk-secret"},
            "pool a: key takes {file: FILE}, .*; the file itself may have no key",
        ),
        ({"key": {"file": "f", "header": "a b"}}, r"pools\[0\].key.header: .* matching regex"),
        (
            {"headers": {"X-Api-Key": "k"}},
            "pool a: headers may not have X-Api-Key: key says",
        ),
        ({"key": {"env": "A_KEY", "header": "Host"}}, "pool a: key.header host: the gateway sets it itself"),
        (
            {"key": {"env": "A_KEY", "header": "X-K"}, "headers": {"x-k": "k"}},
            "headers may not have x-k: key",
        ),
        ({"headers": {"Host": "h"}}, "pool a: headers may not have Host, which the gateway sets itself"),
        ({"headers": {"x": "a\r\nb: c"}}, "matching regex"),
        ({"tls": {"ca-file": "/absent"}}, "pool a: tls.ca-file /absent: .*No such file"),
        ({"tls": {"key-file": "k"}}, "pool a: tls.key-file needs tls.cert-file"),
        ({"overflow": {"waiting": 1}, "hosted": True, "key": "none"}, "pool a: overflow needs the queues of"),
        ({"overflow": {}}, r"pools\[0\].overflow: Object missing required field `waiting`"),
        ({"timeouts": {"total": 7200}}, "pool a: timeouts.total 7200 is more than --request-timeout 3600"),
        ({"timeouts": {"first_token": 1}}, "it takes connect, first-token, event, total"),
        ({"max-attempts": 0}, r"pools\[0\].max-attempts: Expected `int` >= 1"),
        ({"endpoints": ["https://a/v1?key=k"]}, r"'https://a/v1\?\*\*\*' is not http://HOST:PORT or http://"),
    ],
)
def test_connections_that_are_refused(
    fields: dict[str, object], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWO_WORDS", "sk secret")
    monkeypatch.setenv("A_KEY", "sk-secret")
    path = tmp_path / "endpoints.yaml"
    path.write_bytes(msgspec.json.encode({"pools": [{"name": "a", "endpoints": ["https://a"], **fields}]}))
    with pytest.raises(ConfigError, match=problem) as raised:
        EndpointSource(GatewayConfig(endpoints_file=str(path)))
    assert "secret" not in str(raised.value)


def test_accounts_at_one_api_are_pools(tmp_path: Path) -> None:
    url, path = "https://api.example/v1", tmp_path / "endpoints.yaml"
    pools = [{"name": name, "hosted": True, "key": "client", "endpoints": [url]} for name in ("a", "b")]
    path.write_bytes(msgspec.json.encode({"pools": [*pools, {"name": "own", "endpoints": ["http://own"]}]}))
    source = EndpointSource(GatewayConfig(endpoints_file=str(path)))
    document = source.document()
    assert document.urls() == [url, "http://own"]
    assert document.looked_up() == ["http://own"]
    pool = EndpointPool(source.upstreams.default, lambda endpoint: None)
    pool.update(document.reached(document.hosted()))
    assert [(each.url, each.pool) for each in pool.endpoints] == [(f"{url}#a", "a"), (f"{url}#b", "b")]
    for other in ({"endpoints": [url]}, {"hosted": True, "endpoints": [url, url]}):
        with pytest.raises(ValueError, match=f"endpoint '{url}' is given twice"):
            read_endpoints(msgspec.json.encode({"pools": [*pools, {"name": "c", **other}]}).decode())


def test_what_stays_the_same_keeps_its_connections(tmp_path: Path) -> None:
    """Servers get connections of their own only where their pool says something else than before."""
    key, path = tmp_path / "key", tmp_path / "endpoints.yaml"
    key.write_text("k\n")

    def source_of(**fields: object) -> dict[str, object]:
        return {"name": "a", "endpoints": ["http://a", "http://a/v1"], "key": {"file": str(key)}, **fields}

    path.write_bytes(msgspec.json.encode({"pools": [source_of(), {"name": "b", "endpoints": ["http://b"]}]}))
    source = EndpointSource(GatewayConfig(endpoints_file=str(path)))
    first = source.document().upstreams
    assert first["a"][""] is not first["a"]["/v1"]
    assert first["b"] == {"": source.upstreams.default}
    for fields, same in (({"models": ["m"]}, True), ({"max-attempts": 1}, False)):
        changed = tmp_path / "changed"
        changed.write_bytes(msgspec.json.encode({"pools": [source_of(**fields)]}))
        changed.replace(path)
        assert (source.document().upstreams["a"] == first["a"]) is same
    before = source.document()
    changed.write_bytes(msgspec.json.encode({"pools": [source_of(key={"file": "/absent"})]}))
    changed.replace(path)
    assert source.document() is before


def test_routes_of_options() -> None:
    assert read_routes(["chat=small:9,large:1", "a=b"], ["chat=tiny,spare"], ["large=next:0.1"]) == {
        "chat": ModelRoute(targets={"small": 9, "large": 1}, fallback=("tiny", "spare")),
        "a": ModelRoute(targets={"b": 1}),
        "large": ModelRoute(shadow={"next": 0.1}),
    }


def test_names_with_a_tag_in_options() -> None:
    """As Ollama has them: what stands after the last colon is a weight if it is a number."""
    assert read_routes(["chat=llama3.2:latest", "a=qwen3:0.6b:3,phi4:14:1"], [], ["b=qwen3:0.6b:0.5"]) == {
        "chat": ModelRoute(targets={"llama3.2:latest": 1}),
        "a": ModelRoute(targets={"qwen3:0.6b": 3, "phi4:14": 1}),
        "b": ModelRoute(shadow={"qwen3:0.6b": 0.5}),
    }


@pytest.mark.parametrize(
    ("rewrites", "fallbacks", "shadows", "problem"),
    [
        (["a=b:1.2.3"], [], [], "--model-rewrite a=b:1.2.3: '1.2.3' is not a number"),
        (["a=b:0,c:0"], [], [], "--model-rewrite a=b:0,c:0: all weights are 0"),
        (["a=b", "a=c"], [], [], "--model-rewrite a=c: a has one already"),
        (["a=b:9,c,b:1"], [], [], "--model-rewrite a=b:9,c,b:1: b is given twice"),
        ([], [], ["a=b:0.5,b:0.1"], "--model-shadow a=b:0.5,b:0.1: b is given twice"),
        ([], ["a=b,a"], [], "--model-fallback a=b,a: its fallback is itself"),
        ([], [], ["a=b:1.5"], "--model-shadow a=b:1.5: the share 1.5 of b is not allowed"),
    ],
)
def test_options_that_are_refused(
    rewrites: list[str], fallbacks: list[str], shadows: list[str], problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_routes(rewrites, fallbacks, shadows)
    assert problem in str(caught.value)


@pytest.mark.parametrize("rewrite", ["a=b,", "a=b,:2", "a=,b", "a=b,c=d"])
def test_a_target_has_a_name(rewrite: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="model_rewrite"):
        msgspec.convert({"model_rewrite": [rewrite]}, GatewayConfig)


TWO = ["http://a:8000", "https://b.example"]


@pytest.mark.parametrize(
    "text",
    [
        "http://a:8000\nhttps://b.example/\n",
        "# ours\nhttp://a:8000  # first\n\n  # between\nhttps://b.example/",
        "- http://a:8000\n- 'https://b.example/'  # quoted\n",
        '["http://a:8000", "https://b.example/"]',
        "# fleet\nendpoints:\n  - http://a:8000\n  # rest\n  - https://b.example/\n",
    ],
)
def test_ways_to_write_a_file(text: str) -> None:
    assert list(read_endpoints(text).endpoints) == TWO


@pytest.mark.parametrize("text", ["", "# nobody\n", "endpoints: []", "[]"])
def test_a_file_may_name_nobody(text: str) -> None:
    assert read_endpoints(text) == EndpointsDocument()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a:8000", "'a:8000' is not http://HOST:PORT"),
        ("http://user:sesame@a", r"'http://\*\*\*@a' is not http://HOST:PORT"),
        (
            "endpoints:\n- http://a\n- [sesame",
            r"^line [34]: not valid YAML: [^:\n]*expected [^:\n]*$",
        ),
        ("[" * 100_000, "nested too deeply"),
        ("- " * 100_000, "nested too deeply"),
        ("- http://a/path", "'http://a/path' is not"),
        ("- http://a:99999", "'http://a:99999' is not"),
        ("servers: [http://a]", "unknown field `servers`"),
        ("endpoints: http://a", "Expected `array`"),
        ("- {url: http://a}", "Expected `str`"),
        ("- http://u:pw@a:1", r"^'http://\*\*\*@a:1' is not"),
        ("[http://u:pw@a", r"^line \d: not valid YAML: [^:@]* expected ',' or '\]'[^@]*$"),
        ("# ours\n# first\n\nendpoints:\n# second\n- [", r"line [67]: not valid YAML: "),
    ],
)
def test_lists_that_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_endpoints(text)


def write(path: Path, text: str, *, at: int) -> None:
    """``at``: seconds of its modification time, so that no two are alike."""
    path.write_text(text)
    os.utime(path, (at, at))


def test_a_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "endpoints.yaml"
    write(path, "- http://a:1\n", at=1)
    file = endpoints_file(str(path))
    assert file.latest().urls() == ["http://a:1"]
    write(path, "- nonsense\n", at=2)
    assert file.latest().urls() == ["http://a:1"], "the last good one counts"
    write(path, "- http://c:1\n", at=3)
    assert file.latest().urls() == ["http://c:1"]
    assert caplog.messages == [
        f"--endpoints-file {path}: 'nonsense' is not http://HOST:PORT; "
        "1 endpoints, 0 pools and 0 names of models stay in effect",
        f"--endpoints-file {path}: 1 endpoints, 0 pools and 0 names of models are in effect again",
    ]


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("", ["http://a:1", "http://b:8000"]),
        ("# all of them\n", ["http://a:1", "http://b:8000"]),
        ("http://a:1\nhttp://b:80", ["http://a:1", "http://b:8000"]),
        ("http://a:1\nhttp://b:8", ["http://a:1", "http://b:8000"]),
        ("http://a:1\n", ["http://a:1"]),
        ("endpoints: []\n", []),
        ("[]\n", []),
    ],
)
@pytest.mark.parametrize("end", ["\n", ""])
def test_a_file_that_is_cut_takes_no_endpoint_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, urls: list[str], end: str
) -> None:
    path = tmp_path / "endpoints"
    write(path, f"http://a:1\nhttp://b:8000{end}", at=1)
    file = endpoints_file(str(path))
    write(path, text, at=2)
    assert file.latest().urls() == urls
    assert ("2 endpoints, 0 pools and 0 names of models stay in effect" in caplog.text) == (len(urls) == 2)


def test_a_first_file_may_be_empty_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "endpoints"
    write(path, "# soon\n", at=1)
    file = endpoints_file(str(path))
    assert f"{path} is empty: 0 endpoints, 0 pools and 0 names of models until it is not" in caplog.text
    write(path, "http://a:1\n", at=2)
    assert file.latest().urls() == ["http://a:1"]


def test_a_first_file_must_be_good(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--endpoints-file .*No such file"):
        endpoints_file(str(tmp_path / "none"))


def test_a_gateway_follows_its_file(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    with Upstream(good) as one, Upstream(good) as other:
        path.write_text(f"endpoints:\n- {one.url}\n")
        with gateway(options=("--endpoints-file", str(path))) as front:
            assert front.complete().status_code == 200
            assert len(one.calls) == 1
            path.write_text(f"endpoints:\n- {other.url}\n# moved\n")
            eventually(lambda: front.counts("endpoint_up") == {other.url: 1})
            assert front.complete().status_code == 200
            assert (len(one.calls), len(other.calls)) == (1, 1)


def test_endpoints_have_name_and_role_of_their_pool() -> None:
    document = read_endpoints(
        "endpoints: [http://a:1]\n"
        "pools:\n"
        "- {name: p, role: prefill, endpoints: [http://b:1]}\n"
        "- {name: d, role: decode, endpoints: [http://c:1]}\n"
    )
    found = document.in_pools(ResolvedEndpoint(url) for url in document.urls())
    assert [(each.url, each.pool, each.role) for each in found] == [
        ("http://a:1", "", "both"),
        ("http://b:1", "p", "prefill"),
        ("http://c:1", "d", "decode"),
    ]
    with pytest.raises(ValueError, match="Invalid enum value 'encode'"):
        read_endpoints("pools: [{name: p, role: encode}]")
