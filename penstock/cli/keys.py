"""``penstock keys``: makes the key that the hosts of a fleet share."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.command import Command
from penstock.config.errors import ConfigError
from penstock.config.keys import KeysConfig
from penstock.config.origins import Origins


def run(config: KeysConfig, origins: Origins) -> int:
    """Write the file and say what to do with it. Raises ConfigError when it cannot be made."""
    from penstock.supervisor.startup.cluster_key import write_cluster_key

    path = Path(config.cluster_key_file).expanduser()
    try:
        write_cluster_key(path)
    except FileExistsError:
        raise ConfigError(f"{path}: exists; a key that hosts may use is not overwritten") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    print(
        f"{path}: made. Who has it may join the fleet. Copy it to every host by a way that keeps it secret, "
        "and give it to penstock serve as --cluster-key-file."
    )
    return 0


COMMAND = Command(("keys",), "Make the key that the hosts of a fleet share.", KeysConfig, run)
