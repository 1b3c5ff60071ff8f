"""The plugin for hybrid parallelism: few arguments, checked before anything is done.

What is done with the model is told by `gulliver.booster._apply.apply_plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gulliver.booster._blocks import NO_BLOCKS
from gulliver.booster._fp8 import fp8_plan
from gulliver.booster._model import HALVES
from gulliver.booster._plugins import DEFAULT_CHUNK_MB, MIB, STAGES, Plugin
from gulliver.booster._resolve import plan_stages, recomputable
from gulliver.booster._tiers import TierOptions, plan_tiers
from gulliver.booster._wires import WireOptions
from gulliver.booster.hybrid import (
    SHORT,
    Wanted,
    check,
    check_size,
    choose_plan,
    families,
    family_of,
    size_axes,
)
from gulliver.comm import current_world
from gulliver.errors import GulliverError, nearest
from gulliver.families import AUTO, SHARED_BY_TENSOR, is_hugging_face
from gulliver.hardware import Cluster
from gulliver.parallel.pipeline import STYLES
from gulliver.parallel.sequence import SequencePlan
from gulliver.plan import (
    Fp8Plan,
    Mesh,
    PipelineLayout,
    Plan,
    Precision,
    SequenceLayout,
    TensorLayout,
    ZeroPlan,
)

DROPOUT = ("exact", "alike")
"""Ways to draw masks."""


class HybridParallelPlugin(Plugin):
    """Tensor, pipeline and sequence parallelism over one model, ZeRO over its replicas.

    What the sizes leave of the world goes to data parallelism. The model stays the object that it
    was, with parameters under their own names; the loop stays as it is, but for a pipeline, whose
    steps are `Booster.execute_pipeline`.

    Args:
        tp_size: ranks that share each layer's tensors.
        pp_size: stages that the layers are cut into.
        sp_size: ranks that share each sequence, in the modes that have ranks of their own.
        sequence_parallelism_mode: ``split_gather`` or ``ring`` shard activations over the tensor
            axis; ``all_to_all`` (Ulysses) or ``ring_attn`` share sequences over `sp_size` ranks;
            ``auto`` chooses between these two, and mixes of them, by predicted time.
        sequence_length: length in tokens that ``auto`` predicts for; None is the longest that the
            model takes.
        zero_stage: what is sharded over the replicas: 0 nothing, 1 the optimizer, 2 the gradients
            too, 3 the parameters too. None is 0, or 3 with a `memory_limit`, which needs it.
        precision: ``bf16`` or ``fp16``, as of `LowLevelZeroPlugin`.
        num_microbatches: number of micro-batches that a pipeline's batch is cut into; None for two
            to a stage.
        pp_style: the pipeline's schedule: ``gpipe``, ``1f1b``, ``interleaved``, ``zero_bubble``,
            ``zbv``, ``dualpipev``.
        num_model_chunks: stages on each rank, for the schedules that have several.
        cut: blocks of each stage, first to last; None cuts by predicted cost.
        blocks: path of the list of blocks that is cut, where it is not found.
        everywhere: paths of modules that every stage keeps, because their results go into all
            blocks.
        after: paths of modules that run after the blocks although they are registered before.
        extra: entries that a block returns after the hidden state; None is a plain tensor, -1 finds
            it out.
        inner_ring_size: ranks of an inner ring, for ``ring_attn`` over links of two speeds.
        ulysses_size: ranks that exchange heads inside a ring, for ``ring_attn``.
        tensor_rules: how modules lie over the tensor axis, by pattern of their names, for models
            without a plan of their own; see `gulliver.parallel.tensor`.
        replicate_rest: keep modules that no rule knows whole on every rank, instead of refusing.
        allow_dropout: the same as ``dropout="alike"``.
        dropout: how masks are drawn. ``exact``: by the position of each element, so that any grid
            and one process drop the same. None: so where ranks share a model, else as torch does.
            ``alike``: as torch does, which is cheaper, but other masks than one process draws:
            ranks that share tensors or a sequence take one seed at each call, stages draw by
            themselves.
        checkpoint_activations: recompute blocks in backward instead of keeping what they computed.
        max_norm: clip gradients to this norm of the whole model in every step; 0 does not.
        chunk_mb: size of ZeRO's chunks in MiB; ``auto`` is 4, or with a `memory_limit` chosen by
            what a step would move.
        gather_ahead: chunks that stage 3 gathers ahead of the one in use.
        assume_elementwise: take an optimizer that is not known where each rank steps a part of the
            model, on the user's word that its update of an element looks at that element only.
        assume_per_parameter: take it where each rank steps whole parameters, on the user's word
            that its update of a parameter looks at that parameter only.
        memory_limit: memory for this rank's part of the state and for activations, as
            `GeminiPlugin` takes it; None for no limit.
        host_limit: page-locked host memory of a GPU for what does not fit, as of `GeminiPlugin`.
        disk: folder and bytes for what does not fit, as of `GeminiPlugin`.
        weights: folder of a Hugging Face checkpoint to fill a model on meta from; each rank reads
            its part.
        check_batches: compare what the ranks of one model read, at every step.
        verbose: print the plan when the model is boosted.
        use_fp8: the same as in `TorchDDPPlugin`.
        fp8_emulation: the same as in `TorchDDPPlugin`.
        communication_dtype: format of what travels between ranks, as of `LowLevelZeroPlugin`, or of
            some kinds of it: ``reduce`` of the replicas, ``tensor``, ``sequence``, ``pipeline``.
        force_communication_dtype: the same as in `LowLevelZeroPlugin`, as are the next two.
        error_feedback: add what packing loses of a gradient to the next one.
        wire_gate: compare gradients with unpacked ones now and then.

    Raises:
        GulliverError: an argument or a combination that is not supported.
    """

    takes = ("meta",)

    def __init__(
        self,
        tp_size: int = 1,
        pp_size: int = 1,
        sp_size: int | None = None,
        sequence_parallelism_mode: str | None = None,
        sequence_length: int | None = None,
        zero_stage: int | None = None,
        precision: str | None = None,
        num_microbatches: int | None = None,
        pp_style: str = "1f1b",
        num_model_chunks: int | None = None,
        cut: Sequence[int] | None = None,
        blocks: str | None = None,
        everywhere: Sequence[str] = (),
        after: Sequence[str] = (),
        extra: int | None = -1,
        inner_ring_size: int | None = None,
        ulysses_size: int | None = None,
        tensor_rules: Mapping[str, str] | None = None,
        replicate_rest: bool = False,
        allow_dropout: bool = False,
        checkpoint_activations: bool = False,
        max_norm: float = 0.0,
        chunk_mb: float | str = "auto",
        gather_ahead: int = 2,
        assume_elementwise: bool = False,
        weights: Path | str | None = None,
        check_batches: bool = True,
        verbose: bool = True,
        dropout: str | None = None,
        assume_per_parameter: bool = False,
        memory_limit: int | float | str | None = None,
        host_limit: int | float | str | None = None,
        disk: Path | str | None = None,
        use_fp8: bool | str | Fp8Plan = False,
        fp8_emulation: bool = False,
        communication_dtype: str | Mapping[str, str] | None = None,
        force_communication_dtype: bool = False,
        error_feedback: bool = False,
        wire_gate: bool = True,
    ) -> None:
        self.fp8 = fp8_plan(use_fp8, fp8_emulation)
        self.wires = WireOptions.of(
            communication_dtype, force_communication_dtype, error_feedback, wire_gate
        )
        self.tp_size, self.pp_size = tp_size, pp_size
        stage = (0 if memory_limit is None else 3) if zero_stage is None else zero_stage
        self.mode, self.zero_stage = sequence_parallelism_mode, stage
        # Colossal's users name the tensor axis once more in the modes that it serves.
        shared = self.mode in SHARED_BY_TENSOR and sp_size == tp_size
        self.sp_size = 1 if sp_size is None or shared else sp_size
        self.precision, self.max_norm, self.chunk_mb = precision, max_norm, chunk_mb
        self.num_microbatches, self.pp_style = num_microbatches, pp_style
        self.num_model_chunks, self.cut = num_model_chunks, cut
        self.blocks, self.extra = blocks, extra
        self.everywhere, self.after = _paths("everywhere", everywhere), _paths("after", after)
        self.dropout = "alike" if allow_dropout and dropout is None else dropout
        if self.dropout not in (None, *DROPOUT) or (allow_dropout and self.dropout != "alike"):
            raise GulliverError(
                f"dropout={dropout!r} with allow_dropout={allow_dropout}: "
                f"{nearest(str(dropout), DROPOUT)} (or None); allow_dropout=True is 'alike'"
            )
        self.inner_ring_size, self.ulysses_size = inner_ring_size, ulysses_size
        self.tensor_rules, self.replicate_rest = tensor_rules, replicate_rest
        self.checkpoint_activations, self.gather_ahead = checkpoint_activations, gather_ahead
        self.assume_elementwise = assume_elementwise
        self.assume_per_parameter = assume_per_parameter
        self.sequence_length = sequence_length
        self.weights = None if weights is None else Path(weights)
        self.check_batches, self.verbose = check_batches, verbose
        self._check()
        self._chunk_mb = DEFAULT_CHUNK_MB if isinstance(chunk_mb, str) else chunk_mb
        right, again = "zero_stage=3", "recompute" if checkpoint_activations else "keep"
        self.memory = TierOptions.within(
            self.zero_stage, right, memory_limit, disk, host_limit, activations=again
        )

    def _check(self) -> None:
        """Refuses what is wrong whatever the model is."""
        self._check_numbers()
        if self.zero_stage not in STAGES:
            raise GulliverError(
                f"zero_stage={self.zero_stage!r} is not supported: 0 shards nothing, 1 the "
                "optimizer, 2 the gradients too, 3 the parameters too"
            )
        if self.precision not in (None, *HALVES):
            raise GulliverError(
                f"precision={self.precision!r} is not supported: "
                f"{nearest(str(self.precision), HALVES)} (or None)"
            )
        if self.pp_style not in STYLES:
            raise GulliverError(
                f"pp_style={self.pp_style!r} is not known: {nearest(str(self.pp_style), STYLES)}"
            )
        alone = {
            "num_microbatches": self.num_microbatches,
            "num_model_chunks": self.num_model_chunks,
            "cut": self.cut,
            "blocks": self.blocks,
            "everywhere": self.everywhere or None,
            "after": self.after or None,
        }
        for name, value in alone.items():
            if value is not None and self.pp_size == 1:
                raise GulliverError(f"{name}={value!r} is of a pipeline: it needs a pp_size")
        for name in ("inner_ring_size", "ulysses_size"):
            if getattr(self, name) is not None and self.mode != "ring_attn":
                raise GulliverError(
                    f"{name}={getattr(self, name)} needs sequence_parallelism_mode='ring_attn'"
                )
        if self.sequence_length is not None and self.mode != AUTO:
            raise GulliverError(
                "sequence_length is what sequence_parallelism_mode='auto' predicts for: it takes "
                "any length, as the other modes do"
            )
        if self.tensor_rules is not None and self.tp_size == 1:
            raise GulliverError("tensor_rules say how tensors are shared: they need a tp_size")
        self.sequence_plan(causal=False)
        check(self._wanted(None, ()))

    def _check_numbers(self) -> None:
        """Refuses sizes of 0 too, which would read as none given."""
        for name in ("tp_size", "pp_size", "sp_size"):
            check_size(name, getattr(self, name))
        for name in ("num_microbatches", "num_model_chunks", "inner_ring_size", "ulysses_size"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        size: Any = DEFAULT_CHUNK_MB if self.chunk_mb == "auto" else self.chunk_mb
        plain = size, self.max_norm, self.gather_ahead
        numbers = all(isinstance(value, int | float) for value in plain)
        if not (numbers and size > 0 and self.max_norm >= 0 and self.gather_ahead >= 0):
            raise GulliverError(
                "chunk_mb must be positive, max_norm and gather_ahead not negative, not "
                f"{self.chunk_mb!r}, {self.max_norm!r}, {self.gather_ahead!r}"
            )
        cut: Any = () if self.cut is None else self.cut
        if isinstance(cut, str) or not all(isinstance(count, int) for count in cut):
            raise GulliverError(f"cut={cut!r}: give the number of blocks of each stage")

    def _wanted(self, family: str | None, dtypes: tuple[torch.dtype, ...]) -> Wanted:
        # Whether a family takes a mode is asked when there is a model.
        sizes = self.tp_size, self.pp_size, self.sp_size
        return Wanted(family, *sizes, self.mode, dtypes, anonymous=not dtypes)

    def sequence_plan(self, causal: bool) -> SequencePlan:
        """How a sequence lies over its ranks.

        Raises:
            GulliverError: the inner sizes do not divide `sp_size`.
        """
        layout = "zigzag" if causal else "contiguous"
        if self.mode != "ring_attn":
            return SequencePlan(ulysses=self.sp_size, layout=layout)
        ulysses = self.ulysses_size or 1
        inner = self.inner_ring_size or max(1, self.sp_size // ulysses)
        if self.sp_size % (ulysses * inner):
            raise GulliverError(
                f"sp_size={self.sp_size} is no multiple of ulysses_size {ulysses} x "
                f"inner_ring_size {inner} = {ulysses * inner}"
            )
        return SequencePlan(ulysses, self.sp_size // (ulysses * inner), inner, layout)

    def choices(self, ranks: int, precision: str = "none") -> Plan:
        """The axes, and how a model lies over them."""
        sizes = size_axes(ranks, self.pp_size, self.sp_size, self.tp_size)
        device = current_world().device.type
        sequence = self.sequence_plan(causal=False)
        return Plan(
            plugin=type(self).__name__,
            mesh=Mesh(device, {SHORT[name]: size for name, size in sizes.items()}),
            zero=ZeroPlan(
                stage=self.zero_stage,
                chunk_bytes=int(self._chunk_mb * MIB),
                gather_ahead=self.gather_ahead,
                broadcast_buffers=False,
                assume_elementwise=self.assume_elementwise,
                assume_per_parameter=self.assume_per_parameter,
                tiers=None if self.memory is None else self.memory.tiers(device),
            ),
            precision=Precision(precision, self.precision or "none", fp8=self.fp8),
            tensor=self._tensor_layout(),
            sequence=SequenceLayout(
                self.mode, sequence.ulysses, sequence.outer, sequence.inner, sequence.layout
            ),
            pipeline=self._pipeline_layout(),
            max_norm=float(self.max_norm),
            dropout=self.dropout or "auto",
            check_batches=self.check_batches,
            weights=None if self.weights is None else str(self.weights),
        )

    def _tensor_layout(self) -> TensorLayout:
        # A plan says nothing of an axis that it does not have.
        if self.tp_size == 1:
            return TensorLayout()
        return TensorLayout(dict(self.tensor_rules or {}), self.replicate_rest)

    def _pipeline_layout(self) -> PipelineLayout:
        if self.pp_size == 1:
            return PipelineLayout()
        return PipelineLayout(
            schedule=self.pp_style,
            micro_batches=self.num_microbatches or 0,
            chunks_per_rank=self.num_model_chunks or 0,
            cut=tuple(self.cut or ()),
            blocks=self.blocks,
            everywhere=self.everywhere,
            after=self.after,
            extra=self.extra,
        )

    def for_model(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        cluster: Cluster | None,
    ) -> Plan:
        """Mode of sequences, blocks that are recomputed, and chunks under a limit."""
        family = family_of(model)
        dtypes = tuple({p.dtype for p in model.parameters() if p.requires_grad})
        check(self._wanted(family, dtypes))
        known = families().get(family or "")
        chosen, reasons = self.sequence_plan(known.causal if known else False), {}
        mode = self.mode
        if mode == AUTO:
            mode = "all_to_all"
        if self.mode == AUTO and is_hugging_face(model):
            ranks = plan.mesh.size, self.sp_size, self.tp_size
            layout = chosen.layout == "zigzag"
            found = choose_plan(model, *ranks, layout, self.sequence_length, cluster)
            chosen, mode = found.plan, "all_to_all" if found.plan.ring == 1 else "ring_attn"
            reasons["sequence"] = found.reason
        sequence = SequenceLayout(mode, chosen.ulysses, chosen.outer, chosen.inner, chosen.layout)
        blocks = ()
        if self.checkpoint_activations:
            blocks = recomputable(plan, model, plan_stages(plan, model))
            if not blocks:
                raise GulliverError(NO_BLOCKS)
        plan = replace(plan, sequence=sequence, recompute=blocks, reasons=reasons)
        if self.memory is None:
            return plan
        return plan_tiers(plan, model, optimizer, cluster, self.chunk_mb == "auto")

    def data_place(self) -> tuple[int, int]:
        """This rank's number among those that read different samples, and how many there are."""
        world = current_world()
        sizes = size_axes(world.size, self.pp_size, self.sp_size, self.tp_size)
        return world.rank // (sizes["sp"] * sizes["tp"]) % sizes["dp"], sizes["dp"]


def _paths(name: str, paths: Sequence[str]) -> tuple[str, ...]:
    if isinstance(paths, str) or not all(isinstance(path, str) for path in paths):
        raise GulliverError(f"{name}={paths!r}: give a list of paths of modules")
    return tuple(paths)
