"""Options of the plugins, in groups that several plugins share.

A plugin's constructor names the common options and accepts the others as keywords; `sort_options`
sorts them into groups and validates them.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from gulliver.errors import GulliverError, nearest
from gulliver.hardware.cluster import Cluster
from gulliver.options import (
    AT_LEAST_0,
    AT_LEAST_1,
    POSITIVE,
    Options,
    Range,
    check_options,
    unchecked,
)
from gulliver.plan.tree import Fp8Plan, ZeroPlan
from gulliver.planner.fp8 import fp8_plan
from gulliver.planner.tiers import MemoryTiers
from gulliver.planner.wires import WireOptions

MIB = 2**20
# Chunk size before tuning, and with a single rank.
DEFAULT_CHUNK_MB = 4.0
Stage = Literal[0, 1, 2, 3]
Count = Annotated[int, AT_LEAST_1]


@dataclass(frozen=True)
class ZeroOptions(Options):
    """Options of ZeRO.

    Attributes:
        precision: ``bf16`` or ``fp16`` convert the model's floating-point tensors and inputs, and
            train with sharded float32 master weights (``fp16`` with a dynamic loss scale); None
            leaves the model unchanged.
        max_norm: clip gradients to this global norm at every step; 0 disables clipping.
        chunk_mb: chunk size in MiB: small chunks start early, large ones use bandwidth better.
            ``auto`` plans it under a memory limit; otherwise `LowLevelZeroPlugin` tunes it in the
            first steps and stores the result for this model and cluster. ``again`` ignores a stored
            result.
        gather_ahead: chunks that stage 3 prefetches.
        assume_elementwise: shard an unknown optimizer, assuming that its update of an element
            depends on that element only.
        assume_per_parameter: shard an unknown optimizer by full parameters, assuming that its
            update of a parameter depends only on that parameter's value, gradient and state.
    """

    precision: Literal["bf16", "fp16"] | None = None
    max_norm: Annotated[float, Range(0, math.inf)] = 0.0
    chunk_mb: Annotated[float, POSITIVE] | Literal["auto", "again"] = "auto"
    gather_ahead: Annotated[int, AT_LEAST_0] = 2
    assume_elementwise: bool = False
    assume_per_parameter: bool = False

    @property
    def chunk_bytes(self) -> int:
        """Size of chunks before planning or tuning."""
        size = DEFAULT_CHUNK_MB if isinstance(self.chunk_mb, str) else self.chunk_mb
        return int(size * MIB)

    def plan(self, stage: int, **others: Any) -> ZeroPlan:
        """Returns the plan's section; `others` are fields that only some plugins have."""
        return ZeroPlan(
            stage=stage,
            chunk_bytes=self.chunk_bytes,
            gather_ahead=self.gather_ahead,
            assume_elementwise=self.assume_elementwise,
            assume_per_parameter=self.assume_per_parameter,
            **others,
        )

    def refuse_tuning(self) -> None:
        if self.chunk_mb == "again":
            raise GulliverError(
                "chunk_mb='again' (tuning in the first steps) needs LowLevelZeroPlugin without a "
                "memory_limit; use 'auto' or a number of MiB"
            )


@dataclass(frozen=True)
class LimitOptions(Options):
    """Memory that a rank may use.

    Attributes:
        memory_limit: memory for parameters, gradients, optimizer state, their buffers and
            activations on each rank, in bytes or as text: ``6GiB``, ``500 MB``, or ``70%`` of the
            device or, on a CPU, of this process's share. None for no limit.
        host_limit: page-locked host memory per GPU for state that does not fit; None for none.
        disk: folder and bytes for state that does not fit, ``/scratch:100GiB``; None for none.
    """

    memory_limit: int | float | str | None = None
    host_limit: int | float | str | None = None
    disk: str | Path | None = None

    def tiers(self, stage: int, right: str, **others: Any) -> MemoryTiers | None:
        limit = self.memory_limit
        for name in ("disk", "host_limit"):
            if limit is None and (value := getattr(self, name)) is not None:
                raise GulliverError(
                    f"{name}={value!r} has no effect without a memory_limit; set one"
                )
        if limit is None:
            return None
        if stage != 3:
            raise GulliverError(
                f"memory_limit={limit!r} with stage {stage}: unsharded state cannot be offloaded; "
                f"use {right}"
            )
        return MemoryTiers(limit, self.host_limit, self.disk, **others)


