"""Long base64 is taken out of bodies, and found again by the pictures that have it."""

from __future__ import annotations

import json

import pytest

from penstock.generation.media.lifting import MIN_LIFTED, LiftedBody, part_of
from penstock.generation.media.source import ImageSource
from penstock.http.errors import ApiError

DATA = "iVBO" * (MIN_LIFTED // 4)


def source(url: str) -> ImageSource:
    return ImageSource("field", url)


def test_long_pictures_are_taken_out() -> None:
    url = f"data:image/png;base64,{DATA}"
    block = {"type": "base64", "media_type": "image/png", "data": DATA + "AAAA"}
    whole = json.dumps({"a": url, "b": [block], "c": "data:image/png;base64,AAAA"}).encode()
    lifted = LiftedBody(whole)
    assert [bytes(part).decode() for part in lifted.parts] == [DATA, DATA + "AAAA"]
    body = json.loads(lifted.body)
    assert len(lifted.body) < 400
    assert body["c"] == "data:image/png;base64,AAAA"
    urls = [body["a"], "data:image/png;base64," + body["b"][0]["data"]]
    assert [part_of(each) for each in urls] == [0, 1]
    assert lifted.are_seen([*map(source, urls), source(body["c"])])
    assert not lifted.are_seen([source(urls[0])])


def test_what_was_made_of_a_body_gets_its_pictures_back() -> None:
    whole = json.dumps({"a": f"data:image/png;base64,{DATA}", "data": DATA + "=", "c": 0}).encode()
    lifted = LiftedBody(whole)
    made = json.dumps([json.loads(lifted.body), json.loads(lifted.body)["a"]]).encode()
    one, url = json.loads(lifted.restored(made))
    assert one == {"a": f"data:image/png;base64,{DATA}", "data": DATA + "=", "c": 0}
    assert url == one["a"]
    assert lifted.restored(b"{}") == b"{}"
    for bad in (b"\n", b"\x00", b"\xff"):
        lifted = LiftedBody(whole.replace(b'=", "c"', bad + b'", "c"'))
        with pytest.raises(ApiError, match=r"not (valid JSON|UTF-8)"):
            lifted.restored(lifted.body)


@pytest.mark.parametrize(
    "whole",
    [
        json.dumps({"data": DATA[:-8]}),
        json.dumps({"text": DATA}),
        json.dumps({"text": f'"data": "{DATA}'}),
        '{"data": "' + DATA + '\\/"}',
        '{"data": "' + DATA,
        "{}",
    ],
)
def test_what_is_short_or_spelled_otherwise_stays(whole: str) -> None:
    lifted = LiftedBody(whole.encode())
    assert not lifted.parts
    assert lifted.body == whole.encode()


def test_nobody_else_names_a_part() -> None:
    assert part_of("data:image/png;base64,penstockPart00x0") == -1
