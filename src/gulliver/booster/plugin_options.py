"""Options of the plugins, in groups that several plugins share.

The constructor of a plugin names the common ones and takes the others by keyword; `sort_options`
sorts them into groups and checks them against the annotations.
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
# Size of chunks before tuning, and without other ranks.
DEFAULT_CHUNK_MB = 4.0
Stage = Literal[0, 1, 2, 3]
Count = Annotated[int, AT_LEAST_1]


@dataclass(frozen=True)
class ZeroOptions(Options):
    """Options of ZeRO.

    Attributes:
        precision: ``bf16`` or ``fp16`` turn the model's floating-point tensors and its inputs into
            16 bits and train them through float32 copies in the shards, ``fp16`` with a dynamic
            loss scale; None leaves the model as it is.
        max_norm: global norm that gradients are clipped to at every step; 0 does not clip.
        chunk_mb: size of a chunk in MiB: small ones start early, large ones use links better.
            ``auto`` plans it under a memory limit, and else tunes it in the first steps of
            `LowLevelZeroPlugin`, which keeps the result for this model and cluster; ``again``
            ignores the result of an earlier job.
        gather_ahead: chunks that stage 3 gathers ahead of the one in use.
        assume_elementwise: shard an optimizer that is not known, on the user's word that its update
            of an element depends on that element only.
        assume_per_parameter: shard it by whole parameters, on the user's word that its update of a
            parameter depends on the value, gradient and state of that parameter only.
    """

    precision: Literal["bf16", "fp16"] | None = None
    max_norm: Annotated[float, Range(0, math.inf)] = 0.0
    chunk_mb: Annotated[float, POSITIVE] | Literal["auto", "again"] = "auto"
    gather_ahead: Annotated[int, AT_LEAST_0] = 2
    assume_elementwise: bool = False
    assume_per_parameter: bool = False

    @property
    def chunk_bytes(self) -> int:
        """Size of chunks, before it is planned or tuned."""
        size = DEFAULT_CHUNK_MB if isinstance(self.chunk_mb, str) else self.chunk_mb
        return int(size * MIB)

    def plan(self, stage: int, **others: Any) -> ZeroPlan:
        """Returns the section of a plan, with fields that only some plugins have."""
        return ZeroPlan(
            stage=stage,
            chunk_bytes=self.chunk_bytes,
            gather_ahead=self.gather_ahead,
            assume_elementwise=self.assume_elementwise,
            assume_per_parameter=self.assume_per_parameter,
            **others,
        )

    def refuse_tuning(self) -> None:
        """Declines to tune chunks where their size is planned or fixed."""
        if self.chunk_mb == "again":
            raise GulliverError(
                "chunk_mb='again' tunes chunks in the first steps of LowLevelZeroPlugin without a "
                "memory_limit; use 'auto' or a number of MiB"
            )


@dataclass(frozen=True)
class LimitOptions(Options):
    """Memory that a rank may use.

    Attributes:
        memory_limit: memory for parameters, gradients, optimizer state, their buffers and
            activations on each rank, in bytes or as text: ``6GiB``, ``500 MB``, or ``70%`` of the
            device or, on a CPU, of this process's share. None for no limit.
        host_limit: page-locked host memory of a GPU for what does not fit; None for none.
        disk: folder and bytes for what does not fit, ``/scratch:100GiB``; None for none.
    """

    memory_limit: int | float | str | None = None
    host_limit: int | float | str | None = None
    disk: str | Path | None = None

    def tiers(self, stage: int, right: str, **others: Any) -> MemoryTiers | None:
        """Returns the memory tiers of a plugin; None without a limit."""
        limit = self.memory_limit
        for name in ("disk", "host_limit"):
            if limit is None and (value := getattr(self, name)) is not None:
                raise GulliverError(f"{name}={value!r} needs a memory_limit")
        if limit is None:
            return None
        if stage != 3:
            raise GulliverError(
                f"memory_limit={limit!r} with stage {stage}: unsharded state cannot be off-loaded; "
                f"use {right}"
            )
        return MemoryTiers(limit, self.host_limit, self.disk, **others)


@dataclass(frozen=True)
class PlacementOptions(Options):
    """Placement of state under a memory limit.

    Attributes:
        placement_policy: ``auto`` keeps what costs least to keep; ``static`` the shares below.
        shard_param_frac: share of the parameters that is sharded: 1.0, as stage 3 shards all.
        offload_optim_frac: share of the optimizer state that may leave the device, ``static``.
        offload_param_frac: share of the parameters that may leave the device, ``static``.
        keep_freed: keep freed memory in the process for its next tensors, on a CPU with glibc,
            where the limit has room for it and steps hardly wait for transfers: it saves page
            faults. False always returns it to the system.
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
            complete: gradients take less memory, and at stages 1 and 2 gathers begin earlier. With
            `max_norm` and with ``fp16`` all gradients are waited for. Clipping in the loop comes
            too late and is rejected, and `zero_grad` has to follow each step.
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
    """How the collectives of ZeRO use the links between ranks.

    Attributes:
        overlap: False waits for every collective at once; the results are the same.
        axes: names and sizes of the mesh that collectives follow axis by axis, slowest links
            first, such as ``{"node": 2, "local": 4}``; None sends straight from rank to rank.
            ``auto`` takes the faster of the two, and the best axes, as `cluster` predicts them.
        rank_order: ranks as they fill the axes, the innermost first; None for 0, 1, 2 ...
        cluster: links of the ranks for ``axes="auto"``; None for what ``gulliver probe`` measured
            here, or else a description of such machines.
        folder: folder that tuning writes ``chunks.json`` to; None for none.
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
        use_fp8: True, a scaling (``tensorwise``, ``rowwise``) or a
            `gulliver.plan.Fp8Plan`; layers compute in FP8 where that is predicted to be faster.
        fp8_emulation: compute the numerics of FP8 without units for it: slower, for experiments.
    """

    use_fp8: bool | str | Fp8Plan = False
    fp8_emulation: bool = False

    def plan(self) -> Fp8Plan | None:
        """Returns the section of a plan."""
        return fp8_plan(self.use_fp8, self.fp8_emulation)


