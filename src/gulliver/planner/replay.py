"""Replays training steps under a memory limit, with chunks as plain numbers.

The replay runs the memory manager's own policy (`gulliver.solve.replacement.Replacement`), so it
predicts the actual moves. Nothing is allocated, and the model may be on the meta device. Start
reading at `Replay.step`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from gulliver.errors import GulliverError
from gulliver.io.engine import BLOCK
from gulliver.memory.buffers import GRADIENTS, OPTIMIZER_STATE, PARAMETERS, ByteCounter
from gulliver.memory.prefetch import Prefetcher
from gulliver.memory.stores import whole_pages
from gulliver.parallel.zero.chunks import UPDATE_LAG
from gulliver.parallel.zero.memory import (
    Event,
    ImaginedChunk,
    StepReplay,
    backward_uses,
    ordinary_step,
)
from gulliver.parallel.zero.reduce import IN_FLIGHT
from gulliver.plan.tree import Tiers
from gulliver.planner.state_bytes import (
    BACKWARD,
    BEGIN,
    FORWARD,
    REDUCE,
    UPDATE,
    Key,
    Shares,
    StateBytes,
)
from gulliver.solve.replacement import Action, MiddleReplacement, Move, Policy, Replacement

WINDOW = 2  # minimum number of chunks whose parameters are on the device together


@dataclass
class PendingMove:
    """A pending transfer of an object between tiers."""

    key: Key
    # Bytes that move, in full pages; 0 for new memory, which is not read.
    nbytes: int
    # Whether it leaves device memory.
    write: bool
    # Bytes of writes in flight that leave memory for it.
    room: int = 0
    # Number of visits until it is used.
    until: int = 0


@dataclass
class ReplayedUse:
    """One access to a chunk, and the moves it caused."""

    # Part of the step.
    phase: str
    # Number of the chunk.
    chunk: int
    # Reads and writes, in order.
    moves: list[PendingMove] = field(default_factory=list)
    # The same between host and disk.
    behind: list[PendingMove] = field(default_factory=list)
    # Peak bytes of device memory by kind until the next visit.
    held: dict[str, int] = field(default_factory=dict)

    def note(self, counter: ByteCounter) -> None:
        if counter.total > sum(self.held.values()):
            self.held = dict(counter.live)


@dataclass
class TierContents:
    """Objects in a tier during a replay."""

    core: Replacement
    # Objects in it.
    keys: set[Key] = field(default_factory=set)
    # Objects evicted from it in the last step.
    left: set[Key] = field(default_factory=set)
    # Bytes of the objects in it.
    bytes: int = 0
    # Moves of objects that were not used since, and the visits in which they began.
    coming: dict[Key, tuple[PendingMove, int]] = field(default_factory=dict)

    def move(self, move: Move, key: Key, size: int, visits: int) -> PendingMove | None:
        """Moves an object; returns the transfer, or None if none is needed."""
        if move in (Move.LOAD, Move.MAKE):
            self.keys.add(key)
            self.bytes += size
            room = self.core.budget - self.core.lent - self.bytes
            coming = PendingMove(key, size * (move is Move.LOAD), False, room)
            self.coming[key] = coming, visits
            return coming
        if key not in self.keys:
            return None
        self.keys.remove(key)
        self.bytes -= size
        if move is not Move.FORGET:
            self.left.add(key)
        return PendingMove(key, size, True) if move is Move.WRITE else None

    def used(self, key: Key, visits: int) -> None:
        """Records how many visits passed between a transfer's start and the object's first use."""
        if key in self.coming:
            coming, sent = self.coming.pop(key)
            coming.until = visits - sent


class Replay:
    """Replays training steps."""

    def __init__(
        self,
        state: StateBytes,
        budget: int,
        backed: bool,
        tiers: Tiers,
        policy: Policy = "planned",
    ) -> None:
        self.state, self.tiers = state, tiers
        self.counter, self.decides = ByteCounter(), 0
        # Peak bytes of device memory, in use or not.
        self.most = 0
        ahead = tiers.ahead or None
        self._core = Replacement(budget, backed=backed, ahead=ahead, policy=policy)
        # Contents of device memory.
        self.held = TierContents(self._core)
        self._middle = None
        if tiers.host and tiers.disk is not None:
            host, disk = (n // BLOCK * BLOCK for n in (tiers.host, tiers.disk_bytes))
            self._middle = MiddleReplacement(host, disk, self._run_behind, policy)
        # Contents of host memory with a disk behind it; None without three tiers.
        self.behind = None if self._middle is None else TierContents(self._middle.core)
        self._seen: list[ReplayedUse] = []
        self._visits = 0
        self._objects = {o.key: o for o in state.objects()}
        self._together = state.together()
        engines = MicroBatches if state.passes else MultiRankReplay
        engines = UnequalRanks if state.has_copies else engines
        self._ranks = engines(self) if state.parts > 1 else None
        self._homes = {name: n for n, chunk in enumerate(state.chunks) for name in chunk.names}
        self._entered, self._collected = deque[int](), deque[int]()
        self._kept: list[int] = []
        self._stepped = set[int]()
        # The first module computes no gradient of its input, so backward does not read its values.
        first = {name.rpartition(".")[0] for chunk in state.chunks[:1] for name in chunk.names}
        self._begins_alone = len(first) == 1
        shares = Shares.of(tiers)
        self.visit(FORWARD, 0)
        for one in self._objects.values():
            filled = one.key[0] == "master"
            name = f"{one.kind} of chunk {one.chunk}"
            self._run(self._core.add(one.key, name, whole_pages(one.nbytes), filled))
            if one.key[0] == "copy" or shares is None:
                continue  # a copy exists during a step
            if shares.keeps(one.kind, one.nbytes):
                self._run(self._core.use(one.key, write=True))

    @property
    def minimum(self) -> int:
        """Peak bytes in use at the same time so far; no policy needs less."""
        return self._core.minimum

    def step(self) -> list[ReplayedUse]:
        self._seen = []
        for held in (self.held, self.behind):
            if held is not None:
                held.left.clear()
        self.visit(BEGIN, 0)
        for number in self._kept:
            self.discard(number)
        self._kept.clear()
        if self._ranks is None:
            self._alone()
        else:
            self._ranks.step()
        self._core.end_step()
        if self._middle is not None:
            self._middle.core.end_step()
        return self._seen

    # [Note: bytes in use together] A single rank computes with the objects that hold its parameters
    # and gradients: they are held from the first use of a module until the next module's, and a
    # module may have parameters in several chunks. With several ranks, or master weights, full
    # chunks are gathered into temporary buffers, and an object is held only while it is copied;
    # reduced gradients are held while in flight. The number in flight depends on memory: without
    # room, the rank waits for them.

    def _alone(self) -> None:
        count = range(len(self.state.chunks))
        if self.state.passes:
            self._micro_batches()
        else:
            self._one_batch(count)
        if not self.tiers.step_in_backward:
            for number in count:
                self.visit(UPDATE, number)
                self.update(number)

    def _one_batch(self, count: range) -> None:
        for number in count:
            self.visit(FORWARD, number)
            self._enter(number)
            self.keep(number)
        self._leave(1)  # backward begins with the last
        for number in reversed(count):
            self.visit(BACKWARD, number)
            self._backward(number)
        while self._collected:
            self._finish_reduction(self._collected[0])
        self._entered = deque(sorted(self._entered))
        self._leave(0)

    # [Note: micro-batches] Every forward and backward of a pipeline uses the parameters again, and
    # gradients are reduced after the last one. In between each gradient may be offloaded as soon as
    # its micro-batch has been added, so no more is in use at once than in a step of one batch.

    def _micro_batches(self) -> None:
        begun = set[int]()
        for phase, names in self.state.passes:
            numbers = sorted({self._homes[name] for name in names})
            if phase == FORWARD:
                self._leave(0)
                for number in numbers:
                    self.visit(FORWARD, number)
                    self._enter(number)
                self._leave(1)
                continue
            for number in reversed(numbers):
                self.visit(BACKWARD, number)
                self._enter(number)
                self._add_up(number, begun)
            for number in [*self._collected]:
                self._rest(number)
            self._entered = deque(sorted(self._entered))
            self._leave(0)
        for number in reversed(range(len(self.state.chunks))):
            if self.state.chunks[number].trained:
                self.visit(REDUCE, number)
                self._reduce(number, number in begun)

    def _add_up(self, number: int, begun: set[int]) -> None:
        if self.state.chunks[number].trained:
            self.use(self._sum(number), write=number in begun, fresh=number not in begun)
            begun.add(number)
            self._collected.append(number)
        for landed in [n for n in self._collected if self._together[n][0] >= number]:
            self._rest(landed)

    def _rest(self, number: int) -> None:
        self._collected.remove(number)
        self.done(self._sum(number))

    def _sum(self, number: int) -> Key:
        return ("collected" if self.state.is_gathered(number) else "gradient", number)

    def _reduce(self, number: int, begun: bool) -> None:
        self.use(self._sum(number), write=begun, fresh=not begun)
        if self.state.is_gathered(number):
            self.use(("gradient", number), fresh=True)
        self.done(("gradient", number))
        if self.state.is_gathered(number):
            self.done(("collected", number))
            self.forget(("collected", number))

    def _enter(self, number: int) -> None:
        if number in self._entered:
            return
        first, last = self._together[number]
        self._leave(max(WINDOW, last - first + 1) - 1)
        if self.state.chunks[number].copied:
            self.allocate(self.state.chunks[number].whole, PARAMETERS)
        self.use(("master", number))
        if self.state.chunks[number].copied:
            self.done(("master", number))
        self._entered.append(number)

    def _leave(self, width: int) -> None:
        while len(self._entered) > width:
            self._exit(self._entered.popleft())

    def _exit(self, number: int) -> None:
        if self.state.chunks[number].copied:
            self.free(self.state.chunks[number].whole, PARAMETERS)
        else:
            self.done(("master", number))

    def keep(self, number: int) -> None:
        for key in self._activations(number):
            self.use(key, fresh=True)
            self.done(key)

    def restore(self, number: int) -> None:
        for key in reversed(self._activations(number)):
            self.use(key)
            self.done(key)
            self.forget(key)

    def _activations(self, number: int) -> list[Key]:
        sizes = self.state.activations[number] if self.state.activations else ()
        return [("activation", number, part) for part in range(len(sizes))]

    def _backward(self, number: int) -> None:
        if number > 0 or not self._begins_alone:
            self._enter(number)
        self.restore(number)
        chunk = self.state.chunks[number]
        if chunk.trained and chunk.copied:
            self.allocate(chunk.whole, GRADIENTS)
        elif chunk.trained:
            self.use(("gradient", number), fresh=True)
        if chunk.trained:
            self._collected.append(number)
        for landed in [n for n in self._collected if self._together[n][0] >= number]:
            self._finish_reduction(landed)

    def _finish_reduction(self, number: int) -> None:
        """Completes a chunk's reduction; updates it if the optimizer steps in backward."""
        self._collected.remove(number)
        if self.state.chunks[number].copied:
            self.use(("gradient", number), fresh=True)
            self.free(self.state.chunks[number].whole, GRADIENTS)
        if self.tiers.step_in_backward:
            if number in self._entered:
                self._entered.remove(number)
                self._exit(number)
            self.update(number)
        self.done(("gradient", number))
        if self.tiers.step_in_backward:
            self.discard(number)

    def update(self, number: int) -> None:
        if not self.state.chunks[number].trained:
            return
        moments: list[Key] = [("moment", number, n) for n in range(len(self.state.moments[number]))]
        gradient: Key = ("gradient", number)
        first = number not in self._stepped
        self._stepped.add(number)
        extra = sum(self.state.moments[number]) * (first and self.state.moments_twice)
        keys: list[Key] = [("master", number), *moments, gradient]
        if first:  # moments are allocated when the step needs them
            keys = [("master", number), gradient, *moments]
        for key in keys:
            if extra and key == moments[0]:
                self.allocate(extra, OPTIMIZER_STATE)
            self.use(key, write=key != gradient, fresh=first and key in moments)
        if extra:
            self.free(extra, OPTIMIZER_STATE)
        for key in reversed(keys):
            self.done(key)
        if not self.tiers.step_in_backward:
            self._kept.append(number)  # until zero_grad

    # Requests to the manager.

    def use(self, key: Key, write: bool = False, fresh: bool = False) -> None:
        self._decide(lambda: self._core.use(key, write, fresh))
        self.held.used(key, self._visits)
        if self._middle is not None and self.behind is not None:
            self._middle.used(key, write or fresh)
            self.behind.used(key, self._visits)

    def done(self, key: Key) -> None:
        self._run(self._core.done(key))

    def discard(self, number: int) -> None:
        self.forget(("gradient", number))

    def forget(self, key: Key) -> None:
        self._run(self._core.discard(key))

    def allocate(self, nbytes: int, kind: str) -> None:
        self._decide(lambda: self._core.allocate_buffer(whole_pages(nbytes), f"a buffer of {kind}"))
        self.counter.add(kind, nbytes)
        self._seen[-1].note(self.counter)

    def free(self, nbytes: int, kind: str) -> None:
        self.counter.add(kind, -nbytes)
        self._run(self._core.free_buffer(whole_pages(nbytes)))

    def _decide(self, decide: Callable[[], list[Action]]) -> None:
        before = self._core.minimum
        try:
            actions = decide()
        except GulliverError:
            if self._ranks is None or not self._ranks.flying:
                raise
            self._ranks.wait_all_reductions()
            actions = decide()
        self._run(actions)
        if self._core.minimum > before:
            # Number of the chunk at whose use the peak occurred.
            self.decides = self._seen[-1].chunk

    def visit(self, phase: str, number: int) -> None:
        self._visits += 1
        self._seen.append(ReplayedUse(phase, number))
        self._seen[-1].note(self.counter)

    def _run(self, actions: Iterable[Action]) -> None:
        seen = self._seen[-1]
        for action in actions:
            assert isinstance(action.key, tuple)
            one = self._objects[action.key]
            size, before = whole_pages(one.nbytes), self.held.bytes
            moved = self.held.move(action.move, one.key, size, self._visits)
            if self.held.bytes != before:
                sign = 1 if self.held.bytes > before else -1
                self.counter.add(one.kind, sign * one.nbytes)
                seen.note(self.counter)
            seen.moves += [moved] if moved is not None else []
            if self._middle is not None:
                self._middle.follow(action, size)
        self.most = max(self.most, self._core.used)

    def _run_behind(self, actions: Iterable[Action]) -> None:
        assert self.behind is not None
        for action in actions:
            assert isinstance(action.key, tuple)
            size = whole_pages(self._objects[action.key].nbytes)
            moved = self.behind.move(action.move, action.key, size, self._visits)
            self._seen[-1].behind += [moved] if moved is not None else []


