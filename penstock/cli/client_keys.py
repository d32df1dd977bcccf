"""``penstock keys list``, ``add``, ``rotate`` and so on: the file of the gateway's clients' keys.

``keys cluster`` makes the key file that the hosts of one server share.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from penstock.cli.command import Command
from penstock.cli.terminal import visible
from penstock.config.errors import ConfigError
from penstock.config.keys import (
    AddKeyConfig,
    CheckKeyConfig,
    ClientKeysFile,
    ExpireKeyConfig,
    KeysConfig,
    ListKeysConfig,
    OneKeyConfig,
    RevokeKeyConfig,
    RotateKeyConfig,
    ShowKeyConfig,
)
from penstock.config.origins import Origins

if TYPE_CHECKING:
    from penstock.gateway.admission.keys_file import KeyEntry

KEY_BYTES = 32
"""Random bytes of a key."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
T = TypeVar("T")


def list_keys(config: ListKeysConfig, origins: Origins) -> int:
    """Print a line for each client."""
    found = [_described(entry) for entry in _entries(config)]
    if config.json:
        print(json.dumps(found))
        return 0
    rows = [("name", "team", "state", "keys", "expires", "models")]
    for each in found:
        models = ",".join(each["models"]) or "all"
        keys = str(len(each["keys"]))
        rows.append((each["name"], each["team"], each["state"], keys, each["expires"], models))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(visible("  ".join(map(str.ljust, row, widths)).rstrip()))
    return 0


def show(config: ShowKeyConfig, origins: Origins) -> int:
    """Print what the file says of a client, without its keys."""
    found = _described(_named(config, _entries(config)))
    _print(found, as_json=config.json)
    return 0


def add(config: AddKeyConfig, origins: Origins) -> int:
    """Add a client, and print its key."""
    name, key = _name(config), _new_key()
    given: dict[str, Any] = {"name": name, "team": config.team, "sha256": _digest(key)}
    given |= {"expires": config.expires and _moment(config.expires), "priority": config.priority}
    given |= {"weight": config.weight, "models": config.models, "budgets": _budgets(config.budgets)}
    fields = {field: value for field, value in given.items() if value is not None}

    def edit(text: str) -> str:
        from penstock.gateway.admission.keys_editor import add_entry

        return add_entry(text, fields)

    _change(config, edit)
    _tell(config, f"{name} has been added. Its key, which is stored nowhere:")
    print(key)
    return 0


def rotate(config: RotateKeyConfig, origins: Origins) -> int:
    """Give a client another key, and print it; those before are valid for a while."""
    key, until = _new_key(), _moment(config.grace)
    if until is None:
        raise ConfigError("grace: never is not valid: the keys before would be valid for ever")

    def change(entry: KeyEntry) -> dict[str, Any]:
        now = datetime.now(UTC)
        previous: list[dict[str, Any]] = [
            {"sha256": each.sha256, "expires": each.expires} for each in entry.previous
        ]
        previous += [{"sha256": digest.hex(), "expires": until} for digest in entry.digests()]
        kept = [each for each in previous if each["expires"] > now]
        return {"sha256": _digest(key), "key": None, "previous": kept or None}

    name = _edit_entry(config, change)
    ends = "at once" if until <= datetime.now(UTC) else _written(until)
    _tell(config, f"{name} has a new key; those before end {ends}. The new one, which is stored nowhere:")
    print(key)
    return 0


def expire(config: ExpireKeyConfig, origins: Origins) -> int:
    """Set when a client's keys expire."""
    at = _moment(config.at)
    name = _edit_entry(config, lambda entry: {"expires": at})
    _tell(config, f"{name} expires {_written(at)}")
    return 0


def revoke(config: RevokeKeyConfig, origins: Origins) -> int:
    """Refuse a client, or let it in again."""
    name = _edit_entry(config, lambda entry: {"revoked": None if config.undo else True})
    _tell(config, f"{name} {'is let in again' if config.undo else 'is refused'}")
    return 0


def check(config: CheckKeyConfig, origins: Origins) -> int:
    """Print who a key or a token is, and what it is granted; 1 if it is refused."""
    from penstock.gateway.admission.clients_file import read_clients
    from penstock.gateway.admission.presented import examine

    if config.token_file == "-":
        presented = sys.stdin.read(1 << 20)
    else:
        presented = _of_file(config.token_file, lambda text: text)
    known = _of_file(config.client_keys_file, read_clients)
    found = examine(presented.strip().removeprefix("Bearer ").encode(), known, time.time())
    _print(found, as_json=config.json)
    return 1 if "refused" in found else 0


# -- the file


