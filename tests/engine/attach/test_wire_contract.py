"""vLLM's own encoder and decoder at the other end of what attached engines send and take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import vllm.v1.engine as vllm_engine
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from penstock.engine.attach.arrays import read_array, read_logprobs
from penstock.engine.attach.output_decoder import OutputDecoder
from penstock.engine.attach.pictures import AttachedPictures
from penstock.engine.attach.request_ids import RequestIds
from penstock.engine.attach.requests import encode_add
from penstock.media.pages import PageFacts
from penstock.media.store import MediaStore
from penstock.media.vllm_item import item_arrays
from penstock.wire.media.items import MediaItem
from penstock.wire.messages import CacheHints, SamplingParams, Submit
from penstock.wire.pooling import PoolingParams, PoolingTask
from penstock.wire.vllm.messages import (
    ABORT,
    ADD,
    START_DP_WAVE,
    UTILITY,
    EngineCoreOutput,
    HandshakeReply,
    Outputs,
    ReadyResponse,
    VllmFinishReason,
    encode_abort,
    encode_call,
)

EOS = (2, 5)


def test_the_names_and_places_of_fields() -> None:
    places = vllm_engine.EngineCoreOutput.__struct_fields__
    ours = [
        name.replace("new_prompt_logprobs", "new_prompt_logprobs_tensors")
        for name in EngineCoreOutput.__struct_fields__
    ]
    assert list(places[: len(ours)]) == ours[: len(places)]
    fields = vllm_engine.EngineCoreOutputs.__struct_fields__
    assert list(fields[: len(Outputs.__struct_fields__)]) == list(Outputs.__struct_fields__)
    assert vllm_engine.UtilityOutput.__struct_fields__ == ("call_id", "failure_message", "result")
    described = set(vllm_engine.EngineCoreReadyResponse.__annotations__)
    assert set(ReadyResponse.__struct_fields__) <= described


def test_kinds_of_messages_and_reasons() -> None:
    kinds = vllm_engine.EngineCoreRequestType
    assert tuple(kinds[name].value for name in ("ADD", "ABORT", "START_DP_WAVE", "UTILITY")) == (
        ADD,
        ABORT,
        START_DP_WAVE,
        UTILITY,
    )
    ours = {reason.name: int(reason) for reason in VllmFinishReason}
    assert {reason.name: int(reason) for reason in vllm_engine.FinishReason} == ours


def test_vllm_reads_our_requests() -> None:
    sampling = SamplingParams(
        max_tokens=9,
        seed=4,
        seeded=True,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        min_tokens=2,
        stop_token_ids=(8,),
        logprobs=3,
        prompt_logprobs=1,
        logit_bias={6: -1.0},
        allowed_token_ids=(3, 4, 6, 8),
        bad_words=((3, 4), (6,)),
        grammar='start: "a"',
    )
    request = Submit(
        1,
        np.array([3, 4], "<i4").tobytes(),
        sampling,
        priority=-3,
        cache_salt="salt",
        kv_transfer_params=b'{"x": 1}',
    )
    _, body = encode_add("id", request, EOS, 100, ["name", 7, "/path"])
    found = MsgpackDecoder(vllm_engine.EngineCoreRequest).decode([body])
    assert (found.request_id, found.prompt_token_ids, found.cache_salt) == ("id", [3, 4], "salt")
    assert (found.priority, found.client_index, found.current_wave) == (-3, 0, -1)
    assert (found.lora_request.lora_name, found.lora_request.lora_int_id) == ("name", 7)
    assert found.lora_request.lora_path == "/path"
    params = found.sampling_params
    for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "logprobs"):
        assert getattr(params, name) == getattr(sampling, name), name
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "prompt_logprobs"):
        assert getattr(params, name) == getattr(sampling, name), name
    assert params.eos_token_id == 2
    assert sorted(params.stop_token_ids) == [5, 8]
    assert params.all_stop_token_ids == {2, 5, 8}
    assert params.logit_bias == {6: -1.0}
    assert params.allowed_token_ids == [3, 4, 6, 8]
    assert params.bad_words_token_ids == [[3, 4], [6]]
    assert params.extra_args == {"kv_transfer_params": {"x": 1}}
    assert not params.detokenize
    asked = params.structured_outputs
    assert (asked.grammar, asked._backend) == ('start: "a"', "guidance")


def test_vllm_reads_our_pictures(tmp_path: Path) -> None:
    """An item that vLLM has encoded, in the request of another process."""
    values = torch.arange(400, dtype=torch.float32).to(torch.bfloat16).reshape(1, 400)
    field = MultiModalFieldConfig.batched("image")
    item = field.build_elems("pixel_values", values)[0]
    (data,) = MsgpackEncoder(size_threshold=1 << 62).encode(MultiModalKwargsItem({"pixel_values": item}))
    mask = np.array([False, True, True])
    (tmp_path / "store").mkdir()
    store, key = MediaStore(str(tmp_path / "store"), 1 << 20), bytes(32)
    store.write(key, PageFacts(b"", 2), item_arrays("image", 1, 3, mask, bytes(data))).close()
    picture = MediaItem(key, 2, 4, 1)
    request = Submit(1, bytes(36), SamplingParams(max_tokens=1, seed=0), media=(picture,))
    pictures = AttachedPictures(store, ())
    _, body = encode_add("id", request, EOS, 100, None, pictures.features(0, request, None))
    decoder = MsgpackDecoder(vllm_engine.EngineCoreRequest)
    (feature,) = decoder.decode([bytearray(body)]).mm_features
    assert (feature.modality, feature.identifier, feature.mm_hash) == ("image", key.hex(), key.hex())
    place = feature.mm_position
    assert (place.offset, place.length, place.is_embed.tolist()) == (3, 3, mask.tolist())
    assert torch.equal(feature.data["pixel_values"].data, values[0])
    assert feature.data["pixel_values"].field == item.field
    _, body = pictures.question()
    asked = decoder.decode([bytearray(body)])
    assert asked.abort_immediately
    assert asked.mm_features[0].data is None
    store.close()


def test_vllm_reads_our_pooling_parameters() -> None:
    lengths, seconds = np.int32(9).tobytes(), np.int32(4).tobytes()
    for pooling, expected in (
        (PoolingParams(PoolingTask.EMBED, lengths, dimensions=8), (True, 8, "embed", False)),
        (PoolingParams(PoolingTask.EMBED, lengths, normalize=False), (False, None, "embed", False)),
        (PoolingParams(PoolingTask.TOKEN_EMBED, lengths), (True, None, "token_embed", True)),
        (PoolingParams(PoolingTask.CLASSIFY, lengths, activate=False), (False, None, "classify", False)),
        (PoolingParams(PoolingTask.TOKEN_CLASSIFY, lengths), (True, None, "token_classify", True)),
    ):
        request = Submit(1, bytes(36), SamplingParams(max_tokens=1, seed=0), pooling=pooling)
        _, body = encode_add("id", request, (), 100)
        found = MsgpackDecoder(vllm_engine.EngineCoreRequest).decode([body])
        assert found.sampling_params is None
        params = found.pooling_params
        made = params.use_activation, params.dimensions, params.task, params.skip_reading_prefix_cache
        assert made == expected
        assert params.extra_kwargs is None
    pair = PoolingParams(PoolingTask.CLASSIFY, lengths, seconds=seconds)
    request = Submit(1, bytes(36), SamplingParams(max_tokens=1, seed=0), pooling=pair)
    _, body = encode_add("id", request, (), 100, type_ranges=False)
    params = MsgpackDecoder(vllm_engine.EngineCoreRequest).decode([body]).pooling_params
    assert params.extra_kwargs == {"compressed_token_type_ids": 4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4,), (300,), (5, 300)])
def test_we_read_vllms_vectors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    ids = RequestIds(4)
    vector = torch.linspace(-1, 1, int(np.prod(shape))).reshape(shape).to(dtype)
    output = vllm_engine.EngineCoreOutput(
        ids.assign(0), [], pooling_output=vector, finish_reason=vllm_engine.FinishReason.STOP
    )
    frames = frames_of(vllm_engine.EngineCoreOutputs(outputs=[output]))
    ((_, found),) = OutputDecoder(ids).decode(frames[0]).rare
    assert np.array_equal(read_array(found.pooling_output, frames), vector.float().numpy())


def test_hints_are_vllms_own() -> None:
    kv_hints = {
        "protocol_version": "1",
        "message_id": "m",
        "actions": [{"action_id": "a", "action_type": "t", "action_version": "1", "payload": {"x": 1}}],
    }
    hints = CacheHints(300, "session", json.dumps(kv_hints).encode())
    request = Submit(1, np.array([3], "<i4").tobytes(), SamplingParams(max_tokens=9, seed=4), hints=hints)
    _, body = encode_add("id", request, (), 100, hints=True)
    found = MsgpackDecoder(vllm_engine.EngineCoreRequest).decode([body])
    assert found.session_id == "session"
    assert found.kv_hints.actions[0].payload == {"x": 1}


def test_a_request_with_nothing_special_has_vllms_defaults() -> None:
    request = Submit(1, np.array([3], "<i4").tobytes(), SamplingParams(max_tokens=9, seed=4))
    _, body = encode_add("id", request, (), 100)
    params = MsgpackDecoder(vllm_engine.EngineCoreRequest).decode([body]).sampling_params
    assert (params.seed, params.logprobs, params.prompt_logprobs, params.structured_outputs) == (None,) * 4
    assert (params.eos_token_id, params.all_stop_token_ids) == (None, set())


def test_listed_logprobs_are_vllms_own() -> None:
    sampling = SamplingParams(max_tokens=9, seed=4, logprobs=128, logprob_token_ids=tuple(range(128)))
    request = Submit(1, np.array([3], "<i4").tobytes(), sampling)
    _, body = encode_add("id", request, (), 200)
    params = MsgpackDecoder(vllm_engine.EngineCoreRequest).decode([body]).sampling_params
    assert (params.logprobs, params.logprob_token_ids) == (128, list(range(128)))


def test_vllm_reads_our_calls_and_aborts() -> None:
    decoder = MsgpackDecoder()
    _, call = encode_call(5, "sleep", (1,))
    assert decoder.decode([call]) == [0, 5, "sleep", [1]]
    _, aborted = encode_abort(["a", "b"])
    assert decoder.decode([aborted]) == ["a", "b"]


def test_vllm_reads_our_answer_to_hello() -> None:
    from vllm.v1.engine.utils import EngineHandshakeMetadata

    from penstock.wire.vllm.messages import Addresses, encode

    reply = encode(HandshakeReply(Addresses(["tcp://a:1"], ["tcp://a:2"]), {"data_parallel_size": 2}))
    found = msgspec.msgpack.decode(reply, type=EngineHandshakeMetadata)
    assert (found.addresses.inputs, found.addresses.outputs) == (["tcp://a:1"], ["tcp://a:2"])
    assert found.addresses.coordinator_output is None
    assert found.parallel_config == {"data_parallel_size": 2}


def frames_of(message: Any) -> list[memoryview]:
    return [memoryview(bytes(frame)) for frame in MsgpackEncoder().encode(message)]


def test_we_read_vllms_outputs() -> None:
    ids = RequestIds(64)
    names = [ids.assign(slot) for slot in range(40)]
    outputs = [vllm_engine.EngineCoreOutput(name, [slot * 1000]) for slot, name in enumerate(names)]
    wide = 100
    outputs[3].new_logprobs = LogprobsLists(
        np.arange(wide, dtype=np.int32).reshape(1, wide),
        np.linspace(0, -9, wide, dtype=np.float32).reshape(1, wide),
        np.array([4], np.int32),
    )
    outputs[4].new_prompt_logprobs_tensors = LogprobsTensors(
        torch.arange(2 * wide, dtype=torch.int32).reshape(2, wide),
        torch.zeros(2, wide),
        torch.ones(2, dtype=torch.int32),
    )
    outputs[5].finish_reason = vllm_engine.FinishReason.LENGTH
    message = vllm_engine.EngineCoreOutputs(engine_index=3, outputs=outputs)
    decoder = OutputDecoder(ids)
    for _ in range(2):
        frames = frames_of(message)
        found = decoder.decode(frames[0])
        assert found.slots.tolist() == list(range(40))
        assert found.tokens.tolist() == [slot * 1000 for slot in range(40)]
        rare = dict(found.rare)
        assert sorted(rare) == [3, 4, 5]
        scores = read_logprobs(rare[3].new_logprobs, frames)
        assert scores.ids.tolist() == [list(range(wide))]
        assert scores.rank.tolist() == [4]
        prompt = read_logprobs(rare[4].new_prompt_logprobs, frames)
        assert prompt.ids.shape == (2, wide)
        assert rare[5].finish_reason == 1
    assert decoder.by_columns == 2


def test_we_read_vllms_answers() -> None:
    answer = vllm_engine.UtilityOutput(9, None, UtilityResult({"a": [1]}))
    (frame,) = frames_of(vllm_engine.EngineCoreOutputs(utility_output=answer))
    found = msgspec.msgpack.decode(frame, type=Outputs).utility_output
    assert found is not None
    assert (found.call_id, found.result) == (9, [None, {"a": [1]}])
