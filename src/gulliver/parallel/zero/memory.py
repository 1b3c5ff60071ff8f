"""Predicts a rank's peak memory by simulating a training step without tensors.

The simulation uses the same `Prefetcher` and the same rule for pending reductions as training, so
it knows which chunks are gathered together and how long gradients need full buffers. The joint peak
is lower than the sum of the peaks of parameters and gradients, which occur at different times.
Modules run in registration order, or in the order of the plan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

from gulliver.memory.buffers import (
    GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    ByteCounter,
    Presence,
    Resident,
    moment_size,
)
from gulliver.memory.manager import Manager
from gulliver.memory.prefetch import Pass, Prefetcher
from gulliver.parallel.zero.elementwise import state_sizes
from gulliver.parallel.zero.reduce import IN_FLIGHT
from gulliver.parallel.zero.state import ShardedState

Event = tuple[str, int]


@dataclass(frozen=True)
class ChunkBytes:
    """Byte counts of a chunk."""

    names: Sequence[str]
    whole: int
    # Bytes of the part that each rank steps.
    shard: int
    trained: bool = True
    # Whether the shard is a copy in a wider dtype.
    copied: bool = False
    # Bytes of the shard as all ranks have it, if changes are sent packed.
    packed: int = 0


def predicted(shards: ShardedState, pipelined: bool = False) -> dict[str, int]:
    """Predicts this rank's bytes by kind; with tiers, only bytes in the fast tier."""
    chunks = [
        ChunkBytes(
            tuple(c.chunk.parameters),
            c.chunk.nbytes,
            c.chunk.master_shard.nbytes,
            c.trained,
            c.chunk.has_master,
            0 if c.chunk.shown_part is None else c.chunk.shown_part.nbytes,
        )
        for c in shards.all_chunks
    ]
    names = {name for chunk in chunks for name in chunk.names}
    uses = shards.options.uses if names == set(shards.options.uses) else ()
    events = list(ordinary_step(chunks, uses))
    options = shards.stage, shards.parts, shards.options.ahead, _state_bytes(shards)
    found = held_bytes(chunks, *options, events)
    if (pipelined and shards.manager is None) or shards.options.unequal:
        gathered = len(chunks) if shards.options.unequal else shards.options.ahead + 2
        found = reduced_at_end(found, chunks, shards.stage, shards.parts, gathered)
    return found if shards.manager is None else _within(found, shards.manager)


