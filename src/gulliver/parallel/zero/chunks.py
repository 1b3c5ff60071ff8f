"""Partitions tensors into chunks, also for planners, and defines the state of a chunk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor, nn

from gulliver.comm.collectives import Handle
from gulliver.comm.watchdog import Purpose
from gulliver.errors import GulliverError
from gulliver.memory.buffers import ChunkLayout, Resident, ShardPiece, plan_chunks
from gulliver.memory.chunk import Chunk, reduced_gradient

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TensorSize:
    """A parameter on one rank before sharding, without data."""

    name: str
    numel: int
    dtype: torch.dtype
    device: torch.device
    trained: bool = True
    # Elements of each of its optimizer state tensors, before sharding.
    states: tuple[int, ...] = ()
    # Whether the optimizer needs it unsplit.
    whole: bool = False
    # Whether it is frozen, but in the optimizer, which steps it once it is unfrozen.
    frozen_trainable: bool = False
    # Whether the optimizer's first state needs memory in addition to that of the chunks.
    beside: bool = False
    # Positions among all parameter names of the model; a tied parameter has several.
    places: tuple[int, ...] = ()


def shard_dtype(dtype: torch.dtype, trained: bool) -> torch.dtype:
    return torch.float32 if trained and dtype in HALVES else dtype


def chunk_layouts(
    tensors: Sequence[TensorSize], chunk_bytes: int, stage: int, ranks: int
) -> Iterator[tuple[ChunkLayout, torch.dtype]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, int]]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append((tensor.name, tensor.numel))
    parts = ranks if stage else 1
    # An all-reduce is also computed in equal parts; this alignment avoids padding for it.
    align = 16 if parts > 1 else 16 * ranks
    whole = any(tensor.whole for tensor in tensors)
    for (dtype, _), sizes in kinds.items():
        capacity = max(1, chunk_bytes // dtype.itemsize)
        for layout in plan_chunks(sizes, capacity, parts, align, whole):
            yield layout, dtype


def ordered_layouts(
    tensors: Sequence[TensorSize], order: Sequence[str], chunk_bytes: int, stage: int, ranks: int
) -> list[tuple[ChunkLayout, torch.dtype, bool]]:
    place = {name: number for number, name in enumerate(order or [t.name for t in tensors])}
    found = []
    kinds = ((True, False), (False, True), (False, False))  # as of `ShardedState.kinds`
    for trained, sleeping in kinds if stage == 3 else kinds[:1]:
        kind = [t for t in tensors if (t.trained, t.frozen_trainable) == (trained, sleeping)]
        kind.sort(key=lambda t: place.get(t.name, len(place)))
        layouts = chunk_layouts(kind, chunk_bytes, stage, ranks)
        found += [(layout, dtype, trained) for layout, dtype in layouts]
    found.sort(key=lambda one: min(place.get(s.name, len(place)) for s in one[0].slots))
    return found


# A chunk of ZeRO: the state of its parameters and gradients, and this rank's shard.
#
# Two state machines: `Phase` of the gradients, which `reduce.py` changes, and `Presence` of the
# parameters (`gulliver.memory`), which `gather.py` changes.


class Phase(Enum):
    """Phase of a chunk's gradients."""

    EMPTY = auto()
    """No full gradients; reduced gradients are in the shards."""
    COLLECTING = auto()
    """Backward accumulates gradients in the chunk's buffer."""
    REDUCING = auto()
    """A reduction from the buffer to the shards is in flight."""


LEGAL = (
    (Phase.EMPTY, Phase.COLLECTING),  # the first gradient arrives
    (Phase.COLLECTING, Phase.REDUCING),  # all gradients have arrived
    (Phase.REDUCING, Phase.EMPTY),  # the shard has the result
    (Phase.COLLECTING, Phase.EMPTY),  # cleared before the reduction
)


_KINDS = (
    ("gathers", "for a read of parameters"),
    ("gathers", "for a forward"),
    ("gathers", "for a backward"),
    ("gathers", "after a step"),
    ("reduces", "in a backward"),
    ("votes on", "in a backward"),
)


