"""State of cached tables: files, resuming, growing, rounded rows."""

from __future__ import annotations

import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gulliver.checkpoint import AsyncCheckpointer, load
from gulliver.embedding import CachedEmbeddingBag, LookAhead
from gulliver.errors import GulliverError
from tests.embedding.embedding_runs import (
    OPTIMIZERS,
    Step,
    cached,
    most_rows,
    steps,
    train,
    whole_run,
)

ROWS = 50
NAMES = list(OPTIMIZERS)


def _states(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return optimizer.state_dict()["state"].get(0, {})


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    pairs = ((one[key], other[key]) for key in one.keys() | other.keys())
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


@pytest.mark.parametrize("name", NAMES)
def test_run_resumes_with_other_cache_or_torch_table(name: str, tmp_path: Path) -> None:
    first, batches = torch.randn(ROWS, 8), steps(ROWS, 8, 16)
    _, table_state, optimizer_state = whole_run("sum", name, batches, first, False)
    table, optimizer = cached("sum", name, first, most_rows(batches))
    train(table, optimizer, iter(batches[:7]), False)
    state = {"table": table.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "state.pt")
    kept = torch.load(tmp_path / "state.pt")
    whole = nn.EmbeddingBag(ROWS, 8, mode="sum", sparse=True)
    pair: list[tuple[nn.Module, torch.optim.Optimizer]] = [
        cached("sum", name, torch.zeros(ROWS, 8), most_rows(batches) + 4),
        (whole, OPTIMIZERS[name](whole.parameters())),
    ]
    for module, stepper in pair:
        module.load_state_dict(kept["table"])
        stepper.load_state_dict(deepcopy(kept["optimizer"]))  # torch shares the count of steps
        train(module, stepper, iter(batches[7:]), False)
        assert torch.equal(module.state_dict()["weight"], table_state["weight"])
        assert _equal(_states(stepper), optimizer_state["state"].get(0, {}))


@pytest.mark.parametrize("name", ["adagrad", "sparse adam"])
def test_torch_s_state_is_loaded_in_the_middle_of_a_run(name: str) -> None:
    first, batches = torch.randn(ROWS, 8), steps(ROWS, 8, 12)
    whole = nn.EmbeddingBag(ROWS, 8, mode="sum", sparse=True, _weight=first.clone())
    reference = OPTIMIZERS[name](whole.parameters())
    train(whole, reference, iter(batches[:5]), False)
    table, optimizer = cached("sum", name, torch.randn(ROWS, 8), most_rows(batches))
    train(table, optimizer, LookAhead(batches[8:], table, 1, lambda s: s.ids), False)
    table.announce(batches[5].ids)
    table.load_state_dict(whole.state_dict())
    optimizer.load_state_dict(deepcopy(reference.state_dict()))
    train(whole, reference, iter(batches[5:]), False)
    train(table, optimizer, iter(batches[5:]), False)
    assert torch.equal(table.state_dict()["weight"], whole.weight)
    assert _equal(_states(optimizer), _states(reference))


@pytest.mark.parametrize("name", ["row-wise adagrad", "sparse adam"])
def test_a_checkpoint_is_saved_while_rows_move_and_loads_bit_for_bit(
    name: str, tmp_path: Path
) -> None:
    first, batches = torch.randn(ROWS, 8), steps(ROWS, 8, 14)
    _, table_state, optimizer_state = whole_run("sum", name, batches, first, False)
    table, optimizer = cached("sum", name, first, most_rows(batches))
    with AsyncCheckpointer(tmp_path) as checkpointer:
        for number, step in enumerate(LookAhead(batches, table, 3, lambda s: s.ids)):
            train(table, optimizer, iter([step]), False)
            if number == 6:
                checkpointer.save(7, {"model": table, "optimizer": optimizer})
        checkpointer.wait()
    again, stepper = cached("sum", name, torch.zeros(ROWS, 8), ROWS // 2)
    load(tmp_path, {"model": again, "optimizer": stepper})
    train(again, stepper, iter(batches[7:]), False)
    assert torch.equal(again.state_dict()["weight"], table_state["weight"])
    assert _equal(_states(stepper), optimizer_state["state"][0])


def test_states_of_other_sizes_are_refused_by_name() -> None:
    table, optimizer = cached("sum", "adagrad", torch.randn(ROWS, 8), 20)
    with pytest.raises(RuntimeError, match=r"weight has shape \(50, 4\), the table \(50, 8\)"):
        table.load_state_dict({"weight": torch.zeros(50, 4)})
    other = nn.EmbeddingBag(49, 8, sparse=True)
    state = torch.optim.Adagrad(other.parameters()).state_dict()
    with pytest.raises(GulliverError, match=r"state 'sum' of the table must have shape \(50, 8\)"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("name", NAMES)
def test_a_table_that_grows_is_one_that_was_as_large_from_the_start(name: str) -> None:
    first, batches = (
        torch.randn(ROWS + 30, 8),
        [*steps(ROWS, 8, 6), *steps(ROWS + 30, 8, 6, seed=3)],
    )
    _, table_state, optimizer_state = whole_run("sum", name, batches, first, False)
    table, optimizer = cached("sum", name, first[:ROWS], 24)
    train(table, optimizer, iter(batches[:6]), False)
    table.grow(ROWS + 30, first[ROWS:])
    train(table, optimizer, iter(batches[6:]), False)
    assert torch.equal(table.state_dict()["weight"], table_state["weight"])
    assert _equal(_states(optimizer), optimizer_state["state"].get(0, {}))
    with pytest.raises(GulliverError, match="pass a larger number"):
        table.grow(ROWS)
    several = CachedEmbeddingBag({"a": 5, "b": 5}, 4, cache=3)
    with pytest.raises(GulliverError, match="only the last one, 'b', can grow"):
        several.grow({"a": 9})


def few_rows(rows: int, most: int, seed: int) -> list[Step]:
    """Batches of at most so many different rows, which a cache of a small table takes."""
    made = steps(rows, 4, 5, seed=seed)
    for step in made:
        kept = step.ids.unique()[-most:]
        if len(kept):
            step.ids = kept[torch.arange(len(step.ids)) % len(kept)]
    return made


def test_tables_of_any_size_grow_again_and_again(full: bool) -> None:
    """Random tables of 1 to 40 rows against torch's table of the last size."""
    for seed in range(300 if full else 24):
        draw = random.Random(seed)
        sizes = [1 + seed % 17 if seed % 2 else draw.randint(1, 40)]
        for _ in range(draw.randint(1, 3)):
            sizes.append(sizes[-1] + draw.choice((1, 3, 30, 300)))
        parts = [few_rows(rows, sizes[0], seed + number) for number, rows in enumerate(sizes)]
        batches, name = [step for part in parts for step in part], draw.choice(NAMES)
        first = torch.randn(sizes[-1], 4, generator=torch.Generator().manual_seed(seed))
        _, table_state, optimizer_state = whole_run("sum", name, batches, first, False)
        table, optimizer = cached("sum", name, first[: sizes[0]], most_rows(batches))
        for number, part in enumerate(parts):
            if number:
                table.grow(sizes[number], first[sizes[number - 1] : sizes[number]])
            train(table, optimizer, iter(part), False)
        assert torch.equal(table.state_dict()["weight"], table_state["weight"]), seed
        assert _equal(_states(optimizer), optimizer_state["state"].get(0, {})), seed


def test_a_copy_has_the_same_rows_and_trains_alone() -> None:
    rows = {"a": 20, "b": 9}
    table = CachedEmbeddingBag(rows, 4, mode="sum", cache=9, padding_idx={"b": -1})
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    table.attach(optimizer)
    ids = torch.tensor([[1, 2], [3, 8]])

    def step() -> None:
        optimizer.zero_grad()
        table(ids).sum().backward()
        optimizer.step()

    step()
    copy = deepcopy(table)
    before = table.state_dict()["weight"].clone()
    assert torch.equal(copy.state_dict()["weight"], before)
    step()
    assert torch.equal(copy.state_dict()["weight"], before)
    assert not torch.equal(table.state_dict()["weight"], before)
    with torch.no_grad():
        expected = before[ids + torch.tensor([0, 20])] * torch.tensor([[[1], [1]], [[1], [0]]])
        assert torch.equal(copy(ids), expected)
    copy.attach(torch.optim.SGD(copy.parameters(), lr=0.1))
