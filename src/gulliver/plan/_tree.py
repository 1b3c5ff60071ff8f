"""The values of a plan: frozen dataclasses, one for each idea, all of them written to YAML.

Choices and results stand side by side. A choice is what a person may edit, and takes effect; a
result (`MemoryPlan`, `Seconds`, `Model`, the bytes of a chunk, shares, reasons) follows from the
choices, and is computed anew when a plan is applied.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field

from gulliver.plan._formats import Fp8Plan, choice

AXES = ("pipeline", "data", "sequence", "tensor")
"""Axes of a mesh, outer to inner: the tensor axis sends most and often, so neighbours have it."""
MODEL_AXES = ("pipeline", "sequence", "tensor")
SHARED_BY_TENSOR = ("split_gather", "ring")
"""Sequence modes in which the tensor axis shares the sequences, too."""
SHARED_BY_SEQUENCE = ("all_to_all", "ring_attn")
"""Sequence modes with ranks of their own."""


@dataclass(frozen=True)
class Mesh:
    """The ranks as a grid.

    Attributes:
        device: kind of device, ``cpu`` or ``cuda``.
        axes: number of ranks along each axis, of `AXES`, outer to inner.
        torus: number of ranks along each axis that collectives go along step by step, slowest
            links first; empty sends straight from rank to rank.
        rank_order: ranks as they fill the torus, the innermost axis first; empty for 0, 1, 2 ...
    """

    device: str = "cpu"
    axes: dict[str, int] = field(default_factory=lambda: {"data": 1}, metadata={"least": 1})
    torus: dict[str, int] = field(default_factory=dict, metadata={"least": 1})
    rank_order: tuple[int, ...] = field(default=(), metadata={"least": 0})

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.axes.values())

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same parameters: those of the data and sequence axes."""
        return self.of("data") * self.of("sequence")

    @property
    def names_model(self) -> bool:
        """Whether the mesh has axes that one model is spread over, be it of one rank."""
        return any(name in self.axes for name in MODEL_AXES)

    @property
    def cuts_model(self) -> bool:
        """Whether one model is spread over several ranks."""
        return any(self.of(name) > 1 for name in MODEL_AXES)

    def of(self, name: str) -> int:
        """Number of ranks along an axis; 1 where it has none."""
        return self.axes.get(name, 1)


@dataclass(frozen=True)
class ChunkPlan:
    """A chunk of ZeRO: tensors that are gathered and reduced together.

    Attributes:
        tensors: names of its parameters, in order.
        bytes: size with padding.
        padding_bytes: size of the padding.
        dtype: dtype of the parameters.
        tier: memory that it lives in.
    """

    tensors: tuple[str, ...]
    bytes: int
    padding_bytes: int
    dtype: str
    tier: str = choice("device", "device")


@dataclass(frozen=True)
class Tiers:
    """Memories that the model's state lies in, where one of them is too small for it.

    Attributes:
        limit: bytes of the memory where compute happens, for all that is counted: parameters,
            gradients, optimizer state, their buffers, and activations.
        host: bytes of page-locked host memory behind it; 0 for none.
        disk: folder on the disk behind it, or behind the host's memory; None for none.
        disk_bytes: bytes that may lie on the disk.
        policy: ``auto`` keeps what costs least to keep, ``static`` keeps the shares that are said.
        shard_param: share of the parameters that is sharded over the ranks.
        offload_optim: share of the optimizer's state that may leave the first memory.
        offload_param: share of the parameters that may leave it.
        ahead: bytes that are read ahead of use at most; 0 for as many as fit.
        step_in_backward: whether a chunk is stepped as soon as its gradient is complete.
        activations: what forward keeps for backward: ``keep`` it, ``recompute`` blocks,
            ``offload`` all of it to what lies behind, ``auto`` to have it chosen by block;
            ``mixed``: blocks are named by `recompute` and `offloaded`, others keep theirs.
        offloaded: paths of the blocks whose activations leave.
        keep_freed: whether freed memory may stay with the process where steps hardly wait.
    """

    limit: int = choice(MISSING, least=1, size=True)
    host: int = choice(0, least=0, size=True)
    disk: str | None = None
    disk_bytes: int = choice(0, least=0, size=True)
    policy: str = choice("auto", "auto", "static")
    shard_param: float = choice(1.0, least=0, most=1)
    offload_optim: float = choice(1.0, least=0, most=1)
    offload_param: float = choice(1.0, least=0, most=1)
    ahead: int = choice(0, least=0, size=True)
    step_in_backward: bool = False
    activations: str = choice("keep", "keep", "recompute", "offload", "mixed", "auto")
    offloaded: tuple[str, ...] = ()
    keep_freed: bool = True

    @property
    def takes_activations(self) -> bool:
        """Whether activations leave, of all modules or of some blocks."""
        return self.activations == "offload" or bool(self.offloaded)


