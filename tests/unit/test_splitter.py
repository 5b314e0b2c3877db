"""How rows are shared among train workers, for any sizes of blocks, batches and worker counts."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from stoker.serve.recipe_pass import Splitter

BLOCKS = st.lists(st.integers(1, 50), min_size=1, max_size=12)


def rows_by_rank(blocks: list[int], splitter: Splitter) -> list[list[list[tuple[int, int]]]]:
    """Per rank, per step: the (block, row) pairs it takes."""
    for rows in blocks:
        splitter.add(rows)
    splitter.ended = True
    ranks = []
    for rank in range(splitter.workers):
        steps, step = [], 0
        while (share := splitter.share(step, rank)) is not None:
            steps.append([(s.block, row) for s in share.slices for row in range(s.start, s.stop)])
            step += 1
        ranks.append(steps)
    return ranks


@given(BLOCKS, st.integers(1, 5), st.integers(1, 40), st.integers(1, 60) | st.just("drop"))
def test_all_ranks_train_equal_steps_and_a_last_one_below_the_limit_is_left_out_whole(
    blocks: list[int], workers: int, batch: int, remainder: int | str
) -> None:
    splitter, kept = Splitter(workers, batch, equal=True, remainder=remainder), set[int]()
    least = 2 if isinstance(remainder, str) else remainder
    for rows in blocks:
        splitter.add(rows)
        # What is released while rows still arrive must not be needed at the end.
        steps = splitter.rows // splitter.step_rows
        everything = range(len(splitter.starts))
        kept |= {
            b for b in everything if splitter.block_done(b, steps) and not splitter.may_remain(b)
        }
    splitter.ended = True
    left = sum(blocks) % (workers * batch)
    drops = left // workers < min(least, batch)
    rest = splitter.remainder
    assert len(rest) == (left if drops else left % workers)
    assert kept.isdisjoint(part.block for part in splitter.slices(rest.start, rest.stop))
    ranks = rows_by_rank([], splitter)
    assert {len(step) for steps in ranks for step in steps[:-1]} <= {batch}
    assert all(len(steps[-1]) >= min(least, batch) for steps in ranks if steps)
    assert len({tuple(len(step) for step in steps) for steps in ranks}) == 1
    taken = Counter(row for steps in ranks for step in steps for row in step)
    assert set(taken.values()) <= {1}
    assert len(taken) + len(splitter.remainder) == sum(blocks)
    remaining = {
        (s.block, r) for s in splitter.slices(rest.start, rest.stop) for r in range(s.start, s.stop)
    }
    assert not remaining & set(taken)


@given(BLOCKS, st.integers(1, 5), st.integers(1, 40))
def test_validation_gives_every_row_to_exactly_one_rank(
    blocks: list[int], workers: int, batch: int
) -> None:
    splitter = Splitter(workers, batch, equal=False)
    taken = Counter(
        row for steps in rows_by_rank(blocks, splitter) for step in steps for row in step
    )
    assert set(taken.values()) == {1}
    assert len(taken) == sum(blocks)
    assert len(splitter.remainder) == 0


@given(BLOCKS, st.integers(1, 5), st.integers(1, 40))
def test_padding_uses_every_row_and_gives_all_ranks_equal_steps(
    blocks: list[int], workers: int, batch: int
) -> None:
    splitter = Splitter(workers, batch, equal=True, remainder="pad")
    ranks = rows_by_rank(blocks, splitter)
    assert len({tuple(len(step) for step in steps) for steps in ranks}) == 1
    taken = Counter(row for steps in ranks for step in steps for row in step)
    assert len(taken) == sum(blocks)
    steps = len(ranks[0])
    padded = sum(
        s.padded for k in range(steps) for r in range(workers) if (s := splitter.share(k, r))
    )
    assert sum(taken.values()) == sum(blocks) + padded
    assert padded < min(2, batch) * workers
    assert all(len(step) >= min(2, batch) for steps in ranks for step in steps)


@given(BLOCKS, st.integers(1, 4), st.integers(1, 20))
def test_a_global_batch_does_not_depend_on_how_blocks_were_cut(
    blocks: list[int], workers: int, batch: int
) -> None:
    def numbered(sizes: list[int]) -> list[list[list[int]]]:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        ranks = rows_by_rank(sizes, Splitter(workers, batch, equal=True))
        return [[[starts[b] + r for b, r in step] for step in steps] for steps in ranks]

    assert numbered(blocks) == numbered([sum(blocks)])
