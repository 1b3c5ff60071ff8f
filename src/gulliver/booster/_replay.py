"""Steps of training under a memory limit, replayed with chunks that are plain numbers.

The replay asks the very rules by which the memory manager decides (`gulliver.solve.Replacement`):
so bytes that a plan says will move are those that move. Nothing is allocated, and a model may be on
meta. Read `Replay.step` first: the order in which training uses state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gulliver.errors import GulliverError
from gulliver.memory import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    ByteCounter,
    whole_pages,
)
from gulliver.parallel.zero import (
    IN_FLIGHT,
    ChunkBytes,
    ImaginedChunk,
    StepReplay,
    ordinary_step,
)
from gulliver.plan import Tiers
from gulliver.solve import UPDATE_LAG, Action, Move, Policy, Replacement

BEGIN, FORWARD, BACKWARD, UPDATE = "begin", "forward", "backward", "update"
WINDOW = 2
"""Chunks whose parameters are in use at once at least: the present one, and the one before it."""
Key = tuple[str, *tuple[int, ...]]


@dataclass(frozen=True)
class StateObject:
    """State that has a place of its own.

    Attributes:
        key: what it is, and of which chunk.
        kind: kind of state.
        nbytes: size, in bytes.
        chunk: number of its chunk.
    """

    key: Key
    kind: str
    nbytes: int
    chunk: int


@dataclass(frozen=True)
class StateBytes:
    """State of a rank in numbers.

    Attributes:
        chunks: chunks in the order of use.
        moments: bytes of each tensor that the optimizer keeps of a chunk, by chunk.
        parts: number of shards of a chunk.
        ahead: number of chunks that are gathered from other ranks ahead of use.
        order: names of the parameters in the order of use; a tied one is there at each use.
        beside: whether the first step of a chunk has its new moments beside those that are placed.
        activations: bytes of each activation that leaves, by the chunk that is used before it.
        later: bytes that there would be more if what the optimizer may step were all unfrozen.
    """

    chunks: tuple[ChunkBytes, ...]
    moments: tuple[tuple[int, ...], ...]
    parts: int
    ahead: int
    order: tuple[str, ...] = ()
    beside: bool = False
    activations: tuple[tuple[int, ...], ...] = ()
    later: int = 0

    @property
    def total(self) -> int:
        """Bytes of everything that has a place of its own, whole pages each."""
        return sum(whole_pages(o.nbytes) for o in self.objects())

    @property
    def reserved(self) -> int:
        """Bytes that are of use behind: those, whole gradients, which may wait, and `later`."""
        waiting = sum(whole_pages(c.whole) for c in self.chunks if c.trained)
        return self.total + waiting + self.later

    def objects(self) -> Iterator[StateObject]:
        """What has a place of its own, in the order in which it is made."""
        for number, chunk in enumerate(self.chunks):
            kind = OPTIMIZER_STATE if chunk.copied else PARAMETERS
            yield StateObject(("home", number), kind, chunk.shard, number)
        for number, (chunk, sizes) in enumerate(zip(self.chunks, self.moments, strict=True)):
            for moment, size in enumerate(sizes):
                yield StateObject(("moment", number, moment), OPTIMIZER_STATE, size, number)
            if chunk.trained:
                yield StateObject(("gradient", number), GRADIENTS, chunk.shard, number)
        for number, sizes in enumerate(self.activations):
            for part, size in enumerate(sizes):
                yield StateObject(("activation", number, part), ACTIVATIONS, size, number)


class Shares:
    """Decides by the order of objects alone which of them must stay: the policy ``static``.

    Args:
        leaving: share of the bytes of each kind that may leave.
    """

    def __init__(self, leaving: Mapping[str, float]) -> None:
        self._leaving = leaving
        self._seen, self._kept = dict.fromkeys(leaving, 0), dict.fromkeys(leaving, 0)

    @classmethod
    def of(cls, tiers: Tiers) -> Shares | None:
        """The shares of a plan; None where they are found, not said."""
        if tiers.policy == "auto":
            return None
        return cls({PARAMETERS: tiers.offload_param, OPTIMIZER_STATE: tiers.offload_optim})

    def keeps(self, kind: str, nbytes: int) -> bool:
        """Whether the next object of a kind must stay."""
        if kind not in self._leaving:
            return False
        self._seen[kind] += nbytes
        wanted = (1 - self._leaving[kind]) * self._seen[kind]
        stays = self._kept[kind] + nbytes <= wanted + 1e-9 * wanted
        self._kept[kind] += nbytes * stays
        return stays


@dataclass
class Coming:
    """A move of an object.

    Attributes:
        key: object.
        nbytes: bytes that are moved, in whole pages; 0 where memory is made, and nothing is read.
        write: whether it leaves the first memory.
        room: bytes of writes under way beside which there is memory for it.
        until: number of visits until it is used.
    """

    key: Key
    nbytes: int
    write: bool
    room: int = 0
    until: int = 0


@dataclass
class Seen:
    """A visit as it was replayed.

    Attributes:
        phase: part of the step.
        chunk: number of the chunk.
        moves: what is read and written, in order.
    """

    phase: str
    chunk: int
    moves: list[Coming] = field(default_factory=list)


class Replay:
    """Replays steps of training.

    Args:
        state: state of a rank.
        budget: bytes that state may have in the first memory.
        backed: whether there is memory behind it.
        tiers: how the state is used.
        policy: policy of replacement; one without a plan is faster found, and moves a little more.
        in_flight: number of chunks whose gradients travel between ranks at once, where there is
            room for them.

    Attributes:
        counter: bytes in the first memory, by kind.
        held: objects in the first memory.
        left: objects that have left it in the last step.
        decides: number of the chunk that needed most at once.
        most: bytes that were in the first memory at once, in use or not.
    """

    def __init__(
        self,
        state: StateBytes,
        budget: int,
        backed: bool,
        tiers: Tiers,
        policy: Policy = "planned",
        in_flight: int = IN_FLIGHT,
    ) -> None:
        self.state, self.tiers = state, tiers
        self.counter, self.decides = ByteCounter(), 0
        self.held, self.left = set[Key](), set[Key]()
        self.most = self._held_bytes = 0
        ahead = tiers.ahead or None
        self._core = Replacement(budget, backed=backed, ahead=ahead, policy=policy)
        self._seen: list[Seen] = []
        self._coming: dict[Key, tuple[Coming, int]] = {}
        self._visits = 0
        self._objects = {o.key: o for o in state.objects()}
        self._together = _together(state)
        self._ranks = _SeveralRanks(self, in_flight) if state.parts > 1 else None
        self._entered, self._collected = deque[int](), deque[int]()
        self._kept: list[int] = []
        self._stepped = set[int]()
        # What a model begins with has no gradient of its input to compute: values are not needed.
        first = {name.rpartition(".")[0] for chunk in state.chunks[:1] for name in chunk.names}
        self._begins_alone = len(first) == 1
        shares = Shares.of(tiers)
        self.visit(FORWARD, 0)
        for one in self._objects.values():
            filled = one.key[0] == "home"
            name = f"{one.kind} of chunk {one.chunk}"
            self._run(self._core.add(one.key, name, whole_pages(one.nbytes), filled))
            if shares is not None and shares.keeps(one.kind, one.nbytes):
                self._run(self._core.use(one.key, write=True))

    @property
    def minimum(self) -> int:
        """Bytes that were needed at once so far."""
        return self._core.minimum

    def step(self) -> list[Seen]:
        """Forward, backward and update, chunk after chunk."""
        self._seen, self.left = [], set()
        self.visit(BEGIN, 0)
        for number in self._kept:
            self.discard(number)
        self._kept.clear()
        if self._ranks is None:
            self._alone()
        else:
            self._ranks.run(ordinary_step(self.state.chunks, self.state.order))
        self._core.end_step()
        return self._seen

    # [Note: what is in use at once] A rank alone computes with the very objects that hold its
    # parameters, and collects gradients in those that hold them: they are pinned from the first use
    # of a module until the next one's, and a module may have parameters in several chunks. With
    # other ranks, or copies in a wider dtype, whole chunks are gathered into buffers that are lent,
    # and an object is pinned only while it is copied; reduced gradients are while they travel. How
    # many do is a matter of room: where there is none, those on their way are waited for.

    def _alone(self) -> None:
        count = range(len(self.state.chunks))
        for number in count:
            self.visit(FORWARD, number)
            self._enter(number)
            self.keep(number)
        self._leave(1)  # backward begins with the last
        for number in reversed(count):
            self.visit(BACKWARD, number)
            self._backward(number)
        while self._collected:
            self._land(self._collected[0])
        self._entered = deque(sorted(self._entered))
        self._leave(0)
        if not self.tiers.step_in_backward:
            for number in count:
                self.visit(UPDATE, number)
                self.update(number)

    def _enter(self, number: int) -> None:
        """Lets go of what a module no longer needs; uses the parameters of a chunk."""
        if number in self._entered:
            return
        first, last = self._together[number]
        self._leave(max(WINDOW, last - first + 1) - 1)
        if self.state.chunks[number].copied:
            self.lend(self.state.chunks[number].whole, PARAMETERS)
        self.use(("home", number))
        if self.state.chunks[number].copied:
            self.done(("home", number))
        self._entered.append(number)

    def _leave(self, width: int) -> None:
        while len(self._entered) > width:
            self._exit(self._entered.popleft())

    def _exit(self, number: int) -> None:
        if self.state.chunks[number].copied:
            self.give(self.state.chunks[number].whole, PARAMETERS)
        else:
            self.done(("home", number))

    def keep(self, number: int) -> None:
        """Takes the activations that leave once a chunk was used."""
        for key in self._activations(number):
            self.use(key, fresh=True)
            self.done(key)

    def restore(self, number: int) -> None:
        """Gives them back to backward."""
        for key in reversed(self._activations(number)):
            self.use(key)
            self.done(key)
            self._run(self._core.discard(key))

    def _activations(self, number: int) -> list[Key]:
        sizes = self.state.activations[number] if self.state.activations else ()
        return [("activation", number, part) for part in range(len(sizes))]

    def _backward(self, number: int) -> None:
        if number > 0 or not self._begins_alone:
            self._enter(number)
        self.restore(number)
        chunk = self.state.chunks[number]
        if chunk.trained and chunk.copied:
            self.lend(chunk.whole, GRADIENTS)
        elif chunk.trained:
            self.use(("gradient", number), fresh=True)
        if chunk.trained:
            self._collected.append(number)
        for landed in [n for n in self._collected if self._together[n][0] >= number]:
            self._land(landed)

    def _land(self, number: int) -> None:
        """A gradient is complete; the chunk is stepped, where that is done in backward."""
        self._collected.remove(number)
        if self.state.chunks[number].copied:
            self.use(("gradient", number), fresh=True)
            self.give(self.state.chunks[number].whole, GRADIENTS)
        if self.tiers.step_in_backward:
            if number in self._entered:
                self._entered.remove(number)
                self._exit(number)
            self.update(number)
        self.done(("gradient", number))
        if self.tiers.step_in_backward:
            self.discard(number)

    def update(self, number: int) -> None:
        """Steps a chunk."""
        if not self.state.chunks[number].trained:
            return
        moments: list[Key] = [("moment", number, n) for n in range(len(self.state.moments[number]))]
        gradient: Key = ("gradient", number)
        first = number not in self._stepped
        self._stepped.add(number)
        beside = sum(self.state.moments[number]) * (first and self.state.beside)
        keys: list[Key] = [("home", number), *moments, gradient]
        if first:  # moments are made where the step has need of them
            keys = [("home", number), gradient, *moments]
        for key in keys:
            if beside and key == moments[0]:
                self.lend(beside, OPTIMIZER_STATE)
            self.use(key, write=key != gradient, fresh=first and key in moments)
        if beside:
            self.give(beside, OPTIMIZER_STATE)
        for key in reversed(keys):
            self.done(key)
        if not self.tiers.step_in_backward:
            self._kept.append(number)  # until zero_grad

    # What is asked of the manager.

    def use(self, key: Key, write: bool = False, fresh: bool = False) -> None:
        """Uses an object."""
        self._decide(lambda: self._core.use(key, write, fresh))
        if key in self._coming:
            coming, sent = self._coming.pop(key)
            coming.until = self._visits - sent

    def done(self, key: Key) -> None:
        """Ends a use."""
        self._run(self._core.done(key))

    def discard(self, number: int) -> None:
        """Forgets the gradient of a chunk."""
        self._run(self._core.discard(("gradient", number)))

    def lend(self, nbytes: int, kind: str) -> None:
        """Lends a buffer."""
        self._decide(lambda: self._core.lend(whole_pages(nbytes), f"a buffer of {kind}"))
        self.counter.add(kind, nbytes)

    def give(self, nbytes: int, kind: str) -> None:
        """Takes a buffer back."""
        self.counter.add(kind, -nbytes)
        self._run(self._core.give(whole_pages(nbytes)))

    def _decide(self, decide: Callable[[], list[Action]]) -> None:
        before = self._core.minimum
        try:
            actions = decide()
        except GulliverError:
            if self._ranks is None or not self._ranks.flying:
                raise
            self._ranks.land_all()
            actions = decide()
        self._run(actions)
        if self._core.minimum > before:
            self.decides = self._seen[-1].chunk

    def visit(self, phase: str, number: int) -> None:
        """Notes which part of a step begins, and at which chunk it is."""
        self._visits += 1
        self._seen.append(Seen(phase, number))

    def _run(self, actions: Iterable[Action]) -> None:
        seen = self._seen[-1]
        for action in actions:
            assert isinstance(action.key, tuple)
            one, move = self._objects[action.key], action.move
            size = whole_pages(one.nbytes)
            if move in (Move.LOAD, Move.MAKE):
                self.held.add(one.key)
                self._held_bytes += size
                self.counter.add(one.kind, one.nbytes)
                room = self._core.budget - self._core.lent - self._held_bytes
                coming = Coming(one.key, size * (move is Move.LOAD), False, room)
                self._coming[one.key] = coming, self._visits
                seen.moves.append(coming)
            elif one.key in self.held:
                self.held.remove(one.key)
                self._held_bytes -= size
                self.counter.add(one.kind, -one.nbytes)
                if move is Move.WRITE:
                    seen.moves.append(Coming(one.key, size, True))
                if move is not Move.FORGET:
                    self.left.add(one.key)
        self.most = max(self.most, self._core.used)


class _SeveralRanks(StepReplay):
    """Steps of a rank that has others, by the rules of the engines that gather and reduce.

    Args:
        replay: replay whose objects are used.
        in_flight: number of chunks whose gradients travel at once.
    """

    def __init__(self, replay: Replay, in_flight: int) -> None:
        state = replay.state
        super().__init__(state.chunks, 3, state.ahead, in_flight, tight=True)
        self._replay, self._early = replay, replay.tiers.step_in_backward
        self._phase, self._visited = FORWARD, set[int]()
        self._sent, self._unstepped = deque[ImaginedChunk](), list[ImaginedChunk]()

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


def _together(state: StateBytes) -> list[tuple[int, int]]:
    """First and last chunk that are in use together with each, because a module has both."""
    homes: dict[str, list[int]] = {}
    names = {name for chunk in state.chunks for name in chunk.names}
    for number, chunk in enumerate(state.chunks):
        for name in chunk.names:
            module = name.rpartition(".")[0]
            outer = module.rpartition(".")[0]
            # torch's attention reads the weights of its last linear map itself.
            whole = outer if f"{outer}.in_proj_weight" in names else module
            homes.setdefault(whole, []).append(number)
    found = [(number, number) for number in range(len(state.chunks))]
    for numbers in homes.values():
        for number in numbers:
            first, last = found[number]
            found[number] = min(first, *numbers), max(last, *numbers)
    return found