@dataclass(frozen=True)
class ZeroPlan:
    """ZeRO over the data and sequence axes.

    Attributes:
        stage: what is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
        chunk_bytes: size of a chunk; a larger tensor gets a chunk of its own.
        tuning: ``auto`` tunes the size in the first steps, ``again`` although an earlier job did.
        gather_ahead: number of chunks that stage 3 gathers ahead of the one in use.
        overlap: whether collectives travel while the ranks compute.
        broadcast_buffers: whether all ranks take rank 0's buffers at every step.
        assume_elementwise: whether an optimizer that is not known may be sharded.
        assume_per_parameter: whether it may be sharded by whole parameters.
        step_in_backward: whether a chunk is stepped as soon as its gradient is complete; with
            `tiers` their own value counts.
        report: folder that tuning writes ``chunks.json`` and a picture to.
        unequal: whether ranks run unequal work inside of a step, in which nothing is sent.
        tiers: memories that the state lies in; None keeps all of it on the device.
        chunks: chunks of the first rank, in the order of use. The order of their tensors is a
            choice; where one ends follows from `chunk_bytes`.
    """

    stage: int = choice(1, 0, 1, 2, 3)
    chunk_bytes: int = choice(4 * 2**20, least=1)
    tuning: str = choice("off", "off", "auto", "again")
    gather_ahead: int = choice(2, least=0)
    overlap: bool = True
    broadcast_buffers: bool = True
    assume_elementwise: bool = False
    assume_per_parameter: bool = False
    step_in_backward: bool = False
    report: str | None = None
    unequal: bool = False
    tiers: Tiers | None = None
    chunks: tuple[ChunkPlan, ...] = ()

    @property
    def steps_in_backward(self) -> bool:
        """Whether chunks are stepped during backward, with tiers or without."""
        return self.step_in_backward if self.tiers is None else self.tiers.step_in_backward


@dataclass(frozen=True)
class DDPPlan:
    """torch's DistributedDataParallel over the data axis.

    Attributes:
        find_unused_parameters: whether parameters may have no gradient in a backward.
        bucket_mb: size of a gradient bucket in MiB.
        static_graph: promise that the graph never changes.
    """

    find_unused_parameters: bool = False
    bucket_mb: int = choice(25, least=1)
    static_graph: bool = False


@dataclass(frozen=True)
class TensorLayout:
    """How modules lie over the tensor axis.

    Attributes:
        rules: style of each module whose path ends in a pattern, before what is known of the model.
        replicate_rest: whether modules that no rule knows stay whole, instead of being refused.
        modules: style of each path with parameters.
    """

    rules: dict[str, str] = field(default_factory=dict)
    replicate_rest: bool = False
    modules: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OperatorChoice:
    """Layouts of an operator, and the fate of what it saves.

    Attributes:
        operator: path in its block, and name of its first function; says which one is meant.
        along: way in which it is shared along each axis of the mesh, such as ``columns``.
        saved: fate of what it saves for backward.
    """

    operator: str
    along: dict[str, str]
    saved: str = choice("keep", "keep", "recompute", "offload")


@dataclass(frozen=True)
class OperatorBlock:
    """Blocks whose operators run alike.

    Attributes:
        blocks: names of the blocks.
        operators: operators of a block, in the order of forward.
    """

    blocks: tuple[str, ...]
    operators: tuple[OperatorChoice, ...]


