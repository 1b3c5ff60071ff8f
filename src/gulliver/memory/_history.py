"""What a memory manager did in its last steps, as text."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from gulliver.errors import GulliverError
from gulliver.memory._placed import ManagedTensor
from gulliver.solve import Action, Move

STEPS = 4
"""Steps that are remembered."""
LONGEST = 1 << 16
"""Most events of a step that are remembered."""


@dataclass
class MovesOfStep:
    """Events and moves of a step, with names: objects may be gone when they are described."""

    events: list[tuple[str, str]] = field(default_factory=list)
    moves: list[tuple[int, Move, str, str, int, str]] = field(default_factory=list)


class MoveHistory:
    """Notes events and moves."""

    def __init__(self) -> None:
        self.steps = self.evictions = 0
        self._now = MovesOfStep()
        self._past: deque[MovesOfStep] = deque(maxlen=STEPS)

    def event(self, what: str, about: ManagedTensor | int) -> None:
        """Notes an event of an object, or of a number of bytes."""
        if len(self._now.events) < LONGEST:
            told = _mib(about) if isinstance(about, int) else about.name
            self._now.events.append((what, told))

    def move(self, action: Action, managed: ManagedTensor) -> None:
        """Notes a move."""
        self.evictions += action.move in (Move.WRITE, Move.DROP)
        if len(self._now.moves) < LONGEST:
            about = managed.name, managed.kind, managed.size
            self._now.moves.append((len(self._now.events), action.move, *about, action.reason))

    def end_step(self) -> None:
        """Begins a new step."""
        self.steps += 1
        self._past.append(self._now)
        self._now = MovesOfStep()

    def explain(self, step: int) -> str:
        """Says the decisions of a step, one a line, with the number of the event that led to it."""
        found = self._step(step)
        counts = {move: [0, 0] for move in Move}
        lines = []
        for position, move, name, kind, size, reason in found.moves:
            counts[move][0] += 1
            counts[move][1] += size
            at = f"{position:5d}" if position else "start"
            event = found.events[position - 1] if 0 < position <= len(found.events) else None
            during = f"{event[0]} {event[1]}" if event else ""
            lines.append(
                f"{at}  {during:32s} {move.value:6s} {name} ({kind}, {_mib(size)}): {reason}"
            )
        total = ", ".join(f"{n} {m.value} {_mib(b)}" for m, (n, b) in counts.items() if n)
        return "\n".join([*lines, f"{len(found.events)} events: {total or 'nothing moved'}"])

    def _step(self, step: int) -> MovesOfStep:
        if not self._past:
            return self._now
        try:
            return self._past[step]
        except IndexError:
            raise GulliverError(
                f"step {step} is not remembered: the last {len(self._past)} are (-1 is the last)"
            ) from None


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.3g} MiB"
