from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from penstock.config.errors import ConfigError
from penstock.exit_codes import StartupError
from penstock.supervisor.startup import tokenizer_conversion
from penstock.supervisor.startup.tokenizer_conversion import ensure_tokenizer_json

WRITES_ONE = (
    "import pathlib, sys; target = pathlib.Path(sys.argv[2]); target.mkdir(); "
    "(target / 'tokenizer.json').write_text(sys.argv[1])"
)


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)


def _convert_with(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(tokenizer_conversion, "module_command", lambda module: [sys.executable, "-c", code])


def test_a_directory_that_has_one_is_returned(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert ensure_tokenizer_json(tmp_path, "/run") == tmp_path


def test_nothing_to_convert(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"no tokenizer.json in {tmp_path}; .*--tokenizer"):
        ensure_tokenizer_json(tmp_path, "/run")


def test_what_the_conversion_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> None:
        if "." in name:  # as importlib does for a module of a package that is absent
            raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    message = r"only tokenizer\.model; .*pip install transformers sentencepiece protobuf$"
    with pytest.raises(ConfigError, match=message):
        ensure_tokenizer_json(tmp_path, "/run")


@pytest.mark.usefixtures("all_installed")
def test_the_converted_one_lies_in_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir, run_dir = tmp_path / "model", tmp_path / "run"
    model_dir.mkdir()
    run_dir.mkdir()
    (model_dir / "tokenizer.model").write_bytes(b"")
    _convert_with(monkeypatch, WRITES_ONE)
    found = ensure_tokenizer_json(model_dir, str(run_dir))
    assert found.parent == run_dir
    assert (found / "tokenizer.json").read_text() == str(model_dir)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit('first\\nlast words')", "cannot be converted to tokenizer.json: last words"),
        ("import sys; sys.exit(9)", "cannot be converted to tokenizer.json: exit code 9"),
        ("", "transformers gave no tokenizer.json for tokenizer.model"),
    ],
)
@pytest.mark.usefixtures("all_installed")
def test_a_conversion_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    _convert_with(monkeypatch, code)
    with pytest.raises(StartupError, match=message):
        ensure_tokenizer_json(tmp_path, str(tmp_path))


@pytest.mark.usefixtures("all_installed")
def test_a_conversion_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    _convert_with(monkeypatch, "import signal; signal.pause()")
    monkeypatch.setattr(tokenizer_conversion, "_TIMEOUT_S", 0.2)
    with pytest.raises(StartupError, match=r"converting tokenizer\.model took more than 0\.2 s"):
        ensure_tokenizer_json(tmp_path, str(tmp_path))


@pytest.mark.slow
def test_transformers_converts_a_wordpiece_vocabulary(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    found = ensure_tokenizer_json(tmp_path, str(tmp_path))
    encoded = Tokenizer.from_file(str(found / "tokenizer.json")).encode(
        "hello worlds", add_special_tokens=False
    )
    assert encoded.tokens == ["hello", "world", "##s"]
