"""An attached engine at a connection that replays outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.config.serve import ServeConfig
from penstock.engine.attach.attached_core import AttachedCore, CallFailed
from penstock.engine.attach.attached_process import AttachedProcess
from penstock.engine.attach.connection import EngineConnection
from penstock.engine.attach.engine import AttachedEngine, ModelFacts
from penstock.engine.attach.request_ids import RequestIds
from penstock.engine.attach.streams import AttachedStreams
from penstock.engine.base import Hold, RequestRejected, StepRows
from penstock.media.store import MediaStore
from penstock.supervisor.startup.model_resolution import DEMO_DIR
from penstock.wire.frames import FinishReason
from penstock.wire.messages import SamplingParams, Submit
from penstock.wire.vllm.messages import ENGINE_DEAD, EngineLost, ReadyResponse
from penstock.wire.weights.desired import WeightSource
from tests.engine.attach.test_arrays import inline

SLOTS = 4
STOP, LENGTH, ABORT, ERROR = range(4)
PLACES = {"logprobs": 2, "prompt": 3, "stop": 6, "events": 7, "transfer": 8, "prefill": 11, "error": 18}
"""Of fields of EngineCoreOutput."""
NO_LOGPROBS = [inline(np.zeros((0, 1)), "<i4"), inline(np.zeros((0, 1)), "<f4"), inline([], "<i4")]
LONG_PROMPT = [inline([[1]] * 9, "<i4"), inline([[-1]] * 9, "<f4"), inline([1] * 9, "<i4")]


class FakeConnection:
    """Replays messages, and keeps what is sent."""

    wakeups: Sequence[Any] = ()
    has_news = False

    def __init__(self) -> None:
        self.sent: list[Sequence[bytes]] = []
        self.messages: deque[list[memoryview]] = deque()
        self.gone = False
        self.answers: dict[str, Any] = {}
        """Results of calls by method, which are answered at once; an exception's text is a failure."""
        self.failing: dict[str, list[str]] = {}
        """Failures of the next calls by method; an empty one is none."""

    @property
    def has_output(self) -> bool:
        return bool(self.messages)

    def send(self, frames: Sequence[bytes]) -> None:
        if self.gone:
            raise EngineLost("it has closed its connection")
        self.sent.append(frames)
        if frames[0] == b"\x03":
            _, number, method, _ = msgspec.msgpack.decode(frames[1])
            failing = self.failing.get(method)
            words = failing.pop(0) if failing else ""
            result = RuntimeError(words) if words else self.answers.get(method)
            failure = str(result) if isinstance(result, Exception) else None
            answer = [number, failure, None if failure else [None, result]]
            self.put([], utility=answer)

    def put(self, records: list[list[Any]], stats: Any = None, utility: Any = None, *frames: bytes) -> None:
        message = msgspec.msgpack.encode([0, records, stats, 1.0, utility, None, None, None, None])
        self.messages.append([memoryview(message), *map(memoryview, frames)])

    def receive(self) -> list[memoryview] | None:
        return self.messages.popleft() if self.messages else None

    def trust_source(self) -> None: ...

    def wait(self, timeout_s: float) -> bool:
        return False

    def close(self) -> None: ...