def _within(found: dict[str, int], manager: Manager) -> dict[str, int]:
    """Scales predicted bytes to the fast tier: all of them, or as many as fit."""
    total = sum(found.values())
    if total <= manager.budget:
        return found
    if manager.stats()["steps"]:
        return dict(manager.counter.fullest)
    return {kind: nbytes * manager.budget // total for kind, nbytes in found.items()}


def held_bytes(
    chunks: Sequence[ChunkBytes],
    stage: int,
    parts: int,
    ahead: int,
    state: int,
    events: Sequence[Event] | None = None,
) -> dict[str, int]:
    """Predicts the bytes of parameters, gradients and optimizer state at their joint peak.

    A step has one backward, after which gradients are cleared. Parameters are the full chunks; in
    stage 3 the shards and the gathered chunks. Gradients are full buffers and gradient shards.
    Optimizer state includes float32 master weights of 16-bit parameters.

    Args:
        chunks: chunks in the order of use.
        stage: ZeRO stage.
        parts: number of shards of a chunk.
        ahead: number of chunks that stage 3 prefetches.
        state: bytes of the optimizer's state.
        events: recorded events of a step; None for a step in parameter order.
    """
    replay = _Counted(chunks, stage, parts, ahead)
    for made in (0, state):
        # The second step begins with chunks that the first one prefetched, and with existing state;
        # only the first gathers chunks repeatedly if they are used out of order.
        replay.counter.add(OPTIMIZER_STATE, made)
        replay.run(ordinary_step(chunks) if events is None else events)
        replay.forget()
    return replay.counter.fullest


def reduced_at_end(
    found: Mapping[str, int], chunks: Sequence[ChunkBytes], stage: int, parts: int, gathered: int
) -> dict[str, int]:
    """Returns the bytes of a step that reduces all gradients at its end."""
    # Gradients of micro-batches, and of steps of unequal work, accumulate in full buffers in every
    # stage; when they are reduced, shards in flight exist in addition.
    if parts == 1:
        return dict(found)
    trained = [chunk for chunk in chunks if chunk.trained]
    flying = sum(chunk.shard for chunk in trained[-IN_FLIGHT - 1 :])
    whole = sum(chunk.whole for chunk in trained) + flying
    changed = {**found, GRADIENTS: max(found[GRADIENTS], whole)}
    if stage == 3:
        together = (sum(c.whole for c in chunks[n : n + gathered]) for n in range(len(chunks)))
        shards = sum(c.shard for c in chunks if not c.copied)
        changed[PARAMETERS] = max(found[PARAMETERS], shards + max(together, default=0))
    return changed


@dataclass(eq=False, kw_only=True)
class ImaginedChunk(Resident):
    """A simulated chunk, which has byte counts but no tensors."""

    number: int
    size: ChunkBytes


class StepReplay(ABC):
    """Simulates the events of a step; subclasses implement the effects."""

    def __init__(
        self,
        chunks: Sequence[ChunkBytes],
        stage: int,
        ahead: int,
        in_flight: int,
        tight: bool = False,
    ) -> None:
        self.stage, self.in_flight = stage, in_flight
        presence = Presence.ABSENT if stage == 3 else Presence.WHOLE
        self.chunks = [
            ImaginedChunk(presence=presence, number=number, size=size)
            for number, size in enumerate(chunks)
        ]
        self.engine = Prefetcher(self.chunks, self, ahead, tight=tight)
        self.flying: deque[ImaginedChunk] = deque()

    def run(self, events: Iterable[Event]) -> None:
        for what, number in events:
            if what == "collecting":
                self._collect(self.chunks[number])
            elif what == "reduced":
                self._reduce(self.chunks[number])
            elif self.stage == 3:
                self.passes(what, number)
        self.wait_all_reductions()

    def passes(self, what: str, number: int) -> None:
        if what == "used":
            self.engine.use(self.chunks[number])
        elif what in Pass.__members__:
            self.engine.begin(Pass[what])
        elif what in ("forward ended", "evaluation ended"):
            self.engine.end_forward(keep_last=what == "forward ended")
        elif what == "backward ended":
            self.engine.end_backward()
        elif what == "released":
            self.engine.release_all()
        elif what == "prefetched":
            self.wait_all_reductions()
            self.engine.prefetch()

    # Methods of a `Mover`, for the prefetcher.

    def bring(self, chunk: ImaginedChunk) -> None:
        self.finish(chunk)
        self.gathers(chunk, fresh=chunk.presence is Presence.ABSENT)
        chunk.enter(Presence.ARRIVING)

    def finish(self, chunk: ImaginedChunk) -> None:
        if chunk.presence is Presence.ARRIVING:
            chunk.enter(Presence.WHOLE)

    def release(self, chunk: ImaginedChunk) -> None:
        self.finish(chunk)
        if chunk.presence is Presence.WHOLE:
            self.gives_back(chunk)
            chunk.enter(Presence.ABSENT)

    # Behavior of `GradientReducer`.

    def _collect(self, chunk: ImaginedChunk) -> None:
        if chunk in self.flying:
            self.wait_all_reductions()
        self.collects(chunk)

    def _reduce(self, chunk: ImaginedChunk) -> None:
        self.sends(chunk)
        self.flying.append(chunk)
        if self.stage and len(self.flying) > self.in_flight:
            self.wait_reduction(self.flying[0])

    def wait_reduction(self, chunk: ImaginedChunk) -> None:
        if chunk in self.flying:
            self.flying.remove(chunk)
            self.lands(chunk)

    def wait_all_reductions(self) -> None:
        while self.flying:
            self.wait_reduction(self.flying[0])

    # Effects of the events.

    @abstractmethod
    def gathers(self, chunk: ImaginedChunk, fresh: bool) -> None:
        """Called when a chunk's all-gather starts; `fresh` if it fills a new buffer."""

    @abstractmethod
    def gives_back(self, chunk: ImaginedChunk) -> None: ...

    @abstractmethod
    def collects(self, chunk: ImaginedChunk) -> None: ...

    @abstractmethod
    def sends(self, chunk: ImaginedChunk) -> None: ...

    @abstractmethod
    def lands(self, chunk: ImaginedChunk) -> None: ...


class _Counted(StepReplay):
    def __init__(self, chunks: Sequence[ChunkBytes], stage: int, parts: int, ahead: int) -> None:
        super().__init__(chunks, stage, ahead, IN_FLIGHT if parts > 1 else 0)
        self.counter = ByteCounter()
        self._parts, self._buffers, self._reduced = parts, dict[int, int](), dict[int, int]()
        self._unread = _unread(chunks)
        self.counter.add(OPTIMIZER_STATE, sum(c.shard for c in chunks if c.copied))
        held = [c.shard * (not c.copied) if stage == 3 else c.whole for c in chunks]
        beside = [c.packed + c.shard * (not c.copied) for c in chunks if c.packed]
        self.counter.add(PARAMETERS, sum(held) + sum(beside))

    def _is_handed(self, chunk: ImaginedChunk) -> bool:
        """Whether the reduced gradient reuses the full buffer."""
        return self._parts == 1 and not chunk.size.copied

    def passes(self, what: str, number: int) -> None:
        backward = self.engine.current is Pass.BACKWARD
        if not (what == "used" and backward and number in self._unread):
            super().passes(what, number)

    def gathers(self, chunk: ImaginedChunk, fresh: bool) -> None:
        self.counter.add(PARAMETERS, chunk.size.whole if fresh else 0)

    def gives_back(self, chunk: ImaginedChunk) -> None:
        self.counter.add(PARAMETERS, -chunk.size.whole)

    def collects(self, chunk: ImaginedChunk) -> None:
        self.counter.add(GRADIENTS, chunk.size.whole - self._buffers.get(chunk.number, 0))
        self._buffers[chunk.number] = chunk.size.whole

    def sends(self, chunk: ImaginedChunk) -> None:
        if not self._is_handed(chunk):
            self.counter.add(GRADIENTS, chunk.size.shard)

    def lands(self, chunk: ImaginedChunk) -> None:
        # It was added to an existing gradient.
        self.counter.add(GRADIENTS, -self._reduced.get(chunk.number, 0))
        self._reduced[chunk.number] = chunk.size.shard
        if self._is_handed(chunk):
            self._buffers.pop(chunk.number, 0)
        else:
            self.counter.add(GRADIENTS, -self._buffers.pop(chunk.number, 0))

    def forget(self) -> None:
        self.counter.add(GRADIENTS, -sum(self._reduced.values()))
        self._reduced.clear()


def _unread(chunks: Sequence[ChunkBytes]) -> set[int]:
    """Returns the chunks before the repeated blocks, whose parameters backward does not read."""
    # Inputs need no gradient, so neither embeddings nor a first layer use their weights.
    names = [name for chunk in chunks for name in chunk.names]
    first = names[0].rpartition(".")[0] if names else ""
    entry = list(takewhile(lambda n: not any(map(str.isdigit, n.split("."))), names))
    if len(entry) in (0, len(names)):
        entry = [name for name in names if name.rpartition(".")[0] == first]
    return {n for n, chunk in enumerate(chunks) if set(chunk.names) <= set(entry)}


def ordinary_step(
    chunks: Sequence[ChunkBytes], order: Sequence[str] = (), again: Sequence[str] = ()
) -> Iterator[Event]:
    """Yields the events of a step that uses modules in the order of their parameters."""
    if not chunks:
        return
    homes = {name: number for number, chunk in enumerate(chunks) for name in chunk.names}
    names = list(order or homes)
    yield Pass.FORWARD.name, -1
    for name in names:
        yield "used", homes[name]
    yield "forward ended", -1
    yield Pass.BACKWARD.name, -1
    first = {name: place for place, name in reversed(list(enumerate(names)))}
    missing = [set(chunk.names) for chunk in chunks]
    following = deque(n for n in range(len(chunks) - 1, -1, -1) if chunks[n].trained)
    begun: set[int] = set()
    for uses, members in backward_uses(names, again):
        yield from (("used", homes[name]) for name in uses)
        # Autograd sums the gradients of all uses, and passes the sum on once; the gradients of a
        # module arrive together, in any order.
        ended = [name for place, name in members if place == first[name]]
        for number in dict.fromkeys(homes[name] for name in ended):
            if chunks[number].trained and number not in begun:
                begun.add(number)
                yield "collecting", number
        for name in ended:
            missing[homes[name]].discard(name)
        while following and not missing[following[0]]:
            yield "reduced", following.popleft()
    yield "backward ended", -1
    yield "released", -1
    yield "prefetched", -1


def backward_uses(
    names: Sequence[str], again: Sequence[str] = ()
) -> Iterator[tuple[list[str], list[tuple[int, str]]]]:
    entered = None
    backwards = reversed(list(enumerate(names)))
    for module, found in groupby(backwards, key=lambda entry: entry[1].rpartition(".")[0]):
        members = list(found)
        uses = [name for _, name in members]
        block = next((path for path in again if f"{module}.".startswith(f"{path}.")), None)
        if block is not None and block != entered:
            uses = [name for name in names if name.startswith(f"{block}.")] + uses
        entered = block
        yield uses, members


def _state_bytes(shards: ShardedState) -> int:
    total = 0
    for sharded in shards.chunks:
        for piece, owned in sharded.pieces:
            sizes = state_sizes(shards.inner, shards.groups.of(piece.name), owned.shape)
            total += moment_size(sizes) * owned.dtype.itemsize
    return total
