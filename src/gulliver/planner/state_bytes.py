"""Sizes of a rank's state objects, and the order in which a step uses them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from gulliver.memory.buffers import ACTIVATIONS, GRADIENTS, OPTIMIZER_STATE, PARAMETERS
from gulliver.memory.stores import whole_pages
from gulliver.parallel.zero.memory import ChunkBytes
from gulliver.plan.tree import Tiers

BEGIN, FORWARD, BACKWARD, UPDATE = "begin", "forward", "backward", "update"
REDUCE = "reduce"
Key = tuple[str, *tuple[int, ...]]
Passes = tuple[tuple[str, tuple[str, ...]], ...]
"""Forward and backward passes of micro-batches, each with the parameter names it uses, in order."""


@dataclass(frozen=True)
class StateObject:
    """A part of the state that moves between tiers as a unit."""

    # Identifies the object: what it is, and its chunk.
    key: Key
    # Kind of state.
    kind: str
    # Size, in bytes.
    nbytes: int
    # Number of its chunk.
    chunk: int


@dataclass(frozen=True)
class StateBytes:
    """Sizes of a rank's state."""

    # Chunks in the order of use.
    chunks: tuple[ChunkBytes, ...]
    # Bytes of each optimizer state tensor, by chunk.
    moments: tuple[tuple[int, ...], ...]
    # Number of shards of a chunk.
    parts: int
    # Number of chunks that are gathered from other ranks ahead of use.
    ahead: int
    # Names of the parameters in the order of use; a tied one occurs once per use.
    order: tuple[str, ...] = ()
    # Whether the first step of a chunk needs its moments twice: as created and as stored.
    moments_twice: bool = False
    # Bytes of each offloaded activation, by the chunk used before it.
    activations: tuple[tuple[int, ...], ...] = ()
    # Additional bytes if all of the optimizer's parameters were unfrozen.
    later: int = 0
    # Forward and backward passes of a step, if a pipeline has several of each.
    passes: Passes = ()
    # Paths of the blocks that backward recomputes.
    blocks: tuple[str, ...] = ()
    # Whether ranks run unequal work, so that each keeps full copies of chunks during a step.
    unequal: bool = False

    @property
    def total(self) -> int:
        return sum(whole_pages(o.nbytes) for o in self.objects())

    @property
    def reserved(self) -> int:
        """Bytes to reserve in slower tiers: all objects, full gradients, and `later`."""
        waiting = sum(whole_pages(c.whole) for c in self.chunks if c.trained and not self.unequal)
        found = self.total + waiting + self.later
        # Micro-batches move all of it, and freed space of one size class cannot serve another.
        return found + found // 4 if self.passes else found

    def objects(self) -> Iterator[StateObject]:
        for number, chunk in enumerate(self.chunks):
            kind = OPTIMIZER_STATE if chunk.copied else PARAMETERS
            yield StateObject(("master", number), kind, chunk.shard, number)
        for number, (chunk, sizes) in enumerate(zip(self.chunks, self.moments, strict=True)):
            for moment, size in enumerate(sizes):
                yield StateObject(("moment", number, moment), OPTIMIZER_STATE, size, number)
            if chunk.trained:
                yield StateObject(("gradient", number), GRADIENTS, chunk.shard, number)
            if self.has_copies:
                yield StateObject(("copy", number), PARAMETERS, chunk.whole, number)
            if chunk.trained and self.passes and self.is_gathered(number):
                # Accumulates the gradients of micro-batches until all of them are reduced at once.
                yield StateObject(("collected", number), GRADIENTS, chunk.whole, number)
        for number, sizes in enumerate(self.activations):
            for part, size in enumerate(sizes):
                yield StateObject(("activation", number, part), ACTIVATIONS, size, number)

    @property
    def has_copies(self) -> bool:
        """Whether full chunks of parameters are separate objects from their shards."""
        return self.unequal and self.parts > 1

    def is_gathered(self, number: int) -> bool:
        """Whether a chunk is gathered into a buffer separate from its shard."""
        return self.parts > 1 or self.chunks[number].copied

    def together(self) -> list[tuple[int, int]]:
        """First and last chunk that are in use together with each chunk."""
        # A recomputed block uses its parameters until its gradients are complete.
        homes: dict[str, list[int]] = {}
        names = {name for chunk in self.chunks for name in chunk.names}
        for number, chunk in enumerate(self.chunks):
            for name in chunk.names:
                homes.setdefault(self.user(name, names), []).append(number)
        found = [(number, number) for number in range(len(self.chunks))]
        for numbers in homes.values():
            for number in numbers:
                first, last = found[number]
                found[number] = min(first, *numbers), max(last, *numbers)
        return found

    def user(self, name: str, names: Container[str]) -> str:
        """Path of the module or recomputed block that uses a parameter."""
        block = next((path for path in self.blocks if name.startswith(f"{path}.")), None)
        module = name.rpartition(".")[0]
        outer = module.rpartition(".")[0]
        # torch's attention reads the weights of its output projection itself.
        whole = outer if f"{outer}.in_proj_weight" in names else module
        return whole if block is None else block


class Shares:
    """The ``static`` policy: keeps a fixed share of each kind on the device, in object order."""

    def __init__(self, leaving: Mapping[str, float]) -> None:
        self._leaving = leaving
        self._seen, self._kept = dict.fromkeys(leaving, 0), dict.fromkeys(leaving, 0)

    @classmethod
    def of(cls, tiers: Tiers) -> Shares | None:
        """The shares of a plan; None under the policy ``auto``."""
        if tiers.policy == "auto":
            return None
        return cls({PARAMETERS: tiers.offload_param, OPTIMIZER_STATE: tiers.offload_optim})

    def keeps(self, kind: str, nbytes: int) -> bool:
        """Whether the next object of a kind must stay on the device."""
        if kind not in self._leaving:
            return False
        self._seen[kind] += nbytes
        wanted = (1 - self._leaving[kind]) * self._seen[kind]
        stays = self._kept[kind] + nbytes <= wanted + 1e-9 * wanted
        self._kept[kind] += nbytes * stays
        return stays