@dataclass(frozen=True)
class CommunicationOptions(Options):
    """Formats of what ranks send.

    Attributes:
        communication_dtype: ``bf16``, ``fp8``, ``int8`` and others, for all of it, or by kind:
            ``{"reduce": "fp8"}``; None for none. A format that the plan predicts to cost more time
            than it saves stays off.
        force_communication_dtype: use it nevertheless.
        error_feedback: add what packing loses of a gradient to the next one; see docs/wire.md.
        wire_gate: compare gradients with unpacked ones now and then, and stop if they are far off.
    """

    communication_dtype: str | Mapping[str, str] | None = None
    force_communication_dtype: bool = False
    error_feedback: bool = False
    wire_gate: bool = True

    def wires(self) -> WireOptions:
        """Returns the formats of each kind of message."""
        return WireOptions.of(
            self.communication_dtype,
            self.force_communication_dtype,
            self.error_feedback,
            self.wire_gate,
        )


@dataclass(frozen=True)
class GridOptions(Options):
    """How one model is over several ranks.

    Attributes:
        tp_size: ranks that share each layer's tensors.
        pp_size: stages that the blocks are cut into.
        sp_size: ranks that share each sequence, in the modes that have ranks of their own.
        sequence_parallelism_mode: ``split_gather`` or ``ring`` shard activations over the tensor
            axis; ``all_to_all`` (Ulysses) or ``ring_attn`` share sequences over `sp_size` ranks;
            ``auto`` chooses between the latter two, and mixes of them, by predicted time.
        sequence_length: length in tokens that ``auto`` predicts for; None for the longest that the
            model takes.
        inner_ring_size: ranks of an inner ring, for ``ring_attn`` over links of two speeds.
        ulysses_size: ranks that exchange heads inside a ring, for ``ring_attn``.
        tensor_rules: how modules are over the tensor axis, by pattern of their names, for models
            without their own plan; see `gulliver.parallel.tensor`.
        replicate_rest: keep modules that no rule matches whole on every rank.
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
    """How blocks are cut into stages, and in which order these run.

    Attributes:
        num_microbatches: micro-batches that a batch is cut into; None for two to a stage.
        pp_style: schedule: ``gpipe``, ``1f1b``, ``interleaved``, ``zero_bubble``, ``zbv``,
            ``dualpipev``.
        num_model_chunks: stages on each rank, for the schedules that have several.
        cut: blocks of each stage, first to last; None cuts by predicted cost.
        blocks: path of the list of blocks that is cut, where it is not found.
        everywhere: paths of modules that every stage keeps because all blocks use their results.
        after: paths of modules that run after the blocks although they are registered before.
        extra: entries that a block returns after the hidden state; None for a plain tensor, -1 to
            find out.
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
    """How a sharded model runs.

    Attributes:
        zero_stage: what is sharded over the replicas: 0 nothing, 1 the optimizer, 2 gradients too,
            3 parameters too. None is 0, or 3 with a `memory_limit`, which needs it.
        weights: folder of a Hugging Face checkpoint that a model on meta is filled from; each rank
            reads its part.
        checkpoint_activations: recompute blocks in backward instead of keeping activations.
        check_batches: compare the batches of the ranks of one model at every step.
        dropout: how masks are drawn. ``exact``: by the position of each element, so that any grid
            and one process drop the same. None: so where ranks share a model, else as torch does.
            ``alike``: as torch does, which is cheaper, but other masks than one process draws:
            ranks that share tensors or a sequence take one seed at each call, stages draw by
            themselves.
    """

    zero_stage: Stage | None = None
    weights: Path | None = None
    checkpoint_activations: bool = False
    check_batches: bool = True
    dropout: Literal["exact", "alike"] | None = None


def sort_options(
    owner: type, kinds: Sequence[type[Options]], given: Mapping[str, Any]
) -> list[Any]:
    """Sorts the options of a plugin into groups and checks them.

    Args:
        owner: class of the plugin, for messages.
        kinds: dataclasses of the groups.
        given: options by name.

    Returns:
        A group for each of `kinds`.

    Raises:
        GulliverError: no group has such an option, or a value is outside of its range.
    """
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
