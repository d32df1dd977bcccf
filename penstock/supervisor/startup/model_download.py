"""Downloads models from the Hugging Face hub."""

from __future__ import annotations

import logging
from pathlib import Path

from penstock.config.errors import ConfigError
from penstock.exit_codes import StartupError, first_line

log = logging.getLogger(__name__)

_TOKENIZER_FILES = (
    "tokenizer*.json",
    "*.model",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*processor_config.json",
    "config.json",
    "generation_config.json",
    "*quant*_config.json",
)
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
# Subfolders, and a second copy of the weights in another layout.
_UNUSED_FILES = ("*/*", "consolidated*")


def download_model(hub_id: str, revision: str | None, *, weights: bool) -> Path:
    """The local snapshot of a hub id; files in the cache are not downloaded again.

    ``weights``: include the model's weights, not only its tokenizer and configuration. Raises ConfigError
    when there is no such model or revision, or no access to it, StartupError when it cannot be downloaded.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    log.info("looking for %s on the Hugging Face hub", hub_id)
    at = f"{hub_id} at revision {revision}" if revision else hub_id
    try:
        directory = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=[*_TOKENIZER_FILES, *(_WEIGHT_FILES if weights else ())],
            ignore_patterns=list(_UNUSED_FILES),
        )
    except GatedRepoError as error:
        raise ConfigError(
            f"model {hub_id}: its owner must grant you access first: visit https://huggingface.co/{hub_id}, "
            "then set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"--revision {revision}: {hub_id} has no such branch, tag or commit") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"model {hub_id}: no such directory, and no such model on the Hugging Face hub "
            "(a private one needs HF_TOKEN)"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, HTTPError) as error:
        if constants.HF_HUB_OFFLINE:
            raise ConfigError(
                f"model {hub_id}: no such directory, and {at} is not in the Hugging Face cache, which "
                "HF_HUB_OFFLINE has searched alone; unset it, or give a directory"
            ) from error
        raise StartupError(
            f"model {hub_id}: no such directory, {at} is not in the Hugging Face cache, and the hub cannot "
            f"be reached ({first_line(error)}); give a directory to serve without a network"
        ) from error
    except OSError as error:
        raise StartupError(f"model {hub_id}: cannot be downloaded: {first_line(error)}") from error
    return Path(directory)
