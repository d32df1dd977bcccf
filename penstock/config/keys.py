"""Options of ``penstock keys``."""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.config.describe import option


class KeysConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``penstock keys``."""

    cluster_key_file: Annotated[
        str, option("Key file to create; it must not exist.", "Files", positional=True)
    ] = "penstock.key"
