"""The plugin for data-centric training, in which groups of ranks change from step to step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gulliver.booster.hybrid_plugin import HybridParallelPlugin
from gulliver.errors import GulliverError, nearest
from gulliver.families.loss import hugging_face_of
from gulliver.families.record import SHARED_BY_SEQUENCE
from gulliver.hardware.cluster import Cluster
from gulliver.parallel.sequence.layout import SequencePlan
from gulliver.parallel.tensor.styles import dropouts_of
from gulliver.plan.plan import Plan
from gulliver.planner.capability import HEADS, families, family_of

MODES = ("all_to_all", "ring_attn")
# Supported options of `HybridParallelPlugin`; the plan of each step determines the others.
OPTIONS = (
    *("chunk_mb", "assume_elementwise", "assume_per_parameter", "host_limit", "disk"),
    *("tensor_rules", "replicate_rest", "cut", "blocks", "everywhere", "after", "extra"),
)


class DataCentricPlugin(HybridParallelPlugin):
    """Combines ZeRO over all ranks with sequence-parallel groups that change in every step.

    For models of a known family, a `DataCentricLoader` runs groups of adjacent ranks in parallel,
    each with its own samples; for other models, every group has one rank. With `tp_size`, each of
    these ranks is a group of tensor ranks; with `pp_size`, it is a pipeline for the micro-batches
    of its group (1F1B; with fewer micro-batches than stages, all forward passes run first).

    Args:
        zero_stage: state sharded over the ranks between steps: 0 none, 1 optimizer state, 2 also
            gradients, 3 also parameters. Inside a step, each rank has full gradients and
            parameters. None means 3 with a `memory_limit` (which requires it), and 1 otherwise.
        sequence_parallelism_mode: ``all_to_all`` (Ulysses) or ``ring_attn``.
        precision: ``bf16`` or ``fp16``; see `ZeroOptions`.
        max_norm: maximum gradient norm; 0 disables clipping.
        tp_size: tensor parallel size; the planner's `ranks` is the world size divided by `tp_size`
            and `pp_size`.
        pp_size: number of pipeline stages; with several, run steps with `TrainingStep.run`.
        memory_limit: memory for state and activations on each rank; see `LimitOptions`. It includes
            the full parameters and gradients inside a step, which are loaded chunk by chunk.
        check_batches: whether to check that the ranks of a group have the same batches.
        verbose: whether to print the plan when the model is boosted.
        options: options of `HybridParallelPlugin` listed in `OPTIONS`.

    Raises:
        GulliverError: an option is unknown or its value out of range.
    """

    def __init__(
        self,
        zero_stage: int | None = None,
        sequence_parallelism_mode: str = "all_to_all",
        precision: str | None = None,
        max_norm: float = 0.0,
        *,
        tp_size: int = 1,
        pp_size: int = 1,
        memory_limit: int | float | str | None = None,
        check_batches: bool = True,
        verbose: bool = True,
        **options: Any,
    ) -> None:
        if sequence_parallelism_mode not in MODES:
            raise GulliverError(
                f"sequence_parallelism_mode={sequence_parallelism_mode!r} has no separate sequence "
                "axis, which is required for changing groups: "
                f"{nearest(str(sequence_parallelism_mode), MODES)}"
            )
        for name in options:
            if name not in OPTIONS:
                raise GulliverError(
                    f"{type(self).__name__} has no argument {name!r}: {nearest(name, OPTIONS)}"
                )
        self.ways, self._heads = sequence_parallelism_mode, 0
        super().__init__(
            tp_size=tp_size,
            pp_size=pp_size,
            zero_stage=(1 if memory_limit is None else 3) if zero_stage is None else zero_stage,
            precision=precision,
            max_norm=max_norm,
            memory_limit=memory_limit,
            check_batches=check_batches,
            verbose=verbose,
            # All parameters of a step are loaded at its start, so prefetching would have no effect.
            gather_ahead=2 if memory_limit is None else 0,
            **options,
        )

    @property
    def inside(self) -> int:
        """World ranks per rank of a step's plan: tensor ranks times stages."""
        return self.tp_size * self.pp_size

    def choices(self, ranks: int, precision: str = "none") -> Plan:
        """Puts all ranks on the sequence axis, except those for tensors and stages."""
        if ranks % self.inside:
            told = f"tp_size={self.tp_size}" if self.pp_size == 1 else f"pp_size={self.pp_size}"
            if 1 not in (self.tp_size, self.pp_size):
                told = f"tp_size {self.tp_size} x pp_size {self.pp_size} = {self.inside}"
            raise GulliverError(f"{told} does not divide {ranks} ranks")
        self._share(ranks // self.inside)
        plan = super().choices(ranks, precision)
        assert plan.zero is not None, "a hybrid plan shards"
        return replace(plan, zero=replace(plan.zero, unequal=True))

    def _share(self, ranks: int) -> None:
        self.sp_size, self.mode = ranks, self.ways if ranks > 1 else None

    def sequence_plan(self, causal: bool) -> SequencePlan:
        """Plans sequences over all ranks: Ulysses up to the number of heads, then a ring."""
        whole = super().sequence_plan(causal)
        if self.mode != "all_to_all" or not 0 < self._heads < whole.ulysses:
            return whole
        fits = [d for d in range(1, self._heads + 1) if self.sp_size % d == 0]
        return replace(whole, ulysses=fits[-1], inner=self.sp_size // fits[-1])

    def for_model(
        self, plan: Plan, model: nn.Module, optimizer: Optimizer | None, cluster: Cluster | None
    ) -> Plan:
        """Shards sequences if the model's attention supports it; otherwise uses only ZeRO."""
        ranks, alone = plan.mesh.size // self.inside, _why_alone(model)
        self._share(1 if alone else ranks)
        # Each tensor rank has part of the heads.
        self._heads = _heads_of(model) // self.tp_size
        if self.pp_size > 1 and dropouts_of(model):
            raise GulliverError(
                "dropout is not reproducible if stages run different micro-batches in every step "
                f"({dropouts_of(model)[0]}): set it to 0"
            )
        if not alone and ranks > 1 and dropouts_of(model):
            raise GulliverError(
                "dropout is not reproducible if sequences are on different ranks in every step "
                f"({dropouts_of(model)[0]}): set it to 0"
            )
        if alone:
            one = super().choices(plan.mesh.size, plan.precision.autocast)
            plan = replace(plan, mesh=one.mesh, sequence=one.sequence)
        found = super().for_model(plan, model, optimizer, cluster)
        told = alone or f"any neighbours of {ranks} ranks share sequences, as each step is planned"
        reasons = {"mesh.axes.sequence": told}
        if self.zero_stage >= 2 and ranks > 1:
            reasons["zero.stage"] = "gradients" + (
                " and parameters" if self.zero_stage == 3 else ""
            )
            reasons["zero.stage"] += (
                "are complete on each rank inside a step, as ranks run unequal work"
            )
        return replace(found, reasons={**found.reasons, **reasons})


def _why_alone(model: nn.Module) -> str:
    known = families().get(family_of(model) or "")
    if known is None:
        name = type(model).__name__
        return f"every group has one rank: no known family shards the attention of {name}"
    if not {*known.modes} & {*SHARED_BY_SEQUENCE}:
        return f"every group has one rank: {known.why}"
    return ""


def _heads_of(model: nn.Module) -> int:
    """Number of attention heads of a model; 0 if unknown."""
    model = hugging_face_of(model)
    named = (getattr(getattr(model, "config", model), name, None) for name in HEADS)
    return next((heads for heads in named if isinstance(heads, int)), 0)
