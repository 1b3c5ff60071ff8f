"""Sections of a plan, and the allowed values of their fields."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import MISSING, dataclass, field
from typing import Any

from gulliver.precision.fp8.layers import SCALINGS


def choice(
    default: Any,
    *known: Any,
    least: float | None = None,
    most: float | None = None,
    size: bool = False,
) -> Any:
    """Creates a dataclass field with its allowed values or range."""
    # With `size` the field counts bytes, and a file may say ``6GiB``.
    limits = {"known": known, "least": least, "most": most, "size": size}
    return field(default=default, metadata=limits)


@dataclass(frozen=True)
class Fp8Plan:
    """Linear layers that compute in FP8.

    Attributes:
        scaling: granularity of scales: per tensor or per row.
        emulated: whether to emulate the numerics, slowly, without FP8 units.
        gate: whether to convert only layers predicted to be faster (none if emulated).
        exclude: path patterns of layers to leave unconverted.
        layers: paths of the layers; empty chooses them.
        kept: reason why each other linear layer is not converted, by path; a result.
    """

    scaling: str = choice("tensorwise", *SCALINGS)
    emulated: bool = False
    gate: bool = True
    exclude: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    kept: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        how = f"{self.scaling} scales{', emulated' if self.emulated else ''}"
        counts = Counter(self.kept.values())
        kept = "; ".join(f"{count} kept: {reason}" for reason, count in counts.items())
        return f"{how}, {len(self.layers)} linear layers" + (f"; {kept}" if kept else "")


# The sections of a plan: frozen dataclasses, all written to YAML.
#
# Choices and results are side by side. A choice may be edited and takes effect. A result
# (`MemoryPlan`, `Seconds`, `Model`, bytes of chunks, shares, reasons) follows from the choices and
# is recomputed when a plan is applied.


AXES = ("pipeline", "data", "sequence", "tensor")
"""Axes of a mesh, outermost first. The tensor axis communicates most, so its ranks are adjacent."""
MODEL_AXES = ("pipeline", "sequence", "tensor")
SHARED_BY_TENSOR = ("split_gather", "ring")
"""Sequence modes that shard sequences over the tensor axis."""
SHARED_BY_SEQUENCE = ("all_to_all", "ring_attn")
"""Sequence modes with a separate sequence axis."""


@dataclass(frozen=True)
class Mesh:
    """The ranks as a grid of named axes."""

    # Kind of device, ``cpu`` or ``cuda``.
    device: str = "cpu"
    # Number of ranks along each axis, of `AXES`, outer to inner.
    axes: dict[str, int] = field(default_factory=lambda: {"data": 1}, metadata={"least": 1})
    # Axes of a torus for collectives, slowest links first; empty for direct collectives.
    torus: dict[str, int] = field(default_factory=dict, metadata={"least": 1})
    # Ranks as they fill the torus, the innermost axis first; empty for 0, 1, 2 ...
    rank_order: tuple[int, ...] = field(default=(), metadata={"least": 0})

    @property
    def size(self) -> int:
        return math.prod(self.axes.values())

    @property
    def replicas(self) -> int:
        """Number of ranks with the same parameters: product of the data and sequence axes."""
        return self.of("data") * self.of("sequence")

    @property
    def names_model(self) -> bool:
        """Whether the mesh names axes that shard one model, even with size 1."""
        return any(name in self.axes for name in MODEL_AXES)

    @property
    def cuts_model(self) -> bool:
        """Whether one model is sharded over several ranks."""
        return any(self.of(name) > 1 for name in MODEL_AXES)

    def of(self, name: str) -> int:
        """Number of ranks along an axis; 1 if the mesh lacks it."""
        return self.axes.get(name, 1)


@dataclass(frozen=True)
class ChunkPlan:
    """A chunk of ZeRO: tensors that are gathered and reduced together."""

    # Names of its parameters, in order.
    tensors: tuple[str, ...]
    # Size with padding.
    bytes: int
    # Size of the padding.
    padding_bytes: int
    # Dtype of the parameters.
    dtype: str


@dataclass(frozen=True)
class Tiers:
    """Memory tiers of the model's state if it exceeds device memory."""

    # Bytes of device memory for parameters, gradients, optimizer state, their buffers, and
    # activations.
    limit: int = choice(MISSING, least=1, size=True)
    # Bytes of page-locked host memory behind it; 0 for none.
    host: int = choice(0, least=0, size=True)
    # Folder on a disk, the slowest tier; None for none.
    disk: str | None = None
    # Bytes that may be used on the disk.
    disk_bytes: int = choice(0, least=0, size=True)
    # ``auto`` chooses what stays on the device, ``static`` keeps the given shares.
    policy: str = choice("auto", "auto", "static")
    # Share of the optimizer's state that may be offloaded.
    offload_optim: float = choice(1.0, least=0, most=1)
    # Share of the parameters that may be offloaded.
    offload_param: float = choice(1.0, least=0, most=1)
    # Most bytes to prefetch; 0 for as many as fit.
    ahead: int = choice(0, least=0, size=True)
    # Whether a chunk is stepped as soon as its gradient is complete.
    step_in_backward: bool = False
    # Activations: ``keep`` all, ``recompute`` blocks, ``offload`` all, ``auto`` to choose by block;
    # ``mixed``: `recompute` and `offloaded` name blocks, others keep theirs.
    activations: str = choice("keep", "keep", "recompute", "offload", "mixed", "auto")
    # Paths of the blocks whose activations are offloaded.
    offloaded: tuple[str, ...] = ()
    # Whether the process may keep freed memory if steps hardly wait.
    keep_freed: bool = True

    @property
    def takes_activations(self) -> bool:
        """Whether the activations of any blocks are offloaded."""
        return self.activations == "offload" or bool(self.offloaded)