@dataclass(frozen=True)
class OperatorPlan:
    """Operators that all ranks of the mesh share, each in its own way.

    Attributes:
        batch: dtype and sizes of each argument of the model, of all ranks together.
        budget: bytes of a rank that it was made for.
        blocks: the operators of all blocks.
        peak: most bytes of a rank, as predicted; a result.
    """

    batch: dict[str, str]
    budget: int = choice(0, least=0, size=True)
    blocks: tuple[OperatorBlock, ...] = ()
    peak: int = 0


@dataclass(frozen=True)
class SequenceLayout:
    """How sequences lie over ranks.

    Attributes:
        mode: name of the way; None keeps sequences whole.
        ulysses: number of ranks that exchange heads.
        outer: number of inner rings on the outer ring.
        inner: number of ranks of an inner ring.
        layout: order of positions over the ranks.
    """

    mode: str | None = choice(None, None, *SHARED_BY_TENSOR, *SHARED_BY_SEQUENCE, "auto")
    ulysses: int = choice(1, least=1)
    outer: int = choice(1, least=1)
    inner: int = choice(1, least=1)
    layout: str = choice("contiguous", "contiguous", "zigzag")

    @property
    def degree(self) -> int:
        """Number of ranks that share a sequence, beside those of the tensor axis."""
        return self.ulysses * self.outer * self.inner


@dataclass(frozen=True)
class PipelineLayout:
    """How blocks are dealt to stages, and in which order micro-batches run.

    Attributes:
        schedule: name of the order of forwards and backwards.
        micro_batches: number of parts of a batch; 0 for two to a stage.
        chunks_per_rank: number of stages on each rank; 0 for what the schedule has.
        cut: number of blocks of each stage, first to last; empty cuts by predicted cost.
        shares: share of the work of each stage; a result.
        blocks: path of the list of blocks; None where it is found.
        everywhere: paths of modules that every stage keeps.
        after: paths of modules that run after the blocks, though registered before.
        extra: number of entries that a block returns after the hidden state; -1 finds it out.
    """

    schedule: str = "1f1b"
    micro_batches: int = choice(0, least=0)
    chunks_per_rank: int = choice(0, least=0)
    cut: tuple[int, ...] = field(default=(), metadata={"least": 1})
    shares: tuple[float, ...] = ()
    blocks: str | None = None
    everywhere: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    extra: int | None = choice(-1, least=-1)


@dataclass(frozen=True)
class Precision:
    """Number formats.

    Attributes:
        autocast: dtype of autocast, or none: parameters keep their own.
        parameters: dtype that parameters are turned to, with float32 copies in the shards; or none.
        kept: paths of modules that keep their own dtype.
        fp8: linear layers that compute in FP8; None for none.
    """

    autocast: str = choice("none", "none", "bf16")
    parameters: str = choice("none", "none", "bf16", "fp16")
    kept: tuple[str, ...] = ()
    fp8: Fp8Plan | None = None


@dataclass(frozen=True)
class Wire:
    """Formats in which numbers travel between ranks; see `gulliver.precision.wire`.

    Attributes:
        gather: format of the parameters that ZeRO gathers, from stage 1 on.
        reduce: format of gradients of the replicas.
        tensor: format of activations and their gradients between tensor ranks.
        sequence: format of what attention exchanges between ranks of a sequence.
        pipeline: format of activations and their gradients between stages.
        error_feedback: whether what packing loses of a gradient is added to the next one.
        gate: whether gradients are compared with unpacked ones now and then.
    """

    gather: str = "identity"
    reduce: str = "identity"
    tensor: str = "identity"
    sequence: str = "identity"
    pipeline: str = "identity"
    error_feedback: bool = False
    gate: bool = True

    @property
    def formats(self) -> dict[str, str]:
        """Format of each kind."""
        return {kind: getattr(self, kind) for kind in WIRE_KINDS}


WIRE_KINDS = ("gather", "reduce", "tensor", "sequence", "pipeline")
"""Kinds of messages: parameters, gradients, and activations by the axis that shares a model."""


