"""``penstock gateway --check``: all errors at once, what holds, no secret; nothing listens or is called."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trustme

from penstock.cli.main import main
from penstock.config.gateway import GatewayConfig
from penstock.gateway.checking import certificate_dates
from penstock.gateway.checking.certificate_dates import certificates
from tests import certificates as files
from tests.gateway.processes import WAIT_S, Upstream


def write(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def checked(
    capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0, form: str = "on"
) -> tuple[list[str], str]:
    """The lines of the output, and all of it."""
    assert main(["gateway", "--check", form, *arguments]) == code
    printed = capsys.readouterr()
    assert not printed.err
    return printed.out.splitlines(), printed.out


def test_every_error_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = write(
        tmp_path / "fleet.yaml", "pools: [{name: own, role: x, endpoints: [3]}]\nmodels: {a: {targets: 3}}\n"
    )
    keys = write(tmp_path / "keys.yaml", "keys: [{name: a, key: sk-secret, prio: 1}, {name: b c}]\n")
    lines, text = checked(
        capsys,
        *("--endpoints-file", fleet, "--client-keys-file", keys, "--port", "x", "--scorers", "queu=1"),
        *("--queue-timeout", "3", "--ssl-certfile", "/no", "--access-log-file", "/no/log"),
        *("--endpoints", "http://a:99999", "--model-rewrite", "a=b:0", "--host", "nope.invalid"),
        *("--api-key-file", "/no", "--admin-api-key-file", "/nor"),
        code=2,
    )
    errors = lines[1 : lines.index("")]
    assert lines[0] == f"{len(errors)} errors"
    beginnings = [
        "--port: 'x' is not valid, it takes an integer from 0 to 65535",
        "--queue-timeout 3.0: needs --flow-control",
        "--api-key-file /no: ",
        "--admin-api-key-file /nor: ",
        "--host nope.invalid: this is no address",
        "--ssl-certfile /no: ",
        f"--endpoints-file {fleet}: pools[0].endpoints[0]: Expected `str`, got `int`",
        f"--endpoints-file {fleet}: pools[0].role: Invalid enum value 'x'; it takes both, prefill, decode",
        f"--endpoints-file {fleet}: models.a.targets: Expected `str | object | null`, got `int`",
        "--endpoints http://a:99999: Port out of range",
        "--model-rewrite a=b:0: all weights are 0",
        "--scorers queu=1: there is no scorer 'queu'",
        f"--client-keys-file {keys}: keys[0]: Object contains unknown field `prio`; it takes name, key",
        f"--client-keys-file {keys}: keys[1].name: Expected `str` matching",
        "--access-log-file /no/log: No such file",
    ]
    assert len(errors) == len(beginnings)
    for error, beginning in zip(errors, beginnings, strict=True):
        assert error.strip().startswith(beginning)
    assert lines[-1] == "the gateway cannot start"
    assert "sk-secret" not in text


def test_what_is_said_twice_in_a_file_is_told_with_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = write(
        tmp_path / "fleet.yaml",
        "endpoints: ['ftp://u:pw@h', 'http://b']\n"
        "pools: [{name: own, endpoints: ['http://b'], fallback: [own]}, {name: own}]\n"
        "models: {a: {targets: {b: 0}}, c: {fallback: [c]}}\n",
    )
    lines, _ = checked(capsys, "--endpoints-file", fleet, code=2)
    assert [line.strip().removeprefix(f"--endpoints-file {fleet}: ") for line in lines[1:7]] == [
        "'ftp://***@h' is not http://HOST:PORT",
        "pool 'own' is given twice",
        "pool 'own': its fallback is itself",
        "endpoint 'http://b' is given twice",
        "models: a: all weights are 0",
        "models: c: its fallback is itself",
    ]


def test_what_holds_is_printed_without_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is sent to the endpoint, and the port may be taken: nothing listens."""
    fleet = "pools: [{name: own, endpoints: [URL], fallback: [clout]}, {name: cloud, models: [g*], POOL}]\n"
    fleet += "models: {small: {targets: {own: 0.9, gpt-4: 0.1}, fallback: [cloud], shadow: {cloud: 0.5}}}\n"
    fleet = fleet.replace("POOL", "apis: [chat], max-attempts: 2")
    keys = "keys: [{name: search, key: [sk-secret, sk-other], budgets: {tokens-per-day: 5}, models: [m*]},\n"
    keys += " {name: old, team: lab, key: k, revoked: true}]\n"
    keys += "teams: [{name: lab, budgets: {cost-per-month: 1500.5}}]\n"
    called = []

    def behave(call: object) -> None:
        called.append(call)

    with Upstream(behave) as server, socket.create_server(("127.0.0.1", 0)) as taken:
        server.on_metrics = server.on_models = behave
        arguments = (
            *("--endpoints-file", write(tmp_path / "fleet.yaml", fleet.replace("URL", server.url))),
            *("--client-keys-file", write(tmp_path / "keys.yaml", keys)),
            *("--admin-api-key-file", write(tmp_path / "admins", "admin-secret\n")),
            *("--endpoints", "http://nope.invalid:1", "--port", str(taken.getsockname()[1])),
            *("--endpoint-api-key", "endpoint-secret"),
        )
        lines, text = checked(capsys, *arguments)
        _, as_json = checked(capsys, *arguments, form="json")
    assert not called
    address = server.url.removeprefix("http://")
    for line in (
        "pool own; models: those that its endpoints list; fallback: clout",
        f"  {server.url}  {address}",
        "pool cloud; models: g*; apis: chat; with max-attempts",
        "  http://nope.invalid:1  does not resolve",
        "  small -> own (0.9), gpt-4 (0.1); fallback: cloud; shadow: cloud (0.5)",
        "keys: 2 names, 0 without a name; 1 of administrators",
        "  old; 1 key; models: all; cost-per-month of the team 'lab': 1500.5; refused: revoked",
        "  search; 2 keys; models: m*; tokens-per-day: 5",
        "  --endpoint-api-key ***",
        "ok: the gateway can start",
    ):
        assert line in lines
    assert lines[0] == "2 warnings"
    assert lines[1].startswith("  http://nope.invalid:1: ")
    assert lines[2] == (
        "  fallback 'clout' of pool own: no pool has this name, so an endpoint must list such a model; did "
        "you mean cloud?"
    )
    report = json.loads(as_json)
    assert report["ok"]
    assert report["pools"][0]["endpoints"] == [{"url": server.url, "addresses": [address]}]
    assert "secret" not in text + as_json
    assert "sk-other" not in text + as_json