class Attached:
    """The engine, its connection, and what API server 0's streams got."""

    def __init__(
        self,
        run_dir: Path,
        *,
        ranks: int = 1,
        model: Path = DEMO_DIR,
        store: MediaStore | None = None,
        **options: Any,
    ) -> None:
        self.connection = FakeConnection()
        self.ids = RequestIds(SLOTS)
        ready = ReadyResponse(
            max_model_len=128,
            vllm_version="0.32.0",
            max_num_seqs=SLOTS,
            enable_sleep_mode=True,
            data_parallel_size=ranks,
        )
        connection: EngineConnection = self.connection  # type: ignore[assignment]
        core = AttachedCore(connection, ready, self.ids, 60)
        self.core = core
        self.engine = AttachedEngine(
            ServeConfig(model=str(DEMO_DIR), attach="127.0.0.1:0", **options),
            ModelFacts(str(model)),
            AttachedProcess(connection, ready, core),
            run_dir=str(run_dir),
            rank=0,
            store=store,
        )
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason | str] = {}

    def submit(self, stream: int, *, interval: int = 1, resumed: int = 0, **sampling: Any) -> None:
        given = SamplingParams(**({"max_tokens": 20, "seed": 1} | sampling))
        prompt = np.array([40, 41, 42, 43], "<i4").tobytes()
        self.engine.submit(0, Submit(stream, prompt, given, interval=interval, resumed=resumed))

    def id_of(self, stream: int) -> str:
        streams = self.engine._streams
        assert isinstance(streams, AttachedStreams)
        slot = streams.table.find_slot(0, stream)
        assert slot is not None
        return self.ids.of(slot)

    def record(self, stream: int, tokens: list[int], finish: int | None = None, **fields: Any) -> list[Any]:
        made: list[Any] = [self.id_of(stream), tokens, *[None] * 11, 0, *[None] * 5]
        made[5] = finish
        places = {
            "logprobs": 2,
            "prompt": 3,
            "stop": 6,
            "events": 7,
            "transfer": 8,
            "prefill": 11,
            "error": 18,
        }
        for name, value in fields.items():
            made[places[name]] = value
        return made

    def steps(self) -> list[StepRows]:
        made = []
        while self.engine.can_step():
            rows = self.engine.step()
            made.append(rows)
            self._read(rows)
        return made

    def _read(self, rows: StepRows) -> None:
        place = 0
        for row, stream in enumerate(rows.stream.tolist()):
            count = 1 if rows.count is None else int(rows.count[row])
            self.tokens.setdefault(stream, []).extend(rows.tokens[place : place + count].tolist())
            place += count
            if rows.finish is not None and rows.finish[row]:
                self.ends[stream] = FinishReason(rows.finish[row])
        for failure in rows.failed:
            self.ends[failure.stream] = failure.message

    def sent(self, kind: bytes) -> list[Any]:
        self.core.flush()
        return [msgspec.msgpack.decode(frames[1]) for frames in self.connection.sent if frames[0] == kind]


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Attached:
    return Attached(tmp_path)


def test_streams_from_begin_to_end(attached: Attached) -> None:
    for stream in range(3):
        attached.submit(stream)
    assert [request[1] for request in attached.sent(b"\x00")] == [[40, 41, 42, 43]] * 3
    attached.connection.put([attached.record(stream, [10 + stream]) for stream in range(3)])
    attached.connection.put(
        [
            attached.record(0, [20], STOP),
            attached.record(1, [21], STOP, stop=21),
            attached.record(2, [22], LENGTH),
        ]
    )
    attached.steps()
    assert attached.tokens == {0: [10, 20], 1: [11, 21], 2: [12, 22]}
    assert attached.ends == {0: FinishReason.EOS, 1: FinishReason.STOP_TOKEN, 2: FinishReason.LENGTH}
    assert not attached.engine.has_work()


def test_what_vllm_does_not_take_ends_when_its_turn_comes(attached: Attached) -> None:
    for stream in range(SLOTS):
        attached.submit(stream)
    attached.submit(SLOTS, temperature=3.0)
    attached.submit(SLOTS + 1)
    attached.connection.put([attached.record(0, [5], LENGTH)])
    attached.steps()
    assert "temperature: 3, but vLLM takes 0 to 2" in str(attached.ends[SLOTS])
    attached.connection.put([attached.record(SLOTS + 1, [6], LENGTH)])
    attached.steps()
    assert attached.ends[SLOTS + 1] is FinishReason.LENGTH


def test_rows_of_several_tokens_by_interval(attached: Attached) -> None:
    attached.submit(0, interval=4)
    for tokens in ([1], [2, 3], [4], [5, 6], [7]):
        attached.connection.put([attached.record(0, tokens)])
    rows = attached.steps()
    assert [len(each.tokens) for each in rows] == [1, 0, 0, 5, 0]
    attached.connection.put([attached.record(0, [], LENGTH)])
    attached.steps()
    assert attached.tokens[0] == [1, 2, 3, 4, 5, 6, 7]


