from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.errors import ConfigError
from penstock.config.watched_file import TextFiles
from penstock.config.yaml_file import YamlEntry, parse, read


def test_scalars_stay_as_written_and_keys_get_dashes() -> None:
    text = """
    # how we serve
    max_num_seqs: 64
    revision: 0123
    dtype: "float32"
    api-key: [a, 'b']
    served-model-name:
      - x
      - 1.10
    model: ~
    strict-requests: yes
    tokenizer:
    """
    assert parse(text, "f") == [
        YamlEntry("max-num-seqs", 3, "64"),
        YamlEntry("revision", 4, "0123"),
        YamlEntry("dtype", 5, "float32"),
        YamlEntry("api-key", 6, ["a", "b"]),
        YamlEntry("served-model-name", 7, ["x", "1.10"]),
        YamlEntry("model", 10, None),
        YamlEntry("strict-requests", 11, "yes"),
        YamlEntry("tokenizer", 12, None),
    ]


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n", "---\n"])
def test_a_file_may_be_empty(text: str) -> None:
    assert [entry for entry in parse(text, "f") if entry] == []


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("port:\n  number: 1\n", YamlEntry("port", 1, '{"number": 1}', 2)),
        ("api-key: [[a]]\n", YamlEntry("api-key", 1, '[["a"]]', 1)),
        ("api-key: [a, ~]\n", YamlEntry("api-key", 1, '["a", null]', 1)),
        ("x: !!python/name:os.system {a: 1}\n", YamlEntry("x", 1, "", 1)),
    ],
)
def test_what_no_option_takes_becomes_json(text: str, entry: YamlEntry) -> None:
    assert parse(text, "f") == [entry]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 1\nport: 2\n", "f:2: port is given twice, first in line 1"),
        ("max-num-seqs: 1\n\nmax_num_seqs: 2\n", "f:3: max-num-seqs is given twice, first in line 1"),
        ("a: {b: 1,\n c: 2, b: 3}\n", "f:2: the key 'b' is given twice, first in line 1"),
        ("port: [1\n", "f:2: not valid YAML: expected ',' or ']'"),
        ("port: 1\n\tdtype: auto\n", "f:2: not valid YAML: "),
        ("port: 1: 2\n", "f:1: not valid YAML: mapping values are not allowed here"),
        ("- port\n- 1\n", "f:1: the file must map option names to values, this is a list"),
        ("\nport\n", "f:2: the file must map option names to values, this is a single value"),
        ("[a, b]: 1\n", "f:1: a key must be the name of an option"),
        ("port: 1\n---\nport: 2\n", "f:2: not valid YAML: but found another document"),
        ("port: \x00", "f: not valid YAML: it contains a character that YAML forbids"),
        ("port: " + "[" * 5000, "f: the file is nested too deeply"),
    ],
)
def test_errors_name_the_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "f")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "value", ["*sesame", "&sesame &sesame x", "[sesame", "{sesame: }}", "'sesame", "sesame: x", "@sesame"]
)
def test_errors_never_repeat_a_value(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"api-key: {value}\n", "f")
    assert "sesame" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the option file .*none\.yaml: No such file"):
        read(str(tmp_path / "none.yaml"), TextFiles())
    with pytest.raises(ConfigError, match="Is a directory"):
        read(str(tmp_path), TextFiles())
    with pytest.raises(ConfigError, match="cannot read the option file ''"):
        read("", TextFiles())
    files = TextFiles()
    (tmp_path / "good.yaml").write_text("drain-timeout: 60\n")
    assert read(str(tmp_path / "good.yaml"), files)
    files.started = True
    (tmp_path / "good.yaml").write_text("drain-timeout: 6")
    with pytest.raises(ConfigError, match=r"option file .*good\.yaml: its last line has no end"):
        read(str(tmp_path / "good.yaml"), files)
    (tmp_path / "latin.yaml").write_bytes(b"model: caf\xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml: the file is not UTF-8 \(byte 10\)"):
        read(str(tmp_path / "latin.yaml"), TextFiles())


@given(st.text() | st.text(alphabet="ab:-[]{},'\"*&!|>#%@?~ \n\t"))
def test_any_text_gives_entries_or_a_config_error(text: str) -> None:
    try:
        entries = parse(text, "f")
    except ConfigError:
        return
    assert len({entry.key for entry in entries}) == len(entries)
