"""Objects as the API server stores them, with the defaults of their published definitions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gateway.discovery.api_server import ApiServer

Json = dict[str, Any]
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools"
PODS = "/api/v1/namespaces/default/pods"
OBJECTIVES = "/apis/llm-d.ai/v1alpha2/namespaces/default/inferenceobjectives"
OLD_OBJECTIVES = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/default/inferenceobjectives"
REWRITES = "/apis/llm-d.ai/v1alpha2/namespaces/default/inferencemodelrewrites"
LABELS = {"app": "llama"}


def pool(
    name: str = "llama",
    *,
    labels: dict[str, str] = LABELS,
    ports: Sequence[int] = (8000,),
    failure_mode: str = "FailClose",
) -> Json:
    """An InferencePool."""
    picker = {
        "group": "",
        "kind": "Service",
        "name": "gateway",
        "port": {"number": 9002},
        "failureMode": failure_mode,
    }
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": "default", "generation": 1},
        "spec": {
            "appProtocol": "http",
            "selector": {"matchLabels": dict(labels)},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": picker,
        },
        "status": {"parents": []},
    }


def pod(
    name: str,
    ip: str = "",
    *,
    labels: dict[str, str] = LABELS,
    annotations: dict[str, str] | None = None,
    ready: bool = True,
    phase: str = "Running",
    terminating: bool = False,
) -> Json:
    """A pod, as the kubelet reports it."""
    metadata: Json = {"name": name, "namespace": "default", "labels": dict(labels), "uid": f"uid-{name}"}
    if annotations is not None:
        metadata["annotations"] = annotations
    if terminating:
        metadata["deletionTimestamp"] = "2026-11-23T12:00:30Z"
        metadata["deletionGracePeriodSeconds"] = 30
    status: Json = {
        "phase": phase,
        "conditions": [
            {"type": "PodScheduled", "status": "True", "lastProbeTime": None},
            {"type": "Ready", "status": "True" if ready else "False", "lastProbeTime": None},
        ],
        "hostIP": "10.9.0.1",
    }
    if ip:
        status |= {"podIP": ip, "podIPs": [{"ip": ip}]}
    spec = {"containers": [{"name": "server", "image": "server", "ports": [{"containerPort": 8000}]}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


def objective(name: str, priority: int | None = None, *, pool: str = "llama", **ref: str) -> Json:
    """An InferenceObjective."""
    spec: Json = {
        "poolRef": {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool} | ref
    }
    if priority is not None:
        spec["priority"] = priority
    return {"kind": "InferenceObjective", "metadata": {"name": name, "namespace": "default"}, "spec": spec}


def rewrite(
    name: str,
    *rules: tuple[Sequence[str], dict[str, int | None]],
    created: str = "2026-01-01T00:00:00Z",
    pool: str = "llama",
) -> Json:
    """An InferenceModelRewrite. A rule: the models that it matches, and those that replace them by weight."""
    return {
        "kind": "InferenceModelRewrite",
        "metadata": {"name": name, "namespace": "default", "creationTimestamp": created},
        "spec": {
            "poolRef": {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool},
            "rules": [
                {
                    "matches": [{"model": {"type": "Exact", "value": model}} for model in models],
                    "targets": [
                        {"modelRewrite": target} | ({} if weight is None else {"weight": weight})
                        for target, weight in targets.items()
                    ],
                }
                for models, targets in rules
            ],
        },
    }


def kubeconfig(folder: Path, server: ApiServer) -> str:
    """A file with the server's address and token."""
    path = folder / "kubeconfig"
    user = {"name": "u", "user": {"token": server.token} if server.token else {}}
    cluster = {"name": "c", "cluster": {"server": server.url}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    path.write_text(
        json.dumps({"current-context": "x", "contexts": [context], "clusters": [cluster], "users": [user]})
    )
    return str(path)
