"""``penstock keys cluster``: makes the key file that the hosts of one server share."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.command import Command
from penstock.config.errors import ConfigError
from penstock.config.keys import KeysConfig
from penstock.config.origins import Origins


def run(config: KeysConfig, origins: Origins) -> int:
    """Write the file and print what to do with it. Raises ConfigError when it cannot be written."""
    from penstock.supervisor.startup.cluster_key import write_cluster_key

    path = Path(config.cluster_key_file).expanduser()
    try:
        write_cluster_key(path)
    except FileExistsError:
        raise ConfigError(f"{path}: exists; an existing key is never overwritten") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    print(
        f"{path}: created. Anyone who has it can join the server. Copy it to every host over a secure "
        "channel and pass it to penstock serve as --cluster-key-file."
    )
    return 0


COMMAND = Command(
    ("keys", "cluster"), "Make the key file that the hosts of one server share.", KeysConfig, run
)
