"""Follows one InferencePool: its pods, and the objectives and model rewrites that refer to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.gateway.discovery.kubernetes_api import KubernetesApi
from penstock.gateway.discovery.kubernetes_objects import (
    MODEL_REWRITES,
    OBJECTIVES,
    PODS,
    POOLS,
    InferencePool,
    Pod,
    T,
)
from penstock.gateway.discovery.pool_members import (
    Rewrites,
    endpoints_of,
    label_selector,
    priorities_of,
    rewrites_of,
)
from penstock.gateway.discovery.resource_watch import ResourceWatch
from penstock.gateway.routing.endpoint_discovery import ResolvedEndpoint

log = logging.getLogger(__name__)


class InferencePoolWatch:
    """The state of a pool, as of the latest events."""

    def __init__(self, api: KubernetesApi, namespace: str, name: str, on_change: Callable[[], None]) -> None:
        """``on_change`` is called after every change of an object that belongs to the pool."""
        self.name = name
        self._api = api
        self._namespace = namespace
        self._on_change = on_change
        self._pools = ResourceWatch(
            api, POOLS, namespace, self._on_pool, selectors={"fieldSelector": f"metadata.name={name}"}
        )
        self._objectives = [
            ResourceWatch(api, kind, namespace, on_change, optional=True) for kind in OBJECTIVES
        ]
        self._rewrites = [
            ResourceWatch(api, kind, namespace, on_change, optional=True) for kind in MODEL_REWRITES
        ]
        self._of_kinds: tuple[ResourceWatch[Any], ...] = (self._pools, *self._objectives, *self._rewrites)
        self._pods: _PodsWatch | None = None
        """None: there is no pool."""
        self._next_pods: _PodsWatch | None = None
        """The pods of a new selector, until they are listed."""
        self._tasks: asyncio.TaskGroup
        self._known_absent = False
        self._ended_failures = 0
        """Failures of watches of earlier selectors."""

    async def run(self) -> None:
        """Follow the pool until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            for watch in self._of_kinds:
                self._tasks.create_task(watch.run())

    @property
    def pool(self) -> InferencePool | None:
        """None: it does not exist, or is not known yet."""
        return self._pools.objects.get(self.name)

    @property
    def synced(self) -> bool:
        """Whether the pool, and its pods if it exists, are known."""
        return self._pools.synced and (
            self.pool is None or (self._pods is not None and self._pods.watch.synced)
        )

    @property
    def seen_at(self) -> float | None:
        """When the API server last told of the pool and its pods; None: never."""
        pods = self._pools if self._pods is None else self._pods.watch
        times = self._pools.seen_at, pods.seen_at
        return None if None in times else min(time for time in times if time is not None)

    @property
    def failures(self) -> int:
        """Requests to the API server that failed."""
        of_pods = 0 if self._pods is None else self._pods.watch.failures
        return self._ended_failures + of_pods + sum(watch.failures for watch in self._of_kinds)

    def endpoints(self) -> list[ResolvedEndpoint]:
        pool, pods = self.pool, self._pods
        return [] if pool is None or pods is None else endpoints_of(pool, pods.watch.objects.values())

    def priorities(self) -> dict[str, int]:
        """Priority by name of InferenceObjective."""
        return priorities_of(self.name, _by_name(self._objectives))

    def rewrites(self) -> Rewrites:
        return rewrites_of(self.name, _by_name(self._rewrites))

    # -- the pool's selector

    def _on_pool(self) -> None:
        pool = self.pool
        if pool is None and not self._known_absent:
            log.warning("the InferencePool %s/%s does not exist", self._namespace, self.name)
        self._known_absent = pool is None
        self._follow_pods("" if pool is None else label_selector(pool))
        self._on_change()

    def _follow_pods(self, selector: str) -> None:
        """Follow the pods of a selector; empty: none. Those of an earlier one stay until these are listed."""
        latest = self._next_pods or self._pods
        if latest is not None and latest.selector == selector:
            return
        self._end(self._next_pods)
        self._next_pods = None
        if not selector:
            self._end(self._pods)
            self._pods = None
        elif self._pods is None:
            self._pods = self._start(selector)
        elif self._pods.selector != selector:
            self._next_pods = self._start(selector)

    def _start(self, selector: str) -> _PodsWatch:
        watch = ResourceWatch(
            self._api, PODS, self._namespace, self._on_pods, selectors={"labelSelector": selector}
        )
        return _PodsWatch(selector, watch, self._tasks.create_task(watch.run()))

    def _on_pods(self) -> None:
        if self._next_pods is not None and self._next_pods.watch.synced:
            self._end(self._pods)
            self._pods, self._next_pods = self._next_pods, None
        self._on_change()

    def _end(self, pods: _PodsWatch | None) -> None:
        if pods is not None:
            pods.task.cancel()
            self._ended_failures += pods.watch.failures


class _PodsWatch(NamedTuple):
    selector: str
    watch: ResourceWatch[Pod]
    task: asyncio.Task[None]


def _by_name(watches: list[ResourceWatch[T]]) -> list[T]:
    """The objects of all groups; those of a later group replace those of the same name."""
    return list({name: item for watch in watches for name, item in watch.objects.items()}.values())