@dataclass(frozen=True)
class ZeroPlan:
    """ZeRO over the data and sequence axes."""

    # What is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
    stage: int = choice(1, 0, 1, 2, 3)
    # Chunk size; a larger tensor gets a separate chunk.
    chunk_bytes: int = choice(4 * 2**20, least=1)
    # ``auto`` tunes the size in the first steps, ``again`` although an earlier job did.
    tuning: str = choice("off", "off", "auto", "again")
    # Number of chunks that stage 3 prefetches.
    gather_ahead: int = choice(2, least=0)
    # Whether collectives overlap with compute.
    overlap: bool = True
    # Whether all ranks take rank 0's buffers at every step.
    broadcast_buffers: bool = True
    # Whether an unknown optimizer may be sharded by elements.
    assume_elementwise: bool = False
    # Whether it may be sharded by whole parameters.
    assume_per_parameter: bool = False
    # Whether a chunk is stepped as soon as its gradient is complete; `tiers` have a separate value.
    step_in_backward: bool = False
    # Folder that tuning writes ``chunks.json`` to.
    report: str | None = None
    # Whether ranks run different work within a step, without communication until its end.
    unequal: bool = False
    # Memory tiers of the state; None keeps all of it on the device.
    tiers: Tiers | None = None
    # Chunks of the first rank, in the order of use. The order of tensors is a choice; where a chunk
    # ends follows from `chunk_bytes`.
    chunks: tuple[ChunkPlan, ...] = ()

    @property
    def steps_in_backward(self) -> bool:
        """Whether chunks are updated during backward, with or without tiers."""
        return self.step_in_backward if self.tiers is None else self.tiers.step_in_backward


@dataclass(frozen=True)
class DDPPlan:
    """torch's DistributedDataParallel over the data axis."""

    # Whether parameters may have no gradient in a backward.
    find_unused_parameters: bool = False
    # Size of a gradient bucket in MiB.
    bucket_mb: int = choice(25, least=1)
    # Whether the graph never changes (DDP's static_graph).
    static_graph: bool = False


