"""Creates the plugin that runs a grid, and boosts models with plans found by search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.booster.booster import Booster
from gulliver.booster.hybrid_plugin import HybridParallelPlugin
from gulliver.booster.plugins import GeminiPlugin, LowLevelZeroPlugin, Plugin
from gulliver.booster.running import own_loss
from gulliver.comm.collectives import broadcast_object, raise_on_any_rank
from gulliver.comm.world import init_world
from gulliver.errors import GulliverError
from gulliver.hardware.cluster import Cluster
from gulliver.hardware.probe import current_cluster
from gulliver.plan.plan import Plan
from gulliver.plan.tree import SHARED_BY_TENSOR
from gulliver.planner.measure import samples_of
from gulliver.planner.predict import predict
from gulliver.planner.resolve import resolve
from gulliver.planner.search.facts import Grid
from gulliver.planner.search.grids import Found, search_grids
from gulliver.planner.search.score import Scored, Scorer
from gulliver.planner.tiers import OffloadTiers

HALVES = ("bf16", "fp16")


def plugin_of(
    grid: Grid, precision: str = "fp32", limit: int = 0, behind: OffloadTiers | None = None
) -> Plugin:
    half = precision if precision in HALVES else None
    axes, chunk = grid.axes, float(grid.chunk_mb) or "auto"
    limits: dict[str, Any] = {}
    if grid.offload:
        _check_offload(grid, limit)
        behind = behind or OffloadTiers()
        disk = None if behind.disk is None else f"{behind.disk}:{behind.disk_bytes}"
        limits = {"memory_limit": limit, "host_limit": behind.host or None, "disk": disk}
        if not axes.cuts_model:
            again = "recompute" if grid.recomputed else "keep"
            return GeminiPlugin(**limits, activations=again, precision=half, verbose=False)
        chunk = "auto"
    if not axes.cuts_model and not grid.recomputed:
        return LowLevelZeroPlugin(grid.stage, chunk, precision=half, verbose=False)
    line: dict[str, Any] = {}
    if axes.pipeline > 1:
        line = {"num_microbatches": grid.micro_batches, "pp_style": grid.schedule}
        if grid.chunks > 1:
            line["num_model_chunks"] = grid.chunks
    return HybridParallelPlugin(
        axes.tensor,
        axes.pipeline,
        axes.tensor if axes.mode in SHARED_BY_TENSOR else axes.sequence,
        axes.mode or None,
        zero_stage=grid.stage,
        precision=half,
        checkpoint_activations=grid.recomputed > 0,
        replicate_rest=axes.tensor > 1,
        chunk_mb=chunk,
        verbose=False,
        **limits,
        **line,
    )


def _check_offload(grid: Grid, limit: int) -> None:
    if grid.stage != 3:
        raise GulliverError(f"{grid}: unsharded state cannot be offloaded; use stage 3")
    if grid.axes.pipeline == 1 and grid.micro_batches > 1:
        raise GulliverError(
            f"{grid}: offloading with gradient accumulation is not supported; use 1 micro-batch "
            "or a "
            "pipeline"
        )
    if limit < 1:
        raise GulliverError(f"{grid}: the memory per rank is unknown; pass it in bytes as memory=")


# `auto_engine`: searches, plans and boosts in one call.
#
# For example:
#
#     engine = auto_engine(model, optimizer, batch=example, samples=64)
#     for inputs in loader:                    # of this rank: engine.samples of them
#         loss = engine.model(**inputs).loss
#         engine.booster.backward(loss, engine.optimizer)


@dataclass
class AutoEngine:
    """A model boosted with a plan found by search."""

    # Booster that runs the plan: its `backward`, `compare` and checkpoints.
    booster: Booster
    # Model to call in the loop.
    model: nn.Module
    # Optimizer to step in the loop.
    optimizer: Any
    # Result of the search over grids; None for plans with operators.
    found: Found | None
    # The grid in use; None for plans with operators.
    grid: Grid | None
    # Number of backward passes per step; 1 if a pipeline splits the batch.
    accumulate: int
    # Samples that each replica reads per step; `Plugin.data_place` has the replica's index.
    samples: int
    # Better grids that cannot run, with reasons.
    left_out: tuple[tuple[Grid, str], ...]

    @property
    def plan(self) -> Plan:
        return self.booster.plan

    def run(self, batch: Any, criterion: Callable[[Any, Any], Tensor] | None = None) -> float:
        """Runs forward and backward of this replica's samples; call `optimizer.step` next."""
        count = samples_of(batch)
        if count != self.samples:
            raise GulliverError(
                f"the batch has {count} samples, but each replica reads {self.samples} per step"
            )
        *early, last = _parts(batch, self.accumulate)
        total = 0.0
        for part in early:
            with self.booster.no_sync(self.model, self.optimizer):
                total += float(self._of_part(part, criterion))
        return (total + float(self._of_part(last, criterion))) / self.accumulate

    def _of_part(self, part: Any, criterion: Callable[[Any, Any], Tensor] | None) -> Tensor:
        if self.accumulate == 1:
            feed = iter([part])
            found = self.booster.execute_pipeline(feed, self.model, criterion, self.optimizer)
            return found["loss"]
        out = self.model(**part) if isinstance(part, dict) else self.model(*part)
        loss = (criterion or own_loss)(out, part)
        self.booster.backward(loss / self.accumulate, self.optimizer)
        return loss.detach()


