from __future__ import annotations

import pytest

from penstock.config.serve import ServeConfig
from penstock.engine.loop.build_engine import with_rank_limits


@pytest.mark.parametrize("limit", [None, 0, 1, 7, 8])
def test_the_shares_of_all_engines_are_the_limit(limit: int | None) -> None:
    config = ServeConfig(data_parallel_size=4, max_num_queued_reqs=limit, max_num_queued_tokens=limit)
    shares = [with_rank_limits(config, rank) for rank in range(4)]
    for values in (
        [share.max_num_queued_reqs for share in shares],
        [share.max_num_queued_tokens for share in shares],
    ):
        if limit is None:
            assert values == [None] * 4
        else:
            assert sum(filter(None, values)) == limit
            assert values == sorted(values, key=lambda value: -(value or 0))
