"""Tables over ranks compute what one rank computes, bit for bit; files are read on any number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gulliver.checkpoint import AsyncCheckpointer, load
from gulliver.comm import World, current_world
from gulliver.embedding import LookAhead, RowWiseAdagrad, ShardedEmbeddingBag
from gulliver.errors import GulliverError
from tests.covering import grid
from tests.embedding.embedding_runs import OPTIMIZERS
from tests.pool import Pool

SIZES = {"a": 30, "b": 9, "c": 50}
DIM, SAMPLES, STEPS = 8, 8, 6
PLACEMENTS: dict[str, Any] = {
    "column": "column",
    "row": "row",
    "whole": {"a": "whole:0", "b": "whole:LAST", "c": "whole:0"},
    "mixed": {"a": "row", "b": "whole:LAST", "c": "column"},
}


def placement(name: str, ranks: int) -> Any:
    given = PLACEMENTS[name]
    if isinstance(given, str):
        return given
    return {table: text.replace("LAST", str(ranks - 1)) for table, text in given.items()}


def first_values() -> Tensor:
    return torch.randn(sum(SIZES.values()), DIM, generator=torch.Generator().manual_seed(2))


def batch(number: int) -> tuple[dict[str, list[Tensor]], Tensor]:
    """Ids of every sample and table, and the gradient of the outputs."""
    draw = torch.Generator().manual_seed(number)
    ids = {
        name: [
            (
                torch.rand(int(torch.randint(0, 4, (1,), generator=draw)), generator=draw) ** 2
                * rows
            ).long()
            for _ in range(SAMPLES)
        ]
        for name, rows in SIZES.items()
    }
    return ids, torch.randn(SAMPLES, len(SIZES), DIM, generator=draw)


def part(bags: dict[str, list[Tensor]], rank: int, ranks: int) -> tuple[Any, Any]:
    """What a rank is given: ids and offsets by name."""
    each = SAMPLES // ranks
    own = {name: of[rank * each : (rank + 1) * each] for name, of in bags.items()}
    ids = {name: torch.cat(of) for name, of in own.items()}
    sizes = {name: torch.tensor([len(bag) for bag in of]) for name, of in own.items()}
    return ids, {name: size.cumsum(0) - size for name, size in sizes.items()}


def run(
    world: World,
    where: str,
    name: str,
    mode: Any,
    begin: int = 0,
    stop: int = STEPS,
    folder: str = "",
) -> tuple[list[Tensor], dict[str, tuple[int, Tensor]]]:
    """Trains; returns this rank's outputs, and its parts with where they begin."""
    del world
    rank, ranks = current_world().rank, current_world().size
    tables = ShardedEmbeddingBag(
        SIZES, DIM, placement(where, ranks), mode=mode, _weight=first_values(), cache=0.9
    )
    optimizer = OPTIMIZERS[name](tables.parameters())  # also of a rank that has no table
    tables.attach(optimizer)
    if begin:
        load(Path(folder), {"tables": tables.parts()})
        tables.loaded()
    outputs = []
    batches = [batch(number) for number in range(begin, stop)]
    given = [(part(ids, rank, ranks), gradient) for ids, gradient in batches]
    # Announced two ahead: the ids of all ranks are gathered then.
    for (ids, offsets), gradient in given:
        each = SAMPLES // ranks
        output = tables(ids, offsets)
        output.backward(gradient[rank * each : (rank + 1) * each] * ranks)
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(output.detach())
    parts = tables.parts()
    if folder and not begin:
        with AsyncCheckpointer(folder) as saver:
            saver.save(stop, {"tables": parts})
            saver.wait()
    return outputs, {k: (p.start, p.value.clone()) for k, p in parts.items()}


def reference(name: str, mode: str) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
    """The whole run of torch's EmbeddingBags, the gradients of a row added one by one."""
    table = nn.EmbeddingBag(
        sum(SIZES.values()), DIM, mode=mode, sparse=mode != "max", _weight=first_values()
    )
    optimizer = OPTIMIZERS[name](table.parameters())
    outputs = []
    for number in range(STEPS):
        ids, gradient = batch(number)
        first, flat = 0, []
        for table_name, rows in SIZES.items():
            flat += [bag + first for bag in ids[table_name]]
            first += rows
        sizes = torch.tensor([len(bag) for bag in flat])
        output = table(torch.cat(flat), sizes.cumsum(0) - sizes)
        bags = output.view(len(SIZES), SAMPLES, DIM).transpose(0, 1)
        bags.backward(gradient)
        if name != "sgd":
            table.weight.grad = one_by_one(table.weight.grad, torch.cat(flat))  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(bags.detach().clone())
    return outputs, table.weight.detach(), optimizer.state_dict()["state"].get(0, {})


