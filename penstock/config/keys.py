"""Options of ``penstock keys``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from penstock.config.describe import option, option_group

TIME_PATTERN = r"^(never|now|[0-9]{1,6}[smhdw]|[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9:.]+([Zz]|[+-][0-9:]+))\Z"
Moment = Annotated[str, Meta(pattern=TIME_PATTERN)]
ALLOWED_TIME = "30d, 12h, 2030-12-31T18:00:00Z, now or never"


@option_group
class KeysConfig:
    """Options of ``penstock keys cluster``."""

    cluster_key_file: Annotated[
        str, option("Key file to create; it must not exist.", "Files", positional=True)
    ] = "penstock.key"


@option_group
class ClientKeysFile:
    """The file of the clients' keys."""

    client_keys_file: Annotated[
        str, option("File of the gateway's option of this name.", "Files", metavar="FILE")
    ] = "keys.yaml"


@option_group
class JsonOutput:
    """How something is printed."""

    json: Annotated[bool, option("Print JSON instead of text.", "Output")] = False


@option_group
class ListKeysConfig(ClientKeysFile, JsonOutput):
    """Options of ``penstock keys list``."""


@option_group
class OneKeyConfig(ClientKeysFile):
    """Options of commands about one client."""

    name: Annotated[str, option("Name of the client in the file.", "Client", positional=True)] = ""


@option_group
class ShowKeyConfig(OneKeyConfig, JsonOutput):
    """Options of ``penstock keys show``."""


@option_group
class AddKeyConfig(OneKeyConfig):
    """Options of ``penstock keys add``."""

    team: Annotated[str | None, option("Team of the client.", "Client")] = None
    expires: Annotated[
        Moment | None,
        option(
            "When the key expires: a time, or how long. Default: never.",
            "Client",
            allowed=ALLOWED_TIME,
        ),
    ] = None
    models: Annotated[list[str] | None, option("Patterns of its models. Default: all.", "Client")] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-100, le=100)] | None, option("Highest priority of its requests.", "Client")
    ] = None
    weight: Annotated[
        Annotated[float, Meta(gt=0, le=1000)] | None,
        option("Its share beside others of the same priority.", "Client"),
    ] = None
    budgets: Annotated[
        list[Annotated[str, Meta(pattern=r"^[a-z-]+=[0-9]+([.][0-9]+)?\Z")]] | None,
        option(
            "Its budgets: requests-per-minute=600 tokens-per-day=1000000 cost-per-month=12.50.",
            "Client",
            metavar="NAME=AMOUNT",
            allowed="NAME=AMOUNT",
        ),
    ] = None


@option_group
class RotateKeyConfig(OneKeyConfig):
    """Options of ``penstock keys rotate``."""

    grace: Annotated[
        Moment,
        option("How long the keys before are valid beside the new one.", "Client", allowed=ALLOWED_TIME),
    ] = "24h"


@option_group
class ExpireKeyConfig(OneKeyConfig):
    """Options of ``penstock keys expire``."""

    at: Annotated[
        Moment,
        option("When its keys expire: a time, or how long until then.", "Client", allowed=ALLOWED_TIME),
    ] = "now"


@option_group
class RevokeKeyConfig(OneKeyConfig):
    """Options of ``penstock keys revoke``."""

    undo: Annotated[bool, option("Let the client in again.", "Client")] = False


@option_group
class CheckKeyConfig(ClientKeysFile, JsonOutput):
    """Options of ``penstock keys check``."""

    token_file: Annotated[
        str, option("File with a key or a token alone; -: standard input.", "Files", positional=True)
    ] = "-"
