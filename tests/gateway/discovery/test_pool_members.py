"""Endpoints, priorities and rewrites of a pool's objects."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.gateway.discovery.kubernetes_objects import (
    InferenceModelRewrite,
    InferenceObjective,
    InferencePool,
    Pod,
)
from penstock.gateway.discovery.pool_members import (
    endpoints_of,
    label_selector,
    priorities_of,
    rewrites_of,
)
from tests.gateway.discovery.objects import objective, pod, pool, rewrite


def endpoints(pool: Any, *pods: Any) -> list[str]:
    found = endpoints_of(msgspec.convert(pool, InferencePool), [msgspec.convert(pod, Pod) for pod in pods])
    assert [endpoint.url for endpoint in found] == [f"http://{endpoint.destination}" for endpoint in found]
    assert {endpoint.pool for endpoint in found} <= {pool["metadata"]["name"]}
    return [endpoint.destination for endpoint in found]


def test_every_target_port_of_every_pod_is_an_endpoint() -> None:
    two = pool(ports=(8000, 8001))
    assert endpoints(two, pod("b", "10.0.0.2"), pod("a", "fd00::1")) == [
        "[fd00::1]:8000",
        "[fd00::1]:8001",
        "10.0.0.2:8000",
        "10.0.0.2:8001",
    ]


@pytest.mark.parametrize(
    "out",
    [
        pod("a", "10.0.0.1", terminating=True),
        pod("a", "10.0.0.1", ready=False),
        pod("a", "10.0.0.1", phase="Failed"),
        pod("a", "10.0.0.1", labels={"app": "llama", "llm-d.ai/role": "encode"}),
        pod("a", "", phase="Pending"),
        {"metadata": {"name": "a"}},
        {"metadata": {"name": "a"}, "status": {"podIP": "10.0.0.1", "conditions": None}},
    ],
)
def test_pods_that_get_no_requests(out: Any) -> None:
    assert endpoints(pool(), out, pod("b", "10.0.0.2")) == ["10.0.0.2:8000"]


@pytest.mark.parametrize("name", ["llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports"])
def test_a_pod_names_the_ports_that_it_serves(name: str) -> None:
    ranks = pool(ports=(8000, 8001, 8002))
    some = pod("a", "10.0.0.1", annotations={name: "8002, 8000,9000"})
    assert endpoints(ranks, some) == ["10.0.0.1:8000", "10.0.0.1:8002"]
    assert endpoints(ranks, pod("a", "10.0.0.1", annotations={name: ""})) == []


def test_the_selector_as_a_query() -> None:
    labels = {"role": "decode", "app": "llama"}
    assert label_selector(msgspec.convert(pool(labels=labels), InferencePool)) == "app=llama,role=decode"


def test_priorities_are_those_of_the_pools_own_objectives() -> None:
    objectives = [
        objective("chat", 10),
        objective("batch", -5),
        objective("unset"),
        objective("other", 3, pool="qwen"),
        objective("foreign", 3, group="example.com"),
    ]
    found = priorities_of("llama", [msgspec.convert(item, InferenceObjective) for item in objectives])
    assert found == {"chat": 10, "batch": -5, "unset": 0}


def test_the_precedence_of_rewrites() -> None:
    objects = [
        rewrite("younger", (["chat"], {"wrong": None}), ([], {"any": None}), created="2026-03-01T00:00:00Z"),
        rewrite("older", (["chat", "talk"], {"v1": 9, "v2": 1}), (["chat"], {"later": 1})),
        rewrite("other", (["more"], {"wrong": None}), pool="qwen"),
    ]
    assert rewrites_of("llama", [msgspec.convert(item, InferenceModelRewrite) for item in objects]) == {
        "chat": [("v1", 9.0), ("v2", 1.0)],
        "talk": [("v1", 9.0), ("v2", 1.0)],
        None: [("any", 1.0)],
    }


@pytest.mark.parametrize(
    ("labels", "role"),
    [
        (None, "both"),
        ({"llm-d.ai/role": "prefill"}, "prefill"),
        ({"llm-d.ai/role": "encode-prefill"}, "prefill"),
        ({"llm-d.ai/role": "decode"}, "decode"),
        ({"llm-d.ai/role": "prefill-decode"}, "both"),
    ],
)
def test_a_label_of_a_pod_is_its_role(labels: dict[str, str] | None, role: str) -> None:
    labelled = pod("a", "10.0.0.1")
    labelled["metadata"]["labels"] = labels
    (found,) = endpoints_of(msgspec.convert(pool(), InferencePool), [msgspec.convert(labelled, Pod)])
    assert found.role == role
