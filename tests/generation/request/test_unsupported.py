"""Tables of unsupported fields of any length."""

from __future__ import annotations

import pytest

from penstock.dialects.completions.request_schema import CompletionRequest
from penstock.generation.request.unsupported import COMMON, UnsupportedField, UnsupportedFieldCheck
from penstock.http.errors import ApiError

FIELD = "kv_transfer_params"
ROWS = tuple(row for row in COMMON if row.field in (FIELD, "watermarking"))


@pytest.mark.parametrize("rows", [ROWS, tuple(row for row in ROWS if row.field == FIELD)])
def test_a_field_is_refused_unless_it_is_served(rows: tuple[UnsupportedField, ...]) -> None:
    check, served = UnsupportedFieldCheck(rows), UnsupportedFieldCheck(rows, {FIELD})
    check.check_fields(CompletionRequest())
    for empty in (check, served):
        empty.check_fields(CompletionRequest(kv_transfer_params={}))
    used = CompletionRequest(kv_transfer_params={"a": 1})
    served.check_fields(used)
    with pytest.raises(ApiError, match=FIELD):
        check.check_fields(used)
