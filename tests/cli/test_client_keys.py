"""``penstock keys list``, ``add``, ``rotate``, ``expire``, ``revoke``, ``show`` and ``check``."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.gateway.admission.clients_file import read_clients
from penstock.gateway.admission.keys_editor import change_entry
from tests.gateway.token_issuer import OTHER_RSA, issuer, signed

LAYOUTS = {
    "blocks": """\
# Who may use the gateway.
keys:
  - name: search   # the team in Zurich
    # a comment within
    key: sk-old    # do not mail
    models: [chat]

  # the next one
  - key:
      - sk-b1
      - sk-b2   # for the transition
    name: bulk
# the end
""",
    "dashes at the margin": "keys:\n- sha256: {bulk}\n  name: bulk\n- name: search\n  key: sk-old\n"
    "  models: [chat]",
    "one line each": "keys:\n  - {name: search, key: sk-old, models: [chat]}\n  - {key: sk-b1, name: bulk}\n",
    "one line": "keys: [{name: search, models: [chat], key: sk-old}, {name: bulk, key: [sk-b1]}]",
    "quoted": 'keys:\n  - "name": "search"\n    "models": ["chat"]\n    key: "sk-old"\n'
    "  - name: bulk\n    key: sk-b1\n",
}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(request.param.replace("{bulk}", sha256(b"sk-b1").hexdigest()))
    path.chmod(0o640)
    return path


def keys(path: Path, *words: str) -> int:
    return main(["keys", words[0], *words[1:], "--client-keys-file", str(path)])


def state(path: Path, key: str) -> str:
    """Why a key is refused; empty: it is good."""
    grant = read_clients(path.read_text()).grants.get(sha256(key.encode()).digest())
    return "unknown" if grant is None else grant.refusal(time.time())


def comments(text: str) -> list[str]:
    return [line.partition("#")[2] for line in text.splitlines() if "#" in line]


def test_a_client_s_key_is_rotated(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = path.read_text()
    assert keys(path, "rotate", "search", "--grace", "1h") == 0
    first = capsys.readouterr()
    new = first.out.strip()
    assert new.startswith("sk-")
    assert new not in first.err + path.read_text()
    assert [state(path, key) for key in ("sk-old", new, "sk-b1")] == ["", "", ""]
    assert "sk-old" not in path.read_text()
    assert comments(path.read_text()) == comments(said)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert keys(path, "rotate", "search", "--grace", "now") == 0
    newer = capsys.readouterr().out.strip()
    assert [state(path, key) for key in ("sk-old", new, newer)] == ["", "unknown", ""]
    for _ in range(3):
        assert keys(path, "rotate", "bulk") == 0
    assert state(path, "sk-b1") == ""
    assert read_clients(path.read_text()).grants[sha256(newer.encode()).digest()].caller.models == ("chat",)
    assert os.listdir(path.parent) == ["keys.yaml"]


def test_a_client_expires_and_is_revoked(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = path.read_text()
    for name, key in (("search", "sk-old"), ("bulk", "sk-b1")):
        assert keys(path, "expire", name) == 0
        assert state(path, key) == "expired"
        assert keys(path, "expire", name, "--at", "2099-12-31T18:00:00+01:00") == 0
        assert state(path, key) == ""
        assert keys(path, "expire", name, "--at", "never") == 0
        assert keys(path, "revoke", name) == 0
        assert state(path, key) == "revoked"
        assert keys(path, "revoke", name, "--undo") == 0
        assert state(path, key) == ""
    assert path.read_text().rstrip() == said.rstrip()


def test_clients_are_added_listed_and_shown(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = path.read_text()
    given = ["--team", "lab", "--expires", "30d", "--models", "a", "b-*", "--priority", "-1"]
    given += [
        "--weight",
        "2.5",
        "--budgets",
        "requests-per-minute=5",
        "concurrent-requests=2",
        "cost-per-month=12.50",
    ]
    assert keys(path, "add", "trial@1", *given) == 0
    key = capsys.readouterr().out.strip()
    assert state(path, key) == ""
    assert comments(path.read_text()) == comments(said)
    assert keys(path, "revoke", "bulk") == 0
    capsys.readouterr()
    assert keys(path, "show", "trial@1", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["name"], shown["team"], shown["models"]) == ("trial@1", "lab", ["a", "b-*"])
    assert (shown["priority"], shown["weight"]) == (-1, 2.5)
    assert shown["budgets"] == {
        "requests-per-minute": 5,
        "concurrent-requests": 2,
        "cost-per-month": "12.5",
    }
    assert shown["keys"] == [{"sha256": sha256(key.encode()).hexdigest()[:12] + "…", "state": "valid"}]
    assert keys(path, "list") == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "revoked" in rows["bulk"]
    assert "a,b-*" in rows["trial@1"]
    assert not any(secret in str(rows) for secret in ("sk-", key))
    assert keys(path, "add", "search") == 2
    assert "the name 'search' is given already" in capsys.readouterr().err


def test_the_first_client_makes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"
    assert keys(path, "add", "first") == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert state(path, capsys.readouterr().out.strip()) == ""
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    assert keys(link, "revoke", "first") == 0
    assert link.is_symlink()
    assert state(path, "sk-x") == "unknown"
    assert "revoked: true" in path.read_text()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["rotate"], "NAME is missing"),
        (["rotate", "nobody"], "there is no key with the name 'nobody'"),
        (["rotate", "search", "--grace", "never"], "the keys before would be valid for ever"),
        (["show", "nobody"], "there is no key with the name 'nobody'"),
        (["expire", "search", "--at", "soon"], "--at: 'soon' is not valid, it takes 30d"),
        (["expire", "search", "--at", "2030-13-01T00:00:00Z"], "'2030-13-01T00:00:00Z' is no time"),
        (["add", "a b"], "name: Expected `str` matching regex"),
        (["add", "x", "--budgets", "tokens=1"], "unknown field `tokens`"),
        (["rotate", "search", "--client-keys-file", "/no/file"], "/no/file: No such file"),
        (["lisst"], "unknown command lisst; did you mean list"),
    ],
)
def test_mistakes_change_nothing(
    words: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(LAYOUTS["blocks"])
    given = [] if "--client-keys-file" in words or words == ["lisst"] else ["--client-keys-file", str(path)]
    assert main(["keys", *words, *given]) == 2
    said = capsys.readouterr()
    assert problem in said.err
    assert "sk-" not in said.err + said.out
    assert path.read_text() == LAYOUTS["blocks"]


@pytest.mark.parametrize(
    "text",
    [
        "keys:\n- {name: a, key: sk-a, models: [&k sk-b]}\n- name: b\n  key: *k\n",
        "keys: [{name: a, key: &k sk-a}, {name: b, key: *k}]\n",
    ],
)
def test_what_a_program_cannot_change_stays(text: str) -> None:
    """The key is written elsewhere, which the new one must not replace."""
    with pytest.raises(ValueError, match=r"the entry of b .* change it by hand"):
        change_entry(text, "b", lambda entry: {"sha256": "1f" * 32})


def test_changes_at_the_same_time_are_all_made(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    code = (
        "import sys\nfrom penstock.cli.main import main\n"
        "for n in range(5):\n    name = f'{sys.argv[1]}-{n}'\n"
        "    assert main(['keys', 'add', name, '--client-keys-file', sys.argv[2]]) == 0"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, name, str(path)], stdout=-3, stderr=-3) for name in "ab"
    ]
    assert [each.wait(60) for each in running] == [0, 0]
    assert len(read_clients(path.read_text()).grants) == 10


def test_a_key_or_a_token_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, token_file = tmp_path / "keys.yaml", tmp_path / "token"

    def examined(presented: str) -> dict[str, Any]:
        token_file.write_text(f"{presented}\n")
        code = keys(path, "check", str(token_file), "--json")
        said = capsys.readouterr()
        found: dict[str, Any] = json.loads(said.out)
        assert code == (1 if "refused" in found else 0)
        assert not any(len(part) > 7 and part in said.out + said.err for part in presented.split("."))
        return found

    with issuer(tmp_path) as (served, authority):
        path.write_text(
            "teams: [{name: lab, budgets: {cost-per-month: 12.5}}]\n"
            "keys:\n- {name: one, team: lab, key: sk-one-key}\n"
            "- {name: gone, key: sk-gone-key, revoked: true}\n"
            f"issuers: [{{issuer: '{served.url}', audience: penstock, ca-file: {authority}, models: [m]}}]\n"
        )
        path.chmod(0o600)
        one = examined("sk-one-key")
        assert (one["kind"], one["name"], one["expires"], one["models"]) == ("key", "one", "never", ["*"])
        assert one["budgets"] == {"cost-per-month of the team 'lab'": "12.5"}
        assert examined("sk-gone-key")["refused"] == "key_revoked"
        assert examined("sk-other-key")["refused"] == "invalid_api_key"
        alice = examined(served.token())
        assert (alice["kind"], alice["name"], alice["models"]) == ("token", "alice", ["m"])
        assert alice["issuer"] == served.url
        assert examined(served.token(aud="x"))["refused"] == "token_audience"
        assert examined(signed(served.claims(), OTHER_RSA, kid="first"))["refused"] == "token_signature"
        served.down = True
        assert "status 503" in examined(served.token())["reason"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("sk-one-key"))
    assert keys(path, "check") == 0
    assert "one" in capsys.readouterr().out
