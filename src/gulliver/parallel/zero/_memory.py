"""Bytes that a rank will hold: a step of training, replayed with chunks that are plain numbers.

What is gathered together, and how long gradients have whole buffers, is decided by the engines that
run the step; the replay asks the same `Prefetcher`, and lands reductions by the same rule. So the
peak is not a sum of the peaks of parameters and gradients, which come at different moments. The
step is the one that was recorded; before the first it is what an ordinary model does: modules in
their order, and backward through them, the gradients of a module together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from gulliver.memory import (
    GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    ByteCounter,
    Manager,
    Pass,
    Prefetcher,
    Presence,
    Resident,
    moment_size,
)
from gulliver.parallel.zero._elementwise import state_sizes
from gulliver.parallel.zero._reducer import IN_FLIGHT
from gulliver.parallel.zero._shards import ShardedState

Event = tuple[str, int]


@dataclass(frozen=True)
class ChunkBytes:
    """A chunk in numbers.

    Attributes:
        names: names of its parameters, in order.
        whole: bytes of all of it.
        shard: bytes of the part that a rank steps.
        trained: whether it is stepped.
        copied: whether the shard is a copy in a wider dtype.
    """

    names: Sequence[str]
    whole: int
    shard: int
    trained: bool = True
    copied: bool = False


def predicted(shards: ShardedState) -> dict[str, int]:
    """Bytes that a rank will hold of what it has, see `held_bytes`; with tiers, in the fast one."""
    record = shards.gatherer.record
    chunks = [
        ChunkBytes(
            tuple(c.chunk.parameters),
            c.chunk.nbytes,
            c.chunk.home.nbytes,
            c.trained,
            c.chunk.has_master,
        )
        for c in shards.everything
    ]
    events = record.events if record.complete else None
    options = shards.stage, shards.parts, shards.ahead, _state_bytes(shards)
    found = held_bytes(chunks, *options, events)
    return found if shards.manager is None else _within(found, shards.manager)


def _within(found: dict[str, int], manager: Manager) -> dict[str, int]:
    """What of it a manager has in the fast tier: all, or as much as fits, by what it has seen."""
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
    """Bytes of ``parameters``, ``gradients`` and ``optimizer_state`` when they are most together.

    Of a step with one backward, its gradients forgotten afterwards. Parameters: the whole chunks,
    or with stage 3 the shards and the chunks that are gathered at that moment. Gradients: buffers
    that are being filled or reduced, and the shards that are there. Optimizer state: what the
    optimizer keeps, and float32 copies of 16-bit parameters.

    Args:
        chunks: chunks in the order of use.
        stage: stage of ZeRO.
        parts: number of shards of a chunk.
        ahead: number of chunks that stage 3 gathers ahead.
        state: bytes that the optimizer itself keeps.
        events: record of a step; None for one in the order of the parameters.
    """
    replay = _Replay(chunks, stage, parts, ahead, state)
    for _ in range(2):  # the second begins with what the first has gathered ahead
        replay.run(list(_ordinary(chunks)) if events is None else events)
    return replay.counter.fullest


@dataclass(eq=False, kw_only=True)
class _Imagined(Resident):
    """A chunk as numbers of bytes.

    Attributes:
        nbytes: size of the whole chunk.
        shard: size of its reduced gradient.
        handed: whether the reduced gradient is the buffer itself.
        buffer: bytes of its gradient buffer that are there.
        reduced: bytes of its reduced gradient that are there.
    """

    nbytes: int
    shard: int
    handed: bool
    buffer: int = 0
    reduced: int = 0


class _Replay:
    """Replays events and counts."""

    def __init__(
        self, chunks: Sequence[ChunkBytes], stage: int, parts: int, ahead: int, state: int
    ) -> None:
        self.stage, self.counter = stage, ByteCounter()
        self.in_flight = IN_FLIGHT if parts > 1 else 0
        presence = Presence.ABSENT if stage == 3 else Presence.WHOLE
        self.chunks = [
            _Imagined(
                presence=presence,
                nbytes=chunk.whole,
                shard=chunk.shard,
                handed=parts == 1 and not chunk.copied,
            )
            for chunk in chunks
        ]
        self.engine = Prefetcher(self.chunks, self, ahead)
        self.flying: deque[_Imagined] = deque()
        self.counter.add(OPTIMIZER_STATE, state + sum(c.shard for c in chunks if c.copied))
        held = [c.shard * (not c.copied) if stage == 3 else c.whole for c in chunks]
        self.counter.add(PARAMETERS, sum(held))

    def run(self, events: Sequence[Event]) -> None:
        """Replays one step, and what is forgotten after it."""
        for what, number in events:
            if what in ("collecting", "reduced"):
                getattr(self, what)(self.chunks[number])
            elif self.stage == 3:
                self.passes(what, number)
        self.land_all()
        for chunk in self.chunks:
            self.drop(chunk)

    def passes(self, what: str, number: int) -> None:
        """What moves parameters."""
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
            self.land_all()
            self.engine.prefetch()

    # What the prefetcher asks for.

    def bring(self, chunk: _Imagined) -> None:
        """Makes a buffer, where there is none."""
        self.finish(chunk)
        if chunk.presence is Presence.ABSENT:
            self.counter.add(PARAMETERS, chunk.nbytes)
        chunk.enter(Presence.ARRIVING)

    def finish(self, chunk: _Imagined) -> None:
        """Everything is there when it is asked for."""
        if chunk.presence is Presence.ARRIVING:
            chunk.enter(Presence.WHOLE)

    def release(self, chunk: _Imagined) -> None:
        """Gives the buffer back."""
        self.finish(chunk)
        if chunk.presence is Presence.WHOLE:
            self.counter.add(PARAMETERS, -chunk.nbytes)
            chunk.enter(Presence.ABSENT)

    # What `GradientReducer` does.

    def collecting(self, chunk: _Imagined) -> None:
        """The first gradient arrives."""
        if chunk in self.flying:
            self.land_all()
        self.counter.add(GRADIENTS, chunk.nbytes - chunk.buffer)
        chunk.buffer = chunk.nbytes

    def reduced(self, chunk: _Imagined) -> None:
        """All have arrived."""
        if not chunk.handed:
            self.counter.add(GRADIENTS, chunk.shard)
        self.flying.append(chunk)
        if self.stage >= 2 and len(self.flying) > self.in_flight:
            self.land(self.flying.popleft())

    def land(self, chunk: _Imagined) -> None:
        """The shard has its part."""
        if chunk.reduced:
            self.counter.add(GRADIENTS, -chunk.shard)  # it was added to what there was
        chunk.reduced = chunk.shard
        if chunk.handed:
            chunk.buffer = 0
        elif self.stage != 1:
            self.counter.add(GRADIENTS, -chunk.buffer)
            chunk.buffer = 0

    def land_all(self) -> None:
        """Every shard has its part."""
        while self.flying:
            self.land(self.flying.popleft())

    def drop(self, chunk: _Imagined) -> None:
        """The gradient is forgotten."""
        self.counter.add(GRADIENTS, -chunk.reduced)
        chunk.reduced = 0


def _ordinary(chunks: Sequence[ChunkBytes]) -> Iterator[Event]:
    """A step of a model whose modules are used in the order of their parameters."""
    if not chunks:
        return
    names = [(name, number) for number, chunk in enumerate(chunks) for name in chunk.names]
    yield Pass.FORWARD.name, -1
    for _, number in names:
        yield "used", number
    yield "forward ended", -1
    yield Pass.BACKWARD.name, -1
    missing = [len(chunk.names) for chunk in chunks]
    following = deque(n for n in range(len(chunks) - 1, -1, -1) if chunks[n].trained)
    begun: set[int] = set()
    for _, module in groupby(reversed(names), key=lambda entry: entry[0].rpartition(".")[0]):
        members = [number for _, number in module]
        yield from (("used", number) for number in members)
        for number in members:
            missing[number] -= 1
            if chunks[number].trained and number not in begun:
                begun.add(number)
                yield "collecting", number
            while following and missing[following[0]] == 0:
                yield "reduced", following.popleft()
    yield "backward ended", -1
    yield "released", -1
    yield "prefetched", -1


def _state_bytes(shards: ShardedState) -> int:
    """Bytes of the optimizer's state, as it will lie in the buffers of chunks."""
    groups = shards.inner.param_groups
    total = 0
    for sharded in shards.chunks:
        for piece, owned in sharded.pieces:
            group = groups[shards.group_of(piece.name)]
            sizes = state_sizes(shards.inner, group, owned.shape)
            total += moment_size(sizes) * owned.dtype.itemsize
    return total
