"""Numbers of a JSON schema that llguidance enforces exactly.

llguidance holds numbers of schemas as 64-bit floats and writes integers of 64 bits: others are rounded, or
refused. It reads some floats of 16 and 17 digits as the one beside them. A bound moves to the next float
inside the bounds that is read as what it is, so that nothing outside of them is ever written.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, NamedTuple, TypeGuard

LARGEST = 2**63 - 1024
"""The largest float below 2**63. ``maximum`` may also be 2**63 - 1, which llguidance enforces exactly."""
_LIMIT = 2**63
_ONE_SIDED = 10**18
"""From here on llguidance takes no bound on one side alone."""
_TINY = 1e-50
"""Closer to zero, the regular expressions of llguidance are nested too deeply."""
_LARGEST_POWER = 308
"""Exponent of the largest power of ten that is a float."""
MAX_UNITS = 100_000
"""Maximum ``multipleOf``, in units of its last decimal: engines take no larger ones."""
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}

Number = int | float


class Inexact(ValueError):
    """A number cannot be enforced; the message names it and its keyword."""


def fit(part: dict[str, Any], *, strict: bool) -> None:
    """Rewrite the numbers of one schema so that they are enforced exactly.

    Of bounds beyond 64 bits remains what 64 bits have. Raises Inexact for what is left; unless ``strict``,
    that is dropped, with the bounds beyond 64 bits.
    """
    for step in (_fit_values, _fit_multiple, _fit_bounds):
        step(part, strict)


def _fit_values(part: dict[str, Any], strict: bool) -> None:
    for keyword in ("const", "enum"):
        if keyword not in part:
            continue
        values = [part[keyword]] if keyword == "const" else part[keyword]
        number = _first_inexact(values)
        if number is None:
            continue
        if strict:
            raise _inexact(keyword, number)
        del part[keyword]
        if isinstance(values, list):
            part.setdefault("type", sorted({_TYPES[type(value)] for value in values}))


def _first_inexact(values: Any) -> Number | None:
    waiting = [values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, int | float) and (abs(value) > LARGEST or _read(value) != value):
            return value
    return None


def _fit_multiple(part: dict[str, Any], strict: bool) -> None:
    multiple = part.get("multipleOf")
    if not _is_number(multiple) or multiple <= 0:
        return
    # llguidance looks for its decimals in the same way, with the same errors of rounding.
    units, decimals = float(min(multiple, 2 * MAX_UNITS)), 0
    while units % 1 and units <= MAX_UNITS:
        units, decimals = units * 10, decimals + 1
    if units > MAX_UNITS or units / 10**decimals != multiple or _read(multiple) != multiple:
        if strict:
            raise _inexact("multipleOf", multiple)
        del part["multipleOf"]


def _fit_bounds(part: dict[str, Any], strict: bool) -> None:
    types = part.get("type", "number")
    types = types if isinstance(types, list) else [types]
    if "number" not in types and "integer" not in types:
        return
    given = {key: part[key] for key in _BOUNDS if key in part}
    if not given or not all(_is_number(value) or isinstance(value, bool) for value in given.values()):
        return  # llguidance names what is wrong
    integer = "number" not in types
    low = _strictest(given, "minimum", "exclusiveMinimum", integer=integer, sign=-1)
    high = _strictest(given, "maximum", "exclusiveMaximum", integer=integer, sign=1)
    if low is not None and high is not None and low.beyond(high):
        return  # and what is empty
    keyword, number = next(iter(given.items()))
    try:
        fitted_low = _fitted(low, sign=-1, integer=integer, strict=strict)
        fitted_high = _fitted(high, sign=1, integer=integer, strict=strict)
        if fitted_low is not None and fitted_high is not None and fitted_low > fitted_high:
            raise _inexact(keyword, number)
    except Inexact:
        if strict:
            raise
        fitted_low = fitted_high = None
    if fitted_low is not None and fitted_low >= _ONE_SIDED and fitted_high is None:
        fitted_high = LARGEST
    if fitted_high is not None and fitted_high <= -_ONE_SIDED and fitted_low is None:
        fitted_low = -LARGEST
    for key in given:
        del part[key]
    if fitted_low is not None:
        part["minimum"] = fitted_low
    if fitted_high is not None:
        part["maximum"] = fitted_high


class _Bound(NamedTuple):
    value: Number
    exclusive: bool

    def beyond(self, high: _Bound) -> bool:
        """Whether no number is at least this and at most ``high``."""
        return self.value > high.value or (self.value == high.value and (self.exclusive or high.exclusive))


def _strictest(
    given: dict[str, Any], inclusive: str, exclusive: str, *, integer: bool, sign: int
) -> _Bound | None:
    """The bound on one side: ``sign`` is -1 for the lower one."""
    bounds = []
    beside = given.get(exclusive)
    if _is_number(value := given.get(inclusive)):
        bounds.append(_Bound(value, exclusive=beside is True))  # as in draft 4
    if _is_number(beside):
        bounds.append(_Bound(beside, exclusive=True))
    if not bounds:
        return None
    if integer:
        return _Bound(min(sign * _last_integer(bound, sign) for bound in bounds) * sign, exclusive=False)
    return min(bounds, key=lambda bound: (sign * bound.value, not bound.exclusive))


def _last_integer(bound: _Bound, sign: int) -> int:
    """The outermost integer inside the bound."""
    last = math.floor(bound.value) if sign > 0 else math.ceil(bound.value)
    return last - sign if bound.exclusive and last == bound.value else last


def _fitted(bound: _Bound | None, *, sign: int, integer: bool, strict: bool) -> Number | None:
    """The outermost inclusive bound inside ``bound`` that llguidance enforces exactly; None: there is none to
    enforce. Texts between an exclusive bound and the next float would be read as the bound. Raises Inexact if
    nothing inside is left."""
    if bound is None:
        return None
    value, exclusive = bound
    if sign * value > LARGEST:
        if not strict and sign * value > _LIMIT:
            return None
        return _LIMIT - 1 if integer and sign > 0 and value >= _LIMIT - 1 else sign * LARGEST
    if sign * value < -LARGEST:
        raise _inexact("minimum" if sign < 0 else "maximum", value)
    inside = float(value)
    if sign * inside > sign * value or (exclusive and inside == value):
        inside = math.nextafter(inside, -sign * math.inf)
    if 0 < abs(inside) < _TINY:
        inside = 0.0 if inside * sign > 0 else -sign * _TINY
    while not inside.is_integer() and _read(inside) != inside:
        inside = math.nextafter(inside, -sign * math.inf)
    return int(inside) if inside.is_integer() else inside


def _read(number: Number) -> float:
    """The float that llguidance reads in the JSON text of ``number``: like serde_json without its feature
    ``float_roundtrip``, it rounds the digits to a float, and once more when it moves the decimal point."""
    if isinstance(number, int):
        return float(number)
    _, digits, exponent = Decimal(repr(abs(number))).as_tuple()
    assert isinstance(exponent, int)  # the number is finite
    value = float("".join(map(str, digits)))
    while exponent < -_LARGEST_POWER:
        value, exponent = value / 1e308, exponent + _LARGEST_POWER
    value = value / float(f"1e{-exponent}") if exponent < 0 else value * float(f"1e{exponent}")
    return math.copysign(value, number)


def _is_number(value: Any) -> TypeGuard[Number]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _inexact(keyword: str, number: Number) -> Inexact:
    text = str(number)
    text = text if len(text) <= 40 else text[:40] + "…"
    return Inexact(f"the number {text} of the keyword '{keyword}' cannot be enforced")
