"""``penstock drain`` and ``undrain``: an endpoint of a gateway gets no more requests, or some again."""

from __future__ import annotations

from typing import Any

from penstock.cli import terminal
from penstock.cli.command import Command
from penstock.config.errors import ConfigError
from penstock.config.oncall import DrainConfig, UndrainConfig
from penstock.config.origins import Origins


def drain(config: DrainConfig, origins: Origins) -> int:
    """Print how many requests still run; 1 if some do after ``wait``, or the gateway refuses."""
    reply = _call(config, "drain", config.wait, {"wait": config.wait})
    if reply is None:
        return 1
    running = reply["running"]
    print(f"{reply['endpoint']} gets no new requests; {running} still run{'s' if running == 1 else ''}")
    return 1 if running and config.wait else 0


def undrain(config: UndrainConfig, origins: Origins) -> int:
    """Print what holds; 1 if the gateway refuses."""
    reply = _call(config, "undrain", 0.0, {})
    if reply is None:
        return 1
    print(f"{reply['endpoint']} gets requests")
    return 0


def _call(
    config: UndrainConfig, operation: str, wait_s: float, fields: dict[str, Any]
) -> dict[str, Any] | None:
    """The reply of the gateway; None: there is none, which is reported."""
    import msgspec

    from penstock.client import Client, ClientError

    if config.endpoint is None:
        raise ConfigError("ENDPOINT is missing: the URL of one, as penstock status shows it")
    try:
        with Client(config.url, config.api_key, config.timeout + wait_s) as client:
            reply = client.post(f"/admin/endpoints/{operation}", {"url": config.endpoint, **fields})
            return msgspec.json.decode(reply, type=dict[str, Any])
    except ClientError as error:
        terminal.report(error)
    except msgspec.DecodeError as error:
        terminal.report(ClientError(f"{config.url} did not answer like a gateway: {error}"))
    return None


DRAIN = Command(("drain",), "Keep new requests from an endpoint of a gateway.", DrainConfig, drain)
UNDRAIN = Command(("undrain",), "Let an endpoint of a gateway get requests again.", UndrainConfig, undrain)