@dataclass(frozen=True)
class TensorLayout:
    """How modules are sharded over the tensor axis."""

    # Style by path suffix; overrides the model's built-in plan.
    rules: dict[str, str] = field(default_factory=dict)
    # Whether modules without a rule are replicated instead of rejected.
    replicate_rest: bool = False
    # Style of each path with parameters.
    modules: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OperatorChoice:
    """Sharding of an operator, and whether its saved tensors are kept or recomputed."""

    # Path in its block and name of its first function, to identify it.
    operator: str
    # Sharding along each axis of the mesh, such as ``columns``.
    along: dict[str, str]
    # Whether saved tensors are kept or recomputed.
    saved: str = choice("keep", "keep", "recompute")


@dataclass(frozen=True)
class OperatorBlock:
    """Blocks whose operators are sharded in the same way."""

    # Names of the blocks.
    blocks: tuple[str, ...]
    # Operators of a block, in the order of forward.
    operators: tuple[OperatorChoice, ...]


@dataclass(frozen=True)
class OperatorPlan:
    """Sharding of each operator over all ranks of the mesh."""

    # Dtype and sizes of each argument of the model, of all ranks together.
    batch: dict[str, str]
    # Bytes per rank for which it was made.
    budget: int = choice(0, least=0, size=True)
    # The operators of all blocks.
    blocks: tuple[OperatorBlock, ...] = ()
    # Predicted peak bytes of a rank; a result.
    peak: int = 0


@dataclass(frozen=True)
class SequenceLayout:
    """How sequences are sharded over ranks."""

    # Sequence mode; None keeps sequences whole.
    mode: str | None = choice(None, None, *SHARED_BY_TENSOR, *SHARED_BY_SEQUENCE, "auto")
    # Number of ranks that exchange heads.
    ulysses: int = choice(1, least=1)
    # Number of inner rings on the outer ring.
    outer: int = choice(1, least=1)
    # Number of ranks of an inner ring.
    inner: int = choice(1, least=1)
    # Order of positions over the ranks.
    layout: str = choice("contiguous", "contiguous", "zigzag")

    @property
    def degree(self) -> int:
        """Number of ranks that share a sequence, excluding the tensor axis."""
        return self.ulysses * self.outer * self.inner


@dataclass(frozen=True)
class PipelineLayout:
    """How blocks are split into stages, and the order of micro-batches."""

    # Name of the order of forwards and backwards.
    schedule: str = "1f1b"
    # Number of micro-batches; 0 for two per stage.
    micro_batches: int = choice(0, least=0)
    # Number of stages on each rank; 0 for the schedule's default.
    chunks_per_rank: int = choice(0, least=0)
    # Number of blocks of each stage, first to last; empty cuts by predicted cost.
    cut: tuple[int, ...] = field(default=(), metadata={"least": 1})
    # Share of the work of each stage; a result.
    shares: tuple[float, ...] = ()
    # Path of the list of blocks; None if it is detected.
    blocks: str | None = None
    # Paths of modules that every stage keeps.
    everywhere: tuple[str, ...] = ()
    # Paths of modules that run after the blocks, though registered before.
    after: tuple[str, ...] = ()
    # Number of entries that a block returns after the hidden state; -1 detects it.
    extra: int | None = choice(-1, least=-1)


@dataclass(frozen=True)
class Precision:
    """Number formats."""

    # Dtype of autocast, or none: parameters keep their own.
    autocast: str = choice("none", "none", "bf16")
    # Dtype to convert parameters to, with float32 master weights in the shards; or none.
    parameters: str = choice("none", "none", "bf16", "fp16")
    # Paths of modules that keep their own dtype.
    kept: tuple[str, ...] = ()
    # Linear layers that compute in FP8; None for none.
    fp8: Fp8Plan | None = None


@dataclass(frozen=True)
class Wire:
    """Wire formats of messages between ranks; see `gulliver.precision.wire`."""

    # Format of the parameters that ZeRO gathers, from stage 1 on.
    gather: str = "identity"
    # Format of gradients of the replicas.
    reduce: str = "identity"
    # Format of activations and their gradients between tensor ranks.
    tensor: str = "identity"
    # Format of attention messages between ranks of a sequence.
    sequence: str = "identity"
    # Format of activations and their gradients between stages.
    pipeline: str = "identity"
    # Whether packing errors of a gradient are added to the next one.
    error_feedback: bool = False
    # Whether gradients are regularly compared with unpacked ones.
    gate: bool = True

    @property
    def formats(self) -> dict[str, str]:
        return {kind: getattr(self, kind) for kind in WIRE_KINDS}


