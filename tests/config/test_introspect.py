from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import Annotated, Any, Literal

import msgspec
import pytest

from penstock.config.client import ChatConfig, CompleteConfig, short
from penstock.config.describe import option, option_group
from penstock.config.introspect import options_of, without_secrets
from penstock.config.serve import ServeConfig


@option_group
class Sample:
    """One field of every type an option may have."""

    text: Annotated[str, option("A text.", "One", pattern="^a")] = "a"
    count: Annotated[int | None, option("A count.", "One")] = None
    share: Annotated[float, option("A share.", "One", gt=0, le=1)] = 0.5
    on: Annotated[bool, option("A switch.", "Two"), short("o")] = True
    pick: Annotated[Literal["z", "a"], option("A choice.", "Two", metavar="P")] = "z"
    step: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=9)] | Literal["auto"], option("A number or auto.", "Two")
    ] = "auto"
    keys: Annotated[list[str] | None, option("Some keys.", "Two", secret=True)] = None
    numbers: Annotated[list[int], option("Some numbers.", "Two")] = field(default_factory=list)
    place: Annotated[str | None, option("A place.", "Two", positional=True)] = None


OPTIONS = {one.field: one for one in options_of(Sample)}


def test_names_follow_from_the_field() -> None:
    seqs = next(one for one in options_of(ServeConfig) if one.field == "max_num_seqs")
    assert (seqs.name, seqs.flag, seqs.variable) == (
        "max-num-seqs",
        "--max-num-seqs",
        "PENSTOCK_MAX_NUM_SEQS",
    )
    assert OPTIONS["place"].flag == "PLACE"
    assert OPTIONS["on"].short == "-o"


@pytest.mark.parametrize(
    ("field", "allowed"),
    [
        ("text", "text matching ^a"),
        ("count", "an integer"),
        ("share", "a number above 0 and at most 1"),
        ("on", "true or false"),
        ("pick", "z or a"),
        ("step", "an integer from 1 to 9 or auto"),
        ("keys", "one or more values, each text"),
        ("numbers", "one or more values, each an integer"),
        ("place", "text"),
    ],
)
def test_what_is_allowed_in_words(field: str, allowed: str) -> None:
    assert OPTIONS[field].allowed == allowed


def test_options_stand_in_the_order_of_the_groups() -> None:
    @option_group
    class Other:
        other: Annotated[int, option("Another.", "Three")] = 1
        shared: Annotated[int, option("A default of its own.", "Three")] = 1

    @option_group
    class Both(Sample, Other):
        last: Annotated[int, option("The last.", "Four")] = 1
        shared: Annotated[int, option("A default of its own.", "Three")] = 2

    assert [one.field for one in options_of(Both)] == [*OPTIONS, "other", "shared", "last"]
    assert next(one.default for one in options_of(Both) if one.field == "shared") == 2


def test_facts_beside_the_type() -> None:
    assert [one.field for one in OPTIONS.values() if one.optional] == ["count", "keys", "place"]
    assert [one.field for one in OPTIONS.values() if one.many] == ["keys", "numbers"]
    assert [one.field for one in OPTIONS.values() if one.secret] == ["keys"]
    assert [one.metavar for one in OPTIONS.values()] == [
        "TEXT",
        "N",
        "X",
        "",
        "P",
        "N|auto",
        "KEYS",
        "N",
        "PLACE",
    ]
    assert OPTIONS["numbers"].default == []


def test_choices_keep_the_order_in_which_they_are_written() -> None:
    levels = next(one for one in options_of(ServeConfig) if one.field == "log_level")
    assert levels.alternatives[0].choices == ("debug", "info", "warning", "error")


@pytest.mark.parametrize(
    ("default", "text"),
    [
        *((64 * 1024 * 1024, "64Mi"), (1000, "1000"), (0.5, "0.5"), (30.0, "30"), (False, "false")),
        (["chat", "agents"], "chat agents"),
    ],
)
def test_a_default_is_shown_as_one_would_write_it(default: Any, text: str) -> None:
    assert msgspec.structs.replace(OPTIONS["count"], default=default).default_text == text


@pytest.mark.parametrize("config", [ServeConfig, CompleteConfig, ChatConfig, Sample])
def test_every_default_is_allowed(config: type) -> None:
    for one in options_of(config):
        msgspec.convert(one.default, one.type)


@pytest.mark.parametrize(
    ("annotation", "default", "complaint"),
    [
        (int, 1, "not described with option"),
        (Annotated[dict[str, int], option("A table.", "One")], None, "cannot have the type"),
        (Annotated[Literal[1, 2], option("A number.", "One")], 1, "cannot have the type"),
        (Annotated[int, option("A number.", "One")], msgspec.NODEFAULT, "has no default"),
    ],
)
def test_a_field_that_no_source_could_set_is_refused(annotation: Any, default: Any, complaint: str) -> None:
    fields = [("odd", annotation, field() if default is msgspec.NODEFAULT else field(default=default))]
    with pytest.raises(TypeError, match=f"Odd.odd.*{complaint}"):
        options_of(make_dataclass("Odd", fields))


def test_secrets_are_hidden_and_nothing_else() -> None:
    shown = without_secrets(ServeConfig(api_key=["sesame"], port=1))
    assert shown["api_key"] == "***"
    assert shown["port"] == 1
    assert "sesame" not in str(shown)
    assert without_secrets(ServeConfig())["api_key"] is None
