"""Models that are cut over tensor, sequence and pipeline axes train under a memory limit, exactly.

Every case runs at exactly the least limit that its plan states, and beside the same grid without
a limit.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gulliver.booster import limited as _limited
from gulliver.booster.booster import Booster
from gulliver.booster.hybrid_plugin import HybridParallelPlugin
from gulliver.checkpoint import load
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.hardware import current_cluster
from gulliver.plan import Plan
from gulliver.plan.checks import check_plan
from tests.covering import some
from tests.hybrid.hybrid_cells import make_optimizer
from tests.hybrid.hybrid_models import batch, build
from tests.pool import Pool
from tests.random_limits import Watched

FAMILY, STEPS = "qwen2", 3
"""Its embedding is its head's weight too: two stages have it."""
CHUNK_MB = 0.02
TENSOR, STAGES = {"tp_size": 2}, {"pp_size": 2, "num_microbatches": 2}
ULYSSES = {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"}
RING = {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}
TWO = {
    "tensor": TENSOR,
    "tensor, split gather": {**TENSOR, "sequence_parallelism_mode": "split_gather"},
    "Ulysses": ULYSSES,
    "ring": RING,
    "pipeline": STAGES,
    "pipeline, recomputed": {**STAGES, "checkpoint_activations": True},
    "pipeline, 4 micro-batches, GPipe": {**STAGES, "num_microbatches": 4, "pp_style": "gpipe"},
    "pipeline, zero bubble": {**STAGES, "pp_style": "zero_bubble"},
    "pipeline, two stages each": {**STAGES, "pp_style": "interleaved", "num_model_chunks": 2},
}
USUAL = ["tensor", "Ulysses", "pipeline"]
EVERYTHING = {"evaluate": True, "max_norm": 0.05, "passes": 2}


def _plugin(sizes: dict[str, Any], disk: str | None = None, limit: Any = None, **more: Any) -> Any:
    limits = {} if limit is None else {"memory_limit": limit, "disk": f"{disk}:64MiB"}
    options = {"zero_stage": 3, "chunk_mb": CHUNK_MB, "verbose": False}
    return HybridParallelPlugin(**{**options, **sizes, **limits, **more})


def _least(sizes: dict[str, Any], disk: str, **more: Any) -> int:
    model = build(FAMILY, torch.float32, layers=4)
    plan = _plugin(sizes, disk, "1GiB", **more).make_plan(model, make_optimizer(model))
    assert plan.predicted.moved is not None
    return plan.predicted.moved.minimum


def _once(booster: Booster, model: Any, optimizer: Any, data: dict[str, Tensor]) -> Tensor:
    if optimizer.pipeline is not None:
        return booster.execute_pipeline(iter([data]), model, None, optimizer)["loss"]
    loss = model(**data).loss
    booster.backward(loss, optimizer)
    return loss.detach()


def _train(booster: Booster, model: Any, optimizer: Any, how: dict[str, Any]) -> list[Tensor]:
    found, place = list[Tensor](), optimizer.mesh.data.rank
    if how.get("evaluate"):
        model.eval()
        data = batch(FAMILY, 4, seed=99)
        with torch.no_grad():
            if optimizer.pipeline is None:
                found.append(model(**data).loss)
            else:
                found.append(booster.execute_pipeline(iter([data]), model)["loss"])
        model.train()
    for step in range(STEPS):
        for part in range(how.get("passes", 1)):
            data = batch(FAMILY, 4, seed=100 * step + 10 * part + place, length=12 + step)
            found.append(_once(booster, model, optimizer, data))
        optimizer.step()
        if optimizer.grad_norm is not None:
            found.append(optimizer.grad_norm.clone())
        optimizer.zero_grad()
    return found


def _values(model: Any, optimizer: Any) -> list[Tensor]:
    state = {
        f"{name}.{key}": value.clone()
        for name, entries in optimizer.export_state().items()
        for key, value in entries.items()
        if isinstance(value, Tensor)
    }
    weights = [value.clone() for value in model.state_dict().values()]
    return [*weights, *(state[name] for name in sorted(state))]


def _error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Largest difference, relative to each tensor's largest element; 0 is equal to the bit."""
    worst = 0.0
    for one, other in zip(found, wanted, strict=True):
        if not torch.equal(one, other):
            scale = float(other.abs().max()) or 1.0
            worst = max(worst, float((one - other).abs().max()) / scale)
    return worst


def _case(sizes: dict[str, Any], how: dict[str, Any], disk: str) -> tuple[float, int, int]:
    """Error against the grid without a limit, bytes held beyond the budget, and evictions."""
    clip, runs = {"max_norm": how.get("max_norm", 0.0)}, list[list[Tensor]]()
    over = evictions = 0
    for limit in (None, _least(sizes, disk, **clip)):
        model = build(FAMILY, torch.float32, layers=4)
        booster = Booster(plugin=_plugin(sizes, disk, limit, **clip))
        # What else this process holds, and gives back, is no business of the model.
        with patch.object(_limited, "Footprint", side_effect=OSError):
            model, optimizer, *_ = booster.boost(model, make_optimizer(model))
        watched = None if limit is None else Watched(optimizer.shards.manager)
        runs.append(_train(booster, model, optimizer, how) + _values(model, optimizer))
        if watched is not None:
            over, evictions = watched.over, watched.manager.stats()["evictions"]
        booster.close()
    return _error(runs[1], runs[0]), over, evictions


def _cases(
    world: World, grids: dict[str, dict[str, Any]], disk: str
) -> dict[str, tuple[float, int, int]]:
    return {name: _case(sizes, EVERYTHING, disk) for name, sizes in grids.items()}


def _assert_exact(found: list[dict[str, tuple[float, int, int]]], grids: dict[str, Any]) -> None:
    """To the bit where no replicas gather chunks; else a norm is added up in another order."""
    alone = len(found) == 2
    for rank in found:
        for name, (error, over, evictions) in rank.items():
            assert error <= (0 if alone and "sp_size" not in grids[name] else 1e-6), name
            assert over <= 0, name
            assert evictions > 0, name


@pytest.mark.parametrize(
    "names",
    [
        USUAL,
        pytest.param([name for name in TWO if name not in USUAL], marks=pytest.mark.full),
    ],
    ids=["usual", "others"],
)
def test_a_cut_model_trains_at_its_least_limit_as_without_one(
    pool: Pool, tmp_path: Path, names: list[str]
) -> None:
    grids = {name: TWO[name] for name in names}
    _assert_exact(pool.run(_cases, 2, grids, str(tmp_path)), grids)


def _boosted(sizes: dict[str, Any] | None, disk: str) -> tuple[Booster, Any, Any]:
    """A grid at its least limit; without sizes a plain model of one rank."""
    model = build(FAMILY, torch.float32, layers=4)
    plugin = None if sizes is None else _plugin(sizes, disk, _least(sizes, disk))
    booster = Booster(plugin=plugin)
    with patch.object(_limited, "Footprint", side_effect=OSError):
        model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    return booster, model, optimizer


def _resave(world: World, sizes: dict[str, Any] | None, source: str | None, target: str) -> bool:
    """Trains, or loads what another run has written, and saves it; whether it can go on from it."""
    folder = Path(target)
    booster, model, optimizer = _boosted(sizes, str(folder.parent))
    if source is None:
        _train(booster, model, optimizer, {})
    else:
        booster.load(source, model, optimizer)
    booster.save(folder, STEPS, model, optimizer)
    booster.wait()
    if sizes is None:
        return True
    ends = list[list[Tensor]]()
    for _ in range(2):
        ends.append(_train(booster, model, optimizer, {}) + _values(model, optimizer))
        booster.load(folder, model, optimizer)
    booster.close()
    return _error(*ends) == 0


@pytest.mark.parametrize("name", some(["tensor", "ring", "pipeline"], ["ring"]))
def test_checkpoints_of_a_limited_grid_load_in_one_plain_rank_and_back(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    first, plain, back = (str(tmp_path / part) for part in ("first", "plain", "back"))
    assert all(pool.run(_resave, 2, TWO[name], None, first))
    assert all(pool.run(_resave, 1, None, first, plain))
    assert all(pool.run(_resave, 2, TWO[name], plain, back))
    wanted = _saved(first)
    for other in (plain, back):
        found = _saved(other)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], value) for key, value in wanted.items())