def _of_file(path: str, read: Callable[[str], T]) -> T:
    """Raises ConfigError."""
    from penstock.config.watched_file import read_regular, reason

    try:
        return read(read_regular(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {reason(error)}") from None


def _entries(config: ClientKeysFile) -> list[KeyEntry]:
    from penstock.gateway.admission.clients_file import read_clients, read_document

    def read(text: str) -> list[KeyEntry]:
        read_clients(text)
        return read_document(text).keys or []

    return _of_file(config.client_keys_file, read)


def _name(config: OneKeyConfig) -> str:
    if not config.name:
        raise ConfigError("NAME is missing: the name of the client")
    return config.name


def _named(config: OneKeyConfig, entries: list[KeyEntry]) -> KeyEntry:
    name = _name(config)
    for entry in entries:
        if entry.name == name:
            return entry
    raise ConfigError(f"{config.client_keys_file}: there is no key with the name {name!r}")


def _change(config: OneKeyConfig, edit: Callable[[str], str]) -> None:
    """Raises ConfigError."""
    from penstock.config.watched_file import reason
    from penstock.gateway.admission.keys_editor import change_file

    try:
        change_file(config.client_keys_file, edit)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config.client_keys_file}: {reason(error)}") from None


def _edit_entry(config: OneKeyConfig, change: Callable[[KeyEntry], dict[str, Any]]) -> str:
    """Set the fields that ``change`` gives for the client; None removes one. Raises ConfigError."""
    from penstock.gateway.admission.keys_editor import change_entry

    name = _name(config)
    _entries(config)  # an absent file is an error, not an empty one
    _change(config, lambda text: change_entry(text, name, change))
    return name


def _tell(config: ClientKeysFile, text: str) -> None:
    """Beside the output, which is the key alone."""
    print(visible(f"{config.client_keys_file}: {text}"), file=sys.stderr)


# -- values


def _new_key() -> str:
    return f"sk-{secrets.token_urlsafe(KEY_BYTES)}"


def _digest(key: str) -> str:
    from penstock.http.access_keys import key_digest

    return key_digest(key).hex()


def _moment(text: str) -> datetime | None:
    """None: never. Raises ConfigError."""
    now = datetime.now(UTC).replace(microsecond=0)
    if text == "never":
        return None
    if text == "now":
        return now
    try:
        if text[-1] in _UNITS:
            return now + timedelta(seconds=int(text[:-1]) * _UNITS[text[-1]])
        return datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise ConfigError(f"{text!r} is no time") from None


def _written(at: datetime | None) -> str:
    return "never" if at is None else at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _budgets(given: list[str] | None) -> dict[str, int | float] | None:
    if not given:
        return None
    pairs = (each.partition("=") for each in given)
    return {name: float(amount) if "." in amount else int(amount) for name, _, amount in pairs}


def _described(entry: KeyEntry) -> dict[str, Any]:
    grants, now = entry.grants(), time.time()
    states = [(digest.hex()[:12], grant.refusal(now) or "valid") for digest, grant in grants]
    keys = [{"sha256": f"{digest}…", "state": state} for digest, state in states]
    return {
        "name": entry.name,
        "team": entry.team,
        "state": grants[0][1].refusal(now) or "valid",
        "not-before": entry.not_before and _written(entry.not_before),
        "expires": _written(entry.expires),
        "keys": keys,
        "models": entry.models,
        "priority": entry.priority,
        "weight": entry.weight,
        "budgets": {name: each for name, each in msgspec.to_builtins(entry.budgets).items() if each},
    }


def _print(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    width = max(map(len, found)) + 2
    for name, value in found.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        print(visible(f"{name:{width}}{text}"))


LIST = Command(("keys", "list"), "List the keys of the gateway's clients.", ListKeysConfig, list_keys)
SHOW = Command(("keys", "show"), "Show what a client of the gateway may do.", ShowKeyConfig, show)
ADD = Command(("keys", "add"), "Add a client of the gateway, and print its key.", AddKeyConfig, add)
ROTATE = Command(("keys", "rotate"), "Replace the key of a client of the gateway.", RotateKeyConfig, rotate)
EXPIRE = Command(("keys", "expire"), "Set when the keys of a client expire.", ExpireKeyConfig, expire)
REVOKE = Command(("keys", "revoke"), "Refuse a client of the gateway.", RevokeKeyConfig, revoke)
CHECK = Command(("keys", "check"), "Tell who a key or token is, or why it is refused.", CheckKeyConfig, check)


def make_cluster_key(config: KeysConfig, origins: Origins) -> int:
    """Write the file and print what to do with it. Raises ConfigError when it cannot be written."""
    from penstock.supervisor.startup.cluster_key import write_cluster_key

    path = Path(config.cluster_key_file).expanduser()
    try:
        write_cluster_key(path)
    except FileExistsError:
        raise ConfigError(f"{path}: exists; an existing key is never overwritten") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    print(
        f"{path}: created. Anyone who has it can join the server. Copy it to every host over a secure "
        "channel and pass it to penstock serve as --cluster-key-file."
    )
    return 0


CLUSTER = Command(
    ("keys", "cluster"), "Make the key file that the hosts of one server share.", KeysConfig, make_cluster_key
)
