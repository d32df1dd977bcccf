"""Options of engines of vLLM's that run elsewhere."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from penstock.config.describe import option, option_group


@option_group
class AttachOptions:
    """Options of engines of vLLM's that run elsewhere."""

    attach: Annotated[
        Annotated[str, Meta(pattern=r"^([^\s/:\[\]]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}\Z")] | None,
        option(
            "Serve engines of vllm serve --headless, which connect to this address: their "
            "--data-parallel-address and --data-parallel-rpc-port. They take two further ports each, from "
            "PORT + 1 on.",
            "Attached engines",
            allowed="HOST:PORT, or [HOST]:PORT for IPv6",
            metavar="HOST:PORT",
        ),
    ] = None
    print_engine_command: Annotated[
        bool,
        option(
            "Print the vllm serve --headless command of each host with --attach, and end. "
            "--data-parallel-size-local is the number of engines per host.",
            "Attached engines",
        ),
    ] = False