def _saved(folder: str) -> dict[str, Tensor]:
    values = load(folder).values
    state = {
        f"{name}.{key}": value
        for name, entries in values["optimizer"]["state"].items()
        for key, value in entries.items()
        if isinstance(value, Tensor)
    }
    return {**values["model"], **state}


def _plan(sizes: dict[str, Any], ranks: int, limit: Any = "1GiB", **options: Any) -> Plan:
    """The plan of one process for several ranks, which are described."""
    model = build(FAMILY, torch.float32, layers=4)
    cluster = current_cluster(ranks)
    plugin = _plugin(sizes, tempfile.gettempdir(), limit)
    return plugin.make_plan(model, make_optimizer(model), cluster, **options)


def test_plan_describes_tiers_of_the_fullest_rank() -> None:
    whole = _plan({}, 1).predicted.moved
    assert whole is not None
    for name, sizes in (("tensor", TENSOR), ("ring", RING), ("pipeline", STAGES)):
        moved = _plan(sizes, 2).predicted.moved
        assert moved is not None
        share = (moved.stays.total + moved.leaves.total) / (whole.stays.total + whole.leaves.total)
        assert 0.45 < share < 0.8, name  # one of two stages has an embedding, and norms are whole
        tight = _plan(sizes, 2, moved.minimum).predicted.moved
        assert tight is not None
        assert tight.leaves.total > 0
        assert tight.read > 0
        with pytest.raises(GulliverError, match="the smallest limit that works is"):
            _plan(sizes, 2, moved.minimum - 4096)


