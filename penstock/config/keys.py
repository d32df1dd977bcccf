"""Options of ``penstock keys``."""

from __future__ import annotations

from typing import Annotated

from penstock.config.describe import option, option_group


@option_group
class KeysConfig:
    """Options of ``penstock keys``."""

    cluster_key_file: Annotated[
        str, option("Key file to create; it must not exist.", "Files", positional=True)
    ] = "penstock.key"
