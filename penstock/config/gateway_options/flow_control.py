"""Options of the gateway: the clients' keys and budgets, and who waits while all endpoints are full."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.describe import ALLOWED_HEADER, HeaderName, option, option_group


@option_group
class FlowControlOptions:
    """Options of the gateway: the clients' keys and budgets, and who waits while all endpoints are full."""

    client_keys_file: Annotated[
        str | None,
        option(
            "YAML file of further API keys with the name, times, priority, share, models and budgets of "
            "each, and of issuers of tokens (JWT, OpenID Connect); reloaded when it changes.",
            "Budgets",
        ),
    ] = None
    budget_store: Annotated[
        Annotated[str, Meta(pattern=r"^(memory|rediss?://[^/?#]*(/[^@?#]*)?(\?[^@#]*)?|unix://.+)\Z")],
        option(
            "Where budgets are kept. memory: in this gateway, for all its workers; a URL: in Redis, for "
            "several gateways.",
            "Budgets",
            allowed="memory, redis://HOST[:PORT][/DB], rediss://… or unix://PATH",
            metavar="URL",
            secret=True,
        ),
    ] = "memory"
    budget_state_file: Annotated[
        str | None,
        option(
            "File in which budgets in memory outlive the gateway. Default: its start fills them.",
            "Budgets",
            metavar="FILE",
        ),
    ] = None
    budget_store_timeout: Annotated[
        float, option("Maximum time for an answer of Redis, in seconds.", "Budgets", gt=0)
    ] = 0.25
    budget_store_outage: Annotated[
        Literal["local", "refuse"],
        option(
            "What is done while the budget store does not answer. local: each process counts by itself; "
            "refuse: requests of keys with budgets get 503.",
            "Budgets",
        ),
    ] = "local"

    flow_control: Annotated[
        bool,
        option(
            "Hold requests in the gateway while all endpoints that could serve them are full, instead of in "
            "the endpoints' queues: by priority, in fair shares.",
            "Flow control",
        ),
    ] = False
    max_requests_per_endpoint: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        option(
            "Requests at which an endpoint is full. Default: learned from its load.",
            "Flow control",
        ),
    ] = None
    max_queued_requests: Annotated[
        int, option("Maximum requests that wait in each worker.", "Flow control", ge=0)
    ] = 1024
    queue_timeout: Annotated[
        float,
        option(
            "Maximum time that a request waits, in seconds. Clients may set less in the header "
            "x-queue-timeout.",
            "Flow control",
            ge=0,
        ),
    ] = 30.0
    fairness_header: Annotated[
        HeaderName | None,
        option(
            "Request header whose values share the endpoints fairly. Default: keys do, or addresses. Clients "
            "can set it, unless a proxy does.",
            "Flow control",
            allowed=ALLOWED_HEADER,
        ),
    ] = None