WIRE_KINDS = ("gather", "reduce", "tensor", "sequence", "pipeline")
"""Kinds of messages: parameters, gradients, and activations on each axis that shards a model."""


@dataclass(frozen=True)
class Model:
    """The model that the plan was made for; a result.

    Attributes:
        kind: class of the model.
        parameters: number of elements.
        trainable: number of trained elements.
        optimizer: class of the optimizer.
    """

    kind: str = ""
    parameters: int = 0
    trainable: int = 0
    optimizer: str = ""


@dataclass(frozen=True)
class BlockWork:
    """Costs of a block for one batch."""

    # Path of the block; empty for everything outside blocks.
    path: str
    # Seconds of its forward.
    forward_s: float = choice(0.0, least=0)
    # Bytes that its forward saves for backward, without its output.
    saved: int = choice(0, least=0)
    # Size of its output.
    output: int = choice(0, least=0)
    # Working memory of a pass of it.
    working: int = choice(0, least=0)
    # Bytes offloaded with `activations: offload`, its input included.
    movable: int = choice(0, least=0)
    # Size of the largest tensor of that.
    largest: int = choice(0, least=0)


@dataclass(frozen=True)
class Work:
    """Costs of one batch in one process, on which predictions are based."""

    # Number of samples of the batch; 0 where none was measured.
    samples: int = choice(0, least=0)
    # Number of rows that the widest layers multiply.
    tokens: int = choice(0, least=0)
    # Seconds of a forward.
    forward_s: float = choice(0.0, least=0)
    # Seconds of a backward.
    backward_s: float = choice(0.0, least=0)
    # Seconds of the optimizer's step of all parameters.
    update_s: float = choice(0.0, least=0)
    # Bytes of a hidden state between two blocks.
    hidden_bytes: int = choice(0, least=0)
    # Bytes that forward saves for backward.
    activations: int = choice(0, least=0)
    # Peak bytes that are not state: activations, working memory, the batch.
    peak: int = choice(0, least=0)
    # The same with recomputed blocks; 0 if none can be recomputed.
    peak_recomputed: int = choice(0, least=0)
    # The same with offloaded activations, without those that came back.
    peak_offloaded: int = choice(0, least=0)
    # The same with the plan's choice for each block.
    peak_mixed: int = choice(0, least=0)
    # The same for this mesh and recomputation, on the rank with the most; 0 if not counted.
    peak_rank: int = choice(0, least=0)
    # Reason why the step could not be traced with fake tensors; empty if it could.
    unfollowed: str = ""
    # Blocks in forward order, followed by everything outside of them.
    blocks: tuple[BlockWork, ...] = ()
    # Sizes of outputs that tensor ranks add up in a forward.
    reduced_forward: tuple[int, ...] = ()
    # Sizes of gradients of inputs that they add up in a backward.
    reduced_backward: tuple[int, ...] = ()
    # Sizes of those outputs that a recomputed block adds up again, of all blocks.
    reduced_again: tuple[int, ...] = ()
    # Share of the forward's seconds that its blocks take; 0 where not measured.
    share_blocks: float = choice(0.0, least=0)
    # Share of the forward's seconds in modules that tensor ranks divide.
    share_cut: float = choice(0.0, least=0)
    # Number of sequential backwards that the batch is split into.
    backwards: int = choice(1, least=1)
    # Seconds to launch the operations of a forward, for any batch size and number of ranks.
    launch_forward_s: float = choice(0.0, least=0)
    # Seconds to launch the operations of a backward.
    launch_backward_s: float = choice(0.0, least=0)
    # Seconds to read all weights, a lower bound of any forward.
    weights_s: float = choice(0.0, least=0)
    # Seconds of attention in a forward, which hide a ring's messages; 0 if not known.
    attention_forward_s: float = choice(0.0, least=0)
    # The same of the backward.
    attention_backward_s: float = choice(0.0, least=0)