def auto_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    cluster: Cluster | None = None,
    *,
    batch: Any,
    samples: int,
    memory: int | str | None = None,
    precision: str | None = None,
    verbose: bool = True,
    operators: bool = False,
    host: int | str | None = None,
    disk: str | None = None,
) -> AutoEngine:
    """Searches for the fastest plan of a model on these ranks and boosts the model (collective).

    Args:
        model: full model.
        optimizer: optimizer of its parameters.
        cluster: hardware; None for the local machines, as measured by ``gulliver probe`` or
            described.
        batch: example of the model's input; one sample is enough.
        samples: samples per step over all ranks.
        memory: bytes per rank; None for the device's memory.
        precision: ``fp32``, ``bf16`` or ``fp16``; None for bf16 on GPUs and fp32 elsewhere.
        verbose: print the choice, the alternatives and the reason.
        operators: plan sharding and recomputation per operator (`find_operators`) instead of a
            grid; every rank then reads all samples of a step, and `batch` holds all of them.
        host: page-locked host memory per rank for state that exceeds `memory`, as text or in bytes.
        disk: folder and bytes for state that does not fit, ``/scratch:100GiB``.

    Raises:
        GulliverError: no plan fits the memory (the error names the smallest sufficient amount);
            `cluster` has the wrong number of ranks; or none of the grids found can run (the error
            gives the reasons).
    """
    world = init_world()
    cluster = raise_on_any_rank(
        lambda: _of_size(cluster or current_cluster(world.size), world.size)
    )
    if operators:
        if host is not None or disk is not None:
            raise GulliverError(
                "operators=True plans for device memory only; omit host and disk, or use "
                "operators=False"
            )
        return _of_operators(model, optimizer, cluster, batch, samples, memory, precision, verbose)
    kind = precision or ("bf16" if world.device.type == "cuda" else "fp32")
    behind = raise_on_any_rank(lambda: OffloadTiers.of(host, disk))

    def search() -> Found:
        found = search_grids(model, optimizer, batch, cluster, samples, memory, kind, behind=behind)
        if not found.best:
            raise GulliverError(found.why_none())
        return found

    return _of_grids(raise_on_any_rank(search), model, optimizer, samples, kind, verbose)


