"""Manifests name each other's things rightly, and commands that exist; the chart gives what is stored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.gateway.discovery.kubernetes_objects import MODEL_REWRITES, OBJECTIVES, PODS, POOLS
from tests.deploy.tools import DEPLOY, config_of, run_tool

CHART = DEPLOY / "helm" / "penstock"
EXAMPLES = sorted((DEPLOY / "helm" / "examples").glob("*.yaml"))
END_S = 5
"""What a server may take to end after its drain, see docs/serving.md."""
WRITABLE = {"/tmp", "/cache", "/dev/shm", "/state"}
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
    assert ready["httpGet"]["path"] == ("/health" if "--ext-proc-port" in only["command"] else "/ready")
    assert not pod["enableServiceLinks"]
    follows_pods = "--kubernetes-pool" in only["command"]
    assert pod["automountServiceAccountToken"] == follows_pods == ("serviceAccountName" in pod)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {each["name"]: each["mountPath"] for each in only["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    written = {each["mountPath"] for each in only["volumeMounts"] if not each.get("readOnly")}
    assert written <= WRITABLE


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


def test_servers_keep_responses_on_a_volume_and_share_the_key_of_summaries() -> None:
    for name, claim, key in (
        ("server", None, "/etc/penstock/seal/key"),
        ("vllm", "penstock-server-responses", None),
    ):
        [deployment] = BY_NAME[name].of("Deployment")
        _, config = config_of(container(deployment)["command"][1:], {"PENSTOCK_API_KEY": "k"})
        assert (config.response_store_dir, config.seal_key_file) == ("/state/responses", key)
        volumes = {each["name"]: each for each in deployment["spec"]["template"]["spec"]["volumes"]}
        assert volumes["state"].get("persistentVolumeClaim", {}).get("claimName") == claim
        assert (deployment["spec"].get("strategy") == {"type": "Recreate"}) == (claim is not None)
        if key is not None:
            secret = volumes["seal"]["secret"]
            assert (secret["defaultMode"], secret["items"]) == (0o440, [{"key": "seal-key", "path": "key"}])


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
    assert picker["failureMode"] == "FailClose", "the picker checks keys and routes"
    ports = {
        port["name"]: port["port"] for port in release.objects["Service", picker["name"]]["spec"]["ports"]
    }
    assert picker["port"]["number"] == ports["grpc"]
    command = container(release.objects["Deployment", picker["name"]])["command"]
    assert command[command.index("--kubernetes-pool") + 1] == "penstock"


@pytest.mark.parametrize("name", ["envoy", "pools"])
def test_the_gateway_may_read_what_it_follows_and_nothing_else(name: str) -> None:
    release = BY_NAME[name]
    account = release.objects["Deployment", "penstock-gateway"]["spec"]["template"]["spec"][
        "serviceAccountName"
    ]
    command = container(release.objects["Deployment", "penstock-gateway"])["command"]
    pools = command[command.index("--kubernetes-pool") + 1 :]
    documents = [each for each in yaml.safe_load_all(release.path.read_text()) if each]
    roles, bindings = (
        {each["metadata"].get("namespace", ""): each for each in documents if each["kind"] == kind}
        for kind in ("Role", "RoleBinding")
    )
    assert set(roles) == set(bindings) == {pool.rpartition("/")[0] for pool in pools}
    for namespace, binding in bindings.items():
        (subject,) = binding["subjects"]
        assert (subject["kind"], subject["name"]) == ("ServiceAccount", account)
        assert ("ServiceAccount", account) in release.objects
        role = roles[namespace]
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert all(rule["verbs"] == ["list", "watch"] for rule in role["rules"])
        allowed = {
            (group, kind)
            for rule in role["rules"]
            for group in rule["apiGroups"]
            for kind in rule["resources"]
        }
        kinds = (PODS, POOLS, *OBJECTIVES, *MODEL_REWRITES)
        assert allowed == {(kind.group, kind.plural) for kind in kinds}


def test_the_picker_answers_the_envoys_of_the_gateway_alone() -> None:
    release = BY_NAME["envoy"]
    rules = release.objects["NetworkPolicy", "penstock-gateway"]["spec"]["ingress"]
    (rule,) = [each for each in rules if {"port": "grpc", "protocol": "TCP"} in each["ports"]]
    assert rule["ports"] == [{"port": "grpc", "protocol": "TCP"}]
    (peer,) = rule["from"]
    assert ("Gateway", "penstock") in release.objects
    assert peer == {"podSelector": {"matchLabels": {"gateway.networking.k8s.io/gateway-name": "penstock"}}}


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


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ("server: {enabled: false}\ngateway: {enabled: true}\n", "there is nothing to relay to"),
        (
            "gateway: {enabled: true, envoy: {enabled: true}}\n",
            "clientCertificates, or networkPolicy",
        ),
        ("server: {role: encode}\n", "server.role: encode is no role"),
        ("server: {replicas: 2, responses: {create: true}}\n", "a claim is for one replica"),
        ("kvEvents: {enabled: true}\n", "kvEvents.enabled needs networkPolicy.enabled"),
    ],
)
def test_what_cannot_work_is_an_error(tmp_path: Path, values: str, problem: str) -> None:
    run_tool("helm", "version", package="helm.sh")
    path = tmp_path / "values.yaml"
    path.write_text(values)
    with pytest.raises(AssertionError, match=problem):
        run_tool("helm", "template", "x", CHART, "--values", path, package="helm.sh")


def rendered(path: Path, values: str, *arguments: str) -> list[Any]:
    """What the chart gives for these values."""
    path.write_text(values)
    text = run_tool("helm", "template", "x", CHART, "--values", path, *arguments, package="helm.sh")
    return [each for each in yaml.safe_load_all(text) if each]


def test_the_own_namespace_has_one_role_however_it_is_named(tmp_path: Path) -> None:
    values = "server: {enabled: false}\ngateway: {enabled: true, inferencePools: [a, own/b, other/c]}\n"
    objects = rendered(tmp_path / "values.yaml", values, "--namespace", "own")
    for kind in ("Role", "RoleBinding"):
        namespaces = [each["metadata"].get("namespace") for each in objects if each["kind"] == kind]
        assert namespaces == [None, "other"]


def test_servers_that_prefill_publish_events(tmp_path: Path) -> None:
    values = """
        server: {engine: vllm, role: prefill}
        gateway: {enabled: true, inferencePools: [p]}
        kvEvents: {enabled: true, port: 7000, replayPort: 8000, ranks: 4}
        networkPolicy: {enabled: true}
    """
    objects = rendered(tmp_path / "values.yaml", values)
    server, gateway = (
        next(
            each
            for each in objects
            if each["kind"] == "Deployment" and each["metadata"]["name"].endswith(part)
        )
        for part in ("server", "gateway")
    )
    template = server["spec"]["template"]
    assert template["metadata"]["labels"]["llm-d.ai/role"] == "prefill"
    assert "llm-d.ai/role" not in server["spec"]["selector"]["matchLabels"]
    events = config_of(container(server)["command"][1:])[1].kv_events
    assert (events.endpoint, events.replay_endpoint) == ("tcp://*:7000", "tcp://*:8000")
    _, config = config_of(container(gateway)["command"][1:])
    assert (config.kv_events, config.kv_events_ranks) == (["7000:8000"], 4)
    [policy] = [
        each for each in objects if each["kind"] == "NetworkPolicy" and "server" in each["metadata"]["name"]
    ]
    [rule] = [rule for rule in policy["spec"]["ingress"] if rule["ports"][0]["port"] == 7000]
    assert [(port["port"], port["endPort"]) for port in rule["ports"]] == [(7000, 7003), (8000, 8003)]
    [peer] = rule["from"]
    assert selects(peer["podSelector"]["matchLabels"], gateway["spec"]["template"]["metadata"]["labels"])


def gateway_with(tmp_path: Path, values: str) -> dict[str, Any]:
    (gateway,) = [
        each
        for each in rendered(tmp_path / "values.yaml", values)
        if each["kind"] == "Deployment" and each["metadata"]["name"].endswith("gateway")
    ]
    assert isinstance(gateway, dict)
    return gateway


def test_files_of_a_gateway(tmp_path: Path) -> None:
    """Pools and keys are files, and a gateway with pools needs no other endpoints."""
    files = ("/etc/penstock/files/pools.yaml", "/etc/penstock/files/keys.yaml")
    arguments = f"args: [--endpoints-file, {files[0]}, --client-keys-file, {files[1]}]"
    gateway = gateway_with(
        tmp_path,
        f"server: {{enabled: false}}\ngateway: {{enabled: true, filesSecret: mine, {arguments}}}\n",
    )
    _, config = config_of(container(gateway)["command"][1:])
    assert (config.endpoints, config.endpoints_file, config.client_keys_file) == (None, *files)
    (mount,) = [each for each in container(gateway)["volumeMounts"] if each["mountPath"].startswith("/etc")]
    assert all(file.startswith(f"{mount['mountPath']}/") for file in files)
    (volume,) = [each for each in gateway["spec"]["template"]["spec"]["volumes"] if "secret" in each]
    assert volume == {"name": mount["name"], "secret": {"secretName": "mine", "defaultMode": 0o440}}


def test_a_picker_with_certificates(tmp_path: Path) -> None:
    gateway = gateway_with(tmp_path, "gateway: {enabled: true, envoy: {enabled: true, tlsSecret: envoys}}\n")
    _, config = config_of(container(gateway)["command"][1:])
    assert not config.ext_proc_insecure
    mounts = {each["name"]: each["mountPath"] for each in container(gateway)["volumeMounts"]}
    (volume,) = [each for each in gateway["spec"]["template"]["spec"]["volumes"] if "secret" in each]
    assert volume["secret"]["secretName"] == "envoys"
    for file in (config.ext_proc_cert_file, config.ext_proc_key_file, config.ext_proc_client_ca_file):
        assert file.startswith(f"{mounts[volume['name']]}/")


def test_the_script_that_writes_them_can_be_run() -> None:
    assert os.access(DEPLOY / "helm" / "render.sh", os.X_OK)