class MultiRankReplay(StepReplay):
    """Replays steps of one of several ranks, with ZeRO's all-gathers and reduce-scatters."""

    def __init__(self, replay: Replay) -> None:
        state = replay.state
        super().__init__(state.chunks, 3, state.ahead, IN_FLIGHT, tight=True)
        self._replay, self._early = replay, replay.tiers.step_in_backward
        self._phase, self._visited = FORWARD, set[int]()
        self._sent, self._unstepped = deque[ImaginedChunk](), list[ImaginedChunk]()

    def step(self) -> None:
        state = self._replay.state
        self.run(ordinary_step(state.chunks, state.order, state.blocks))

    def passes(self, what: str, number: int) -> None:
        if what in (FORWARD.upper(), BACKWARD.upper()):
            self._phase = what.lower()
            self._visited.clear()
            self._unstepped = [chunk for chunk in self.chunks if chunk.size.trained]
        elif what == "backward ended":
            while self._early and self._sent:
                self._step_sent()
        begins = what == "used" and number not in self._visited
        if begins:
            self._visited.add(number)
            self._replay.visit(self._phase, number)
            if self._phase == BACKWARD:
                self._replay.restore(number)
        super().passes(what, number)
        if begins and self._phase == FORWARD:
            self._replay.keep(number)
        if what == "released":
            self._step()

    def gathers(self, chunk: ImaginedChunk, fresh: bool) -> None:
        if fresh:
            self._replay.allocate(chunk.size.whole, PARAMETERS)
        self._replay.use(("master", chunk.number))
        self._replay.done(("master", chunk.number))

    def gives_back(self, chunk: ImaginedChunk) -> None:
        self._replay.free(chunk.size.whole, PARAMETERS)

    def collects(self, chunk: ImaginedChunk) -> None:
        self._replay.allocate(chunk.size.whole, GRADIENTS)

    def sends(self, chunk: ImaginedChunk) -> None:
        self._replay.use(("gradient", chunk.number), fresh=True)

    def _reduce(self, chunk: ImaginedChunk) -> None:
        super()._reduce(chunk)
        self._sent.append(chunk)
        while self._early and len(self._sent) > UPDATE_LAG:
            self._step_sent()

    def _step_sent(self) -> None:
        sent = self._sent.popleft()
        self.release(sent)
        self._update(sent)

    def lands(self, chunk: ImaginedChunk) -> None:
        self._replay.free(chunk.size.whole, GRADIENTS)
        self._replay.done(("gradient", chunk.number))

    def _step(self) -> None:
        self._sent.clear()
        for chunk in self._unstepped[:]:
            self._replay.visit(UPDATE, chunk.number)
            self._update(chunk)

    def _update(self, chunk: ImaginedChunk) -> None:
        self._unstepped.remove(chunk)
        self.wait_reduction(chunk)
        self._replay.update(chunk.number)
        if self._early:
            self._replay.discard(chunk.number)


