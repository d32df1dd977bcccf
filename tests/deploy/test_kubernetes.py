"""Manifests name each other's things rightly, and commands that exist; the chart gives what is stored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.tools import DEPLOY, config_of, run_tool

CHART = DEPLOY / "helm" / "penstock"
EXAMPLES = sorted((DEPLOY / "helm" / "examples").glob("*.yaml"))
END_S = 5
"""What a server may take to end after its drain, see docs/serving.md."""
WRITABLE = {"/tmp", "/cache", "/dev/shm"}
CLUSTER_KINDS = {"InferencePool", "Gateway", "HTTPRoute", "PodMonitor", "PrometheusRule"}
"""Of other projects: Kubernetes' schemas do not have them."""


class Release:
    """The manifests of one example."""

    def __init__(self, example: Path) -> None:
        self.path = DEPLOY / "kubernetes" / example.name
        objects = filter(None, yaml.safe_load_all(self.path.read_text()))
        self.objects: dict[tuple[str, str], Any] = {
            (each["kind"], each["metadata"]["name"]): each for each in objects
        }

    def of(self, kind: str) -> list[Any]:
        return [each for (found, _), each in self.objects.items() if found == kind]

    def labels(self) -> list[dict[str, str]]:
        """Labels of all pods."""
        return [each["spec"]["template"]["metadata"]["labels"] for each in self.of("Deployment")]

    def environment(self, deployment: Any) -> dict[str, str]:
        """Of the pod's container: its own variables, and those that Kubernetes adds for the namespace's
        services (kubernetes.io/docs/concepts/services-networking/service)."""
        found = {
            each["name"]: each.get("value", "of a secret") for each in container(deployment).get("env", ())
        }
        if deployment["spec"]["template"]["spec"].get("enableServiceLinks", True):
            for service in self.of("Service"):
                prefix = service["metadata"]["name"].upper().replace("-", "_")
                port = service["spec"]["ports"][0]
                found |= {
                    f"{prefix}_SERVICE_HOST": "10.0.0.1",
                    f"{prefix}_SERVICE_PORT": str(port["port"]),
                    f"{prefix}_PORT": f"tcp://10.0.0.1:{port['port']}",
                }
        return found


RELEASES = [Release(example) for example in EXAMPLES]
BY_NAME = {release.path.stem: release for release in RELEASES}
DEPLOYMENTS = [
    pytest.param(release, deployment, id=f"{release.path.stem}-{deployment['metadata']['name']}")
    for release in RELEASES
    for deployment in release.of("Deployment")
]
every_release = pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.path.stem)


def container(deployment: Any) -> Any:
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    return found


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


@pytest.mark.parametrize(("release", "deployment"), DEPLOYMENTS)
def test_containers_run_what_there_is(release: Release, deployment: Any) -> None:
    program, *words = container(deployment)["command"]
    assert program == "penstock"
    name, config = config_of(words, release.environment(deployment))
    ports = {port["containerPort"] for port in container(deployment)["ports"]}
    served = {config.port} if name == "serve" else {config.port, config.ext_proc_port} - {None}
    assert ports == served
    assert config.host == "0.0.0.0"
    grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > config.drain_grace + config.drain_timeout + END_S
    assert config.drain_grace > 0, "load balancers need a moment"


