"""Steps of training under a memory limit, replayed with chunks that are plain numbers.

The replay asks the very rules by which the memory manager decides (`gulliver.solve.Replacement`):
so bytes that a plan says will move are those that move. Nothing is allocated, and a model may be on
meta. Read `Replay.step` first: the order in which training uses state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from gulliver.memory import (
    GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    ByteCounter,
    whole_pages,
)
from gulliver.parallel.zero import IN_FLIGHT, ChunkBytes, held_bytes
from gulliver.plan import Tiers
from gulliver.solve import Action, Move, Policy, Replacement

BEGIN, FORWARD, BACKWARD, UPDATE = "begin", "forward", "backward", "update"
REDUCE = "reduce"
WINDOW = 2
"""Chunks whose parameters are in use at once at least: the present one, and the one before it."""
Key = tuple[str, *tuple[int, ...]]
Passes = tuple[tuple[str, tuple[int, ...]], ...]
"""Forwards and backwards of micro-batches, with the numbers of the chunks that each uses."""


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
        passes: forwards and backwards of a step, where a pipeline has several of each.
        kept: bytes that stay gathered beside what modules use.
        blocks: paths of the blocks that backward computes again.
    """

    chunks: tuple[ChunkBytes, ...]
    moments: tuple[tuple[int, ...], ...]
    parts: int
    ahead: int
    passes: Passes = ()
    kept: int = 0
    blocks: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Bytes of everything that has a place of its own, whole pages each."""
        return sum(whole_pages(o.nbytes) for o in self.objects())

    @property
    def reserved(self) -> int:
        """Bytes that are of use behind: those, and whole gradients, which may have to wait."""
        found = self.total + sum(whole_pages(c.whole) for c in self.chunks if c.trained)
        # Micro-batches let all of it come and go: places of one size do not serve another.
        return found + found // 4 if self.passes else found

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
            if chunk.trained and self.passes and self.is_gathered(number):
                # Micro-batches add up in it, until all of them are reduced at once.
                yield StateObject(("collected", number), GRADIENTS, chunk.whole, number)

    def is_gathered(self, number: int) -> bool:
        """Whether a chunk is used in a buffer beside its shard."""
        return self.parts > 1 or self.chunks[number].copied

    def together(self) -> list[tuple[int, int]]:
        """First and last chunk in use together with each: a module has both, or a recomputed block.

        What a block has computed again looks at its parameters until its gradients are there.
        """
        homes: dict[str, list[int]] = {}
        names = {name for chunk in self.chunks for name in chunk.names}
        for number, chunk in enumerate(self.chunks):
            for name in chunk.names:
                homes.setdefault(self._user(name, names), []).append(number)
        found = [(number, number) for number in range(len(self.chunks))]
        for numbers in homes.values():
            for number in numbers:
                first, last = found[number]
                found[number] = min(first, *numbers), max(last, *numbers)
        return found

    def _user(self, name: str, names: Container[str]) -> str:
        """Path of what reads a parameter and others with it."""
        block = next((path for path in self.blocks if name.startswith(f"{path}.")), None)
        module = name.rpartition(".")[0]
        outer = module.rpartition(".")[0]
        # torch's attention reads the weights of its last linear map itself.
        whole = outer if f"{outer}.in_proj_weight" in names else module
        return whole if block is None else block


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
        nbytes: size in whole pages.
        write: whether it leaves the first memory.
        until: number of visits until it is used.
    """

    key: Key
    nbytes: int
    write: bool
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
    ) -> None:
        self.state, self.tiers = state, tiers
        self.counter, self.decides = ByteCounter(), 0
        self.held, self.left = set[Key](), set[Key]()
        self.most = 0
        ahead = tiers.ahead or None
        self._core = Replacement(budget, backed=backed, ahead=ahead, policy=policy)
        self._seen: list[Seen] = []
        self._coming: dict[Key, tuple[Coming, int]] = {}
        self._visits = 0
        self._objects = {o.key: o for o in state.objects()}
        self._transient, self._together = _transient(state), state.together()
        self._entered, self._collected = deque[int](), deque[int]()
        self._kept: list[int] = []
        # What a model begins with has no gradient of its input to compute: values are not needed.
        first = {name.rpartition(".")[0] for chunk in state.chunks[:1] for name in chunk.names}
        self._begins_alone = len(first) == 1
        shares = Shares.of(tiers)
        self._visit(FORWARD, 0)
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
        self._visit(BEGIN, 0)
        for number in self._kept:
            self._run(self._core.discard(("gradient", number)))
        self._kept.clear()
        count = range(len(self.state.chunks))
        with self._lend(self._transient):
            if self.state.passes:
                self._micro_batches()
            else:
                self._one_batch(count)
        if not self.tiers.step_in_backward:
            for number in count:
                self._visit(UPDATE, number)
                self._update(number)
        self._core.end_step()
        return self._seen

    def _one_batch(self, count: range) -> None:
        for number in count:
            self._visit(FORWARD, number)
            self._enter(number)
        self._leave(1)  # backward begins with the last
        for number in reversed(count):
            self._visit(BACKWARD, number)
            self._backward(number)
        while self._collected:
            self._land(self._collected[0])
        self._entered = deque(sorted(self._entered))
        self._leave(0)

    # [Note: micro-batches] Every forward and backward of a pipeline uses the parameters anew, and
    # gradients are reduced after the last. In between each may leave as soon as its micro-batch has
    # been added, so that no more is in use at once than in a step of one batch.

    def _micro_batches(self) -> None:
        begun = set[int]()
        for phase, numbers in self.state.passes:
            if phase == FORWARD:
                self._leave(0)
                for number in numbers:
                    self._visit(FORWARD, number)
                    self._enter(number)
                self._leave(1)
                continue
            for number in reversed(numbers):
                self._visit(BACKWARD, number)
                self._enter(number)
                self._add_up(number, begun)
            for number in [*self._collected]:
                self._rest(number)
            self._entered = deque(sorted(self._entered))
            self._leave(0)
        for number in reversed(range(len(self.state.chunks))):
            if self.state.chunks[number].trained:
                self._visit(REDUCE, number)
                self._reduce(number, number in begun)
        while self._collected:
            self._arrive(self._collected.popleft())

    def _add_up(self, number: int, begun: set[int]) -> None:
        """Adds the gradient of a micro-batch to those before."""
        if self.state.chunks[number].trained:
            self._use(self._sum(number), write=number in begun, fresh=number not in begun)
            begun.add(number)
            self._collected.append(number)
        for landed in [n for n in self._collected if self._together[n][0] >= number]:
            self._rest(landed)

    def _rest(self, number: int) -> None:
        self._collected.remove(number)
        self._done(self._sum(number))

    def _sum(self, number: int) -> Key:
        """Key of what micro-batches add up in."""
        return ("collected" if self.state.is_gathered(number) else "gradient", number)

    def _reduce(self, number: int, begun: bool) -> None:
        """Sends what was added up to the shards."""
        self._use(self._sum(number), write=begun, fresh=not begun)
        if self.state.is_gathered(number):
            self._use(("gradient", number), fresh=True)
        self._collected.append(number)
        if len(self._collected) > (IN_FLIGHT if self.state.parts > 1 else 0):
            self._arrive(self._collected.popleft())

    def _arrive(self, number: int) -> None:
        self._done(("gradient", number))
        if self.state.is_gathered(number):
            self._done(("collected", number))
            self._run(self._core.discard(("collected", number)))

    # [Note: what is in use at once] A rank alone computes with the very objects that hold its
    # parameters, and collects gradients in those that hold them: they are pinned from the first use
    # of a module until the next one's, and a module may have parameters in several chunks. With
    # other ranks, or copies in a wider dtype, whole chunks are gathered into buffers that are lent,
    # and an object is pinned only while it is copied; reduced gradients are while they travel.

    def _enter(self, number: int) -> None:
        """Uses the parameters of a chunk; lets go of what a module no longer needs."""
        if number in self._entered:
            return
        self._use(("home", number))
        if self.state.is_gathered(number):
            self._done(("home", number))
        else:
            self._entered.append(number)
            first, last = self._together[number]
            self._leave(max(WINDOW, last - first + 1))

    def _leave(self, width: int) -> None:
        while len(self._entered) > width:
            self._done(("home", self._entered.popleft()))

    def _backward(self, number: int) -> None:
        if number > 0 or not self._begins_alone:
            self._enter(number)
        if self.state.chunks[number].trained:
            self._use(("gradient", number), fresh=True)
            self._collected.append(number)
        travelling = IN_FLIGHT if self.state.parts > 1 else 0
        complete = [n for n in self._collected if self._together[n][0] >= number]
        for landed in complete[: max(0, len(complete) - travelling)]:
            self._land(landed)

    def _land(self, number: int) -> None:
        """A gradient is complete; the chunk is stepped, where that is done in backward."""
        self._collected.remove(number)
        if self.tiers.step_in_backward:
            if number in self._entered:
                self._entered.remove(number)
                self._done(("home", number))
            self._update(number)
        self._done(("gradient", number))
        if self.tiers.step_in_backward:
            self._run(self._core.discard(("gradient", number)))

    def _update(self, number: int) -> None:
        if not self.state.chunks[number].trained:
            return
        moments: list[Key] = [("moment", number, n) for n in range(len(self.state.moments[number]))]
        gradient: Key = ("gradient", number)
        keys: list[Key] = [("home", number), *moments, gradient]
        for key in keys:
            self._use(key, write=key != gradient)
        for key in reversed(keys):
            self._done(key)
        if not self.tiers.step_in_backward:
            self._kept.append(number)  # until zero_grad

    def _use(self, key: Key, write: bool = False, fresh: bool = False) -> None:
        before = self._core.minimum
        self._run(self._core.use(key, write, fresh))
        if key in self._coming:
            coming, sent = self._coming.pop(key)
            coming.until = self._visits - sent
        if self._core.minimum > before:
            self.decides = self._objects[key].chunk

    def _done(self, key: Key) -> None:
        self._run(self._core.done(key))

    @contextmanager
    def _lend(self, nbytes: int) -> Iterator[None]:
        if not nbytes:
            yield
            return
        self._run(self._core.lend(nbytes, "buffers"))
        self.counter.add(PARAMETERS, nbytes)
        yield
        self.counter.add(PARAMETERS, -nbytes)
        self._run(self._core.give(nbytes))

    def _visit(self, phase: str, number: int) -> None:
        self._visits += 1
        self._seen.append(Seen(phase, number))

    def _run(self, actions: Iterable[Action]) -> None:
        seen = self._seen[-1]
        for action in actions:
            assert isinstance(action.key, tuple)
            one, move = self._objects[action.key], action.move
            if move in (Move.LOAD, Move.WRITE):
                coming = Coming(one.key, whole_pages(one.nbytes), move is Move.WRITE)
                seen.moves.append(coming)
                if move is Move.LOAD:
                    self._coming[one.key] = coming, self._visits
            if move in (Move.LOAD, Move.MAKE):
                self.held.add(one.key)
                self.counter.add(one.kind, one.nbytes)
            elif one.key in self.held:
                self.held.remove(one.key)
                self.counter.add(one.kind, -one.nbytes)
                if move is not Move.FORGET:
                    self.left.add(one.key)
        self.most = max(self.most, self._core.used)


def _transient(state: StateBytes) -> int:
    """Bytes of whole chunks that are gathered, and of gradients that are collected, at once.

    What a rank alone uses in its own type lies where it is used, and takes none.
    """
    # What micro-batches add up in are objects.
    reduced = not state.passes
    whole = [
        ChunkBytes(c.names, whole_pages(c.whole), 0, c.trained and reduced, True)
        for c in state.chunks
        if state.parts > 1 or c.copied
    ]
    held = held_bytes(whole, 3, state.parts, state.ahead, 0)
    return sum(held.values()) + whole_pages(state.kept)