def test_what_a_first_output_tells(attached: Attached) -> None:
    attached.submit(0)
    events = [{"type": kind, "timestamp": 1.0} for kind in (1, 2, 3, 3)]
    prefill = {"num_cached_tokens": 3, "num_external_cached_tokens": 2}
    attached.connection.put([attached.record(0, [1], events=events, prefill=prefill)])
    (rows,) = attached.steps()
    assert rows.cached is not None
    assert rows.cached.tolist() == [3]
    assert attached.engine.take_preempted() == [(0, 0)] * 2
    metrics = attached.engine.metrics()
    assert (metrics["preemptions_total"], metrics["external_prompt_tokens_total"]) == (2, 2)


def test_logprobs_inline_and_in_frames_of_their_own(attached: Attached) -> None:
    attached.submit(0, logprobs=2, prompt_logprobs=1)
    scores = [inline([[9, 8, 7]], "<i4"), inline([[-1, -2, -3]], "<f4"), inline([2], "<i4"), None]
    data = np.arange(6, dtype="<i8").tobytes()
    prompt = [["int64", [3, 2], 1], inline([[-1, -2]] * 3, "<f4", "float32"), inline([1] * 3, "<i8", "int64")]
    attached.connection.put([attached.record(0, [9], logprobs=scores, prompt=prompt)], None, None, data)
    (rows,) = attached.steps()
    assert rows.logprobs is not None
    assert rows.prompt is not None
    assert rows.logprobs.ids.tolist() == [[9, 8, 7]]
    assert rows.prompt.ids.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_logprobs_that_nobody_asked_for_are_left_out(attached: Attached) -> None:
    attached.submit(0)
    scores = [inline([[9, 8]], "<i4"), inline([[-1, -2]], "<f4"), inline([2], "<i4"), None]
    attached.connection.put([attached.record(0, [9], logprobs=scores)])
    (rows,) = attached.steps()
    assert rows.logprobs is None
    assert attached.tokens == {0: [9]}


def test_an_error_is_told_in_vllms_words_if_it_has_any(attached: Attached) -> None:
    attached.submit(0)
    attached.submit(1)
    attached.connection.put(
        [attached.record(0, [], ERROR), attached.record(1, [], ERROR, error={"message": "no KV"})]
    )
    attached.steps()
    assert "the engine's log says more" in str(attached.ends[0])
    assert attached.ends[1] == "vLLM ended this request by an error: no KV"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ({"code": "engine_paused", "message": "m", "retryable": True}, "unavailable"),
        ({"code": "validation_error", "message": "m", "retryable": False}, "invalid_request"),
        ({"code": "validation_error", "message": "m", "retryable": True}, "invalid_request"),
        ({"code": "multimodal_cache_miss", "message": "m"}, "engine_error"),
        ({"code": 5, "message": None, "retryable": 1}, "engine_error"),
        ({}, "engine_error"),
    ],
)
def test_an_errors_code_says_what_becomes_of_the_request(
    attached: Attached, error: dict[str, Any], code: str
) -> None:
    attached.submit(0)
    attached.connection.put([attached.record(0, [], ERROR, error=error)])
    (rows,) = attached.steps()
    (failure,) = rows.failed
    assert (failure.code, failure.position) == (code, 0)


def test_kv_transfer_params_of_an_end(attached: Attached) -> None:
    attached.submit(0)
    attached.connection.put([attached.record(0, [5], LENGTH, transfer={"ids": [1]})])
    (rows,) = attached.steps()
    assert rows.kv_transfer_params == {0: {0: b'{"ids":[1]}'}}


def test_aborted_streams_end_at_once_and_late_outputs_are_left_out(attached: Attached) -> None:
    attached.submit(0)
    late = attached.record(0, [5])
    request_id = attached.id_of(0)
    attached.engine.abort(0, [0])
    attached.connection.put([late])
    attached.steps()
    assert attached.ends == {0: FinishReason.ABORT}
    assert attached.tokens[0] == []
    assert attached.sent(b"\x01") == [[request_id]]
    attached.submit(1)
    attached.connection.put([late])
    attached.steps()
    assert 1 not in attached.tokens


