"""Manifests name each other's things rightly, and commands that exist. Envoy's own file is run elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli import gateway, parser, serve
from penstock.cli.main import all_options
from penstock.config.sources import resolve

FOLDER = Path(__file__).parent.parent / "deploy" / "kubernetes"
COMMANDS = {"gateway": gateway.COMMAND, "serve": serve.COMMAND}
OBJECTS: dict[tuple[str, str], Any] = {
    (each["kind"], each["metadata"]["name"]): each
    for path in FOLDER.glob("*.yaml")
    for each in yaml.safe_load_all(path.read_text())
}
DEPLOYMENTS = [each for (kind, _), each in OBJECTS.items() if kind == "Deployment"]


def container(deployment: Any) -> Any:
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    return found


def environment(deployment: Any) -> dict[str, str]:
    """Of the pod's container: its own variables, and those that Kubernetes adds for the namespace's services
    (kubernetes.io/docs/concepts/services-networking/service)."""
    found = {each["name"]: each["value"] for each in container(deployment).get("env", ())}
    if deployment["spec"]["template"]["spec"].get("enableServiceLinks", True):
        for (kind, name), service in OBJECTS.items():
            if kind == "Service":
                prefix, port = name.upper().replace("-", "_"), service["spec"]["ports"][0]
                address = f"tcp://10.0.0.1:{port['port']}"
                found |= {
                    f"{prefix}_SERVICE_HOST": "10.0.0.1",
                    f"{prefix}_SERVICE_PORT": str(port["port"]),
                    f"{prefix}_SERVICE_PORT_{port['name'].upper()}": str(port["port"]),
                    f"{prefix}_PORT": address,
                    f"{prefix}_PORT_{port['port']}_TCP": address,
                }
    return found


def name_of(each: Any) -> str:
    return str(each["metadata"]["name"])


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=name_of)
def test_containers_run_what_there_is(deployment: Any) -> None:
    program, name, *words = container(deployment)["command"]
    assert program == "penstock"
    arguments, file, *_ = parser.parse(COMMANDS[name], words)
    config, *_ = resolve(
        COMMANDS[name].config,
        arguments,
        environment(deployment),
        file=file,
        other_options=all_options,
    )
    ports = {port["containerPort"] for port in container(deployment)["ports"]}
    served = {config.port} if name == "serve" else {config.port, config.ext_proc_port}
    assert ports == served
    assert config.host == "0.0.0.0"


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=name_of)
def test_services_lead_to_their_pods(deployment: Any) -> None:
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    service = OBJECTS["Service", name_of(deployment)]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    ports = {port["name"]: port["containerPort"] for port in container(deployment)["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports


def test_the_pool_is_what_the_picker_picks_from() -> None:
    pool = OBJECTS["InferencePool", "model-servers"]["spec"]
    model_servers = OBJECTS["Service", "model-servers"]["spec"]
    assert pool["selector"]["matchLabels"] == model_servers["selector"]
    assert [port["number"] for port in pool["targetPorts"]] == [
        port["port"] for port in model_servers["ports"]
    ]
    picker = pool["endpointPickerRef"]
    ports = {port["name"]: port["port"] for port in OBJECTS["Service", picker["name"]]["spec"]["ports"]}
    assert picker["port"]["number"] == ports["grpc"]
    assert "http://model-servers:8000" in container(OBJECTS["Deployment", picker["name"]])["command"]


def test_the_route_leads_to_the_pool() -> None:
    route = OBJECTS["HTTPRoute", "models"]["spec"]
    assert [("Gateway", each["name"]) in OBJECTS for each in route["parentRefs"]] == [True]
    backends = [each for rule in route["rules"] for each in rule["backendRefs"]]
    assert [(each["kind"], each["name"]) in OBJECTS for each in backends] == [True]
