"""Sets up vLLM's data-parallel process group: agrees on a port, and sets vLLM's environment variables."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import FileStore  # type: ignore[attr-defined]

from penstock.wire.sockets import ProcessGroupSpec

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for rank 0 to publish its port: all import vLLM before that."""
VARIABLES = (
    "VLLM_DP_SIZE",
    "VLLM_DP_RANK",
    "VLLM_DP_RANK_LOCAL",
    "VLLM_DP_MASTER_IP",
    "VLLM_DP_MASTER_PORT",
)
"""Environment variables from which vLLM creates its process groups."""


def set_process_group_environment(group: ProcessGroupSpec) -> None:
    """Set the variables for vLLM to join ``group``, on a port that rank 0 has found free."""
    store = FileStore(group.rendezvous, group.world_size)
    store.set_timeout(RENDEZVOUS_TIMEOUT)
    if group.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            store.set("port", str(free.getsockname()[1]))
    rank = str(group.rank)
    values = (str(group.world_size), rank, rank, "127.0.0.1", store.get("port").decode())
    os.environ.update(zip(VARIABLES, values, strict=True))