@dataclass(eq=False)
class ShardedChunk(Resident):
    """A chunk with this rank's pieces of its parameters."""

    chunk: Chunk
    # This rank's pieces: ranges of parameters, and the flat tensors that the optimizer steps.
    pieces: list[tuple[ShardPiece, nn.Parameter]]
    trained: bool = True
    phase: Phase = Phase.EMPTY
    # Parameters that the current backward has not reached yet.
    waiting: dict[str, nn.Parameter] = field(default_factory=dict)
    # This rank's flat shard of the mean gradient, if any; with tiers, a placeholder outside of
    # `gradients`.
    gradient_shard: Tensor | None = None
    # Pending factor of the gradient, after clipping; None for 1.
    factor: Tensor | None = None
    # Its contribution to the squared norm of all gradients, in float64, if known.
    squared: Tensor | None = None
    # Buffer that a reduction in flight writes.
    incoming: Tensor | None = None
    reduction: Handle | None = None
    gathering: Handle | None = None
    index: int = -1
    # The same plus an offset per optimizer, to identify collectives.
    number: int = 0
    # Names of parameters whose optimizer state is in the chunk's buffers.
    placed: set[str] = field(default_factory=set)
    # Number of updates during backward.
    updates: int = 0
    # Whether such an update has consumed the gradient, without a zero_grad since.
    used_up: bool = False
    # Whether it was updated during backward, and the step has not followed.
    is_ahead: bool = False
    # Whether operations on its parameters are intercepted although it is gathered.
    asked: bool = False
    # Tensors that share the parameters' buffer without using it in computations.
    users: int = 0

    def __post_init__(self) -> None:
        self._purposes: dict[tuple[str, str], Purpose] = {}
        self.own(self.pieces)

    def own(self, pieces: Iterable[tuple[ShardPiece, nn.Parameter]]) -> None:
        self.pieces = list(pieces)
        self.owned = [owned for _, owned in self.pieces]
        # Gradients of the pieces outside of a step.
        self.stand_ins = [reduced_gradient(owned) for owned in self.owned]
        self.hide_gradients()

    def take_assigned(self) -> None:
        for piece, owned in self.pieces:
            run = self.chunk.master_shard[piece.start : piece.end]
            if owned.data_ptr() != run.data_ptr():
                run = run.view(owned.shape)
                run.copy_(owned.detach())
                owned.data = run

    def move(self, phase: Phase) -> None:
        assert (self.phase, phase) in LEGAL, f"{self.phase} -> {phase}"
        self.phase = phase

    def show_gradients(self, used: Container[str]) -> None:
        whole = self.gradient_shard
        for piece, owned in self.pieces:
            if whole is None or piece.name not in used:
                owned.grad = None
                continue
            run = whole[piece.start : piece.start + piece.numel]
            owned.grad = run if owned.ndim == 1 else run.view(owned.shape)

    def gradients(self, write: bool = False) -> Iterator[Tensor]:
        """Yields the gradient shard, if any, after loading it to the device."""
        if self.gradient_shard is None:
            return
        write = write or self.factor is not None
        with self.chunk.gradients.reduced(self.gradient_shard, write) as gradient:
            if self.factor is not None:
                gradient.mul_(self.factor.to(gradient.dtype))
            if write:
                self.factor = self.squared = None
            yield gradient

    @contextmanager
    def stepped_gradient(self) -> Iterator[None]:
        """Context with the gradient shard loaded for an optimizer step, which only reads it."""
        # [Note: clipped in tiers] Scaling gradients in place would load each one and write it back,
        # only for the step to load it again. So clipping records a factor, which the step applies
        # to the loaded gradient. If the store has the gradient, that copy is not overwritten: the
        # scaled one is dropped and the factor kept.
        parked, factor = self.gradient_shard, self.factor
        if parked is None:
            yield
            return
        try:
            if factor is None:
                with self.chunk.gradients.reduced(parked) as self.gradient_shard:
                    yield
            else:
                with self.chunk.gradients.scaled(parked, factor) as (self.gradient_shard, stays):
                    if stays:
                        self.factor = self.squared = None
                    yield
        finally:
            self.gradient_shard = parked

    def squared_norm(self, measure: Squared) -> Tensor | float:
        if self.squared is not None and self.factor is None:
            return self.squared
        return sum(measure(self, gradient) for gradient in self.gradients())

    def clip(self, factor: Tensor, later: bool) -> None:
        if later and self.gradient_shard is not None and self.factor is None:
            self.factor = factor
            return
        for gradient in self.gradients(write=True):
            gradient.mul_(factor.to(gradient.dtype))

    def forget_gradient(self) -> None:
        if self.gradient_shard is not None:
            self.chunk.gradients.give_reduced(self.gradient_shard)
        self.gradient_shard = self.factor = self.squared = None

    def zero_gradients(self, names: Collection[str]) -> None:
        if not names:
            return
        for gradient in self.gradients(write=True):
            for piece, _ in self.pieces:
                if piece.name in names:
                    gradient[piece.start : piece.end].zero_()

    @property
    def reduced_in_place(self) -> bool:
        """Whether the reduced gradient occupies the full buffer."""
        return self.chunk.layout.parts == 1 and not self.chunk.has_master

    def hide_gradients(self) -> None:
        for owned, stand_in in zip(self.owned, self.stand_ins, strict=True):
            owned.grad = stand_in

    def purpose(self, verb: str, why: str) -> Purpose:
        found = self._purposes.get((verb, why))
        if found is None:
            first = self.chunk.layout.slots[0].name
            code = (1 + _KINDS.index((verb, why))) * 256 + self.number % 256
            found = Purpose(f"{verb} the chunk of {first!r} {why}", code)
            self._purposes[verb, why] = found
        return found


