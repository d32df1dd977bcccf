"""The model of a form is found however the form is cut."""

from __future__ import annotations

import pytest

from penstock.gateway.requests.form_scan import FormScan
from penstock.gateway.requests.model_field import MAX_PART_HEADERS

KIND = b"multipart/form-data; boundary=x"
MODEL = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nchat\r\n'
FILE = b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\nabc\r\n-\r\n--\r\n'


@pytest.mark.parametrize("form", [MODEL + FILE, FILE + MODEL + FILE], ids=["first", "behind a file"])
def test_the_model_is_complete_with_the_delimiter_behind_it(form: bytes) -> None:
    scan, held = FormScan(KIND), bytearray()
    end = form.index(b"chat") + len(b"chat\r\n--x")
    for size in range(1, len(form) + 1):
        held += form[size - 1 : size]
        scan.feed(held)
        assert scan.done is (size >= end)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (KIND, b"no form"),
        (KIND, FILE + b"--x--"),
        (KIND, b"--x\r\n" + bytes(MAX_PART_HEADERS)),
        (KIND, b"--xy" + FILE),
        (b"multipart/form-data", b""),
    ],
    ids=["malformed", "ended", "long headers", "no line", "no boundary"],
)
def test_nothing_is_waited_for_where_no_model_can_be(kind: bytes, form: bytes) -> None:
    scan = FormScan(kind)
    scan.feed(bytearray(form))
    assert scan.done
