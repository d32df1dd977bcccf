"""Every supported version's messages, as its own definitions encode them, are read alike."""

from __future__ import annotations

import base64
import json
import logging
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.config.errors import ConfigError
from penstock.engine.attach.arrays import read_array, read_logprobs
from penstock.engine.attach.output_decoder import OutputDecoder
from penstock.engine.attach.pooling.requests import pooling_params
from penstock.engine.attach.request_ids import RequestIds
from penstock.engine.attach.versions import NEWEST, OLDEST, check_version, takes_type_ranges
from penstock.wire.pooling import PoolingParams
from penstock.wire.vllm.messages import Outputs, ReadyResponse
from tests.engine.attach.record_messages import FILE

RECORDED: dict[str, dict[str, Any]] = json.loads(FILE.read_text())


def minor(version: str) -> tuple[int, int]:
    first, second, *_ = version.split(".")
    return int(first), int(second)


def test_each_supported_version_is_recorded() -> None:
    (major, first), (_, last) = OLDEST, NEWEST
    assert {minor(version) for version in RECORDED} == {(major, each) for each in range(first, last + 1)}


@pytest.mark.parametrize("field", ["output_fields", "outputs_fields"])
def test_versions_append_fields(field: str) -> None:
    numbers = [RECORDED[version][field] for version in sorted(RECORDED, key=minor)]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("version", RECORDED)
def test_pooled_outputs(version: str) -> None:
    ids = RequestIds(16)
    ids.tag = "0123abcd"
    for slot in range(3):
        ids.assign(slot)
    message = memoryview(base64.b64decode(RECORDED[version]["pooled"]))
    found = [output for _, output in OutputDecoder(ids).decode(message).rare]
    assert [output.finish_reason for output in found] == [0, 0, 3]
    vector, vectors = (read_array(output.pooling_output, [message]) for output in found[:2])
    assert vector.tolist() == [0.5, -2.0]
    assert vectors.dtype == np.float32
    assert vectors.tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("version", RECORDED)
def test_places_of_pooling_parameters(version: str) -> None:
    names = RECORDED[version]["pooling_fields"]
    params = PoolingParams(0, np.int32(9).tobytes(), dimensions=4, seconds=np.int32(3).tobytes())
    sent = dict(zip(names, pooling_params(params, type_ranges=takes_type_ranges(version)), strict=False))
    assert {name: value for name, value in sent.items() if value not in (None, False)} == {
        "use_activation": True,
        "dimensions": 4,
        "task": "embed",
        "extra_kwargs": {"compressed_token_type_ids": [3, 9] if minor(version) >= (0, 33) else 3},
    }


@pytest.mark.parametrize("version", RECORDED)
def test_outputs(version: str) -> None:
    ids = RequestIds(16)
    ids.tag = "0123abcd"
    for slot in range(7):
        assert ids.assign(slot) == f"0123abcd{slot:04x}0001"
    message = memoryview(base64.b64decode(RECORDED[version]["outputs"]))
    found = OutputDecoder(ids).decode(message)
    assert found.slots.tolist() == list(range(7))
    assert found.tokens.tolist() == [17, 300, 70000, 2, 5, 99, 7]
    assert found.count is not None
    assert found.count.tolist() == [1, 2, 1, 1, 1, 1, 0]
    by_entry = dict(found.rare)
    assert [by_entry[entry].finish_reason for entry in (2, 3, 4, 6)] == [0, 0, 1, 3]
    assert by_entry[3].stop_reason == 5
    assert by_entry[4].kv_transfer_params == {"remote_block_ids": [1, 2]}
    scored = by_entry[5]
    assert [event.type for event in scored.events or ()] == [1, 2, 3]
    assert scored.prefill_stats is not None
    assert scored.prefill_stats.num_cached_tokens == 3
    scores = read_logprobs(scored.new_logprobs, [message])
    assert scores.ids.tolist() == [[7, 3, 9]]
    assert scores.values.tolist() == [[-0.5, -1.0, -2.0]]
    assert scores.rank.tolist() == [1]
    prompt = read_logprobs(scored.new_prompt_logprobs, [message])
    assert prompt.ids.tolist() == [[40, 1], [41, 2], [42, 3]]
    assert prompt.rank.dtype == np.int32
    stats = found.rest.scheduler_stats
    assert stats is not None
    assert stats.prefix_cache_stats is not None
    assert stats.spec_decoding_stats is not None
    assert (stats.num_running_reqs, stats.kv_cache_usage, stats.prefix_cache_stats.hits) == (5, 0.25, 3)
    assert stats.spec_decoding_stats.num_accepted_tokens_per_pos == [1, 0]
    if minor(version) >= (0, 33):
        assert by_entry[6].error == {"message": "the KV cache could not be loaded"}


@pytest.mark.parametrize("version", RECORDED)
def test_answers_to_calls(version: str) -> None:
    found = msgspec.msgpack.decode(base64.b64decode(RECORDED[version]["utility"]), type=Outputs)
    assert found.utility_output is not None
    assert (found.utility_output.call_id, found.utility_output.result) == (77, [None, [1, 2]])


@pytest.mark.parametrize("version", RECORDED)
def test_descriptions(version: str) -> None:
    ready = msgspec.msgpack.decode(base64.b64decode(RECORDED[version]["ready"]), type=ReadyResponse)
    assert (ready.vllm_version, ready.max_model_len, ready.max_num_seqs) == (version, 2048, 64)
    assert ready.supports_lora is (True if minor(version) >= (0, 29) else None)


@pytest.mark.parametrize("version", ["0.26.9", "0.9.1", "0.1"])
def test_older_versions_are_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine 3 is vLLM {version}; supported are 0.27 to 0.33"):
        check_version(version, 3)


@pytest.mark.parametrize("version", ["0.27.0", "0.32.0+cpu", "0.33.1rc2.dev12+g123"])
def test_supported_versions_are_taken_without_a_word(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_version(version, 0)
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.34.0", "1.0", "dev"])
def test_newer_versions_are_warned_of(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_version(version, 2)
    (record,) = caplog.records
    assert "engine 2" in record.getMessage()
    assert version in record.getMessage()