@dataclass(frozen=True)
class Model:
    """The model that a plan is of; a result.

    Attributes:
        kind: class of the model.
        parameters: number of elements.
        trainable: number of elements that are trained.
        optimizer: class of the optimizer.
    """

    kind: str = ""
    parameters: int = 0
    trainable: int = 0
    optimizer: str = ""


@dataclass(frozen=True)
class BlockWork:
    """What a block computes and keeps for one batch.

    Attributes:
        path: path of the block; empty for what is outside of all blocks.
        forward_s: seconds of its forward.
        saved: size of what its forward keeps for backward, its output aside.
        output: size of its output.
        working: bytes that a pass of it needs besides.
        movable: size of what leaves where activations are off-loaded, its input included.
        largest: size of the largest tensor of that.
    """

    path: str
    forward_s: float = choice(0.0, least=0)
    saved: int = choice(0, least=0)
    output: int = choice(0, least=0)
    working: int = choice(0, least=0)
    movable: int = choice(0, least=0)
    largest: int = choice(0, least=0)


@dataclass(frozen=True)
class Work:
    """What one model computes for one batch in one process, from which seconds are predicted.

    Attributes:
        samples: number of samples of the batch; 0 where none was measured.
        tokens: number of rows that the widest layers multiply.
        forward_s: seconds of a forward.
        backward_s: seconds of a backward.
        update_s: seconds of the optimizer's step of all parameters.
        hidden_bytes: size of what a block hands to the next.
        activations: size of what forward keeps for backward.
        peak: most bytes at once that are no state: activations, what operations need, the batch.
        peak_recomputed: the same where backward computes blocks again; 0 where it cannot.
        peak_offloaded: the same where activations are off-loaded, without those that came back.
        peak_mixed: the same with blocks as the plan has chosen for each.
        peak_rank: the same of the rank that needs most, blocks recomputed as the plan says, where
            that was counted for its mesh; 0 takes shares of the others.
        unfollowed: why the step could not be followed before it ran; empty where it could.
        blocks: blocks in the order of forward, and last what is outside of them.
        reduced_forward: sizes of outputs that tensor ranks add up in a forward.
        reduced_backward: sizes of gradients of inputs that they add up in a backward.
        reduced_again: sizes of those outputs that a recomputed block adds up again, of all blocks.
        share_blocks: share of the forward's seconds that its blocks take; 0 where not measured.
        share_cut: share of the forward's seconds in modules that tensor ranks divide.
        backwards: number of backwards that the batch is cut into, one after the other.
        launch_forward_s: seconds of each forward beside those of the batch, whatever its size and
            however many ranks share it: operations are launched; likewise the next.
        launch_backward_s: seconds of each backward beside those of the batch.
        weights_s: seconds for reading all weights, below which no forward of a part comes.
        attention_forward_s: seconds of the forward in attention itself, behind which the messages
            of a ring hide; 0 where it is not known.
        attention_backward_s: the same of the backward.
    """

    samples: int = choice(0, least=0)
    tokens: int = choice(0, least=0)
    forward_s: float = choice(0.0, least=0)
    backward_s: float = choice(0.0, least=0)
    update_s: float = choice(0.0, least=0)
    hidden_bytes: int = choice(0, least=0)
    activations: int = choice(0, least=0)
    peak: int = choice(0, least=0)
    peak_recomputed: int = choice(0, least=0)
    peak_offloaded: int = choice(0, least=0)
    peak_mixed: int = choice(0, least=0)
    peak_rank: int = choice(0, least=0)
    unfollowed: str = ""
    blocks: tuple[BlockWork, ...] = ()
    reduced_forward: tuple[int, ...] = ()
    reduced_backward: tuple[int, ...] = ()
    reduced_again: tuple[int, ...] = ()
    share_blocks: float = choice(0.0, least=0)
    share_cut: float = choice(0.0, least=0)
    backwards: int = choice(1, least=1)
    launch_forward_s: float = choice(0.0, least=0)
    launch_backward_s: float = choice(0.0, least=0)
    weights_s: float = choice(0.0, least=0)
    attention_forward_s: float = choice(0.0, least=0)
    attention_backward_s: float = choice(0.0, least=0)
