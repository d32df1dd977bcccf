"""Options of a server that spans several hosts."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.describe import option, option_group

HEAD = "head"
"""Name in ``--api-server-hosts`` of the host where ``penstock serve`` runs."""


@option_group
class HostOptions:
    """Options of a server that spans several hosts."""

    data_parallel_size_local: Annotated[
        Annotated[int, Meta(ge=0, le=1024)] | None,
        option(
            "Number of engine processes on this host. Default: all ranks from --data-parallel-start-rank on.",
            "Hosts",
        ),
    ] = None
    data_parallel_start_rank: Annotated[
        int, option("Rank of the first engine on a --headless host.", "Hosts", ge=0, lt=1024)
    ] = 0
    headless: Annotated[
        bool, option("Run engines only, for the API servers on the host of --coordinator.", "Hosts")
    ] = False
    coordinator: Annotated[
        Annotated[str, Meta(pattern=r"^tcp://([^\s/:\[\]]+|\[[0-9A-Fa-f:.]+\]):[1-9][0-9]{0,4}\Z")] | None,
        option(
            "Coordinator address, tcp://HOST:PORT. The head listens there; --headless hosts connect to it.",
            "Hosts",
            allowed="tcp://HOST:PORT, or tcp://[HOST]:PORT for IPv6",
        ),
    ] = None
    cluster_key_file: Annotated[
        str | None,
        option("Key file made by penstock keys cluster, the same on every host.", "Hosts", metavar="FILE"),
    ] = None
    engine_host: Annotated[
        Annotated[str, Meta(pattern=r"^[^\s/\[\]]+\Z")] | None,
        option(
            "Address at which the engines of this --headless host listen for API servers. Default: "
            "the local address of its connection to the coordinator.",
            "Hosts",
            allowed="a name or an address without a port",
        ),
    ] = None
    data_parallel_backend: Annotated[
        Literal["mp", "ray"],
        option(
            "Where engines run. mp: as processes of this host; ray: on the machines of a Ray cluster.",
            "Hosts",
        ),
    ] = "mp"
    ray_address: Annotated[
        str,
        option(
            "Ray cluster, HOST:PORT; auto: the one that this host belongs to.",
            "Hosts",
            pattern=r"^(auto|[^\s/]+:[0-9]{1,5})\Z",
            allowed="auto or HOST:PORT",
        ),
    ] = "auto"
    engine_resources: Annotated[
        Annotated[str, Meta(pattern=r"^[^\s,=]+=[0-9]+(\.[0-9]+)?(,[^\s,=]+=[0-9]+(\.[0-9]+)?)*\Z")] | None,
        option(
            "Ray resources per engine, such as CPU=4,GPU=1. Default: CPU=1, and GPU=1 for engines "
            "that use one.",
            "Hosts",
            allowed="NAME=NUMBER, several separated by commas",
        ),
    ] = None
    api_server_hosts: Annotated[
        Annotated[str, Meta(pattern=r"^[^\s,]+(,[^\s,]+)*\Z")] | None,
        option(
            f"Hosts of the API servers, assigned in turn: {HEAD} (this host) and Ray machines by "
            f"address, name or id. They listen on their address and --port. Default: {HEAD}.",
            "Hosts",
            allowed="hosts separated by commas, without spaces",
            metavar="HOST[,HOST...]",
        ),
    ] = None
