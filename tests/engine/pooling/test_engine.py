"""Batches of inputs of all requests, in the order of each, and the ends of their streams."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from penstock.engine.base import Hold, RequestRejected
from penstock.engine.pooling.model import PoolingBatch
from penstock.wire.arrays import F32
from penstock.wire.frames import FinishReason
from penstock.wire.pooling import PoolingTask
from penstock.wire.submits import without_inputs
from tests.engine.pooling.support import WIDTH, PickyModel, make_engine, pooling_submit, run, vectors_of


def test_each_stream_gets_its_vectors_whatever_runs_beside_it() -> None:
    alone = make_engine()
    alone.submit(0, pooling_submit(3, [4, 2, 9], first_id=50))
    expected = vectors_of(run(alone), 3)
    assert expected.shape == (3, WIDTH)
    assert np.allclose(np.linalg.norm(expected, axis=1), 1, atol=1e-6)

    beside = make_engine(max_num_batched_tokens=16)
    beside.max_tokens = 16
    beside.submit(0, pooling_submit(1, [5] * 40))
    beside.submit(1, pooling_submit(3, [4, 2, 9], first_id=50))
    beside.submit(0, pooling_submit(2, [7], PoolingTask.TOKEN_EMBED, dimensions=4))
    steps = run(beside)
    assert vectors_of(steps, 3).tobytes() == expected.tobytes()
    assert vectors_of(steps, 2).shape == (7, 4)
    assert vectors_of(steps, 1).shape == (40, WIDTH)


def test_a_short_request_does_not_wait_for_a_long_one() -> None:
    model = PickyModel()
    engine = make_engine(model)
    engine.max_tokens = 100
    engine.submit(0, pooling_submit(1, [10] * 50))
    engine.step()
    engine.submit(0, pooling_submit(2, [10]))
    rows = engine.step()
    assert rows.finish is not None
    assert rows.stream[rows.finish != 0].tolist() == [2]
    assert sum(model.batches[-1]) == 100, "the step is full nevertheless"


def test_an_input_that_fails_ends_its_stream_alone() -> None:
    engine = make_engine(PickyModel(bad=120))
    engine.submit(0, pooling_submit(1, [10] * 4, first_id=1))
    engine.submit(0, pooling_submit(2, [10] * 4, first_id=101))
    engine.submit(0, pooling_submit(3, [10] * 4, first_id=201))
    steps = run(engine)
    [failure] = [each for rows in steps for each in rows.failed]
    assert (failure.stream, failure.position, failure.code) == (2, 1, "engine_error")
    assert "this token is bad" in failure.message
    assert len(vectors_of(steps, 1)) == len(vectors_of(steps, 3)) == 4
    assert len(vectors_of(steps, 2)) == 1, "the one before it was delivered"


@pytest.mark.parametrize("task", [PoolingTask.EMBED, PoolingTask.TOKEN_EMBED])
def test_a_batch_that_fails_by_its_size_is_computed_in_parts(task: PoolingTask) -> None:
    """As of a device without the memory for all; a stream has one row in a step, or its server refuses it."""

    class SmallModel(PickyModel):
        def compute(self, batch: PoolingBatch) -> Sequence[F32]:
            if len(batch.lengths) > 1:
                raise MemoryError
            return super().compute(batch)

    requests = [pooling_submit(1, [3, 4, 5, 6, 7], task), pooling_submit(2, [10] * 4, task, first_id=101)]
    whole, engine = make_engine(), make_engine(SmallModel(bad=125))
    for request in requests:
        whole.submit(0, request)
        engine.submit(0, request)
    expected, steps = run(whole), run(engine)
    for rows in steps:
        assert len(set(rows.stream.tolist())) == len(rows.stream)
    assert vectors_of(steps, 1).tobytes() == vectors_of(expected, 1).tobytes()
    [failure] = [each for rows in steps for each in rows.failed]
    assert (failure.stream, failure.position) == (2, 2)
    assert len(vectors_of(steps, 2)) == (20 if task is PoolingTask.TOKEN_EMBED else 2)
    assert not engine.has_work()


def test_an_engine_whose_model_computes_nothing_ends() -> None:
    """Otherwise it would fail every request from then on."""
    model = PickyModel(bad=120)
    engine = make_engine(model)
    engine.submit(0, pooling_submit(1, [10], first_id=111))
    assert [failure.stream for failure in engine.step().failed] == [1], "the request is the cause"
    engine.submit(0, pooling_submit(2, [10, 10]))
    engine.submit(0, pooling_submit(3, [10], first_id=1))
    model.broken = True
    with pytest.raises(ValueError, match="it is broken"):
        engine.step()


def test_a_resumed_stream_goes_on_with_the_inputs_that_are_left() -> None:
    request = pooling_submit(1, [3, 4, 5, 6])
    whole = make_engine()
    whole.submit(0, request)
    expected = vectors_of(run(whole), 1)
    rest = without_inputs(request, 3)
    assert rest.resumed == 3
    engine = make_engine()
    engine.submit(0, rest)
    [rows] = run(engine)
    assert rows.position.tolist() == [3]
    assert vectors_of([rows], 1).tobytes() == expected[3:].tobytes()


def test_aborts_end_running_and_waiting_streams_with_a_row() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.submit(0, pooling_submit(1, [3, 3]))
    engine.submit(0, pooling_submit(2, [3]))
    engine.step()
    engine.abort(0, [1, 2, 77])
    rows = engine.step()
    assert rows.finish is not None
    ends = dict(
        zip(rows.stream.tolist(), zip(rows.position.tolist(), rows.finish.tolist(), strict=True), strict=True)
    )
    assert ends == {1: (1, FinishReason.ABORT), 2: (0, FinishReason.ABORT)}
    assert not engine.has_work()
    engine.abort(0, [1])
    assert not engine.can_step(), "a stream that has ended is not looked for"


def test_priorities_and_holds() -> None:
    engine = make_engine(scheduling_policy="priority", max_num_seqs=1)
    engine.submit(0, pooling_submit(1, [3], priority=5))
    engine.submit(0, pooling_submit(2, [3], priority=1))
    engine.hold(Hold.ALL)
    assert not engine.can_step()
    engine.hold(Hold.NOTHING)
    assert [rows.stream.tolist() for rows in run(engine)] == [[2], [1]]


@pytest.mark.parametrize(
    ("lengths", "task", "dimensions", "reason"),
    [
        ([513], PoolingTask.EMBED, 0, "input: one has 513 tokens, the model takes 512"),
        ([3], PoolingTask.EMBED, 9, "dimensions: 9, vectors have 8 values"),
    ],
)
def test_what_the_model_cannot_is_refused(
    lengths: list[int], task: PoolingTask, dimensions: int, reason: str
) -> None:
    with pytest.raises(RequestRejected, match=reason):
        make_engine().submit(0, pooling_submit(1, lengths, task, dimensions=dimensions))


def test_the_streams_of_an_api_server_that_is_gone_are_forgotten() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.submit(0, pooling_submit(1, [3, 3]))
    engine.submit(1, pooling_submit(1, [3]))
    engine.step()
    engine.drop_server(0)
    rows = run(engine)
    assert [each.server.tolist() for each in rows] == [[1]]
    engine.submit(0, pooling_submit(4, [3]))
    assert [failure.stream for failure in engine.fail_all("engine_error", "it ends").failed] == [4]
    assert not engine.has_work()