def test_streams_of_an_api_server_that_is_gone_are_aborted(attached: Attached) -> None:
    for stream in range(SLOTS + 2):
        attached.submit(stream)
    ids = [attached.id_of(stream) for stream in range(SLOTS)]
    attached.engine.drop_server(0)
    assert attached.sent(b"\x01") == [ids]
    assert not attached.engine.has_work()


def test_further_streams_wait_for_a_slot(attached: Attached) -> None:
    for stream in range(SLOTS + 1):
        attached.submit(stream)
    assert len(attached.sent(b"\x00")) == SLOTS
    assert attached.engine.load().waiting == 1
    attached.connection.put([attached.record(2, [1], LENGTH)])
    attached.steps()
    assert len(attached.sent(b"\x00")) == SLOTS + 1


def test_load_tells_what_waits_in_vllm(attached: Attached) -> None:
    for stream in range(3):
        attached.submit(stream)
    stats = {
        "num_running_reqs": 1,
        "num_waiting_reqs": 1,
        "num_skipped_waiting_reqs": 1,
        "kv_cache_usage": 0.5,
    }
    attached.connection.put([attached.record(0, [1])], stats)
    attached.steps()
    load = attached.engine.load()
    assert (load.waiting, load.running, load.kv_used) == (2, 1, 0.5)


@pytest.mark.parametrize("usage", [-1.0, 7.5, float("nan"), float("inf")])
def test_a_usage_beyond_bounds_is_none(attached: Attached, usage: float) -> None:
    attached.submit(0)
    attached.connection.put([attached.record(0, [1])], {"kv_cache_usage": usage})
    attached.steps()
    assert 0 <= attached.engine.load().kv_used <= 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": [1] * 21, "logprobs": None}, "more tokens than a request asked for"),
        ({"tokens": [4096]}, "a token that the vocabulary does not have"),
        ({"finish": ABORT}, "it is shutting down, or was paused"),
        ({"logprobs": [1, 2, 3]}, "cannot be understood"),
        ({"prompt": [inline([[1]], "<i4")]}, "cannot be understood"),
        ({"logprobs": NO_LOGPROBS}, "fewer tokens"),
        ({"prompt": LONG_PROMPT}, "more tokens than the prompt"),
        ({"logprobs": None}, "without the logprobs"),
    ],
)
def test_what_an_engine_must_not_send_loses_it(
    attached: Attached, change: dict[str, Any], reason: str
) -> None:
    attached.submit(0, logprobs=0, prompt_logprobs=0)
    scores = [inline([[1]], "<i4"), inline([[-1]], "<f4"), inline([1], "<i4"), None]
    attached.connection.put([attached.record(0, **({"tokens": [1], "logprobs": scores} | change))])
    with pytest.raises(EngineLost, match=reason):
        attached.steps()


def test_a_request_with_two_outputs_in_a_message(attached: Attached) -> None:
    attached.submit(0)
    attached.connection.put([attached.record(0, [1])] * 2)
    with pytest.raises(EngineLost, match="two outputs of a request"):
        attached.steps()


def test_an_engine_that_dies_says_so(attached: Attached) -> None:
    attached.submit(0)
    attached.connection.messages.append([memoryview(ENGINE_DEAD)])
    with pytest.raises(EngineLost, match="has failed"):
        attached.steps()


def test_a_request_to_a_lost_engine_goes_on_elsewhere(attached: Attached) -> None:
    """It has a place among the engine's streams, which all are resumed."""
    attached.connection.gone = True
    attached.submit(0)
    assert attached.engine.has_work()
    assert attached.engine.can_step()
    with pytest.raises(EngineLost, match="closed its connection"):
        attached.engine.step()
    failed = attached.engine.fail_all("engine_error", "it failed").failed
    assert [failure.stream for failure in failed] == [0]


def test_silence(attached: Attached, monkeypatch: pytest.MonkeyPatch) -> None:
    attached.submit(0)
    assert not attached.engine.can_step()
    attached.core.heard_at -= 61
    assert attached.engine.can_step()
    with pytest.raises(EngineLost, match="sent nothing for 60 s"):
        attached.engine.step()


