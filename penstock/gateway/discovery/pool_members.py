"""What the objects of an InferencePool mean: its endpoints, its priorities, its model rewrites."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.gateway.discovery.kubernetes_objects import (
    POOL_GROUP,
    InferenceModelRewrite,
    InferenceObjective,
    InferencePool,
    Pod,
    PoolRef,
)
from penstock.gateway.routing.endpoint import Role
from penstock.gateway.routing.endpoint_discovery import ResolvedEndpoint, host_and_port

ACTIVE_PORTS = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")
"""Annotations of a pod: the target ports that it serves, separated by commas. Without one it serves all."""
ROLE = "llm-d.ai/role"
ENDED_PHASES = frozenset({"Succeeded", "Failed"})

Rewrites = dict[str | None, list[tuple[str, float]]]
"""Models with weights that replace a model; None: any model that has no entry."""


def endpoints_of(pool: InferencePool, pods: Iterable[Pod]) -> list[ResolvedEndpoint]:
    """Every target port of every serving pod."""
    found = []
    for pod in sorted(pods, key=lambda pod: pod.metadata.name):
        if is_serving(pod):
            for port in ports_of(pool, pod):
                destination = host_and_port(pod.status.pod_ip, port)
                url = f"http://{destination}"
                found.append(
                    ResolvedEndpoint(url, destination=destination, pool=pool.metadata.name, role=role_of(pod))
                )
    return found


def role_of(pod: Pod) -> Role:
    """As llm-d labels pods; those without a label, or with another role, serve whole requests."""
    match (pod.metadata.labels or {}).get(ROLE):
        case "prefill" | "encode-prefill":
            return "prefill"
        case "decode":
            return "decode"
    return "both"


def is_serving(pod: Pod) -> bool:
    """Whether new requests may be sent: not to a pod that terminates, which still finishes those it has, and
    not to one that encodes images alone."""
    status = pod.status
    if (pod.metadata.labels or {}).get(ROLE) == "encode":
        return False
    if pod.metadata.deletion_timestamp is not None or not status.pod_ip or status.phase in ENDED_PHASES:
        return False
    return any(
        condition.type == "Ready" and condition.status == "True" for condition in status.conditions or ()
    )


def ports_of(pool: InferencePool, pod: Pod) -> list[int]:
    """The pool's target ports that the pod serves."""
    ports = list(dict.fromkeys(port.number for port in pool.spec.target_ports))
    annotations = pod.metadata.annotations or {}
    active = next((annotations[name] for name in ACTIVE_PORTS if name in annotations), None)
    if active is None:
        return ports
    texts = {text.strip() for text in active.split(",")}
    return [port for port in ports if str(port) in texts]


def label_selector(pool: InferencePool) -> str:
    """The pool's selector, as a query of the API server."""
    return ",".join(f"{name}={value}" for name, value in sorted(pool.spec.selector.match_labels.items()))


def priorities_of(pool: str, objectives: Iterable[InferenceObjective]) -> dict[str, int]:
    """Priority by name of objective; one without a priority has 0."""
    return {
        objective.metadata.name: objective.spec.priority or 0
        for objective in objectives
        if _is_for(pool, objective.spec.pool_ref)
    }


def rewrites_of(pool: str, objects: Iterable[InferenceModelRewrite]) -> Rewrites:
    """The rule of each model. One that names the model counts before one for all, then that of the oldest
    object, then the first."""
    merged: Rewrites = {}
    mine = [item for item in objects if _is_for(pool, item.spec.pool_ref)]
    for item in sorted(mine, key=lambda item: (item.metadata.creation_timestamp or "", item.metadata.name)):
        for rule in item.spec.rules:
            targets = [(target.model_rewrite, float(target.weight or 1)) for target in rule.targets or ()]
            models: list[str | None] = [match.model.value for match in rule.matches or ()]
            for model in models or [None]:
                merged.setdefault(model, targets)
    return merged


def _is_for(pool: str, ref: PoolRef) -> bool:
    return ref.name == pool and ref.group == POOL_GROUP
