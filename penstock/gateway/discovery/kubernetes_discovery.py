"""``--kubernetes-pool``: endpoints, priorities and model rewrites of InferencePools, as they change.

Nothing is written to the cluster, and every gateway follows the pools by itself: replicas need no leader.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from glob import escape

from penstock.gateway.discovery.inference_pool_watch import InferencePoolWatch
from penstock.gateway.discovery.kubernetes_api import KubernetesApi
from penstock.gateway.discovery.pool_members import Rewrites
from penstock.gateway.metric_definitions import KUBERNETES_AGE, KUBERNETES_FAILURES, Figure
from penstock.gateway.models.model_routes import ModelRoute
from penstock.gateway.models.pools import Pool
from penstock.gateway.routing.endpoint_discovery import ResolvedEndpoint

log = logging.getLogger(__name__)

COALESCE_S = 0.1
"""Changes within this time are taken together; the first one is taken at once."""


class KubernetesDiscovery:
    """What the pools say, as of the latest change; the last state stays while the API server is away."""

    def __init__(self, kubeconfig: str | None, pools: Sequence[str], *, has_keys: bool = False) -> None:
        """``pools``: ``[NAMESPACE/]NAME`` each. ``has_keys``: clients need API keys."""
        self.endpoints: list[ResolvedEndpoint] = []
        self.priorities: dict[str, int] = {}
        """Priorities by name of InferenceObjective. Changed in place, for those who look names up in it."""
        self.rewrites: Rewrites = {}
        self.synced = False
        """Whether all pools are known."""
        self.news = asyncio.Event()
        """Set after every change of the above; whoever follows it clears it."""
        self._api = KubernetesApi(kubeconfig)
        self._names = pools
        self._pools: list[InferencePoolWatch] = []
        self._changed = asyncio.Event()
        self._has_keys = has_keys
        self._open: set[str] = set()
        """Pools for which it was logged that they fail open."""

    async def connect(self) -> None:
        """Find the API server and the credentials. Raises ConfigError."""
        await self._api.connect()
        for text in self._names:
            namespace, _, name = text.rpartition("/")
            self._pools.append(
                InferencePoolWatch(self._api, namespace or self._api.namespace, name, self._changed.set)
            )

    async def run(self) -> None:
        """Follow the pools until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for pool in self._pools:
                    tasks.create_task(pool.run())
                while True:
                    await self._changed.wait()
                    self._changed.clear()
                    self._update()
                    await asyncio.sleep(COALESCE_S)
        finally:
            await self._api.close()

    def endpoints_in(self, pools: Sequence[Pool]) -> list[ResolvedEndpoint]:
        """The endpoints, with what ``pools`` say of theirs. Pods may have a role of their own."""
        named = {pool.name: pool for pool in pools}
        return [
            replace(each, role=pool.role if each.role == "both" else each.role, apis=pool.spoken)
            if (pool := named.get(each.pool)) is not None
            else each
            for each in self.endpoints
        ]

    def with_pools(self, pools: Sequence[Pool]) -> tuple[Pool, ...]:
        """``pools``, and the InferencePools among which they do not say more of one."""
        named = {pool.name for pool in pools}
        return (*pools, *(Pool(name=pool.name) for pool in self._pools if pool.name not in named))

    def with_routes(self, routes: Mapping[str, ModelRoute]) -> dict[str, ModelRoute]:
        """``routes``, which come first, and those of the InferenceModelRewrites."""
        found = dict(routes)
        for model, targets in self.rewrites.items():
            found.setdefault("*" if model is None else escape(model), ModelRoute(targets=dict(targets)))
        return found

    def figures(self) -> Iterator[Figure]:
        """For metrics."""
        now = asyncio.get_running_loop().time()
        times = [pool.seen_at for pool in self._pools]
        seen_at = min((-math.inf if time is None else time for time in times), default=-math.inf)
        yield Figure(KUBERNETES_AGE, now - seen_at)
        yield Figure(KUBERNETES_FAILURES, sum(pool.failures for pool in self._pools))

    def _update(self) -> None:
        endpoints = [endpoint for pool in self._pools for endpoint in pool.endpoints()]
        # What the first pool says counts.
        priorities = {
            name: value for pool in reversed(self._pools) for name, value in pool.priorities().items()
        }
        rewrites = {model: to for pool in reversed(self._pools) for model, to in pool.rewrites().items()}
        latest = endpoints, priorities, rewrites, all(pool.synced for pool in self._pools)
        if latest != (self.endpoints, self.priorities, self.rewrites, self.synced):
            self.endpoints, _, self.rewrites, self.synced = latest
            self.priorities.clear()
            self.priorities.update(priorities)
            self.news.set()
        self._warn_of_open_pools()

    def _warn_of_open_pools(self) -> None:
        """Proxies let requests pass unchecked when the picker of such a pool does not answer."""
        for watch in self._pools if self._has_keys else ():
            ref = None if watch.pool is None else watch.pool.spec.endpoint_picker_ref
            if ref is None or ref.failure_mode != "FailOpen":
                self._open.discard(watch.name)
            elif watch.name not in self._open:
                self._open.add(watch.name)
                log.warning(
                    "the InferencePool %s has the failureMode FailOpen: while this gateway is down, requests "
                    "without an API key pass",
                    watch.name,
                )
