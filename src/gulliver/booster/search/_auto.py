"""Plans of the grids that a search found, and the one call that searches, plans and boosts.

engine = auto_engine(model, optimizer, batch=example, samples=64)
for inputs in loader:                    # of this rank: engine.samples of them
loss = engine.model(**inputs).loss
engine.booster.backward(loss, engine.optimizer)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.booster._booster import Booster
from gulliver.booster._hybrid_plugin import HybridParallelPlugin
from gulliver.booster._measure import samples_of
from gulliver.booster._plugins import LowLevelZeroPlugin, Plugin
from gulliver.booster._predict import predict
from gulliver.booster._resolve import resolve
from gulliver.booster.search._grids import Grid
from gulliver.booster.search._score import Scored, Scorer
from gulliver.booster.search._search import Found, search_grids
from gulliver.comm import broadcast_object, init_world
from gulliver.errors import GulliverError
from gulliver.hardware import Cluster, current_cluster
from gulliver.plan import SHARED_BY_TENSOR, Plan

HALVES = ("bf16", "fp16")


@dataclass
class Engine:
    """A model that runs as a search has chosen.

    Attributes:
        booster: booster that runs the plan: its `backward`, `compare` and checkpoints.
        model: model to call in the loop.
        optimizer: optimizer to step in the loop.
        found: all that the search found.
        grid: the grid that runs.
        accumulate: number of backwards in a step; 1 where a pipeline cuts the batch.
        samples: number of samples of a step that each replica reads, `Plugin.data_place` of them.
        left_out: better grids that could not be run, and why.
    """

    booster: Booster
    model: nn.Module
    optimizer: Any
    found: Found
    grid: Grid
    accumulate: int
    samples: int
    left_out: tuple[tuple[Grid, str], ...]

    @property
    def plan(self) -> Plan:
        """The plan that runs."""
        return self.booster.plan

    def run(self, batch: Any, criterion: Callable[[Any, Any], Tensor] | None = None) -> float:
        """Forward and backward of a step's samples of this replica; `optimizer.step` follows.

        Args:
            batch: `samples` of them: a dict of the model's keyword arguments, or a tuple.
            criterion: loss of the outputs and the batch that made them, a mean over its samples;
                None takes the outputs' own ``loss``. Parts of a batch weigh alike.

        Returns:
            The loss, the mean over the parts.

        Raises:
            GulliverError: the batch has another number of samples.
        """
        count = samples_of(batch)
        if count != self.samples:
            raise GulliverError(
                f"the batch has {count} samples, and each replica reads {self.samples} a step"
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
        loss = out.loss if criterion is None else criterion(out, part)
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
) -> Engine:
    """Searches how a model lies best over the ranks, and boosts it so; every rank calls it.

    Args:
        model: whole model.
        optimizer: optimizer of its parameters.
        cluster: machines; None for those here, as measured by ``gulliver probe`` or as described.
        batch: example of the batch, as the model takes it: one sample is enough.
        samples: samples of a step, of all ranks together.
        memory: bytes that a rank may hold; None for what its device has.
        precision: ``fp32``, ``bf16`` or ``fp16``; None for bf16 on GPUs and fp32 elsewhere.
        verbose: print what was chosen, beside what, and why.

    Raises:
        GulliverError: nothing fits the memory, with the least that would do; a cluster of another
            number of ranks; or none of the grids found can be run, with the reasons.
    """
    world = init_world()
    cluster = cluster or current_cluster(world.size)
    if cluster.size != world.size:
        raise GulliverError(
            f"the cluster {cluster.name!r} has {cluster.size} ranks, and there are {world.size}: "
            f"pass cluster.resized({world.size}), or none"
        )
    precision = precision or ("bf16" if world.device.type == "cuda" else "fp32")
    found = search_grids(model, optimizer, batch, cluster, samples, memory, precision)
    if not found.best:
        raise GulliverError(found.why_none())
    left_out: list[tuple[Grid, str]] = []
    # Ranks may have timed, or know, other links: the first one's order counts.
    for scored in broadcast_object(found.best):
        try:
            plan = plan_of(scored, found, model, optimizer, precision)
        except GulliverError as error:
            left_out.append((scored.grid, str(error)))
            continue
        if verbose and world.is_main:
            _tell(found, scored.grid, left_out)
        booster = Booster(plan=plan, verbose=verbose)
        boosted, stepper, *_ = booster.boost(model, optimizer)
        axes, micro = scored.grid.axes, scored.grid.micro_batches
        accumulate = 1 if axes.pipeline > 1 else micro
        each = samples // axes.data
        return Engine(
            booster, boosted, stepper, found, scored.grid, accumulate, each, tuple(left_out)
        )
    reasons = "; ".join(f"{grid}: {why}" for grid, why in left_out[:3])
    raise GulliverError(f"none of the {len(left_out)} best grids can be run: {reasons}")


def _parts(batch: Any, count: int) -> list[Any]:
    """A batch in equal parts of its samples."""
    if isinstance(batch, dict):
        cut = {key: _parts(value, count) for key, value in batch.items()}
        return [{key: values[n] for key, values in cut.items()} for n in range(count)]
    if isinstance(batch, Tensor):
        return list(batch.chunk(count)) if batch.ndim else [batch] * count
    if isinstance(batch, tuple | list):
        return list(zip(*(_parts(value, count) for value in batch), strict=True))
    return [batch] * count


def _tell(found: Found, grid: Grid, left_out: list[tuple[Grid, str]]) -> None:
    print(f"searched {found.looked:,} grids in {sum(found.seconds):.1f} s on {found.cluster.name}")
    print(found)
    for other, why in left_out:
        print(f"left out {other}: {why}")
    print(f"runs: {grid}")


def plugin_of(grid: Grid, precision: str = "fp32") -> Plugin:
    """The plugin that a person would write for a grid.

    Args:
        grid: the grid; where only some blocks are recomputed, the plugin recomputes all.
        precision: ``fp32``, ``bf16`` or ``fp16``.
    """
    half = precision if precision in HALVES else None
    axes, chunk = grid.axes, float(grid.chunk_mb) or "auto"
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
        **line,
    )


def plan_of(
    scored: Scored,
    found: Found,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    precision: str = "fp32",
) -> Plan:
    """The plan that runs a grid, with what is predicted of it; nothing is changed.

    Args:
        scored: one of the grids that a search found.
        found: the search.
        model: whole model, perhaps on meta.
        optimizer: optimizer of its parameters.
        precision: ``fp32``, ``bf16`` or ``fp16``, as searched for.

    Raises:
        GulliverError: the model cannot be run so.
    """
    grid, facts = scored.grid, found.facts
    scorer = Scorer(facts, found.cluster, scored.samples, "cpu", 0.0)
    work = scorer.work(grid)
    plan = plugin_of(grid, precision).make_plan(model, optimizer, found.cluster, work=work)
    if 0 < grid.recomputed < len(plan.recompute):
        # As many of each stage: every so many blocks one.
        count, every = grid.recomputed, len(plan.recompute)
        chosen = sorted({number * every // count for number in range(count)})
        paths = tuple(plan.recompute[number] for number in chosen)
        plan = resolve(replace(plan, recompute=paths), model, optimizer)
        plan = predict(plan, model, optimizer, found.cluster)
    told = f"the fastest of {found.looked:,} grids that fit: {grid}"
    return replace(plan, reasons={**plan.reasons, "grid": told})