def one_by_one(gradient: Tensor, ids: Tensor) -> Tensor:
    if not gradient.is_sparse:
        rows = ids.unique()
        return torch.sparse_coo_tensor(rows[None], gradient[rows], gradient.shape).coalesce()
    sums: dict[int, Tensor] = {}
    for row, value in zip(gradient._indices()[0].tolist(), gradient._values(), strict=True):
        sums[row] = sums[row] + value if row in sums else value
    rows = sorted(sums)
    values = torch.stack([sums[row] for row in rows])
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, gradient.shape).coalesce()


def joined(parts: list[dict[str, tuple[int, Tensor]]], where: str, key: str) -> Tensor:
    """A whole tensor of the parts of all ranks."""
    found = [part[key] for part in parts if key in part]
    by_columns = placement(where, 1) == "column" or (where == "mixed" and key.startswith("c."))
    if by_columns:
        return torch.cat([value for _, value in found], 1)
    return torch.cat([value for _, value in sorted(found, key=lambda pair: pair[0])])


CASES = grid(
    list(PLACEMENTS),
    [1, 2, 4],
    ["sgd", "adagrad", "sparse adam", "row-wise adagrad"],
    ["sum", "mean", "max"],
    allowed=lambda where, ranks, name, mode: (
        name != "row-wise adagrad" or where in ("row", "whole")
    ),
)


@pytest.mark.parametrize(("where", "ranks", "name", "mode"), CASES)
def test_ranks_that_share_tables_train_as_torch_s_one_table(
    where: str, ranks: int, name: str, mode: str, pool: Pool
) -> None:
    outputs, weight, state = reference(name, mode)
    found = pool.run(run, ranks, where, name, mode)
    for number, expected in enumerate(outputs):
        whole = torch.cat([own[number] for own, _ in found])
        assert torch.equal(whole, expected), (number, (whole - expected).abs().max())
    parts, first = [part for _, part in found], 0
    for table, rows in SIZES.items():
        assert torch.equal(joined(parts, where, f"{table}.weight"), weight[first : first + rows])
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() == 2:
                own = joined(parts, where, f"{table}.{key}")
                assert torch.equal(own, value[first : first + rows]), (table, key)
        first += rows


@pytest.mark.parametrize(
    ("saved", "there", "name"),
    [
        ((4, "mixed"), (2, "row"), "adagrad"),
        ((2, "row"), (4, "whole"), "sparse adam"),
        ((4, "whole"), (2, "whole"), "sparse adam"),
    ],
    ids=str,
)
def test_tables_resume_with_other_ranks_and_placement(
    saved: tuple[int, str], there: tuple[int, str], name: str, pool: Pool, tmp_path: Path
) -> None:
    outputs, weight, _ = reference(name, "sum")
    pool.run(run, *saved, name, "sum", 0, 3, str(tmp_path))
    found = pool.run(run, *there, name, "sum", 3, STEPS, str(tmp_path))
    for number, expected in enumerate(outputs[3:]):
        assert torch.equal(torch.cat([own[number] for own, _ in found]), expected)
    parts = [part for _, part in found]
    assert torch.equal(torch.cat([joined(parts, there[1], f"{t}.weight") for t in SIZES]), weight)


def announced(world: World) -> list[Tensor]:
    ids = [
        torch.randint(0, 9, (4, 3), generator=torch.Generator().manual_seed(n)) for n in range(5)
    ]
    tables = ShardedEmbeddingBag(SIZES, DIM, "row", mode="sum", cache=0.5)
    batches = [of[world.rank * 2 : world.rank * 2 + 2] for of in ids] if world.size > 1 else ids
    with torch.no_grad():
        return [tables(of) for of in LookAhead(batches, tables, 2, lambda of: of)]  # type: ignore[arg-type]


