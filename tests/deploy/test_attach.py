"""vLLM in a container of its own, and Penstock beside it: each runs what the other one expects."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml

from penstock.config.serve import ServeConfig
from penstock.engine.attach.launch.serve_command import attach_commands
from tests.deploy.test_hosts import DOCKERFILE, check_state
from tests.deploy.test_kubernetes import END_S
from tests.deploy.tools import DEPLOY, config_of

FOLDER = DEPLOY / "attach"


def check_commands(penstock: list[str], vllm: list[str]) -> ServeConfig:
    """vLLM's command is the one that Penstock prints for its own."""
    name, config = config_of(penstock)
    assert name == "serve"
    [printed] = attach_commands(config, config.model, [])
    assert vllm == shlex.split(printed)
    assert str(config.attach).startswith("127.0.0.1:"), "the wire has no authentication"
    assert config.host == "0.0.0.0"
    assert config.run_dir == "/state/run", "on a volume: the engine is taken over by the next container"
    return config


def test_compose() -> None:
    document = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    penstock, vllm = document["services"]["penstock"], document["services"]["vllm"]
    config = check_commands(penstock["command"], vllm["entrypoint"] + vllm["command"])
    check_state(penstock, config.response_store_dir)
    assert vllm["network_mode"] == "service:penstock"
    assert penstock["ports"] == [f"127.0.0.1:{config.port}:{config.port}"]
    assert (FOLDER / penstock["build"]["context"] / penstock["build"]["dockerfile"]).resolve() == DOCKERFILE
    assert (
        int(penstock["stop_grace_period"].removesuffix("s")) > config.drain_grace + config.drain_timeout + 5
    )
    named = {volume.split(":")[0] for each in (penstock, vllm) for volume in each["volumes"]}
    assert named == document["volumes"].keys()


def manifest() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())}


def test_kubernetes() -> None:
    objects = manifest()
    template = objects["Deployment"]["spec"]["template"]
    pod = template["spec"]
    [vllm], [penstock] = pod["initContainers"], pod["containers"]
    config = check_commands(penstock["command"][1:], vllm["command"])
    assert vllm["restartPolicy"] == "Always", "a sidecar"
    assert pod["terminationGracePeriodSeconds"] > config.drain_grace + config.drain_timeout + END_S
    assert config.response_store_dir == "/state/responses"
    volumes = {each["name"] for each in pod["volumes"]}
    assert {mount["name"] for each in (vllm, penstock) for mount in each["volumeMounts"]} == volumes
    [port] = penstock["ports"]
    assert port["containerPort"] == config.port
    service = objects["Service"]["spec"]
    assert service["ports"][0]["targetPort"] == port["name"]
    assert service["selector"].items() <= template["metadata"]["labels"].items()
    assert objects["Deployment"]["spec"]["selector"]["matchLabels"] == service["selector"]


def test_kubernetes_takes_it() -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for each in manifest().values():
        schemas.validate(each, schemas.latest_version(), strict=True)