def test_silence_of_an_idle_engine_is_none(attached: Attached) -> None:
    attached.core.heard_at -= 1000
    assert not attached.engine.can_step()
    attached.submit(0)
    assert not attached.engine.can_step()


def test_outputs_before_an_answer_are_kept(attached: Attached) -> None:
    attached.submit(0)
    attached.connection.put([attached.record(0, [1])])
    attached.connection.answers["reset_prefix_cache"] = True
    attached.engine.call("reset_prefix_cache", {})
    assert attached.engine.can_step()
    attached.steps()
    assert attached.tokens == {0: [1]}


def test_calls_that_fail(attached: Attached) -> None:
    attached.connection.answers["reset_prefix_cache"] = False
    with pytest.raises(ValueError, match="try again"):
        attached.engine.call("reset_prefix_cache", {})
    with pytest.raises(ValueError, match="no operation 'dance'"):
        attached.engine.call("dance", {})


@pytest.mark.parametrize(
    "words",
    [
        "Worker failed with error 'Profiling is not enabled.', please check the stack trace above",
        "Profiling is not enabled.",
    ],
    ids=["in a worker's process", "in the engine's"],
)
def test_calls_fail_with_the_reason_alone(attached: Attached, words: str) -> None:
    attached.connection.answers["profile"] = RuntimeError(f"Call to profile method failed: {words}")
    with pytest.raises(CallFailed, match=r"^Profiling is not enabled\.$"):
        attached.engine.call("start_profile", {})


def test_weights_that_were_dropped_are_read_again(attached: Attached) -> None:
    attached.engine.call("sleep", {"level": 2})
    attached.engine.call("wake_up", {})
    assert calls(attached) == [
        ("reset_prefix_cache", []),
        ("sleep", [2]),
        ("wake_up", []),
        ("collective_rpc", ["reload_weights"]),
    ]


def test_weights_that_a_trainer_has_sent_are_not_dropped(attached: Attached) -> None:
    attached.engine.call("init_weight_transfer_engine", {"init_info": {"packed": False}})
    attached.engine.call("expect_weights", {"path": "transfer:1", "update_info": {}, "timeout_s": 5})
    loader = attached.engine.weights
    assert loader is not None
    attached.connection.answers["reset_prefix_cache"] = True
    plan = loader.plan([WeightSource("transfer:1")])
    loader.load(plan, drop_cache=True, in_step=False, tick=lambda: None)
    sent = calls(attached)
    assert sent[0] == (
        "collective_rpc",
        ["init_weight_transfer_engine", None, [], {"init_info": {"packed": False}}],
    )
    with pytest.raises(ValueError, match=r"only once.*; level 1 keeps them"):
        attached.engine.call("sleep", {"level": 2})
    assert calls(attached) == sent
    attached.engine.call("sleep", {"level": 1})


def test_requests_of_an_earlier_attachment_are_aborted(attached: Attached) -> None:
    attached.submit(0)
    foreign = attached.record(0, [1])
    foreign[0] = "feedfacef00d0001"
    attached.connection.put([foreign, attached.record(0, [2])])
    attached.steps()
    assert attached.sent(b"\x01") == [["feedfacef00d0001"]]
    assert attached.tokens == {0: [2]}


def test_what_speculation_does_not_support_is_refused_once_it_shows(attached: Attached) -> None:
    attached.submit(0, min_p=0.1)
    drafted = {"num_drafts": 1, "num_draft_tokens": 2, "num_accepted_tokens": 1}
    stats = {"spec_decoding_stats": drafted | {"num_accepted_tokens_per_pos": [1, 0]}}
    attached.connection.put([attached.record(0, [1, 2])], stats)
    attached.steps()
    with pytest.raises(RequestRejected, match=r"^min_p: "):
        attached.submit(1, min_p=0.1)
    metrics = attached.engine.metrics()
    assert metrics["spec_decode_accepted_tokens_per_pos_total/0"] == 1