class MicroBatches(MultiRankReplay):
    """Replays a pipelined step, which accumulates gradients until the last micro-batch."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self._homes = {n: c.number for c in self.chunks for n in c.size.names}
        self._begun, self._open = set[int](), set[int]()

    def step(self) -> None:
        self._begun.clear()
        self.run(self._events())

    def _events(self) -> Iterator[Event]:
        for phase, names in self._replay.state.passes:
            yield phase.upper(), -1
            if phase == FORWARD:
                yield from (("used", self._homes[name]) for name in names)
            else:
                yield from self._backward(names)
            yield f"{phase} ended", -1
        for chunk in reversed(self.chunks):
            if chunk.size.trained:
                yield "reduced", chunk.number
        yield "released", -1
        yield "prefetched", -1

    def _backward(self, names: tuple[str, ...]) -> Iterator[Event]:
        left = {number: set(self.chunks[number].size.names) for number in self._homes.values()}
        first = {name: place for place, name in reversed(list(enumerate(names)))}
        for uses, members in backward_uses(names, self._replay.state.blocks):
            yield from (("used", self._homes[name]) for name in uses)
            for place, name in members:
                number = self._homes[name]
                if place == first[name] and self.chunks[number].size.trained:
                    yield "collecting", number
                    left[number].discard(name)
                    if not left[number]:
                        yield "resting", number
        yield from (("resting", number) for number in list(self._open))

    def passes(self, what: str, number: int) -> None:
        if what == "resting":
            self._open.remove(number)
            self._replay.done(("collected", number))
        else:
            super().passes(what, number)

    def collects(self, chunk: ImaginedChunk) -> None:
        if chunk.number not in self._open:
            self._open.add(chunk.number)
            self._add_up(chunk.number)

    def _add_up(self, number: int) -> None:
        begun = number in self._begun
        self._replay.use(("collected", number), write=begun, fresh=not begun)
        self._begun.add(number)

    def sends(self, chunk: ImaginedChunk) -> None:
        self._replay.visit(REDUCE, chunk.number)
        self._add_up(chunk.number)
        super().sends(chunk)

    def lands(self, chunk: ImaginedChunk) -> None:
        key: Key = ("collected", chunk.number)
        self._replay.done(key)
        self._replay.forget(key)
        self._replay.done(("gradient", chunk.number))


class UnequalRanks(MicroBatches):
    """Replays steps of ranks with unequal work, which copy full chunks when a step begins.

    Nothing is gathered or reduced until the last micro-batch, so chunks move as on a single rank.
    """

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self.engine = Prefetcher(self.chunks, self, 0, every=False, tight=True)

    def step(self) -> None:
        for chunk in self.chunks:
            self._replay.visit(BEGIN, chunk.number)
            self._replay.use(("copy", chunk.number), fresh=True)
            self._replay.use(("master", chunk.number))
            self._replay.done(("master", chunk.number))
            self._replay.done(("copy", chunk.number))
        super().step()

    def _events(self) -> Iterator[Event]:
        *events, _ = super()._events()
        reduced = next(n for n, (what, _) in enumerate(events) if what == "reduced")
        yield from events[:reduced]
        yield "copies end", -1
        yield from events[reduced:]

    def passes(self, what: str, number: int) -> None:
        if what == "copies end":
            self.engine.release_all()
            for chunk in self.chunks:
                self._replay.forget(("copy", chunk.number))
        else:
            super().passes(what, number)

    def gathers(self, chunk: ImaginedChunk, fresh: bool) -> None:
        self._replay.use(("copy", chunk.number))

    def gives_back(self, chunk: ImaginedChunk) -> None:
        self._replay.done(("copy", chunk.number))
