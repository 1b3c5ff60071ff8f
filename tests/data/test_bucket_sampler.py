"""Every sample exactly once per epoch, on any number of ranks, through any resumptions."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gulliver.data import Bucket, BucketSampler
from gulliver.errors import GulliverError

BUCKETS = [Bucket(1, 8, 8), Bucket(5, 8, 16), Bucket(9, 16, 8), Bucket(9, 32, 32)]
assignments = st.lists(st.sampled_from([*BUCKETS, None]), min_size=1, max_size=90).filter(any)
sizes = st.fixed_dictionaries({bucket: st.integers(1, 9) for bucket in BUCKETS})
worlds = st.integers(1, 7)


def ranks_of(buckets, size, world, seed, state=None) -> list[BucketSampler]:
    samplers = [BucketSampler(buckets, size, rank, world, seed) for rank in range(world)]
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(state)
    return samplers


@settings(max_examples=150, deadline=None)
@given(assignments, sizes, worlds, st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_uses_each_sample_once_and_a_step_one_bucket(
    buckets, size, world, seed, epoch
) -> None:
    samplers = ranks_of(buckets, size, world, seed)
    used: Counter[int] = Counter()
    for sampler in samplers:
        sampler.set_epoch(epoch)
    for steps in zip(*samplers, strict=True):
        together = [index for step in steps for index in step.indices]
        assert len({step.bucket for step in steps}) == 1
        assert all(buckets[index] == steps[0].bucket for index in together)
        assert len(together) == steps[0].total <= size[steps[0].bucket]
        assert [s.offset for s in steps] == [
            sum(len(before.indices) for before in steps[:rank]) for rank in range(world)
        ]
        shares = [len(step.indices) for step in steps]
        assert max(shares) - min(shares) <= 1
        used.update(together)
    assert used == Counter(i for i, bucket in enumerate(buckets) if bucket is not None)


@settings(max_examples=150, deadline=None)
@given(
    assignments,
    sizes,
    st.lists(st.tuples(worlds, st.integers(0, 12)), min_size=1, max_size=5),
    st.integers(0, 5),
)
def test_resuming_with_other_numbers_of_ranks_changes_nothing(buckets, size, legs, seed) -> None:
    alone = BucketSampler(buckets, size, seed=seed)
    expected = []
    while len(expected) < sum(steps for _, steps in legs) + 1:
        expected += [(step.epoch, step.bucket, step.indices) for step in alone]
    found, state = [], None
    for world, steps in legs:
        samplers = ranks_of(buckets, size, world, seed, state)
        iterators = [iter(sampler) for sampler in samplers]
        for _ in range(steps):
            try:
                parts = [next(iterator) for iterator in iterators]
            except StopIteration:
                iterators = [iter(sampler) for sampler in samplers]
                parts = [next(iterator) for iterator in iterators]
            indices = [index for part in parts for index in part.indices]
            found.append((parts[0].epoch, parts[0].bucket, indices))
        states = [sampler.state_dict() for sampler in samplers]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert found == expected[: len(found)]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    buckets = [BUCKETS[i % 3] for i in range(60)]

    def order(seed: int, epoch: int) -> list[int]:
        sampler = BucketSampler(buckets, 4, seed=seed)
        sampler.set_epoch(epoch)
        return [i for step in sampler for i in step.indices]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1) != order(1, 1)


def test_next_iteration_is_next_epoch() -> None:
    sampler = BucketSampler([BUCKETS[0]] * 5, 2)
    assert [step.epoch for _ in range(3) for step in sampler] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len(sampler) == 3
    assert "5 samples in 3 batches" in sampler.describe()


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"batch_size": 3},
        {"buckets": [BUCKETS[0]] * 6},
    ],
)
def test_a_position_in_other_data_is_refused(change: dict) -> None:
    usual = {"buckets": [BUCKETS[0]] * 5, "batch_size": 2, "seed": 0}
    state = BucketSampler(**usual).state_dict()
    with pytest.raises(GulliverError, match="other data, batch sizes or another seed"):
        BucketSampler(**{**usual, **change}).load_state_dict(state)
