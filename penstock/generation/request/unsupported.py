"""Request fields that OpenAI's or vLLM's APIs have and this server does not support: one table.

A request with such a field is refused by its name. A feature that gets supported loses its row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Any, NamedTuple

from penstock.http.errors import not_served


class UnsupportedField(NamedTuple):
    """A known request field, and the values of it that are supported."""

    field: str
    served: Callable[[Any], bool]
    allowed: str
    """The supported values in words, for the error message."""


def absent(value: Any) -> bool:
    return not value


def _one(value: Any) -> bool:
    return bool(value == 1)


MUST_BE_ABSENT = "it must be absent"


def _outputs(field: str, name: str) -> UnsupportedField:
    """A constraint's name in earlier versions of vLLM or in SGLang. Ignored it would yield free text."""
    return UnsupportedField(field, lambda value: False, f'write structured_outputs: {{"{name}": …}}')


def other_names(name: str, *others: str) -> tuple[UnsupportedField, ...]:
    """What other APIs call the field ``name``. Ignored they would have a default hold without a word."""
    return tuple(UnsupportedField(other, lambda value: False, f"write {name}") for other in others)


COMMON = (
    _outputs("ebnf", "grammar"),
    UnsupportedField("ec_transfer_params", absent, MUST_BE_ABSENT),
    _outputs("guided_choice", "choice"),
    _outputs("guided_grammar", "grammar"),
    _outputs("guided_json", "json"),
    _outputs("guided_regex", "regex"),
    _outputs("json_schema", "json"),
    UnsupportedField("kv_transfer_params", absent, MUST_BE_ABSENT),
    UnsupportedField("length_penalty", _one, "it must be 1 or absent"),
    _outputs("regex", "regex"),
    UnsupportedField("repetition_detection", absent, MUST_BE_ABSENT),
    UnsupportedField("routed_experts_prompt_start", absent, "it must be 0 or absent"),
    UnsupportedField("spaces_between_special_tokens", bool, "it must be true or absent"),
    UnsupportedField("use_beam_search", absent, "it must be false or absent"),
    UnsupportedField("vllm_xargs", absent, MUST_BE_ABSENT),
    UnsupportedField("watermarking", absent, "it must be false or absent"),
)


class UnsupportedFieldCheck:
    """Refuses the fields of a table."""

    def __init__(self, rows: tuple[UnsupportedField, ...], served: Collection[str] = ()) -> None:
        """``served``: fields of ``rows`` that this server's engine supports."""
        self._rows = rows = tuple(row for row in rows if row.field not in served)
        names = [row.field for row in rows]
        # One call reads all fields: for a request with none of them this takes half a microsecond.
        self._values: Callable[[Any], tuple[Any, ...]] = attrgetter(*names) if len(names) > 1 else _few(names)
        self._nothing = (None,) * len(rows)

    def check_fields(self, request: Any) -> None:
        """Raises ApiError for the first field with an unsupported value."""
        values = self._values(request)
        if values == self._nothing:
            return
        for row, value in zip(self._rows, values, strict=True):
            if value is not None and not row.served(value):
                raise not_served(row.field, row.allowed)


def _few(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """As :func:`operator.attrgetter`, which returns no tuple for one name, and takes no less."""
    return lambda request: tuple(getattr(request, name) for name in names)
