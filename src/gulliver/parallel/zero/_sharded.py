"""A chunk of ZeRO: where its parameters and its gradients are, and which of it this rank owns.

Two small state machines in one place. Who moves them: the gradients `_reducer.py`, the parameters
`_gatherer.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from torch import Tensor, nn

from gulliver.comm import Handle, Purpose
from gulliver.memory import Chunk, Piece


class Phase(Enum):
    """Where the gradients of a chunk are."""

    EMPTY = auto()
    """Nowhere, or all in the shards."""
    COLLECTING = auto()
    """Being added up in the chunk's buffer."""
    REDUCING = auto()
    """On their way from the buffer to the shards."""


LEGAL = {
    (Phase.EMPTY, Phase.COLLECTING),  # the first gradient arrives
    (Phase.COLLECTING, Phase.REDUCING),  # all gradients have arrived
    (Phase.REDUCING, Phase.EMPTY),  # the shard has its part
    (Phase.COLLECTING, Phase.EMPTY),  # forgotten before they travelled
}


class Presence(Enum):
    """Where the parameters of a chunk are."""

    WHOLE = auto()
    """In the buffer, right on every rank."""
    ARRIVING = auto()
    """On their way from the ranks that own them."""
    ABSENT = auto()
    """With their owners only: there is no buffer."""


LEGAL_PRESENCE = {
    (Presence.WHOLE, Presence.ARRIVING),  # the shard was updated in its place in the buffer
    (Presence.ABSENT, Presence.ARRIVING),  # a buffer was made for what comes
    (Presence.ARRIVING, Presence.WHOLE),  # all parts are there
    (Presence.WHOLE, Presence.ABSENT),  # used, and given back
}


_KINDS = (
    ("gathers", "for a read of parameters"),
    ("gathers", "for a forward"),
    ("gathers", "for a backward"),
    ("gathers", "after a step"),
    ("reduces", "in a backward"),
)


@dataclass(eq=False)
class ShardedChunk:
    """A chunk, the pieces of parameters that this rank owns of it, and its state.

    Frozen parameters have chunks too where parameters are sharded; those have no pieces.
    """

    chunk: Chunk
    pieces: list[tuple[Piece, nn.Parameter]]
    trained: bool = True
    phase: Phase = Phase.EMPTY
    presence: Presence = Presence.WHOLE
    waiting: set[str] = field(default_factory=set)
    """Parameters that the present backward has not reached yet."""
    gradient_shard: Tensor | None = None
    """This rank's part of the mean gradient."""
    incoming: Tensor | None = None
    reduction: Handle | None = None
    gathering: Handle | None = None
    kept: bool = False
    """Needed again in the same pass: stays once it is there."""
    held: bool = False
    """A graph may refer to its parameters: stays until backward or the next step."""
    number: int = 0
    """Its place among the optimizer's chunks, counted from another one for each optimizer."""

    def move(self, phase: Phase) -> None:
        """Enters another phase."""
        assert (self.phase, phase) in LEGAL, f"{self.phase} -> {phase}"
        self.phase = phase

    def purpose(self, verb: str, why: str) -> Purpose:
        """What a collective of it is for; that of another chunk, or reason, is not taken for it."""
        first = self.chunk.layout.slots[0].name
        kind = 1 + _KINDS.index((verb, why))
        return Purpose(f"{verb} the chunk of {first!r} {why}", kind * 256 + self.number % 256)

    def enter(self, presence: Presence) -> None:
        """Changes where the parameters are."""
        assert (self.presence, presence) in LEGAL_PRESENCE, f"{self.presence} -> {presence}"
        self.presence = presence