def test_a_name_that_nobody_can_serve_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = (
        "pools: [{name: own, models: [m], endpoints: ['http://127.0.0.1:9']}]\nmodels: {a: {targets: n}}\n"
    )
    lines, _ = checked(capsys, "--endpoints-file", write(tmp_path / "fleet.yaml", fleet))
    assert lines[:2] == [
        "1 warning",
        "  target 'n' of 'a': no pool has this name, and no endpoint serves such a model",
    ]


def test_certificates_that_end_soon_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = files.make(tmp_path)
    (tmp_path / "key.pem").chmod(0o600)
    given = ("--endpoints", "https://127.0.0.1:9", "--ssl-certfile", made.chain, "--ssl-keyfile", made.key)
    lines, _ = checked(capsys, *given, "--upstream-ca-file", made.authority)
    at = lines.index("certificates")
    assert lines[at + 1].startswith(f"  --ssl-certfile {made.chain}: until ")
    assert lines[at + 2].startswith(f"  --upstream-ca-file {made.authority}: until ")
    config = GatewayConfig(endpoints=["http://a"], ssl_certfile=made.chain, ssl_keyfile=made.key)
    [dates], warnings = certificates(config)
    assert not warnings
    other = trustme.CA().issue_cert("a")
    other.private_key_pem.write_to_path(str(tmp_path / "other.pem"))
    lines, _ = checked(capsys, *given[:-1], str(tmp_path / "other.pem"), code=2)
    assert "MISMATCH" in lines[1].upper()
    monkeypatch.setattr(certificate_dates, "SOON_S", 1e12)
    _, [warning] = certificates(config)
    assert warning == f"--ssl-certfile {made.chain}: the certificate ends on {dates['until'][:10]} " + (
        f"{dates['until'][11:16]} UTC"
    )
    _, [warning] = certificates(config, now=time.time() + 1e12)
    assert "has ended on" in warning


def test_all_that_is_wrong_with_a_pool_is_told_and_when_its_certificates_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = "pools: [{name: far, hosted: true, endpoints: ['https://localhost:1'], key: {file: KEY},"
    pool += " tls: {ca-file: CA}, headers: {x-secret: verysecret}}]\n"
    text = pool.replace("KEY", "/no/key").replace("CA", "/no/ca")
    lines, _ = checked(capsys, "--endpoints-file", write(tmp_path / "fleet.yaml", text), code=2)
    assert lines[0] == "2 errors"
    assert "pool far: key.file /no/key: No such file" in lines[1]
    assert "/no/ca: " in lines[2]
    authority = files.make(tmp_path).authority
    text = pool.replace("KEY", write(tmp_path / "key", "sk-pool\n")).replace("CA", authority)
    lines, text = checked(capsys, "--endpoints-file", write(tmp_path / "fleet.yaml", text))
    assert any(line.startswith(f"  pool far: tls.ca-file {authority}: until ") for line in lines)
    assert any(line.startswith("pool far; ") and "with hosted, key, headers, tls" in line for line in lines)
    assert "verysecret" not in text
    assert "sk-pool" not in text


def test_it_runs_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "gateway", "--check"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={**os.environ, "PENSTOCK_ENDPOINTS": "http://127.0.0.1:9"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "  --endpoints http://127.0.0.1:9  (PENSTOCK_ENDPOINTS)" in done.stdout.splitlines()
