"""How ranks that compute layers together tell vLLM where they meet."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import FileStore  # type: ignore[attr-defined]

from penstock.wire.sockets import ProcessGroupSpec

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the first one to say where it listens: all import vLLM before."""
VARIABLES = (
    "VLLM_DP_SIZE",
    "VLLM_DP_RANK",
    "VLLM_DP_RANK_LOCAL",
    "VLLM_DP_MASTER_IP",
    "VLLM_DP_MASTER_PORT",
)
"""What vLLM reads from the environment when it makes its process groups."""


def set_process_group_environment(place: ProcessGroupSpec) -> None:
    """Have vLLM join its ranks' process groups, over a port that the first rank has found free."""
    store = FileStore(place.rendezvous, place.world_size)
    store.set_timeout(RENDEZVOUS_TIMEOUT)
    if place.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            store.set("port", str(free.getsockname()[1]))
    rank = str(place.rank)
    values = (str(place.world_size), rank, rank, "127.0.0.1", store.get("port").decode())
    os.environ.update(zip(VARIABLES, values, strict=True))
