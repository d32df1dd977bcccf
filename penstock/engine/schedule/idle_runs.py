"""The cached runs that no stream holds, in the order in which they are evicted.

Runs that nobody wants come first, the longest idle one first. Runs that clients want for a time (*kept*) come
after all of these, until the time is over. The kept ones of a tenant, that is a cache salt, may have a
quarter of the blocks, those of all tenants half: beyond that a tenant's longest idle ones are as others. So a
client that wants everything kept has its own forgotten, and nobody else's.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.wire.messages import MAX_KEEP_S

if TYPE_CHECKING:
    from penstock.engine.schedule.prefix_cache import CachedRun

LIFETIMES = (60, 300, 1800, 3600, 12 * 3600, MAX_KEEP_S)
"""Seconds. Clients may name any; few differ, so that few queues are looked at before a run is evicted."""
MAX_TENANT_SHARE, MAX_KEPT_SHARE = 0.25, 0.5
"""Parts of the KV cache's blocks that kept runs may have: of one tenant, and of all."""


def lifetime(seconds: int) -> int:
    """The shortest lifetime of at least so many seconds; 0: none is asked for."""
    return LIFETIMES[min(bisect_left(LIFETIMES, seconds), len(LIFETIMES) - 1)] if seconds else 0


@dataclass(slots=True)
class _Tenant:
    """The kept runs of one salt."""

    runs: OrderedDict[CachedRun, int] = field(default_factory=OrderedDict)
    """Blocks by run, the longest idle one first."""
    blocks: int = 0


class IdleRuns:
    """Runs without holders. A run that follows another is evicted before it."""

    def __init__(self, blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        """``blocks``: those of the KV cache; ``clock``: monotonic seconds."""
        self.kept_blocks = 0
        self._clock = clock
        self._most = int(MAX_TENANT_SHARE * blocks), int(MAX_KEPT_SHARE * blocks)
        self._plain: OrderedDict[CachedRun, None] = OrderedDict()
        self._kept: dict[int, OrderedDict[CachedRun, float]] = {}
        """When the time of kept runs is over, by their lifetime: each in the order of that time."""
        self._tenants: dict[str | None, _Tenant] = {}

    def __iter__(self) -> Iterator[CachedRun]:
        yield from self._plain
        for runs in self._kept.values():
            yield from runs

    def add(self, run: CachedRun) -> None:
        """Add a run, or make it the one that is idle for the shortest time."""
        if run.keep_s:
            self._keep(run)
        else:
            self._plain[run] = None
            self._plain.move_to_end(run)

    def remove(self, run: CachedRun) -> None:
        if run in self._plain:
            del self._plain[run]
        else:
            self._forget(run)

    def resize(self, run: CachedRun) -> None:
        """The run has other blocks than before."""
        tenant = self._tenants.get(run.scope.salt)
        if tenant is not None and run in tenant.runs:
            self._count(tenant, run, len(run.blocks))

    def next(self) -> CachedRun:
        """The run to evict next; there must be one. Its time as a kept one may be over."""
        now = self._clock()
        for runs in [*self._kept.values()]:
            while runs and next(iter(runs.values())) <= now:
                self._demote(next(iter(runs)))
        first = next(iter(self._plain), None)
        if first is None:  # all are kept: those of the tenant with the most
            most = max(self._tenants.values(), key=lambda tenant: tenant.blocks)
            first = next(iter(most.runs))
        while first.children:  # which are idle, and perhaps kept
            first = next(reversed(first.children.values()))
        return first

    def clear(self) -> None:
        self._plain.clear()
        self._kept.clear()
        self._tenants.clear()
        self.kept_blocks = 0

    # -- kept ones

    def _keep(self, run: CachedRun) -> None:
        if run in self._plain:
            del self._plain[run]
        else:
            self._forget(run)
        self._kept.setdefault(run.keep_s, OrderedDict())[run] = self._clock() + run.keep_s
        tenant = self._tenants.setdefault(run.scope.salt, _Tenant())
        self._count(tenant, run, len(run.blocks))
        of_tenant, of_all = self._most
        while tenant.blocks > of_tenant or (tenant.blocks and self.kept_blocks > of_all):
            self._demote(next(iter(tenant.runs)))

    def _count(self, tenant: _Tenant, run: CachedRun, blocks: int) -> None:
        more = blocks - tenant.runs.get(run, 0)
        tenant.runs[run] = blocks
        tenant.blocks += more
        self.kept_blocks += more

    def _forget(self, run: CachedRun) -> None:
        """It is no longer kept, if it was."""
        runs = self._kept.get(run.keep_s)
        if runs is None or run not in runs:
            return
        del runs[run]
        if not runs:
            del self._kept[run.keep_s]
        tenant = self._tenants[run.scope.salt]
        self._count(tenant, run, 0)
        del tenant.runs[run]
        if not tenant.runs:
            del self._tenants[run.scope.salt]

    def _demote(self, run: CachedRun) -> None:
        """A kept run is one that nobody wants: the next to be evicted, because it is idle for long."""
        self._forget(run)
        run.keep_s = 0
        self._plain[run] = None
        self._plain.move_to_end(run, last=False)
