from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.config.errors import ConfigError, NeedsVllm
from penstock.config.serve import ServeConfig
from penstock.distribution import pip_install
from penstock.supervisor.startup import model_resolution
from penstock.supervisor.startup.model_resolution import (
    DEMO_NAME,
    ResolvedModel,
    check_prompt_files,
    resolve_model,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model's directory, as far as the supervisor looks at it."""
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The modules that can be imported; a test takes some away."""
    names = {"torch", "transformers", "safetensors"}
    found = importlib.util.find_spec("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name in names else None)
    return names


@pytest.mark.usefixtures("importable")
def test_a_directory_is_served_under_what_the_user_wrote(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory.parent)
    found = resolve_model(ServeConfig(model="tiny"), "/run")
    assert (found.model_dir, found.tokenizer_dir) == (str(directory), str(directory))
    assert found.served_names == ["tiny"]


@pytest.mark.usefixtures("importable")
def test_a_model_without_experts_cannot_have_them_split(directory: Path) -> None:
    options = {"model": str(directory), "data_parallel_size": 2, "enable_expert_parallel": True}
    with pytest.raises(ConfigError, match=r"--enable-expert-parallel: .* 'llama', which has no experts"):
        resolve_model(ServeConfig(**options), "/run")
    (directory / "config.json").write_text('{"model_type": "mixtral"}')
    assert resolve_model(ServeConfig(**options), "/run").model_dir == str(directory)


@pytest.mark.usefixtures("importable")
def test_names_the_user_gives_replace_it(directory: Path) -> None:
    config = ServeConfig(model=str(directory), served_model_name=["a", "b"])
    assert resolve_model(config, "/run").served_names == ["a", "b"]


@pytest.mark.usefixtures("importable")
def test_the_home_directory_is_understood(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HOME", str(directory.parent))
    assert resolve_model(ServeConfig(model="~/tiny"), "/run").model_dir == str(directory)


@pytest.mark.parametrize("engine", ["torch", "synthetic"])
@pytest.mark.usefixtures("importable")
def test_no_model_is_the_bundled_one(engine: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_resolution, "DEMO_DIR", directory)
    found = resolve_model(ServeConfig(engine="torch" if engine == "torch" else "synthetic"), "/run")
    assert found.model_dir == str(directory)
    assert found.served_names == [DEMO_NAME]


def test_another_tokenizer(directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    config = ServeConfig(model=str(directory), engine="synthetic", tokenizer=str(other))
    assert resolve_model(config, "/run").tokenizer_dir == str(other)


@pytest.mark.parametrize("absent", ["torch", "transformers"])
def test_torch_that_is_not_installed(directory: Path, importable: set[str], absent: str) -> None:
    importable.discard(absent)
    with pytest.raises(ConfigError) as caught:
        resolve_model(ServeConfig(model=str(directory)), "/run")
    assert f"--engine torch: {absent} cannot be imported" in str(caught.value)
    assert f"run {pip_install('torch')}, or" in str(caught.value)
    assert "--engine synthetic" in str(caught.value)
    # The synthetic engine does without.
    assert resolve_model(ServeConfig(model=str(directory), engine="synthetic"), "/run").served_names


@pytest.mark.usefixtures("importable")
def test_a_model_without_config_is_for_the_synthetic_engine_alone(directory: Path) -> None:
    (directory / "config.json").unlink()
    with pytest.raises(ConfigError, match=rf"no config.json in {directory}"):
        resolve_model(ServeConfig(model=str(directory)), "/run")
    assert resolve_model(ServeConfig(model=str(directory), engine="synthetic"), "/run")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ServeConfig(model="/no/such/dir"), "model /no/such/dir: no such directory, nor a hub id"),
        (ServeConfig(model="a/b/c"), "model a/b/c: no such directory"),
        (ServeConfig(model="../no-such-model"), r"model \.\./no-such-model: no such directory"),
        (ServeConfig(model=""), "model: an empty name"),
        (ServeConfig(model=__file__), "is a file; give its directory"),
        (ServeConfig(revision="main"), "--revision main: the bundled demo model has no revisions"),
        (ServeConfig(model="/", revision="main"), "--revision main: / is a directory"),
    ],
)
@pytest.mark.usefixtures("importable")
def test_models_that_cannot_be(config: ServeConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_model(config, "/run")


def test_a_tokenizer_of_the_hub(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(hub_id: str, revision: str | None, *, weights: bool) -> Path:
        assert (hub_id, revision, weights) == ("acme/tokenizer", None, False)
        return tmp_path / "other"

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(model_resolution, "download_model", download)
    config = ServeConfig(model=str(directory), engine="synthetic", tokenizer="acme/tokenizer")
    assert resolve_model(config, "/run").tokenizer_dir == str(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"--tokenizer \./gpt2: no such directory, nor a hub id"):
        resolve_model(ServeConfig(model=str(directory), engine="synthetic", tokenizer="./gpt2"), "/run")


@pytest.mark.parametrize(
    ("described", "behind"),
    [
        ({"rope_theta": 1e6}, {"rope_theta": 1e6, "factor": 2.0}),
        ({"rope_parameters": {"rope_theta": 5, "rope_type": "default"}}, {"rope_theta": 5, "factor": 2.0}),
        ({}, None),
        ({"rope_theta": 5, "rope_scaling": {"type": "linear", "factor": 2}}, None),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 2048}, None),
    ],
)
@pytest.mark.parametrize("engine", ["torch", "vllm"])
@pytest.mark.usefixtures("importable")
def test_a_length_beyond_the_models_is_refused_before_anything_starts(
    directory: Path, importable: set[str], described: dict[str, Any], behind: Any, engine: Any
) -> None:
    importable.add("vllm")
    described = {"model_type": "llama", "max_position_embeddings": 4096, **described}
    (directory / "config.json").write_text(json.dumps(described))
    with pytest.raises(
        ConfigError, match=r"--max-model-len 8192: the model takes at most \d+ tokens"
    ) as caught:
        resolve_model(ServeConfig(model=str(directory), max_model_len=8192, engine=engine), "/run")
    assert isinstance(caught.value, NeedsVllm) == (behind is not None)
    if isinstance(caught.value, NeedsVllm):
        rope = behind | {"rope_type": "yarn", "original_max_position_embeddings": 4096}
        assert caught.value.behind[0] == "--hf-overrides"
        assert json.loads(caught.value.behind[1]) == {"rope_parameters": rope}


@pytest.mark.parametrize(
    ("described", "options"),
    [
        ({"max_position_embeddings": 8192}, {}),
        ({}, {}),  # the engine knows the architecture's default
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 2.0}}, {}),
        ({"max_position_embeddings": 4096}, {"engine": "synthetic"}),
        ({"max_position_embeddings": 4096}, {"engine": "vllm", "engine_args": ["--hf_overrides", "{}"]}),
    ],
)
def test_lengths_that_are_taken(
    directory: Path, importable: set[str], described: dict[str, Any], options: dict[str, Any]
) -> None:
    importable.add("vllm")
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", **described}))
    assert resolve_model(ServeConfig(model=str(directory), max_model_len=8192, **options), "/run").model_dir


@pytest.mark.usefixtures("importable")
def test_an_architecture_that_the_torch_engine_lacks_is_refused_before_anything_starts(
    directory: Path,
) -> None:
    (directory / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(
        ConfigError, match=r"'mamba' is not supported by the torch engine: layers of it keep a recurrent"
    ):
        resolve_model(ServeConfig(model=str(directory)), "/run")
    assert resolve_model(ServeConfig(model=str(directory), engine="synthetic"), "/run")


@pytest.mark.parametrize(
    ("options", "weights"),
    [({"engine": "torch"}, True), ({"engine": "synthetic"}, False), ({"load_format": "dummy"}, False)],
    ids=str,
)
@pytest.mark.usefixtures("importable")
def test_a_hub_id_is_downloaded_with_weights_when_they_are_used(
    options: dict[str, Any], weights: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(hub_id: str, revision: str | None, *, weights: bool) -> Path:
        asked.append((hub_id, revision, weights))
        return directory

    monkeypatch.setattr(model_resolution, "download_model", download)
    config = ServeConfig(model="acme/tiny-1.5", revision="v2", **options)
    found = resolve_model(config, "/run")
    assert asked == [("acme/tiny-1.5", "v2", each) for each in ([False, True] if weights else [False])]
    assert found.served_names == ["acme/tiny-1.5"]
    assert found.model_dir == str(directory)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "unsloth/Qwen3-0.6B-GGUF:Q4_K_M",
            "owner/name-gguf",
            "owner/name_GGUF:latest",
            "owner/name:UD-IQ2_XXS",
        ),
        *("hf.co/owner/name:Q8_0", "owner/name:BF16", "owner/name/model-Q8_0.gguf", "/no/such/model.GGUF"),
        *("https://huggingface.co/owner/name-GGUF/resolve/main/model.gguf", "~/m-00001-of-00003.gguf"),
        *("{files}/model-Q4_K_M.gguf", "{files}/blob", "{files}", "{files}/"),
    ],
)
@pytest.mark.parametrize("engine", ["torch", "vllm", "synthetic"])
@pytest.mark.usefixtures("importable")
def test_gguf_is_told_by_its_name(
    name: str, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_resolution, "_check_software", lambda config: None)
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF\3")
    (tmp_path / "blob").write_bytes(b"GGUF\3")
    with pytest.raises(ConfigError, match=r": it is of GGUF, .* with safetensors"):
        resolve_model(ServeConfig(model=name.format(files=tmp_path), engine=engine), "/run")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("llama3:8b", "give llama3, and a branch"),
        ("owner/name:main", "give owner/name, and a branch or a commit with --revision"),
        ("https://huggingface.co/owner/name", "the model's hub id is owner/name"),
        ("hf.co/owner/name/tree/main", "the model's hub id is owner/name"),
    ],
)
@pytest.mark.usefixtures("importable")
def test_names_that_other_programs_take(name: str, instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model(ServeConfig(model=name), "/run")
    assert instead in str(caught.value)


@pytest.mark.usefixtures("importable")
def test_a_directory_of_another_kind(directory: Path, tmp_path: Path) -> None:
    (directory / "model.safetensors").touch()
    (directory / "extra.gguf").write_bytes(b"GGUF")
    assert resolve_model(ServeConfig(model=str(directory)), "/run").model_dir == str(directory)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a LoRA adapter: give its base model"):
        resolve_model(ServeConfig(model=str(adapter)), "/run")
    with pytest.raises(ConfigError, match=r"--tokenizer .*: it is of GGUF"):
        resolve_model(ServeConfig(model=str(directory), tokenizer="a/b.gguf"), "/run")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("[1]", "must be a JSON object: Expected `object`, got `array`"),
        ("{'a': 1}", "must be a JSON object: JSON is malformed"),
        ('{"mood": "calm", "tools": []}', "cannot set tools: requests have fields of these names"),
    ],
)
def test_variables_that_no_template_can_have(given: str, message: str) -> None:
    model = ResolvedModel("", "", [])
    with pytest.raises(ConfigError, match=re.escape(f"--default-chat-template-kwargs {given}: {message}")):
        check_prompt_files(ServeConfig(default_chat_template_kwargs=given), model)
    check_prompt_files(ServeConfig(default_chat_template_kwargs='{"mood": "calm"}'), model)
