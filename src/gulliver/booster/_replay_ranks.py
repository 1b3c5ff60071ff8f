"""Steps of a rank that has others, replayed by the rules of the engines that gather and reduce."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from gulliver.booster._state_bytes import BACKWARD, BEGIN, FORWARD, REDUCE, UPDATE, Key, StateBytes
from gulliver.memory import GRADIENTS, PARAMETERS, Prefetcher
from gulliver.parallel.zero import (
    Event,
    ImaginedChunk,
    StepReplay,
    backward_uses,
    ordinary_step,
)
from gulliver.plan import Tiers
from gulliver.solve import UPDATE_LAG


class Replay(Protocol):
    """What is asked of the replay whose objects come and go; see `_replay.py`."""

    state: StateBytes
    tiers: Tiers

    def visit(self, phase: str, number: int) -> None: ...
    def keep(self, number: int) -> None: ...
    def restore(self, number: int) -> None: ...
    def update(self, number: int) -> None: ...
    def discard(self, number: int) -> None: ...
    def forget(self, key: Key) -> None: ...
    def use(self, key: Key, write: bool = False, fresh: bool = False) -> None: ...
    def done(self, key: Key) -> None: ...
    def lend(self, nbytes: int, kind: str) -> None: ...
    def give(self, nbytes: int, kind: str) -> None: ...


class SeveralRanks(StepReplay):
    """Steps of a rank that has others, by the rules of the engines that gather and reduce."""

    def __init__(self, replay: Replay, in_flight: int) -> None:
        state = replay.state
        super().__init__(state.chunks, 3, state.ahead, in_flight, tight=True)
        self._replay, self._early = replay, replay.tiers.step_in_backward
        self._phase, self._visited = FORWARD, set[int]()
        self._sent, self._unstepped = deque[ImaginedChunk](), list[ImaginedChunk]()

    def step(self) -> None:
        """Replays a step."""
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
            self._replay.lend(chunk.size.whole, PARAMETERS)
        self._replay.use(("home", chunk.number))
        self._replay.done(("home", chunk.number))

    def gives_back(self, chunk: ImaginedChunk) -> None:
        self._replay.give(chunk.size.whole, PARAMETERS)

    def collects(self, chunk: ImaginedChunk) -> None:
        self._replay.lend(chunk.size.whole, GRADIENTS)

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
        self._replay.give(chunk.size.whole, GRADIENTS)
        self._replay.done(("gradient", chunk.number))

    def _step(self) -> None:
        """Steps what backward has not."""
        self._sent.clear()
        for chunk in self._unstepped[:]:
            self._replay.visit(UPDATE, chunk.number)
            self._update(chunk)

    def _update(self, chunk: ImaginedChunk) -> None:
        self._unstepped.remove(chunk)
        self.land(chunk)
        self._replay.update(chunk.number)
        if self._early:
            self._replay.discard(chunk.number)


class MicroBatches(SeveralRanks):
    """Steps of a pipeline: gradients add up in objects until the last micro-batch, see `Replay`."""

    def __init__(self, replay: Replay, in_flight: int) -> None:
        super().__init__(replay, in_flight)
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
        """Uses and gradients of a micro-batch; each chunk's rest when all of it has come."""
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
    """Steps of ranks with unequal work: each has copies of whole chunks, made when a step begins.

    Nothing is gathered or reduced until the last micro-batch, so a chunk comes and goes as those of
    a rank that is alone.
    """

    def __init__(self, replay: Replay, in_flight: int) -> None:
        super().__init__(replay, in_flight)
        self.engine = Prefetcher(self.chunks, self, 0, every=False, tight=True)

    def step(self) -> None:
        for chunk in self.chunks:
            self._replay.visit(BEGIN, chunk.number)
            self._replay.use(("copy", chunk.number), fresh=True)
            self._replay.use(("home", chunk.number))
            self._replay.done(("home", chunk.number))
            self._replay.done(("copy", chunk.number))
        super().step()

    def _events(self) -> Iterator[Event]:
        """Micro-batches, the end of the copies, and reductions."""
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
