"""The process group of ranks that share a model's layers: rendezvous and collectives (torch.distributed)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.wire.sockets import ProcessGroupSpec

POLL_INTERVAL_S = 0.05
"""Seconds between two checks whether the other ranks have loaded. A FileStore's own wait polls as well, and
its timeout cannot be told from other RuntimeErrors."""
PROGRESS_INTERVAL_S = 5.0
"""Seconds between two progress messages while waiting."""
MEETING_TIMEOUT_S = 120.0
"""Seconds for the other ranks to replace their weights: longer than the copy of a large model takes."""
FOREVER = timedelta(days=365)
"""Timeout of collectives: the supervisor ends a group in which a rank is lost or hangs."""

Progress = Callable[[str, float | None], None]


class ProcessGroup:
    """This process's membership in PyTorch's default process group.

    A collective waits until every rank has called it. After a rank's death it raises RuntimeError, or waits
    until the supervisor ends the process.
    """

    def __init__(self, spec: ProcessGroupSpec, device: torch.device) -> None:
        """Wait for the other ranks. Host tensors are exchanged through gloo, GPU tensors through NCCL unless
        ranks share a GPU, which NCCL refuses. All ranks are on this host and use its loopback interface.
        A CUDA ``device`` is the process's current one, which NCCL uses.
        """
        self.rank, self.size = spec.rank, spec.world_size
        self._meetings = 0
        backend = "gloo"
        if device.type == "cuda" and torch.cuda.device_count() >= spec.world_size:
            backend = "cpu:gloo,cuda:nccl"
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ[name] = _loopback()
        self._store = dist.FileStore(spec.rendezvous, spec.world_size)  # type: ignore[attr-defined]
        self._store.set_timeout(FOREVER)
        dist.init_process_group(
            backend, store=self._store, rank=spec.rank, world_size=spec.world_size, timeout=FOREVER
        )

    def all_gather(self, own: Tensor) -> Tensor:
        """[N, ...] of every rank, with equal shapes → [ranks, N, ...]"""
        every = own.new_empty((self.size, *own.shape))
        dist.all_gather(list(every.unbind()), own)
        return every

    def all_reduce(self, part: Tensor) -> None:
        """Sum of all ranks' tensors, in place."""
        dist.all_reduce(part)

    def barrier(self, progress: Progress) -> None:
        """Wait until every rank has called this, and report progress: other ranks may load for longer."""
        next_progress = 0.0

        def report() -> None:
            nonlocal next_progress
            if time.monotonic() >= next_progress:
                next_progress = time.monotonic() + PROGRESS_INTERVAL_S
                progress("waiting for the other ranks", None)

        self._wait_for_all("loaded", report)

    def meet(self, tick: Callable[[], None]) -> None:
        """Wait until every rank has called this as often. Raises TimeoutError after MEETING_TIMEOUT_S."""
        self._meetings += 1
        deadline = time.monotonic() + MEETING_TIMEOUT_S

        def wait() -> None:
            tick()
            if time.monotonic() > deadline:
                raise TimeoutError("the other ranks have not done the same")

        self._wait_for_all(f"met {self._meetings}", wait)

    def _wait_for_all(self, occasion: str, wait: Callable[[], None]) -> None:
        self._store.set(f"{occasion} {self.rank}", "")
        while not self._store.check([f"{occasion} {rank}" for rank in range(self.size)]):
            wait()
            time.sleep(POLL_INTERVAL_S)

    def close(self) -> None:
        dist.destroy_process_group()


def _loopback() -> str:
    """The name of the network interface with the address 127.0.0.1."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    raise RuntimeError("no network interface has the address 127.0.0.1, over which ranks of one host meet")
