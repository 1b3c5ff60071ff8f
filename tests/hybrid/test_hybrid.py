"""Hybrid parallelism as a whole: every grid equals one process; what cannot be is refused."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gulliver.booster import Booster, HybridParallelPlugin
from gulliver.booster.hybrid.mesh import make_mesh, size_axes
from gulliver.comm import World
from gulliver.comm.groups import RankGroup
from gulliver.errors import GulliverError
from gulliver.parallel.pipeline.batches import compare_batches
from gulliver.parallel.sequence import SequencePlan
from gulliver.planner.capability import MODES, check_family, families
from tests.covering import some
from tests.hybrid.hybrid_cells import (
    BARS,
    CELLS,
    LARGE_CELLS,
    MASKED_CELLS,
    Cell,
    errors_of,
    grid,
    make_optimizer,
)
from tests.hybrid.hybrid_models import batch, build
from tests.pool import Pool


def _each(cells: Sequence[Cell], *key: str) -> list[Any]:
    """Cells as parameters: by default few of them have all values of each attribute.

    The others are of the full grid.
    """
    values = [{(name, str(attrgetter(name)(cell))) for name in key} for cell in cells]
    left, kept = set().union(*values), set()
    while left:
        # Of equals the one furthest from those that are kept: families take turns.
        best = max(range(len(cells)), key=lambda n: (len(values[n] & left), n % 7))
        left -= values[best]
        kept.add(best)
    full = pytest.mark.full
    return [pytest.param(c, marks=() if n in kept else full) for n, c in enumerate(cells)]


@pytest.mark.parametrize("cell", _each(CELLS, "family", "grid.name"), ids=lambda cell: cell.name)
def test_a_grid_trains_as_one_process(pool: Pool, cell: Cell, full: bool) -> None:
    for errors in pool.run(errors_of, cell.grid.ranks, cell, torch.float64, steps=3 if full else 2):
        assert max(errors.values()) <= BARS[torch.float64], errors


@pytest.mark.parametrize(
    "cell", _each(MASKED_CELLS, "family", "mask", "grid.name"), ids=lambda cell: cell.name
)
def test_a_mask_that_the_table_lists_is_exact(pool: Pool, cell: Cell) -> None:
    for errors in pool.run(errors_of, cell.grid.ranks, cell, torch.float64, steps=2):
        assert max(errors.values()) <= BARS[torch.float64], errors


@pytest.mark.parametrize("cell", some(LARGE_CELLS, [LARGE_CELLS[6]]), ids=lambda cell: cell.name)
def test_three_axes_train_as_one_process(pool: Pool, cell: Cell) -> None:
    found = pool.run(errors_of, cell.grid.ranks, cell, torch.float64, steps=2, deadline_s=180)
    for errors in found:
        assert max(errors.values()) <= BARS[torch.float64], errors


@pytest.mark.parametrize(
    "plugin",
    [
        {"tp_size": 2, "zero_stage": 1},
        {"pp_size": 2, "zero_stage": 2, "num_microbatches": 2},
        {"sp_size": 2, "sequence_parallelism_mode": "ring_attn", "zero_stage": 3},
    ],
    ids=str,
)
def test_the_norm_that_clips_is_of_the_whole_model(pool: Pool, plugin: dict[str, Any]) -> None:
    cell = Cell("gpt2", grid("clipped", 4, **plugin), clip=0.05)
    for errors in pool.run(errors_of, 4, cell, torch.float64, steps=3):
        assert max(errors.values()) <= 1e-7, errors  # the norm adds 1e-6 before it divides


@given(
    world=st.integers(1, 64),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
)
def test_sizes_make_the_world_or_are_refused(world: int, sizes: tuple[int, int, int]) -> None:
    pp, sp, tp = sizes
    model = pp * sp * tp
    if world % model:
        with pytest.raises(GulliverError, match=f"= {model} ranks for one model"):
            size_axes(world, pp, sp, tp)
    else:
        found = size_axes(world, pp, sp, tp)
        assert found == {"pp": pp, "dp": world // model, "sp": sp, "tp": tp}


def _lines(world: World) -> dict[str, tuple[int, ...]]:
    mesh = make_mesh({"pp": 2, "dp": 1, "sp": 2, "tp": 2}, SequencePlan(inner=2), "cpu")
    lines = ("pipeline", "data", "tensor", "replicas", "shards", "model")
    found = {name: getattr(mesh, name).ranks for name in lines}
    return {**found, "sequence": mesh.sequence.all.ranks, "place": tuple(mesh.place.values())}


def test_a_grid_numbers_the_tensor_axis_innermost(pool: Pool) -> None:
    fifth = pool.run(_lines, 8)[5]
    assert fifth["place"] == (1, 0, 0, 1)
    assert fifth["tensor"] == (4, 5)
    assert fifth["sequence"] == (5, 7)
    assert fifth["replicas"] == (5, 7)
    assert fifth["pipeline"] == (1, 5)
    assert fifth["shards"] == (0, 1, 4, 5)
    assert fifth["model"] == tuple(range(8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sp_size": 2}, "needs a sequence_parallelism_mode"),
        (
            {"sequence_parallelism_mode": "ring_attn", "sp_size": 4, "inner_ring_size": 3},
            "sp_size=4 .* inner_ring_size 3",
        ),
        ({"cut": [1, 2]}, "set pp_size"),
        ({"tp": 2}, "has no argument 'tp'"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(GulliverError, match=message):
        HybridParallelPlugin(**arguments)


@pytest.mark.parametrize("family", ["bloom", "t5", "whisper"])
@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
def test_unsupported_mode_is_rejected_naming_a_supported_one(family: str, mode: str) -> None:
    with pytest.raises(GulliverError, match=f"{family} .*{mode}.*'split_gather'"):
        check_family(family, mode, size=2)


def test_every_family_runs_under_modes_that_exist() -> None:
    for known in families().values():
        assert set(known.modes) <= set(MODES)


def _other_batches(world: World) -> str:
    line = RankGroup(tuple(range(world.size)), world.rank, torch.distributed.group.WORLD)
    data = batch("llama", 2, seed=0)
    compare_batches(data, "", [line], torch.device("cpu"), check=True)
    if world.rank == 2:
        data["input_ids"][1, 3] += 1
    try:
        compare_batches(data, "", [line], torch.device("cpu"), check=True)
    except GulliverError as error:
        return str(error)
    return ""


def test_a_rank_that_reads_another_batch_is_named(pool: Pool) -> None:
    for message in pool.run(_other_batches, 3):
        assert "rank 2 has a different batch from rank 0" in message


def _refusals(world: World, family: str, plugin: dict[str, Any], change: dict[str, Any]) -> str:
    model = build(family)
    for name, value in change.items():
        model.get_submodule(name).p = value
    try:
        Booster(plugin=HybridParallelPlugin(**plugin, verbose=False)).boost(
            model, make_optimizer(model)
        )
    except GulliverError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("ranks", "family", "plugin", "change", "message"),
    [
        (3, "llama", {"tp_size": 2}, {}, "does not divide the world of 3"),
        (3, "llama", {"tp_size": 3}, {}, ""),
        (4, "bert", {"pp_size": 4}, {}, "2 blocks"),
    ],
)
def test_unsplittable_model_is_rejected(
    pool: Pool, ranks: int, family: str, plugin: Any, change: Any, message: str
) -> None:
    for found in pool.run(_refusals, ranks, family, plugin, change):
        assert message in found
        assert bool(found) == bool(message)


def _chosen(world: World, ranks: tuple[int, int]) -> tuple[str, float]:
    sp_size, tp_size = ranks
    cell = Cell("llama", grid("chosen", world.size, sp_size=sp_size, tp_size=tp_size))
    cell.grid.plugin["sequence_parallelism_mode"] = "auto"
    cell.grid.plugin["sequence_length"] = 4096
    errors = errors_of(world, cell, torch.float64, steps=2)
    return cell.name, max(errors.values())


@pytest.mark.parametrize("ranks", [(2, 1), (2, 2)], ids=str)
def test_auto_mode_is_as_exact_as_named_mode(pool: Pool, ranks: tuple[int, int]) -> None:
    for _, error in pool.run(_chosen, ranks[0] * ranks[1], ranks):
        assert error <= BARS[torch.float64]
