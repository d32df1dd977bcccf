"""Options of a fleet on several hosts."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.describe import option
from penstock.config.groups.synthetic import SyntheticOptions

HEAD = "head"
"""Name in ``--api-server-hosts`` of the host where ``penstock serve`` runs."""


class HostOptions(SyntheticOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a fleet on several hosts."""

    data_parallel_size_local: Annotated[
        Annotated[int, Meta(ge=0, le=1024)] | None,
        option("How many of them this host runs; default: all from its first one on.", "Hosts"),
    ] = None
    data_parallel_start_rank: Annotated[
        int, option("Rank of the first engine of a --headless host.", "Hosts", ge=0, lt=1024)
    ] = 0
    headless: Annotated[
        bool, option("Run engines only, for the API servers of the host that --coordinator names.", "Hosts")
    ] = False
    coordinator: Annotated[
        Annotated[str, Meta(pattern=r"^tcp://([^\s/:\[\]]+|\[[0-9A-Fa-f:.]+\]):[1-9][0-9]{0,4}$")] | None,
        option(
            "Address of the fleet's coordinator, tcp://HOST:PORT: where this host listens for engines of "
            "others or, with --headless, where its engines join the fleet.",
            "Hosts",
        ),
    ] = None
    cluster_key_file: Annotated[
        str | None,
        option(
            "File that penstock keys has made, the same on every host of the fleet.", "Hosts", metavar="FILE"
        ),
    ] = None
    engine_host: Annotated[
        Annotated[str, Meta(pattern=r"^[^\s/\[\]]+$")] | None,
        option(
            "Address of this --headless host at which its engines listen for API servers; default: the one "
            "it reaches the coordinator by.",
            "Hosts",
        ),
    ] = None
    data_parallel_backend: Annotated[
        Literal["mp", "ray"],
        option(
            "Where engines run: mp, as processes of this host; ray, on machines of a Ray cluster.", "Hosts"
        ),
    ] = "mp"
    ray_address: Annotated[
        str,
        option(
            "The Ray cluster, HOST:PORT; auto: the one that this host belongs to.",
            "Hosts",
            pattern=r"^(auto|[^\s/]+:[0-9]{1,5})$",
        ),
    ] = "auto"
    engine_resources: Annotated[
        Annotated[str, Meta(pattern=r"^[^\s,=]+=[0-9]+(\.[0-9]+)?(,[^\s,=]+=[0-9]+(\.[0-9]+)?)*$")] | None,
        option(
            "What an engine takes of a machine of the Ray cluster, such as CPU=4,GPU=1. Default: CPU=1, and "
            "GPU=1 unless it runs without.",
            "Hosts",
        ),
    ] = None
    api_server_hosts: Annotated[
        Annotated[str, Meta(pattern=r"^[^\s,]+(,[^\s,]+)*$")] | None,
        option(
            f"Where API servers run, in turn: {HEAD}, which is this host, and machines of the Ray cluster by "
            f"address, name or id, where they listen on that address and --port. Default: {HEAD}.",
            "Hosts",
            metavar="HOST[,HOST...]",
        ),
    ] = None