def test_running_requests_are_aborted_at_the_end(attached: Attached) -> None:
    attached.submit(0)
    request_id = attached.id_of(0)
    attached.engine.close()
    assert attached.sent(b"\x01") == [[request_id]]


def calls(attached: Attached) -> list[tuple[str, list[Any]]]:
    return [(call[2], call[3]) for call in attached.sent(b"\x03")]


def test_held_streams_are_paused_in_vllm_and_new_ones_wait_here(attached: Attached) -> None:
    attached.submit(0, interval=4)
    attached.connection.put([attached.record(0, [1, 2])])
    attached.connection.put([attached.record(0, [3])])
    attached.engine.hold(Hold.ALL)
    attached.submit(1)
    attached.steps()
    assert attached.tokens == {0: [1, 2]}  # what had been computed is settled, and the interval holds it back
    attached._read(attached.engine.flush())
    attached._read(attached.engine.flush())
    assert attached.tokens == {0: [1, 2, 3]}
    attached.core.heard_at -= 1000
    assert not attached.engine.can_step()
    assert attached.engine.has_work()
    attached.engine.hold(Hold.ALL)
    assert len(attached.sent(b"\x00")) == 1
    attached.engine.hold(Hold.NOTHING)
    attached.steps()
    assert len(attached.sent(b"\x00")) == 2
    assert calls(attached) == [("pause_scheduler", ["keep", False]), ("resume_scheduler", [])]


def test_newcomers_wait_while_others_go_on(attached: Attached) -> None:
    attached.submit(0)
    attached.connection.put([], {"num_waiting_reqs": 1})
    attached.steps()
    assert attached.engine.load().running == 0  # vLLM has not begun it
    attached.engine.hold(Hold.NEWCOMERS)
    assert attached.engine.load().running == 1  # and will: it is not held back
    attached.submit(1)
    attached.connection.put([attached.record(0, [1], LENGTH)])
    attached.steps()
    assert (attached.engine.load().running, attached.engine.load().waiting) == (0, 1)
    assert not attached.engine.can_step()
    assert calls(attached) == []
    attached.engine.hold(Hold.NOTHING)
    attached.steps()
    assert len(attached.sent(b"\x00")) == 2


def test_held_streams_can_be_aborted(attached: Attached) -> None:
    attached.submit(0)
    request_id = attached.id_of(0)
    attached.engine.hold(Hold.ALL)
    attached.engine.abort(0, [0])
    attached.steps()
    assert attached.ends == {0: FinishReason.ABORT}
    assert attached.sent(b"\x01") == [[request_id]]


def test_a_pause_that_vllm_refuses_changes_nothing(attached: Attached) -> None:
    lacks = (
        "Call to pause_scheduler method failed: 'EngineCoreProc' object has no attribute 'pause_scheduler'"
    )
    attached.connection.answers["pause_scheduler"] = RuntimeError(lacks)
    with pytest.raises(ValueError, match=r"^vLLM 0\.32\.0 has no pause_scheduler$"):
        attached.engine.hold(Hold.ALL)
    attached.submit(0)
    assert len(attached.sent(b"\x00")) == 1


def test_an_engine_that_is_lost_in_a_call_is_lost_in_the_next_step(attached: Attached) -> None:
    """Who calls may take it for a change that has failed."""
    attached.connection.gone = True
    with pytest.raises(EngineLost, match="closed its connection"):
        attached.engine.hold(Hold.ALL)
    attached.connection.gone = False
    assert attached.engine.can_step()
    with pytest.raises(EngineLost, match="closed its connection"):
        attached.engine.step()


def test_engines_that_step_together_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.attach.engine.has_experts", lambda directory: True)
    attached = Attached(tmp_path, ranks=2)
    for hold in (Hold.NEWCOMERS, Hold.ALL):
        with pytest.raises(ValueError, match="mixture of experts with several ranks, cannot keep streams"):
            attached.engine.hold(hold)
    attached.engine.hold(Hold.NOTHING)
    assert attached.engine.weights is None
    with pytest.raises(ValueError, match="cannot replace its weights while it runs"):
        attached.engine.call("expect_weights", {"path": "transfer:1", "update_info": {}, "timeout_s": 5})
