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
    Pass,
    Prefetcher,
    Presence,
    Resident,
    moment_size,
)
from gulliver.parallel.zero._elementwise import state_tensors
from gulliver.parallel.zero._reducer import IN_FLIGHT
from gulliver.parallel.zero._sharded import ShardedChunk
from gulliver.parallel.zero._shards import ShardedState

Event = tuple[str, int]


def predicted(shards: ShardedState) -> dict[str, int]:
    """Bytes of ``parameters``, ``gradients`` and ``optimizer_state`` when they are most together.

    Of a step with one backward, its gradients forgotten afterwards. Parameters: the whole chunks,
    or with stage 3 the shards and the chunks that are gathered at that moment. Gradients: buffers
    that are being filled or reduced, and the shards that are there. Optimizer state: moments, and
    float32 copies of 16-bit parameters.
    """
    record = shards.gatherer.record
    events = record.events if record.complete else list(_ordinary(shards))
    replay = _Replay(shards)
    for _ in range(2):  # the second begins with what the first has gathered ahead
        replay.run(events)
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

    def __init__(self, shards: ShardedState) -> None:
        self.stage, self.counter = shards.stage, ByteCounter()
        self.chunks = [_imagined(c, shards.stage) for c in shards.everything]
        self.engine = Prefetcher(self.chunks, self, shards.ahead)
        self.flying: deque[_Imagined] = deque()
        self.counter.add(OPTIMIZER_STATE, _state_bytes(shards))
        for sharded, chunk in zip(shards.everything, self.chunks, strict=True):
            home = sharded.chunk.home.nbytes
            if sharded.chunk.has_master:
                self.counter.add(OPTIMIZER_STATE, home)
            if self.stage < 3 or not sharded.chunk.has_master:
                self.counter.add(PARAMETERS, home if self.stage == 3 else chunk.nbytes)

    def run(self, events: Sequence[Event]) -> None:
        """One step, and what is forgotten after it."""
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
        if self.stage >= 2 and len(self.flying) > IN_FLIGHT:
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


def _imagined(sharded: ShardedChunk, stage: int) -> _Imagined:
    chunk = sharded.chunk
    return _Imagined(
        presence=Presence.ABSENT if stage == 3 else Presence.WHOLE,
        nbytes=chunk.nbytes,
        shard=chunk.layout.part_size * chunk.home.dtype.itemsize,
        handed=chunk.layout.parts == 1 and not chunk.has_master,
    )


def _ordinary(shards: ShardedState) -> Iterator[Event]:
    """A step of a model whose modules are used in the order of their parameters."""
    chunks = shards.everything
    if not chunks:
        return
    names = [(slot.name, n) for n, c in enumerate(chunks) for slot in c.chunk.layout.slots]
    yield Pass.FORWARD.name, -1
    for _, number in names:
        yield "used", number
    yield "forward ended", -1
    yield Pass.BACKWARD.name, -1
    missing = [len(c.chunk.layout.slots) for c in chunks]
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
    kept = [state_tensors(shards.inner, group) for group in groups]
    total = 0
    for sharded in shards.chunks:
        for number in range(max(kept, default=0)):
            sizes = [p.numel for p, _ in sharded.pieces if kept[shards.group_of(p.name)] > number]
            total += moment_size(sizes) * sharded.chunk.home.dtype.itemsize
    return total