@dataclass(frozen=True)
class PlacementOptions(Options):
    """Placement of state under a memory limit.

    Attributes:
        placement_policy: ``auto`` chooses by cost which state stays on the device; ``static`` uses
            the fractions below.
        shard_param_frac: fraction of the parameters that is sharded; must be 1.0, because stage 3
            shards all of them.
        offload_optim_frac: fraction of the optimizer state that may leave the device (``static``).
        offload_param_frac: fraction of the parameters that may leave the device (``static``).
        keep_freed: whether freed CPU memory (with glibc) is reused if the limit has room and steps
            rarely wait for transfers, which saves page faults; False always returns it to the
            system.
    """

    placement_policy: Literal["auto", "static"] = "auto"
    shard_param_frac: float = 1.0
    offload_optim_frac: Annotated[float, Range(0, 1)] | None = None
    offload_param_frac: Annotated[float, Range(0, 1)] | None = None
    keep_freed: bool = True


@dataclass(frozen=True)
class StepOptions(Options):
    """Treatment of gradients, activations and buffers in a step.

    Attributes:
        step_in_backward: step each chunk inside `Booster.backward`, as soon as its gradient is
            complete: gradients take less memory, and all-gathers at stages 1 and 2 start earlier.
            With `max_norm` or ``fp16``, steps wait for all gradients. Clipping in the training loop
            would be too late and is rejected; `zero_grad` must follow each step.
        activations: treatment of activations under a memory limit: ``keep``, ``recompute`` by
            blocks, ``offload`` to the host or the disk, or ``auto``, the fastest for each block.
        broadcast_buffers: give all ranks rank 0's buffers, such as running statistics, at every
            step, as torch's DDP does.
    """

    step_in_backward: bool = False
    activations: Literal["keep", "recompute", "offload", "auto"] = "keep"
    broadcast_buffers: bool = True


@dataclass(frozen=True)
class LinkOptions(Options):
    """How ZeRO's collectives use the links between ranks.

    Attributes:
        overlap: False waits for every collective immediately; the results are the same.
        axes: names and sizes of the mesh axes that collectives use in sequence, slowest links
            first, such as ``{"node": 2, "local": 4}``; None communicates directly
            between ranks. ``auto`` chooses the fastest option, as predicted for `cluster`.
        rank_order: ranks in the order in which they fill the axes, innermost first; None for 0, 1,
            2 ...
        cluster: links of the ranks for ``axes="auto"``; None for the local ones, as measured by
            ``gulliver probe`` or described.
        folder: folder to which tuning writes ``chunks.json``; None for none.
    """

    overlap: bool = True
    axes: Mapping[str, int] | Literal["auto"] | None = None
    rank_order: Sequence[int] | None = None
    cluster: Cluster | None = None
    folder: Path | None = None


@dataclass(frozen=True)
class Fp8Options(Options):
    """FP8 in linear layers.

    Attributes:
        use_fp8: True, a scaling (``tensorwise``, ``rowwise``) or a `gulliver.plan.Fp8Plan`; only
            layers that are predicted to be faster in FP8 use it.
        fp8_emulation: emulate FP8 numerics on hardware without FP8 units; slow, for experiments.
    """

    use_fp8: bool | str | Fp8Plan = False
    fp8_emulation: bool = False

    def plan(self) -> Fp8Plan | None:
        return fp8_plan(self.use_fp8, self.fp8_emulation)


@dataclass(frozen=True)
class CommunicationOptions(Options):
    """Wire formats of messages between ranks.

    Attributes:
        communication_dtype: ``bf16``, ``fp8``, ``int8`` and others, for all messages or by kind:
            ``{"reduce": "fp8"}``; None for none. A format is not used if it is predicted to cost
            more time than it saves.
        force_communication_dtype: use the format regardless of the prediction.
        error_feedback: add the rounding error of a packed gradient to the next one; see
            docs/wire.md.
        wire_gate: periodically compare packed gradients with unpacked ones, and stop packing if the
            difference is too large.
    """

    communication_dtype: str | Mapping[str, str] | None = None
    force_communication_dtype: bool = False
    error_feedback: bool = False
    wire_gate: bool = True

    def wires(self) -> WireOptions:
        return WireOptions.of(
            self.communication_dtype,
            self.force_communication_dtype,
            self.error_feedback,
            self.wire_gate,
        )


