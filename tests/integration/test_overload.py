"""What does not fit the queue is refused at once."""

from contextlib import ExitStack
from pathlib import Path

from .server import Server, wait_until
from .test_connections import connect, request


def test_a_full_queue_answers_503_until_there_is_room(tmp_path: Path) -> None:
    slow = ("--engine", "synthetic", "--synthetic-step-ms", "200")
    limits = ("--max-num-seqs", "1", "--max-num-queued-reqs", "1")
    body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with Server(*slow, *limits, directory=tmp_path) as server, ExitStack() as stack:
        held = []
        for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
            held.append(stack.enter_context(connect(server)))
            held[-1].sendall(request(body))
            wait_until(lambda gauge=gauge: server.metric(gauge) == 1, 60, gauge)
        refused = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert refused.status_code == 503
        assert "--max-num-queued-reqs" in refused.json()["error"]["message"]
        for connection in held:
            connection.close()
        wait_until(lambda: server.metric("vllm:num_requests_running") == 0, 60, "freeing the slot")
        assert server.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
