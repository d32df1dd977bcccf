"""Options of the gateway: which model serves a request."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.describe import option, option_group


@option_group
class ModelRoutingOptions:
    """Options of the gateway: which model serves a request."""

    model_rewrite: Annotated[
        list[Annotated[str, Meta(pattern=r"^[^=]+=[^=,:]([^=,]*[^=,:])?(,[^=,:]([^=,]*[^=,:])?)*\Z")]] | None,
        option(
            "Model names to replace by others or by pools, optionally by weight: chat=small:9,large:1. A "
            "session keeps its model. A number after the last colon is a weight: name a model qwen3:14 as "
            "qwen3:14:1.",
            "Models",
            allowed="NAME=MODEL, or NAME=MODEL:WEIGHT,MODEL:WEIGHT",
            metavar="NAME=MODEL[:WEIGHT],...",
        ),
    ] = None
    model_fallback: Annotated[
        list[Annotated[str, Meta(pattern=r"^[^=]+=[^=,]+(,[^=,]+)*\Z")]] | None,
        option(
            "Models or pools that take a model's requests when none of its endpoints is ready, or all "
            "refuse: large=small,spare.",
            "Models",
            allowed="NAME=MODEL, or NAME=MODEL,MODEL",
            metavar="NAME=MODEL,...",
        ),
    ] = None
    model_shadow: Annotated[
        list[Annotated[str, Meta(pattern=r"^[^=]+=[^=,:][^=,]*:[0-9.]+(,[^=,:][^=,]*:[0-9.]+)*\Z")]] | None,
        option(
            "Models or pools that also get a share of a model's requests, from 0 to 1; the replies are "
            "discarded: large=candidate:0.1.",
            "Models",
            allowed="NAME=MODEL:SHARE, or NAME=MODEL:SHARE,MODEL:SHARE",
            metavar="NAME=MODEL:SHARE,...",
        ),
    ] = None
    models_interval: Annotated[
        float,
        option(
            "Time between readings of each endpoint's /v1/models, in seconds; 0: off, any endpoint gets "
            "requests for any model.",
            "Models",
            ge=0,
        ),
    ] = 60.0
    unknown_models: Annotated[
        Literal["auto", "refuse", "relay"],
        option(
            "Requests for models that no endpoint lists. auto: they are relayed if all endpoints list the "
            "same models, and refused otherwise.",
            "Models",
        ),
    ] = "auto"