def _of_grids(
    found: Found,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: int,
    precision: str,
    verbose: bool,
) -> AutoEngine:
    """Boosts the model with the fastest grid that can run."""
    left_out: list[tuple[Grid, str]] = []
    # Ranks may know different link rates, so rank 0's order is used.
    for scored in broadcast_object(found.best):
        try:
            plan = raise_on_any_rank(partial(plan_of, scored, found, model, optimizer, precision))
        except GulliverError as error:
            left_out.append((scored.grid, str(error)))
            continue
        if verbose and init_world().is_main:
            _report(found, scored.grid, left_out)
        booster = Booster(plan=plan, verbose=verbose)
        boosted, stepper, *_ = booster.boost(model, optimizer)
        axes, micro = scored.grid.axes, scored.grid.micro_batches
        accumulate = 1 if axes.pipeline > 1 else micro
        each = samples // axes.data
        return AutoEngine(
            booster, boosted, stepper, found, scored.grid, accumulate, each, tuple(left_out)
        )
    reasons = "; ".join(f"{grid}: {why}" for grid, why in left_out[:3])
    raise GulliverError(f"none of the {len(left_out)} best grids can run: {reasons}")


def _of_size(cluster: Cluster, size: int) -> Cluster:
    if cluster.size != size:
        raise GulliverError(
            f"the cluster {cluster.name!r} has {cluster.size} ranks, but there are {size} ranks; "
            f"pass cluster.resized({size}), or omit the cluster"
        )
    return cluster


def _of_operators(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    cluster: Cluster,
    batch: Any,
    samples: int,
    memory: int | str | None,
    precision: str | None,
    verbose: bool,
) -> AutoEngine:
    """Boosts the model with the best per-operator plan, along one or two mesh axes."""
    from gulliver.operators.plans import find_operators

    def search() -> Plan:
        if samples_of(batch) != samples or precision not in (None, "fp32"):
            raise GulliverError(
                f"operators=True needs a batch of all {samples} samples (this one has "
                f"{samples_of(batch)}), and precision=None, as it runs in the model's dtypes"
            )
        inner = cluster.axes[-1].size if len(cluster.axes) > 1 else 1
        meshes = [{"data": cluster.size}]
        meshes += [{"data": cluster.size // inner, "tensor": inner}] if inner > 1 else []
        plans = (find_operators(model, batch, cluster, axes, memory, optimizer) for axes in meshes)
        return min(plans, key=lambda found: found.predicted.seconds.step)

    plan = broadcast_object(raise_on_any_rank(search))
    booster = Booster(plan=plan, verbose=verbose)
    boosted, stepper, *_ = booster.boost(model, optimizer)
    return AutoEngine(booster, boosted, stepper, None, None, 1, samples, ())


def _parts(batch: Any, count: int) -> list[Any]:
    if isinstance(batch, dict):
        cut = {key: _parts(value, count) for key, value in batch.items()}
        return [{key: values[n] for key, values in cut.items()} for n in range(count)]
    if isinstance(batch, Tensor):
        return list(batch.chunk(count)) if batch.ndim else [batch] * count
    if isinstance(batch, tuple | list):
        return list(zip(*(_parts(value, count) for value in batch), strict=True))
    return [batch] * count


def _report(found: Found, grid: Grid, left_out: list[tuple[Grid, str]]) -> None:
    print(f"searched {found.looked:,} grids in {sum(found.seconds):.1f} s on {found.cluster.name}")
    print(found)
    for other, why in left_out:
        print(f"left out {other}: {why}")
    print(f"runs: {grid}")


def plan_of(
    scored: Scored,
    found: Found,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    precision: str = "fp32",
) -> Plan:
    """Creates the plan of a grid, with its predictions."""
    grid, facts = scored.grid, found.facts
    scorer = Scorer(facts, found.cluster, scored.samples, "cpu", 0.0)
    work = scorer.work(grid)
    plugin = plugin_of(grid, precision, found.limit, found.behind)
    plan = plugin.make_plan(model, optimizer, found.cluster, work=work)
    if 0 < grid.recomputed < len(plan.recompute):
        # Evenly spaced, so that each stage recomputes the same number of blocks.
        count, every = grid.recomputed, len(plan.recompute)
        chosen = sorted({number * every // count for number in range(count)})
        paths = tuple(plan.recompute[number] for number in chosen)
        resolved = resolve(replace(plan, recompute=paths), model, optimizer)
        plan = predict(resolved, found.cluster).plan
    told = f"the fastest of {found.looked:,} grids that fit: {grid}"
    return replace(plan, reasons={**plan.reasons, "grid": told})
