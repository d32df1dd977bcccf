"""Bodies that another parser may read in another way than the gateway."""

from __future__ import annotations

import json

import pytest

from penstock.gateway.disaggregation import prefill_request
from penstock.gateway.kv_events import prompt_tokens
from penstock.gateway.requests import one_meaning, request_body
from penstock.gateway.requests.model_field import read_model
from penstock.gateway.requests.one_meaning import DECIDING, check_meaning
from penstock.gateway.requests.request_body import read_request
from penstock.http import repeated_names
from penstock.http.errors import ApiError


def test_all_fields_that_the_gateway_reads_decide() -> None:
    read = {*request_body._Body.__struct_fields__, *prefill_request._NEEDS_PROMPT, "n", "best_of"}
    assert read.union(*prompt_tokens._FIELDS.values()) <= DECIDING


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"model":"m","Model":"x"}', "Model"),
        (b'{"MODEL":"x"}', "MODEL"),
        (b'{"model":"x","model":"m"}', "model"),
        (b'{"\\u006dodel":"x","model":"m"}', "model"),
        (b'{"model":"m" , "\\u006Dodel" : "x"}', "model"),
        (b'{"model":"m","model":"m"}', "model"),
        (b'{"model":"m","\\u004dodel":"x"}', "Model"),
        (b'{"model":"m","model\\u0000":"x"}', r"model\x00"),
        ('{"max_to\u212aens":9}'.encode(), "max_to\u212aens"),
        (b'{"\\u017ftream":true}', "\u017ftream"),
        (b'{"max_tokens":1,"max_tokens":12}', "max_tokens"),
        (b'{"max_tokens":12,"max_tokens":1}', "max_tokens"),
        (b'{"Priority":9}', "Priority"),
        (b'{"Previous_Response_Id":"resp_1"}', "Previous_Response_Id"),
        (b'{"lora_path":"x","lora_path":null}', "lora_path"),
        (b'{"messages":[{"a":"}"}],"messages":[]}', "messages"),
        (b'{"n": 1, "model": "m", "a": 1, "b": 2, "n":1}', "n"),
        (b'{"n":2,"model":"m","a":1,"b":2,"n":1}', "n"),
        (b'{"stream_options":{"include_usage":true,"include_usage":false}}', "stream_options.include_usage"),
        (b'{"stream_options":{"Include_Usage":false}}', "stream_options.Include_Usage"),
    ],
)
def test_what_may_be_read_otherwise_is_refused_by_name(body: bytes, field: str) -> None:
    for read in (check_meaning, read_request, lambda raw: read_model([], raw)):
        with pytest.raises(ApiError) as refusal:
            read(body)
        assert refusal.value.status == 400
        shown = field.replace(r"\x00", "\0")
        assert refusal.value.param == shown
        assert repr(shown) in refusal.value.message


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","metadata":{"Model":"x","model":"y"},"Modell":1,"models_":2}',
        b'\n{ "model" : "m" , "tools" : [ {"model": 1}, {"Model": "\\"model\\":"} ] }\n',
        json.dumps(
            {"model": "m", "a": 1.5e3, "b": [True, None], "c": {}, "d": '\u00e9"}'}, indent=2
        ).encode(),
        b"{}",
        b"[]",
        b"RIFF",
        b'{"model":',
        b'{"metadata":{"a":1,"a":2}}',
    ],
)
def test_what_all_read_alike_is_not(body: bytes) -> None:
    check_meaning(body)


def test_a_body_as_python_writes_it_is_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual one of clients. Others are: the same with a name of escapes, or a blank more."""
    monkeypatch.setattr(repeated_names, "_first", None)
    body = {"model": "m", "messages": [{"role": "user", "content": "a: b, {"}], "max_tokens": 1, "n": 1}
    for separators in ((", ", ": "), (",", ":")):
        check_meaning(json.dumps(body, separators=separators).encode())
    for walked in (b'{"a\\"": 1, "b": 2}', b'{"a": 1, "b": 2 }'):
        with pytest.raises(TypeError):
            check_meaning(walked)


def test_too_many_fields_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts may have as many colons as they like."""
    monkeypatch.setattr(one_meaning, "MAX_COLONS", 3)
    text = json.dumps(":" * 100)
    assert read_request(b'{"model":"m","prompt":%b}' % text.encode()).model == "m"
    assert read_model([], b'{"model":"m","input":%b}' % text.encode()) == "m"
    with pytest.raises(ApiError, match="too many fields"):
        read_request(b'{"model":"m","a":1,"b":2,"c":3}')