def test_batches_are_announced_over_ranks_and_first_values_do_not_depend_on_them(
    pool: Pool,
) -> None:
    (one,), two = pool.run(announced, 1), pool.run(announced, 2)
    for number, expected in enumerate(one):
        assert torch.equal(torch.cat([of[number] for of in two]), expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("columns", "did you mean 'column'"),
        ("whole", "did you mean 'whole:0'"),
        ("whole:1", "ranks are 0 to 0"),
        ({"a": "row"}, "unknown table 'b' in placement"),
    ],
)
def test_unknown_placements_are_refused(given: Any, message: str) -> None:
    with pytest.raises(GulliverError, match=message):
        ShardedEmbeddingBag({"a": 4, "b": 4}, 4, given)


def refuses_columns(world: World) -> str:
    tables = ShardedEmbeddingBag(SIZES, DIM, "column")
    with pytest.raises(GulliverError) as caught:
        tables.attach(RowWiseAdagrad(tables.parameters()))
    return str(caught.value)


def test_an_optimizer_of_whole_rows_refuses_columns(pool: Pool) -> None:
    assert "by row or unsharded" in pool.run(refuses_columns, 2)[0]


def all_refuse(world: World, where: Any) -> tuple[list[str], list[Tensor]]:
    """One rank after the other gives something wrong; then all go on as if nothing had been."""
    told = []
    tables = ShardedEmbeddingBag(
        {"a": 12, "b": 40}, DIM, where, "sum", cache=0.5,
        _weight=torch.arange(52.0 * DIM).view(52, DIM),
    )  # fmt: skip
    tables.attach(torch.optim.SGD(tables.parameters(), lr=0.5))
    good = torch.tensor([[1, 2], [3, 4]]) + world.rank
    bad = torch.tensor([[1, 40], [3, 4]])
    many = {"a": torch.arange(6).view(1, 6), "b": torch.arange(40).view(1, 40)}
    few = {"a": torch.arange(6).view(1, 6), "b": torch.tensor([[1]])}
    for rank in range(world.size):
        mine = world.rank == rank
        for attempt in (
            lambda mine=mine: tables(bad if mine else good),
            lambda mine=mine: tables({"a": good[:, :1]} if mine else good),
            lambda mine=mine: tables.announce(bad if mine else good),
            lambda mine=mine: tables(many if mine else few),
        ):
            with pytest.raises(GulliverError) as caught:
                attempt()
            told.append(str(caught.value))
    tables.announce(good)
    with pytest.raises(GulliverError) as caught:
        tables(good + (world.rank == 0))
    told.append(str(caught.value))
    output = tables(good)
    output.sum().backward()
    return told, [output.detach()]


@pytest.mark.parametrize("where", ["row", "column", {"a": "whole:1", "b": "whole:1"}])
def test_error_of_one_rank_is_raised_on_all_and_recoverable(where: Any, pool: Pool) -> None:
    one, two = pool.run(all_refuse, 2, where)
    assert one[0] == two[0]
    for rank in range(2):
        bad, missing, announced, small = one[0][4 * rank : 4 * rank + 4]
        who = f"rank {rank}: "
        assert bad.startswith(who + "table 'b' has rows 0 to 39; id 40 at position 0 of 2")
        assert missing.startswith(who + "table 'b' has no ids")
        assert announced == bad
        assert "distinct rows does not fit into a cache of" in small
    assert "not the next announced batch" in one[0][-1]
    table = torch.arange(52.0 * DIM).view(52, DIM)
    for rank, (_, (output,)) in enumerate((one, two)):
        ids = torch.tensor([[1, 14], [3, 16]]) + rank
        assert torch.equal(output, table[ids])


def without_a_table(world: World) -> tuple[int, list[Tensor]]:
    torch.manual_seed(world.rank)
    weight = torch.arange(20.0 * DIM, dtype=torch.float64).view(20, DIM)
    tables = ShardedEmbeddingBag({"a": 20}, DIM, "whole:0", "sum", _weight=weight, cache=0.9)
    optimizer = torch.optim.Adagrad(tables.parameters(), lr=0.1)
    tables.attach(optimizer)
    output = tables(torch.tensor([[3 + world.rank]]))
    output.sum().backward()
    optimizer.step()
    return sum(p.numel() for p in tables.parameters()), [output.detach()]


def test_a_rank_without_a_table_has_a_parameter_and_gets_rows_of_every_dtype(pool: Pool) -> None:
    (some, (first,)), (none, (second,)) = pool.run(without_a_table, 2)
    assert (some, none) == (18 * DIM, 0)
    assert first.dtype == second.dtype == torch.float64
    assert torch.equal(second[0, 0], torch.arange(4.0 * DIM, 5 * DIM, dtype=torch.float64))
