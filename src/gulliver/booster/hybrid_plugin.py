"""The plugin for hybrid parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gulliver.booster.hybrid.mesh import size_axes
from gulliver.booster.hybrid.steps import SHORT
from gulliver.booster.plugin_options import (
    GridOptions,
    HybridOptions,
    LimitOptions,
    PipelineOptions,
    ZeroOptions,
    refuse_unused,
)
from gulliver.booster.plugins import Plugin
from gulliver.comm.world import current_world
from gulliver.errors import GulliverError, nearest
from gulliver.families.lookup import is_hugging_face
from gulliver.families.record import AUTO, SHARED_BY_TENSOR
from gulliver.hardware.cluster import Cluster
from gulliver.parallel.pipeline.schedules import STYLES
from gulliver.parallel.sequence.layout import SequencePlan
from gulliver.plan.plan import Plan
from gulliver.plan.tree import Mesh, PipelineLayout, Precision, SequenceLayout, TensorLayout
from gulliver.planner.capability import check_family, check_sizes, choose_plan, families, family_of
from gulliver.planner.model import NO_BLOCKS
from gulliver.planner.resolve import plan_stages, recomputable
from gulliver.planner.tiers import plan_tiers


class HybridParallelPlugin(Plugin):
    """Tensor, pipeline and sequence parallelism of one model, ZeRO over its replicas.

    Remaining ranks are used for data parallelism. The model stays the same object with the same
    parameter names. The training loop stays the same, except that pipelines use
    `Booster.execute_pipeline`.

    Args:
        tp_size: ranks that share each layer's tensors.
        pp_size: stages that the blocks are split into.
        sp_size: ranks that share each sequence, in the modes with a separate sequence axis.
        sequence_parallelism_mode: ``split_gather``, ``ring``, ``all_to_all``, ``ring_attn`` or
            ``auto``; see `GridOptions`.
        zero_stage: state to shard over the replicas; see `HybridOptions`.
        precision: ``bf16`` or ``fp16``; see `ZeroOptions`.
        num_microbatches: micro-batches per batch of a pipeline; None for two per stage.
        pp_style: the pipeline's schedule; see `PipelineOptions`.
        max_norm: clip gradients to this norm of the full model at every step; 0 disables clipping.
        memory_limit: memory for this rank's model state and activations; see `LimitOptions`.
        verbose: print the plan when the model is boosted.
        options: fields of `GridOptions`, `PipelineOptions`, `HybridOptions`, `ZeroOptions`,
            `LimitOptions`, `Fp8Options` and `CommunicationOptions`.

    Raises:
        GulliverError: an option is unknown, a value out of range, or a combination not supported.
    """

    takes = ("meta",)

    def __init__(
        self,
        tp_size: int = 1,
        pp_size: int = 1,
        sp_size: int | None = None,
        sequence_parallelism_mode: str | None = None,
        *,
        zero_stage: int | None = None,
        precision: str | None = None,
        num_microbatches: int | None = None,
        pp_style: str = "1f1b",
        max_norm: float = 0.0,
        memory_limit: int | float | str | None = None,
        verbose: bool = True,
        **options: Any,
    ) -> None:
        kinds = (GridOptions, PipelineOptions, HybridOptions, ZeroOptions, LimitOptions)
        given = {
            "tp_size": tp_size,
            "pp_size": pp_size,
            "sp_size": sp_size,
            "sequence_parallelism_mode": sequence_parallelism_mode,
            "zero_stage": zero_stage,
            "precision": precision,
            "num_microbatches": num_microbatches,
            "pp_style": pp_style,
            "max_norm": max_norm,
            "memory_limit": memory_limit,
        }
        groups = self._sort(kinds, given | options)
        self.grid, self.pipeline, self.hybrid, self.zero, limits = groups
        self.precision, self.max_norm = self.zero.precision, self.zero.max_norm
        self.tp_size, self.pp_size, self.mode = tp_size, pp_size, sequence_parallelism_mode
        # Users of Colossal-AI set sp_size to the tensor axis' size in the modes that use this axis.
        repeated = self.mode in SHARED_BY_TENSOR and sp_size == tp_size
        self.sp_size = 1 if sp_size is None or repeated else sp_size
        default_stage = 0 if memory_limit is None else 3
        self.zero_stage = default_stage if zero_stage is None else zero_stage
        self.dropout = self.hybrid.dropout
        self.verbose = verbose
        self._check()
        self.memory = limits.tiers(
            self.zero_stage,
            "zero_stage=3",
            activations="recompute" if self.hybrid.checkpoint_activations else "keep",
        )

    def _check(self) -> None:
        self.zero.refuse_tuning()
        if self.pipeline.pp_style not in STYLES:
            style = self.pipeline.pp_style
            raise GulliverError(f"pp_style={style!r} is not known: {nearest(style, STYLES)}")
        staged = ("num_microbatches", "num_model_chunks", "cut", "blocks", "everywhere", "after")
        if self.pp_size == 1:
            refuse_unused(self.pipeline, staged, "needs a pipeline: set pp_size")
        if self.mode != "ring_attn":
            needs = "needs sequence_parallelism_mode='ring_attn'"
            refuse_unused(self.grid, ("inner_ring_size", "ulysses_size"), needs)
        if self.mode != AUTO:
            needs = "is what sequence_parallelism_mode='auto' predicts for: leave it out"
            refuse_unused(self.grid, ("sequence_length",), needs)
        if self.tp_size == 1:
            refuse_unused(self.grid, ("tensor_rules",), "shards tensors: set tp_size")
        self.sequence_plan(causal=False)
        check_sizes(self.mode, self.tp_size, self.sp_size)

    def sequence_plan(self, causal: bool) -> SequencePlan:
        """Returns how a sequence is distributed over its ranks.

        Raises:
            GulliverError: the inner sizes do not divide `sp_size`.
        """
        layout = "zigzag" if causal else "contiguous"
        if self.mode != "ring_attn":
            return SequencePlan(ulysses=self.sp_size, layout=layout)
        ulysses = self.grid.ulysses_size or 1
        inner = self.grid.inner_ring_size or max(1, self.sp_size // ulysses)
        if self.sp_size % (ulysses * inner):
            raise GulliverError(
                f"sp_size={self.sp_size} is not a multiple of ulysses_size {ulysses} x "
                f"inner_ring_size {inner} = {ulysses * inner}"
            )
        return SequencePlan(ulysses, self.sp_size // (ulysses * inner), inner, layout)

    def choices(self, ranks: int, precision: str = "none") -> Plan:
        """Plans the axes, and how a model is sharded over them."""
        sizes = size_axes(ranks, self.pp_size, self.sp_size, self.tp_size)
        device = current_world().device.type
        sequence = self.sequence_plan(causal=False)
        return Plan(
            plugin=type(self).__name__,
            mesh=Mesh(device, {SHORT[name]: size for name, size in sizes.items()}),
            zero=self.zero.plan(
                self.zero_stage,
                broadcast_buffers=False,
                tiers=None if self.memory is None else self.memory.tiers(device),
            ),
            precision=Precision(precision, self.precision or "none", fp8=self.fp8),
            tensor=self._tensor_layout(),
            sequence=SequenceLayout(
                self.mode, sequence.ulysses, sequence.outer, sequence.inner, sequence.layout
            ),
            pipeline=self._pipeline_layout(),
            max_norm=self.max_norm,
            dropout=self.dropout or "auto",
            check_batches=self.hybrid.check_batches,
            weights=None if self.hybrid.weights is None else str(self.hybrid.weights),
        )

    def _tensor_layout(self) -> TensorLayout:
        # Without a tensor axis, the plan has no tensor layout.
        if self.tp_size == 1:
            return TensorLayout()
        return TensorLayout(dict(self.grid.tensor_rules or {}), self.grid.replicate_rest)

    def _pipeline_layout(self) -> PipelineLayout:
        if self.pp_size == 1:
            return PipelineLayout()
        options = self.pipeline
        return PipelineLayout(
            schedule=options.pp_style,
            micro_batches=options.num_microbatches or 0,
            chunks_per_rank=options.num_model_chunks or 0,
            cut=options.cut or (),
            blocks=options.blocks,
            everywhere=options.everywhere,
            after=options.after,
            extra=options.extra,
        )

    def for_model(
        self, plan: Plan, model: nn.Module, optimizer: Optimizer | None, cluster: Cluster | None
    ) -> Plan:
        """Chooses the sequence mode and recomputed blocks; under a memory limit also the chunks."""
        family = family_of(model)
        check_family(family, self.mode, max(self.tp_size, self.sp_size))
        known = families().get(family or "")
        chosen, reasons = self.sequence_plan(known.causal if known else False), {}
        mode = self.mode
        if mode == AUTO:
            mode = "all_to_all"
        if self.mode == AUTO and is_hugging_face(model):
            ranks = plan.mesh.size, self.sp_size, self.tp_size
            layout = chosen.layout == "zigzag"
            found = choose_plan(model, *ranks, layout, self.grid.sequence_length, cluster)
            chosen, mode = found.plan, "all_to_all" if found.plan.ring == 1 else "ring_attn"
            reasons["sequence"] = found.reason
        sequence = SequenceLayout(mode, chosen.ulysses, chosen.outer, chosen.inner, chosen.layout)
        blocks = ()
        if self.hybrid.checkpoint_activations:
            blocks = recomputable(plan, model, plan_stages(plan, model))
            if not blocks:
                raise GulliverError(NO_BLOCKS)
        plan = replace(plan, sequence=sequence, recompute=blocks, reasons=reasons)
        if self.memory is None:
            return plan
        return plan_tiers(plan, model, optimizer, cluster, self.zero.chunk_mb == "auto")

    def data_place(self) -> tuple[int, int]:
        """Index of this rank among the ranks that read different samples, and their number."""
        world = current_world()
        sizes = size_axes(world.size, self.pp_size, self.sp_size, self.tp_size)
        return world.rank // (sizes["sp"] * sizes["tp"]) % sizes["dp"], sizes["dp"]
