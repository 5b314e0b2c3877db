"""The leases by which Ray Data runs chain workers."""

from __future__ import annotations

from typing import Any

import pytest
from waiting import until

from stoker.serve import chain_worker
from stoker.serve.chain_worker import Leases
from stoker.serve.pool import ChainHost, Pool


def test_an_error_of_ray_data_is_noticed_though_nobody_waits_for_its_rows(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    def execution(places: list[str]) -> Any:
        leases = ray.data.from_items([{"lease": n} for n in range(4)], override_num_blocks=4)
        leases.context.max_errored_blocks = 0
        leases.context.execution_no_progress_timeout_s = (
            600.0  # as in a run, and not as tests here set it
        )
        return leases.map_batches(fails_at_the_last, batch_size=None)

    def fails_at_the_last(rows: Any) -> Any:
        if rows["lease"][0] == 3:
            raise RuntimeError("a lease was lost for good")
        return {"tasks": rows["lease"]}

    errors: list[BaseException] = []
    pool = Pool()
    pool.update([ChainHost("", slots=1)], hungry=True, now=0.0)
    leases = Leases(None, "run", pool, errors.append)
    monkeypatch.setattr(leases, "_dataset", execution)
    monkeypatch.setattr(chain_worker, "UNWATCHED_S", 1.0)

    def look() -> bool:
        leases.look(alone=True, silent=True)
        return bool(errors)

    until(look)
    assert "a lease was lost for good" in str(errors[0])
