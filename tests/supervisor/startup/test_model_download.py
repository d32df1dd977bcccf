from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from penstock.config.errors import ConfigError
from penstock.exit_codes import StartupError
from penstock.supervisor.startup.model_download import download_model

REPOSITORY = [
    ".gitattributes",
    "README.md",
    "chat_template.jinja",
    "config.json",
    "consolidated.safetensors",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "onnx/model.safetensors",
    "original/config.json",
    "original/tokenizer.model",
    "preprocessor_config.json",
    "processor_config.json",
    "pytorch_model.bin",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
]
TOKENIZER = [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
]


class FakeHub:
    """Stands for huggingface_hub.snapshot_download."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.files: list[str] = []
        self.revision: str | None = None

    def __call__(
        self, hub_id: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        if self.error is not None:
            raise self.error
        self.revision = revision
        self.files = [
            name
            for name in REPOSITORY
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns)
            and not any(fnmatch.fnmatch(name, pattern) for pattern in ignore_patterns)
        ]
        return f"/cache/{hub_id}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def test_fetches_only_what_is_needed(hub: FakeHub) -> None:
    assert download_model("acme/tiny", "v1", weights=False) == Path("/cache/acme/tiny")
    assert hub.files == TOKENIZER
    assert hub.revision == "v1"
    download_model("acme/tiny", None, weights=True)
    assert sorted(set(hub.files) - set(TOKENIZER)) == [
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def _http_error(kind: Any) -> Exception:
    """Without a response, which no message of ours needs."""
    error: Exception = kind.__new__(kind)
    error.args = ("server said no\nRequest ID: 1",)
    return error


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (
            _http_error(errors.GatedRepoError),
            ConfigError,
            r"must grant you access .*https://huggingface\.co/a/b",
        ),
        (_http_error(errors.RevisionNotFoundError), ConfigError, "--revision v9: a/b has no such branch"),
        (
            _http_error(errors.RepositoryNotFoundError),
            ConfigError,
            "model a/b: no such directory, and no such",
        ),
        (errors.HFValidationError("bad"), ConfigError, "model a/b: no such directory, and no such"),
        (
            errors.LocalEntryNotFoundError("offline\nmore"),
            StartupError,
            r"a/b at revision v9 is not in .*\(offline\)",
        ),
        (_http_error(errors.HfHubHTTPError), StartupError, r"cannot be reached \(server said no\)"),
        (errors.HTTPError("read timeout"), StartupError, r"cannot be reached \(read timeout\)"),
        (OSError(28, "No space left on device"), StartupError, "cannot be downloaded: .*No space left"),
    ],
)
def test_every_failure_is_said_clearly(
    hub: FakeHub, error: Exception, expected: type[Exception], message: str
) -> None:
    hub.error = error
    with pytest.raises(expected, match=message):
        download_model("a/b", "v9", weights=True)


def test_a_model_in_the_local_cache_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub's own code, over a cache as it lays one out."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--acme--tiny"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    for name in ("main", "v1"):
        (repository / "refs" / name).write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert download_model("acme/tiny", None, weights=True) == snapshot
    assert download_model("acme/tiny", "v1", weights=False) == snapshot
    assert download_model("acme/tiny", commit, weights=True) == snapshot
    with pytest.raises(
        ConfigError, match="revision v2 is not in the Hugging Face cache, which HF_HUB_OFFLINE"
    ):
        download_model("acme/tiny", "v2", weights=True)