@pytest.mark.parametrize(("release", "deployment"), DEPLOYMENTS)
def test_pods_have_probes_and_no_rights(release: Release, deployment: Any) -> None:
    pod, only = deployment["spec"]["template"]["spec"], container(deployment)
    assert only["livenessProbe"]["httpGet"]["path"] == only["startupProbe"]["httpGet"]["path"] == "/health"
    ready = only["readinessProbe"]
    assert "grpc" in ready or ready["httpGet"]["path"] == "/ready"
    assert not pod["enableServiceLinks"]
    assert not pod["automountServiceAccountToken"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {each["name"]: each["mountPath"] for each in only["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert set(mounts.values()) <= WRITABLE


@every_release
def test_names_and_selectors_lead_somewhere(release: Release) -> None:
    pods = release.labels()
    for service in release.of("Service"):
        targets = [
            deployment
            for deployment in release.of("Deployment")
            if selects(service["spec"]["selector"], deployment["spec"]["template"]["metadata"]["labels"])
        ]
        (deployment,) = targets
        ports = {port["name"]: port["containerPort"] for port in container(deployment)["ports"]}
        assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        for each in release.of(kind):
            assert sum(selects(each["spec"]["selector"]["matchLabels"], labels) for labels in pods) == 1
    for policy in release.of("NetworkPolicy"):
        assert sum(selects(policy["spec"]["podSelector"]["matchLabels"], labels) for labels in pods) == 1
    for scaler in release.of("HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        assert "replicas" not in release.objects[target["kind"], target["name"]]["spec"]
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for deployment in release.of("Deployment")
        for volume in deployment["spec"]["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == {each["metadata"]["name"] for each in release.of("PersistentVolumeClaim")}


def test_the_examples_show_every_part() -> None:
    kinds = {kind for release in RELEASES for kind, _ in release.objects}
    assert kinds >= CLUSTER_KINDS | {"HorizontalPodAutoscaler", "PodDisruptionBudget", "NetworkPolicy"}
    server = BY_NAME["server"].of("Deployment")[0]
    (key,) = [each for each in container(server)["env"] if each["name"] == "PENSTOCK_API_KEY"]
    assert "secretKeyRef" in key["valueFrom"]
    assert container(BY_NAME["vllm"].of("Deployment")[0])["resources"]["limits"] == {"nvidia.com/gpu": 2}


def test_the_pool_is_what_the_picker_picks_from() -> None:
    release = BY_NAME["envoy"]
    pool = release.objects["InferencePool", "penstock"]["spec"]
    servers = release.objects["Service", "penstock-server-pods"]["spec"]
    assert servers["clusterIP"] == "None"
    assert pool["selector"]["matchLabels"] == servers["selector"]
    assert [port["number"] for port in pool["targetPorts"]] == [port["port"] for port in servers["ports"]]
    picker = pool["endpointPickerRef"]
    ports = {
        port["name"]: port["port"] for port in release.objects["Service", picker["name"]]["spec"]["ports"]
    }
    assert picker["port"]["number"] == ports["grpc"]
    command = container(release.objects["Deployment", picker["name"]])["command"]
    assert "http://penstock-server-pods:8000" in command


def test_the_route_leads_to_the_pool() -> None:
    objects = BY_NAME["envoy"].objects
    route = objects["HTTPRoute", "penstock"]["spec"]
    assert [("Gateway", each["name"]) in objects for each in route["parentRefs"]] == [True]
    backends = [each for rule in route["rules"] for each in rule["backendRefs"]]
    assert [(each["kind"], each["name"]) in objects for each in backends] == [True]


@every_release
def test_kubernetes_takes_them(release: Release) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for (kind, _), each in release.objects.items():
        if kind not in CLUSTER_KINDS:
            schemas.validate(each, schemas.latest_version(), strict=True)


@every_release
def test_the_chart_gives_what_is_stored(release: Release) -> None:
    example = f"examples/{release.path.name}"
    rendered = run_tool(
        "helm", "template", "penstock", CHART, "--values", DEPLOY / "helm" / example, package="helm.sh"
    )
    head = f"# Made of deploy/helm/{example} by deploy/helm/render.sh: change the chart, not this file.\n"
    assert release.path.read_text() == head + rendered, "run deploy/helm/render.sh"


def test_the_chart_has_no_flaw() -> None:
    run_tool("helm", "lint", "--strict", CHART, package="helm.sh")


def test_what_cannot_work_is_an_error(tmp_path: Path) -> None:
    run_tool("helm", "version", package="helm.sh")
    values = tmp_path / "values.yaml"
    values.write_text("server: {enabled: false}\ngateway: {enabled: true}\n")
    with pytest.raises(AssertionError, match="there is nothing to relay to"):
        run_tool("helm", "template", "x", CHART, "--values", values, package="helm.sh")


def test_the_script_that_writes_them_can_be_run() -> None:
    assert os.access(DEPLOY / "helm" / "render.sh", os.X_OK)
