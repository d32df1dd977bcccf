"""The ranks that compute a model's layers together: how they meet, and what they exchange."""

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
"""How often a rank looks whether the others have loaded. There is nothing to wait on: a FileStore's own wait
looks every so often, too, and its timeout is a RuntimeError like any other."""
PROGRESS_INTERVAL_S = 5.0
"""How often it says that it waits."""
FOREVER = timedelta(days=365)
"""The supervisor ends a group of which a rank is lost or hangs; a rank need not guess."""

Progress = Callable[[str, float | None], None]


class ProcessGroup:
    """This process among the ranks: PyTorch's default process group, of which a process has one.

    Its collectives wait until every rank has called the same one; after a rank's death they raise
    RuntimeError or wait until the supervisor ends the process.
    """

    def __init__(self, place: ProcessGroupSpec, device: torch.device) -> None:
        """Waits for the other ranks. Tensors on the host go through gloo; those on GPUs through NCCL, unless
        ranks share one, which NCCL refuses. All ranks are on this host and meet on its loopback interface.
        """
        self.rank, self.size = place.rank, place.world_size
        backend = "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(place.rank % torch.cuda.device_count())
            if torch.cuda.device_count() >= place.world_size:
                backend = "cpu:gloo,cuda:nccl"
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ[name] = _loopback()
        self._store = dist.FileStore(place.rendezvous, place.world_size)  # type: ignore[attr-defined]
        self._store.set_timeout(FOREVER)
        dist.init_process_group(
            backend, store=self._store, rank=place.rank, world_size=place.world_size, timeout=FOREVER
        )

    def all_gather(self, own: Tensor) -> Tensor:
        """[N, ...] of every rank, of one shape → [ranks, N, ...]"""
        every = own.new_empty((self.size, *own.shape))
        dist.all_gather(list(every.unbind()), own)
        return every

    def all_reduce(self, part: Tensor) -> None:
        """Make it the sum of all ranks', in place."""
        dist.all_reduce(part)

    def barrier(self, progress: Progress) -> None:
        """Until every rank has come here. Says that it waits: loading may take longer elsewhere."""
        self._store.set(f"loaded {self.rank}", "")
        next_word = 0.0
        while not self._store.check([f"loaded {rank}" for rank in range(self.size)]):
            if time.monotonic() >= next_word:
                next_word = time.monotonic() + PROGRESS_INTERVAL_S
                progress("waiting for the other ranks", None)
            time.sleep(POLL_INTERVAL_S)

    def close(self) -> None:
        dist.destroy_process_group()


def _loopback() -> str:
    """The name of the interface that has 127.0.0.1."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    raise RuntimeError("no network interface has the address 127.0.0.1, over which ranks of one host meet")
