"""Batches of sequences: each token once, nothing mixed, the same steps on any number of ranks."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gulliver.errors import GulliverError
from gulliver.finetune import Example, make_batches
from gulliver.solve.packing import pack
from tests.hybrid.hybrid_models import Precise
from tests.models.family_models import build

LENGTH = 12
lengths = st.lists(st.integers(1, LENGTH), min_size=1, max_size=40)
sizes = st.fixed_dictionaries(
    {"rows": st.integers(1, 5), "packing": st.booleans(), "shuffle": st.booleans()}
)
worlds = st.tuples(st.integers(1, 4), st.integers(1, 3))


def examples_of(counts: list[int], seed: int = 0) -> list[Example]:
    """Sequences whose tokens occur nowhere else, of which some are learnt."""
    draw, at = np.random.default_rng(seed), 1
    found = []
    for number, count in enumerate(counts):
        answer = (draw.random(count) < 0.6) & (np.arange(count) > 0)
        found.append(Example(np.arange(at, at + count, dtype=np.int32), answer, f"a:{number}"))
        at += count
    return found


def loaders(
    examples: list[Example], world: tuple[int, int], rows: int, **options: Any
) -> list[Any]:
    ranks, accumulate = world
    return [
        make_batches(
            examples,
            tokens=rows * LENGTH,
            length=LENGTH,
            rank=rank,
            ranks=ranks,
            accumulate=accumulate,
            **options,
        )
        for rank in range(ranks)
    ]


def epoch(examples: list[Example], world: tuple[int, int], **options: Any) -> list[list[Any]]:
    """The steps of an epoch: the batches of all ranks and micro-batches of each."""
    by_rank = [list(loader) for loader in loaders(examples, world, **options)]
    assert len({len(batches) for batches in by_rank}) == 1
    accumulate, steps = world[1], []
    for start in range(0, len(by_rank[0]), accumulate):
        micro = [batches[start : start + accumulate] for batches in by_rank]
        # In the order of the parts that a step is cut into.
        steps.append([micro[rank][m] for m in range(accumulate) for rank in range(world[0])])
    return steps


def rows_of(batch: Any) -> list[list[tuple[int, int, int]]]:
    """Token, label and position of what is no padding, row by row."""
    ids, labels = batch["input_ids"], batch["labels"]
    where = batch.get("position_ids")
    if where is None:
        where = torch.arange(ids.shape[1]).expand_as(ids)
        real = batch["attention_mask"].bool() & (ids > 0)
    else:
        real = ids > 0
    return [
        list(zip(ids[n][on].tolist(), labels[n][on].tolist(), where[n][on].tolist(), strict=True))
        for n, on in enumerate(real)
    ]


@settings(max_examples=120)
@given(lengths, sizes, worlds, st.integers(1, 4))
def test_an_epoch_has_each_token_once_in_its_place(
    counts: list[int], options: dict[str, Any], world: tuple[int, int], multiple: int
) -> None:
    examples = examples_of(counts)
    wanted = {
        int(token): (int(token) if learnt else -100, place)
        for one in examples
        for place, (token, learnt) in enumerate(zip(one.ids, one.answer, strict=True))
    }
    starts = {int(one.ids[0]): one for one in examples}
    seen: Counter[int] = Counter()
    for step in epoch(examples, world, multiple=multiple, **options):
        shapes = {batch["input_ids"].shape[1] for batch in step}
        assert len(shapes) == 1
        assert shapes.pop() % multiple == 0
        learnt = sum(int((batch["labels"] != -100).sum()) for batch in step)
        assert {batch["num_items"] for batch in step} == {learnt}
        for row in (row for batch in step for row in rows_of(batch)):
            assert {token: (label, place) for token, label, place in row} == {
                token: wanted[token] for token, _, _ in row
            }
            # Whole sequences, one after the other.
            whole = [t for t, _, _ in row if t in starts for t in starts[t].ids.tolist()]
            assert [token for token, _, _ in row] == whole
            seen.update(token for token, _, _ in row)
    assert seen == Counter(wanted.keys())


@settings(max_examples=60)
@given(lengths, sizes, worlds, st.integers(0, 3))
def test_the_steps_are_the_same_on_any_number_of_ranks(
    counts: list[int], options: dict[str, Any], world: tuple[int, int], seed: int
) -> None:
    examples = examples_of(counts)
    alone = epoch(examples, (1, 1), seed=seed, **options)
    shared = epoch(examples, world, seed=seed, **options)
    assert [[r for b in step for r in rows_of(b) if r] for step in shared] == [
        rows_of(batch) for (batch,) in alone
    ]


@settings(max_examples=60)
@given(lengths, sizes)
def test_epochs_have_equally_many_steps_in_another_order(
    counts: list[int], options: dict[str, Any]
) -> None:
    (loader,) = loaders(examples_of(counts), (1, 1), **options)
    epochs = [[rows_of(batch) for batch in loader] for _ in range(3)]
    assert {len(steps) for steps in epochs} == {len(loader)}
    if not options["shuffle"]:
        assert epochs[0] == epochs[1] == epochs[2]
    elif len(counts) > 30 and len(set(counts)) < 9 and len(loader) > 4:
        assert epochs[0] != epochs[1]


@settings(max_examples=60)
@given(lengths, st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_a_part_of_a_sorted_step_has_no_more_tokens_than_one_of_full_rows(
    counts: list[int], rows: int, parts: int
) -> None:
    for step in epoch(examples_of(counts), (parts, 1), rows=rows * parts, packing=False):
        assert all(batch["input_ids"].numel() <= rows * LENGTH for batch in step)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, LENGTH), min_size=8, max_size=40),
    sizes,
    st.lists(st.tuples(worlds, st.integers(0, 6)), min_size=1, max_size=4),
)
def test_a_position_resumes_with_other_ranks_and_other_micro_batches(
    counts: list[int], options: dict[str, Any], legs: list[tuple[tuple[int, int], int]]
) -> None:
    examples = examples_of(counts)
    (loader,) = loaders(examples, (1, 1), **options)
    wanted = (row for batch in forever(loader) for row in rows_of(batch))
    found: list[Any] = []
    state = None
    for world, steps in legs:
        ranks = loaders(examples, world, **options)
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        streams = [forever(loader) for loader in ranks]
        for _ in range(steps):
            micro = [[next(stream) for _ in range(world[1])] for stream in streams]
            for m in range(world[1]):
                found += [row for batches in micro for row in rows_of(batches[m]) if row]
        state = ranks[-1].state_dict()
    assert found == list(islice(wanted, len(found)))


def forever(loader: Any) -> Any:
    while True:
        yield from loader


def test_a_position_that_does_not_fit_is_refused() -> None:
    examples = examples_of([5, 7, 9, 3, 12, 12])
    (loader,) = loaders(examples, (1, 2), rows=1, packing=True)
    next(iter(loader))
    inside = loader.state_dict()
    for changed in (
        loaders(examples[:-1], (1, 2), rows=1, packing=True),
        loaders(examples, (1, 2), rows=2, packing=True),
        loaders(examples, (1, 2), rows=1, packing=False),
    ):
        with pytest.raises(GulliverError, match="other data, batch sizes or another seed"):
            changed[0].load_state_dict(inside)
    with pytest.raises(GulliverError, match=r"seed 0, .*\b1:"):
        loaders(examples, (1, 2), rows=1, packing=True, seed=1)[0].load_state_dict(inside)
    with pytest.raises(GulliverError, match="not the state"):
        loader.load_state_dict({**inside, "inner": {"done": 1}})


@pytest.mark.parametrize("packing", [True, False])
def test_losses_over_num_items_add_up_to_the_mean_of_the_step(packing: bool) -> None:
    """The gradient of a step is that of the mean over its tokens, however it is cut."""
    counts = [5, 12, 3, 7, 7, 9, 2, 12, 4, 6, 1, 3]
    examples = [Example(one.ids % 60 + 4, one.answer, one.source) for one in examples_of(counts)]
    model = build("causal", "llama").double()
    options = {"rows": 3, "packing": packing, "shuffle": False}

    def gradients(world: tuple[int, int]) -> list[torch.Tensor]:
        found = []
        for step in epoch(examples, world, **options):
            model.zero_grad()
            for batch in step:
                items, labels = batch.pop("num_items"), batch.pop("labels")
                logits = model(**batch).logits[:, :-1]
                loss = F.cross_entropy(
                    logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
                )
                (loss / items).backward()
            grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            found.append(torch.cat(grads))
        return found

    def alone() -> list[torch.Tensor]:
        """The mean over all learnt tokens of the sequences of each step, one by one."""
        found = []
        by_start = {int(one.ids[0]): one for one in examples}
        assert len(by_start) == len(examples)
        for step in epoch(examples, (1, 1), **options):
            model.zero_grad()
            ones = []
            for row in (row for batch in step for row in rows_of(batch)):
                places = [n for n, (_, _, place) in enumerate(row) if place == 0]
                ones += [by_start[row[n][0]] for n in places]
            total = torch.zeros((), dtype=torch.float64)
            for one in (one for one in ones if one.learnt):
                ids = torch.from_numpy(one.ids).long()
                losses = F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
                total = total + losses[torch.from_numpy(one.answer)[1:]].sum()
            (total / sum(one.learnt for one in ones)).backward()
            grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            found.append(torch.cat(grads))
        return found

    with Precise():
        wanted = alone()
        for world in ((1, 1), (1, 2), (2, 1), (2, 4)):
            for mine, expected in zip(gradients(world), wanted, strict=True):
                assert float((mine - expected).abs().max() / expected.abs().max()) < 1e-12


def fewest_bins(sizes: list[int], capacity: int) -> int:
    """Brute force: each thing into every bin that has room, or a new one."""
    best = len(sizes)

    def place(at: int, rooms: list[int]) -> None:
        nonlocal best
        if len(rooms) >= best and at < len(sizes):
            return
        if at == len(sizes):
            best = min(best, len(rooms))
            return
        for n in range(len(rooms)):
            if rooms[n] >= sizes[at] and rooms[n] not in rooms[:n]:
                place(at + 1, [*rooms[:n], rooms[n] - sizes[at], *rooms[n + 1 :]])
        place(at + 1, [*rooms, capacity - sizes[at]])

    place(0, [])
    return best


@settings(max_examples=150)
@given(st.lists(st.integers(1, 10), max_size=8))
def test_packing_needs_few_bins(sizes: list[int]) -> None:
    found = pack(sizes, 10)
    assert sorted(n for one in found.bins for n in one) == list(range(len(sizes)))
    assert all(sum(sizes[n] for n in one) <= 10 for one in found.bins)
    best = fewest_bins(sizes, 10)
    assert found.bound <= best <= len(found.bins) <= 11 / 9 * best + 4


def test_packing_goes_into_the_fullest_bin_that_has_room() -> None:
    """Against the definition, thing by thing."""
    draw = np.random.default_rng(3)
    sizes = draw.integers(1, 100, 300).tolist()
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fits = [n for n, room in enumerate(rooms) if room >= size]
        if fits:
            best = min(fits, key=lambda n: rooms[n])
            rooms[best] -= size
        else:
            rooms.append(100 - size)
    found = pack(sizes, 100)
    assert sorted(100 - sum(sizes[n] for n in one) for one in found.bins) == sorted(rooms)
