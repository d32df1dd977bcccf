"""Refuses a request that the engines' queues could not take even when they are empty."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config.serve import ServeConfig
from penstock.generation.plan import RequestPlan
from penstock.http.errors import ApiError


def check_queue_capacity(
    config: ServeConfig, plan: RequestPlan, lengths: Sequence[int], rank: int | None
) -> None:
    """Raises ApiError if the streams of a request, one per choice of each prompt, can never all be accepted.

    ``lengths``: tokens of each prompt; ``rank``: the only engine that may run the request. A single stream is
    always accepted by an idle engine.
    """
    streams = len(lengths) * plan.n
    if streams == 1:
        return
    engines = 1 if rank is not None else config.data_parallel_size
    field = "prompt" if len(lengths) > 1 else "n" if plan.kept is None else "best_of"
    on_engine = "" if rank is None else f" on engine {rank}"
    if config.max_num_queued_reqs is not None:
        places = _limit(config, config.max_num_queued_reqs, rank)
        slots = config.max_num_seqs * engines
        if streams > slots + places:
            raise ApiError(
                400,
                f"{field}: {streams} outputs of one request, but at most {slots + places} are accepted at "
                f"once{on_engine}: {slots} that run (--max-num-seqs) and {places} that wait "
                "(--max-num-queued-reqs).",
                param=field,
            )
    if config.max_num_queued_tokens is not None:
        most = _limit(config, config.max_num_queued_tokens, rank)
        tokens = sum(lengths) * plan.n
        # An engine whose queue is empty accepts any one prompt.
        largest = max(most, max(lengths)) if engines == 1 else most + engines * max(lengths)
        if streams > engines and tokens > largest:
            raise ApiError(
                400,
                f"{field}: {streams} outputs have {tokens} prompt tokens together, but at most {most} may "
                f"wait{on_engine} (--max-num-queued-tokens).",
                param=field,
            )


def _limit(config: ServeConfig, limit: int, rank: int | None) -> int:
    """``limit`` of all engines, or the part of one."""
    return limit if rank is None else -(-limit // config.data_parallel_size)