def check_not_ahead(chunks: Iterable[ShardedChunk]) -> None:
    for sharded in chunks:
        if sharded.is_ahead:
            raise GulliverError(
                f"parameter {next(iter(sharded.chunk.parameters))!r}, or another one in its "
                "chunk, was read "
                "after step_in_backward had updated it and before step: read it after step, "
                "accumulate inside no_sync, and disable step_in_backward if recomputation in "
                "backward reads later layers"
            )


# [Note: which gathers during backward] With updates during backward, a chunk can be gathered as
# soon as it is updated. If all chunks were, these gathers would precede the last reductions, which
# the next forward waits for first; if none were, the link would only carry reductions in backward,
# and forward would wait for gathers. The link is equally busy in forward and backward if a share (B
# - F) / (B + F) of the gathers runs during backward, where F and B are the times of both: a third
# if backward takes twice as long. This suits slow links, which are then always busy, as well as
# fast ones. So every third chunk is gathered during backward, but none of the last, which would
# delay the chunks that forward waits for first. The rule depends on indices instead of times,
# because gathers are collectives, which all ranks have to start in the same order.
UPDATE_LAG = 2
"""Number of later chunks that are reduced before a chunk is updated during backward."""
EVERY = 3
"""One in `EVERY` chunks is gathered during backward."""


def gathers_in_backward(number: int, count: int) -> bool:
    return number > UPDATE_LAG and (count - 1 - number) % EVERY == 0


NORM_BLOCK = 1 << 16
"""Elements of a gradient converted to float64 at a time, so that they stay in the CPU cache."""
Squared = Callable[[ShardedChunk, Tensor], Tensor]
"""Returns the contribution of a chunk's gradient shard to the squared norm, in float64."""


def squared_norm(_: ShardedChunk, gradient: Tensor) -> Tensor:
    if gradient.device.type != "cpu":
        return torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
    # Five times as fast as torch's norm with another dtype, which casts element by element.
    wide = (block.double() for block in gradient.reshape(-1).split(NORM_BLOCK))
    return torch.stack([torch.dot(block, block) for block in wide]).sum()