@dataclass(frozen=True)
class GridOptions(Options):
    """How one model is distributed over ranks.

    Attributes:
        tp_size: ranks that share each layer's tensors.
        pp_size: stages that the blocks are split into.
        sp_size: sequence-parallel ranks, for the modes with a separate sequence axis.
        sequence_parallelism_mode: ``split_gather`` or ``ring`` shard activations over the tensor
            axis; ``all_to_all`` (Ulysses) or ``ring_attn`` share sequences over `sp_size` ranks;
            ``auto`` chooses all_to_all, ring_attn or a combination by predicted time.
        sequence_length: length in tokens that ``auto`` predicts for; None for the model's maximum.
        inner_ring_size: ranks of an inner ring, for ``ring_attn`` over links of two speeds.
        ulysses_size: ranks that exchange heads inside a ring, for ``ring_attn``.
        tensor_rules: sharding style of modules, by name pattern, for models without a built-in
            plan; see `gulliver.parallel.tensor`.
        replicate_rest: replicate modules that no rule matches.
    """

    tp_size: Count = 1
    pp_size: Count = 1
    sp_size: Count | None = None
    sequence_parallelism_mode: str | None = None
    sequence_length: Count | None = None
    inner_ring_size: Count | None = None
    ulysses_size: Count | None = None
    tensor_rules: Mapping[str, str] | None = None
    replicate_rest: bool = False


@dataclass(frozen=True)
class PipelineOptions(Options):
    """How blocks are split into pipeline stages, and the schedule of the stages.

    Attributes:
        num_microbatches: micro-batches that a batch is split into; None for two per stage.
        pp_style: schedule: ``gpipe``, ``1f1b``, ``interleaved``, ``zero_bubble``, ``zbv``,
            ``dualpipev``.
        num_model_chunks: stages per rank, for schedules that have several.
        cut: number of blocks of each stage, first to last; None balances predicted cost.
        blocks: path of the list of blocks, if it is not found automatically.
        everywhere: paths of modules that every stage keeps because all blocks use their results.
        after: paths of modules that run after the blocks although they are registered before.
        extra: number of outputs of a block besides the hidden state; None for a plain tensor, -1 to
            detect it.
    """

    num_microbatches: Count | None = None
    pp_style: str = "1f1b"
    num_model_chunks: Count | None = None
    cut: tuple[int, ...] | None = None
    blocks: str | None = None
    everywhere: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    extra: int | None = -1


@dataclass(frozen=True)
class HybridOptions(Options):
    """State, activations and dropout of a sharded model.

    Attributes:
        zero_stage: state sharded over the replicas: 0 none, 1 optimizer state, 2 gradients too, 3
            parameters too. None is 0, or 3 with a `memory_limit`, which requires it.
        weights: folder of a Hugging Face checkpoint that fills a model on meta; each rank reads its
            part.
        checkpoint_activations: recompute blocks in backward instead of keeping activations.
        check_batches: compare the batches of ranks that share a model at every step.
        dropout: how masks are drawn. ``exact``: by element position, so that any grid drops the
            same elements as one process. ``alike``: as torch does, which is cheaper, but masks
            differ from those of one process: ranks that share tensors or a sequence use one seed at
            each call, stages draw independently. None: ``exact`` if ranks share a model, otherwise
            as torch does.
    """

    zero_stage: Stage | None = None
    weights: Path | None = None
    checkpoint_activations: bool = False
    check_batches: bool = True
    dropout: Literal["exact", "alike"] | None = None


def sort_options(
    owner: type, kinds: Sequence[type[Options]], given: Mapping[str, Any]
) -> list[Any]:
    """Sorts a plugin's options into an instance of each of `kinds`, and validates them."""
    kind_of = {field.name: kind for kind in kinds for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in given:
        if name not in kind_of:
            known = [*kind_of, *list(inspect.signature(owner).parameters)[:-1]]
            right = nearest(name, known)
            raise GulliverError(f"{owner.__name__} has no argument {name!r}: {right}")
    groups = []
    for kind in kinds:
        # Checked below, where the message can name the plugin.
        with unchecked():
            group = kind(**{name: v for name, v in given.items() if kind_of[name] is kind})
        check_options(group, f"{owner.__name__}.")
        groups.append(group)
    return groups


def refuse_unused(options: Options, names: Sequence[str], needs: str) -> None:
    """Rejects options that have no effect, unless they have their default values."""
    default = type(options)()
    for name in names:
        if (value := getattr(options, name)) != getattr(default, name):
            raise GulliverError(f"{name}={value!r} {needs}")