def test_micro_batches_read_state_again_and_the_plan_counts_them() -> None:
    least = _plan(STAGES, 2).predicted.moved
    assert least is not None
    read = []
    for count in (2, 8):
        moved = _plan({**STAGES, "num_microbatches": count}, 2, least.minimum).predicted.moved
        assert moved is not None
        read.append(moved.read)
    assert read[1] > 2 * read[0]


def test_unsupported_combinations_are_rejected(tmp_path: Path) -> None:
    text = _plan(TENSOR, 2).to_yaml()
    zero, inside, tiers = text.partition("tiers:")
    for before, after, told in (
        ("step_in_backward: false", "step_in_backward: true", "step_in_backward: True"),
        ('activations: "keep"', 'activations: "offload"', "activations: offload"),
        ('activations: "keep"', 'activations: "auto"', "activations: auto"),
    ):
        changed = zero + inside + tiers.replace(before, after, 1)
        assert changed != text
        with pytest.raises(GulliverError, match=rf"mesh.axes.* and zero.tiers.{told}"):
            check_plan(Plan.from_yaml(changed), 2)
    for options, message in (
        ({"zero_stage": 1, "memory_limit": "1GiB"}, "zero_stage=3"),
        ({"disk": "/tmp:1GiB"}, "without a memory_limit"),
        ({"host_limit": "1GiB"}, "without a memory_limit"),
        ({"memory_limit": "lots"}, "is not a size"),
        ({"chunk_mb": "again"}, "chunk_mb"),
    ):
        with pytest.raises(GulliverError, match=message):
            HybridParallelPlugin(**TENSOR, **options)
    assert HybridParallelPlugin(**TENSOR, memory_limit="1GiB").zero_stage == 3
