"""``penstock route``: where a gateway would send a request of this moment, and why."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.cli import terminal
from penstock.cli.command import Command
from penstock.config.errors import ConfigError
from penstock.config.oncall import RouteConfig
from penstock.config.origins import Origins


def run(config: RouteConfig, origins: Origins) -> int:
    """Print text or JSON; 1 if the gateway would refuse the request, or does not say."""
    from penstock.client import Client, ClientError

    asked = _asked(config)
    try:
        with Client(config.url, config.api_key, config.timeout) as client:
            report = json.loads(client.post("/admin/route", asked))
    except ClientError as error:
        return terminal.report(error)
    except ValueError as error:
        return terminal.report(ClientError(f"{config.url} did not answer like a gateway: {error}"))
    print(json.dumps(report) if config.json else terminal.visible("\n".join(_lines(report))))
    return 1 if report["refused"] else 0


def _asked(config: RouteConfig) -> dict[str, Any]:
    """The question. Raises ConfigError."""
    asked: dict[str, Any] = {"api": config.api}
    if config.model is not None:
        asked["model"] = config.model
    if config.session is not None:
        asked["session"] = config.session
    if config.body is not None:
        try:
            text = terminal.text_or_stdin("-") if config.body == "-" else Path(config.body).read_text()
            asked["body"] = json.loads(text)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--body {config.body}: {error}") from None
    elif config.model is None:
        raise ConfigError("--model is missing, or --body with a request that names one")
    if config.key_file is not None:
        try:
            key = Path(config.key_file).read_text().partition("\n")[0].strip()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--key-file {config.key_file}: {error}") from None
        asked["key_sha256"] = hashlib.sha256(key.encode()).hexdigest()
    return asked


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    if (refused := report["refused"]) is not None:
        yield f"refused: {refused['status']} {refused['code']}: {refused['message']}"
    if report["endpoint"] is not None:
        yield f"endpoint  {report['endpoint']}"
        yield f"retries   {', '.join(report['then']) or 'none'}"
        if report.get("translated"):
            yield f"api       {report['request']['path']} as chat completions"
    if (name := report.get("name")) is not None:
        rule = "no rule" if name["rule"] is None else f"rule {name['rule']}"
        yield f"name      {report['request']['model']} -> {name['target']} ({rule}; by {name['chosen_by']})"
        for what in ("targets", "shadow"):
            if weights := name.get(what):
                listed = (f"{each} ({weight:g})" for each, weight in weights.items())
                yield f"{what:9} {', '.join(listed)}"
    if (flow := report.get("flow_control")) is not None:
        told = "the request would wait" if flow["would_wait"] else "the request would not wait"
        yield f"queue     {flow['waiting']} requests wait at this worker; {told}"
    for budget in report["budgets"] or ():
        told = f"{budget['left']} of {budget['amount']} left"
        yield f"budget    {budget['budget']} of {budget['whose']}: {told}"
    if report["budgets"] is None:
        yield "budget    the store of budgets does not answer"
    for number, step in enumerate(report["steps"], 1):
        pools = f", pools {', '.join(filter(None, step['pools']))}" if any(step["pools"]) else ""
        yield ""
        yield f"step {number}: model {step['model']}{pools}" + _step_notes(step)
        for each in step["endpoints"]:
            yield f"  {each['endpoint']}  {_endpoint(each)}"
    for each in report.get("others", ()):
        yield f"  {each['endpoint']}  not used: {each['why']}"


def _step_notes(step: Mapping[str, Any]) -> str:
    notes = "  <- takes it" if step["holds"] else ""
    if step.get("overflows"):
        notes += f"  (overflows: more than {step['overflow']} requests wait at each endpoint)"
    return notes


def _endpoint(each: Mapping[str, Any]) -> str:
    parts = []
    if each["score"] is not None:
        scores = ", ".join(f"{name} {score:g}" for name, score in each["scores"].items())
        parts.append(f"score {each['score']:g} ({scores})")
    parts.append("; ".join(each["obstacles"]) or "ready")
    parts.append(f"{each['in_flight']} in flight")
    if waiting := each.get("waiting"):
        parts.append(f"{waiting} waiting")
    if each["free_places"] is not None:
        parts.append("full" if each["free_places"] <= 0 else f"{each['free_places']} free places")
    if not each["lists_model"]:
        parts.append("does not list the model")
    return ", ".join(parts)


COMMAND = Command(("route",), "Say where a gateway would send a request, and why.", RouteConfig, run)
