"""The objects of the Kubernetes API that discovery reads, and their fields that it uses; others are ignored.

Fields are those of the core API (Pod), of the Gateway API Inference Extension (InferencePool), and of llm-d,
which has taken over InferenceObjective and InferenceModelRewrite from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import msgspec
from msgspec import field


class KubernetesStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Fields are named as in Python here, and as in JavaScript by the API server."""


class Metadata(KubernetesStruct, frozen=True):
    name: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    """When the object has to be gone; set while it terminates."""


# -- pods


class PodCondition(KubernetesStruct, frozen=True):
    type: str
    status: str


class PodStatus(KubernetesStruct, frozen=True):
    phase: str = ""
    pod_ip: str = field(name="podIP", default="")
    conditions: list[PodCondition] | None = None


class Pod(KubernetesStruct, frozen=True):
    metadata: Metadata
    status: PodStatus = PodStatus()


# -- InferencePool, inference.networking.k8s.io/v1


class PoolSelector(KubernetesStruct, frozen=True):
    match_labels: dict[str, str]


class TargetPort(KubernetesStruct, frozen=True):
    number: int


class EndpointPickerRef(KubernetesStruct, frozen=True):
    name: str = ""
    failure_mode: Literal["FailOpen", "FailClose"] = "FailClose"


class PoolSpec(KubernetesStruct, frozen=True):
    selector: PoolSelector
    target_ports: list[TargetPort]
    endpoint_picker_ref: EndpointPickerRef | None = None


class InferencePool(KubernetesStruct, frozen=True):
    metadata: Metadata
    spec: PoolSpec


# -- InferenceObjective and InferenceModelRewrite, v1alpha2


class PoolRef(KubernetesStruct, frozen=True):
    """The pool that an objective or a rewrite is for, in the same namespace."""

    name: str
    group: str = "inference.networking.k8s.io"


class ObjectiveSpec(KubernetesStruct, frozen=True):
    pool_ref: PoolRef
    priority: int | None = None


class InferenceObjective(KubernetesStruct, frozen=True):
    metadata: Metadata
    spec: ObjectiveSpec


class ModelMatch(KubernetesStruct, frozen=True):
    value: str
    type: Literal["Exact"] = "Exact"


class RewriteMatch(KubernetesStruct, frozen=True):
    model: ModelMatch


class TargetModel(KubernetesStruct, frozen=True):
    model_rewrite: str
    weight: int | None = None


class RewriteRule(KubernetesStruct, frozen=True):
    matches: list[RewriteMatch] | None = None
    """None, or empty: every model."""
    targets: list[TargetModel] | None = None


class RewriteSpec(KubernetesStruct, frozen=True):
    pool_ref: PoolRef
    rules: list[RewriteRule]


class InferenceModelRewrite(KubernetesStruct, frozen=True):
    metadata: Metadata
    spec: RewriteSpec


AnyObject = Pod | InferencePool | InferenceObjective | InferenceModelRewrite
T = TypeVar("T", bound=AnyObject)


@dataclass(frozen=True, slots=True)
class Resource(Generic[T]):
    """A kind of objects, and where the API server has it."""

    type: type[T]
    plural: str
    group: str
    """Empty: the core API."""
    version: str

    def path(self, namespace: str) -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        return f"{root}/namespaces/{namespace}/{self.plural}"


POOL_GROUP = "inference.networking.k8s.io"
PODS = Resource(Pod, "pods", "", "v1")
POOLS = Resource(InferencePool, "inferencepools", POOL_GROUP, "v1")
# Of two objects of the same name, that of the later group counts. Neither group has a stable version.
OBJECTIVES = (
    Resource(InferenceObjective, "inferenceobjectives", "inference.networking.x-k8s.io", "v1alpha2"),
    Resource(InferenceObjective, "inferenceobjectives", "llm-d.ai", "v1alpha2"),
)
MODEL_REWRITES = (
    Resource(InferenceModelRewrite, "inferencemodelrewrites", "inference.networking.x-k8s.io", "v1alpha2"),
    Resource(InferenceModelRewrite, "inferencemodelrewrites", "llm-d.ai", "v1alpha2"),
)
