"""``/invocations``: the one route of a container on SageMaker, for any API whose field the body has."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, NamedTuple

import msgspec

from penstock.generation.dialect import NO_INFO, Dialect, LookedUp, ReplyFormat, RequestInfo
from penstock.generation.plan import RequestPlan
from penstock.generation.request.body_decoder import check_parts
from penstock.http.errors import ApiError

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class _Invocation(NamedTuple):
    """What the reply's format needs of a plan."""

    dialect: Dialect
    fields: object
    """The ``dialect_fields`` of the plan's own dialect."""


class Invocations(Dialect):
    """Requests of other dialects, told apart by the field that only they have."""

    path = "/invocations"

    def __init__(self, dialects: Mapping[str, Dialect]) -> None:
        """``dialects`` by their field, in order of precedence."""
        self._dialects = dialects

    def look_up(self, body: bytes, info: RequestInfo) -> Awaitable[LookedUp] | None:
        return self._choose(body).look_up(body, info)

    def plan(self, body: bytes, info: RequestInfo = NO_INFO, found: Any = None) -> RequestPlan:
        dialect = self._choose(body)
        plan = dialect.plan(body, info, found)
        plan.dialect_fields = _Invocation(dialect, plan.dialect_fields)
        return plan

    def reply_format(self, plan: RequestPlan, request_id: str) -> ReplyFormat:
        invocation: _Invocation = plan.dialect_fields
        plan.dialect_fields = invocation.fields
        return invocation.dialect.reply_format(plan, request_id)

    def _choose(self, body: bytes) -> Dialect:
        check_parts(body, "The request body", max_commas=len(body))  # its dialect knows how many may be there
        try:
            fields = _decode_fields(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return next(iter(self._dialects.values()))  # its error says what is wrong with the body
        for field, dialect in self._dialects.items():
            if field in fields:
                return dialect
        known = " or ".join(f"{name} (as {each.path})" for name, each in self._dialects.items())
        raise ApiError(400, f"The body has neither: {known} is needed.", param=" or ".join(self._dialects))
