"""What a memory manager did in its last steps, as text and as a picture."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gulliver.errors import GulliverError
from gulliver.io import atomic_file
from gulliver.memory._bytes import GRADIENTS, KINDS, OPTIMIZER_STATE, PARAMETERS
from gulliver.memory._placed import ManagedTensor, Residency
from gulliver.solve import Action, Move

STEPS = 4
"""Steps that are remembered."""
LONGEST = 1 << 16
"""Most events of a step that are remembered."""
COLORS = {PARAMETERS: "#4878a8", GRADIENTS: "#b0553a", OPTIMIZER_STATE: "#7a9a5a"}


@dataclass
class Step:
    """Events and moves of a step, with names: objects may be gone when they are told."""

    start: dict[int, tuple[str, str]] = field(default_factory=dict)
    events: list[tuple[str, int, str]] = field(default_factory=list)
    moves: list[tuple[int, Move, int, str, str, int, str]] = field(default_factory=list)


class History:
    """Notes events and moves."""

    def __init__(self) -> None:
        self.steps = self.evictions = 0
        self._now = Step()
        self._past: deque[Step] = deque(maxlen=STEPS)

    def event(self, what: str, about: ManagedTensor | int) -> None:
        """Notes an event of an object, or of a number of bytes."""
        if len(self._now.events) >= LONGEST:
            return
        if isinstance(about, int):
            self._now.events.append((what, -1, _mib(about)))
        else:
            self._now.events.append((what, about.number, about.name))

    def move(self, action: Action, managed: ManagedTensor) -> None:
        """Notes a move."""
        self.evictions += action.move in (Move.WRITE, Move.DROP)
        if len(self._now.moves) < LONGEST:
            about = managed.number, managed.name, managed.kind, managed.size
            self._now.moves.append((len(self._now.events), action.move, *about, action.reason))

    def end_step(self, objects: Iterable[ManagedTensor]) -> None:
        """Begins a new step."""
        self.steps += 1
        self._past.append(self._now)
        here = (Residency.QUEUED, Residency.ARRIVING, Residency.HERE)
        self._now = Step({o.number: (o.name, o.kind) for o in objects if o.residency in here})

    def explain(self, step: int) -> str:
        """Says the decisions of a step, one a line, with the number of the event that led to it."""
        found = self._step(step)
        counts = {move: [0, 0] for move in Move}
        lines = []
        for position, move, _, name, kind, size, reason in found.moves:
            counts[move][0] += 1
            counts[move][1] += size
            at = f"{position:5d}" if position else "start"
            event = found.events[position - 1] if 0 < position <= len(found.events) else None
            during = f"{event[0]} {event[2]}" if event else ""
            lines.append(
                f"{at}  {during:32s} {move.value:6s} {name} ({kind}, {_mib(size)}): {reason}"
            )
        total = ", ".join(f"{n} {m.value} {_mib(b)}" for m, (n, b) in counts.items() if n)
        return "\n".join([*lines, f"{len(found.events)} events: {total or 'nothing moved'}"])

    def draw(self, path: str | os.PathLike[str], step: int) -> None:
        """Draws a row for each object: when it was in the fast tier, in use, read and written."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise GulliverError(
                "a picture needs matplotlib: pip install matplotlib, or read explain()"
            ) from error
        found = self._step(step)
        rows, bars = _stays(found)
        figure = Figure(figsize=(10, min(2 + 0.14 * len(rows), 40)), layout="constrained")
        axes = figure.subplots()
        for number, kind, begin, end in bars:
            axes.barh(rows[number][0], end - begin, left=begin, height=0.8, color=COLORS[kind])
        for position, (what, number, _) in enumerate(found.events):
            if what == "use" and number in rows:
                axes.plot(position + 0.5, rows[number][0], "|", color="black", markersize=4)
        for move, mark in ((Move.LOAD, ">"), (Move.WRITE, "<")):
            points = [(p, rows[n][0]) for p, m, n, *_ in found.moves if m is move and n in rows]
            if points:
                axes.plot(*zip(*points, strict=True), mark, color="#202020", markersize=3)
        axes.set_yticks([row for row, _ in rows.values()], [name for _, name in rows.values()])
        axes.tick_params(axis="y", labelsize=5)
        axes.invert_yaxis()
        axes.set_xlabel("event of the step   ( | use   > read from   < written to the store )")
        axes.legend(
            handles=[axes.barh(0, 0, color=COLORS[kind], label=kind) for kind in KINDS],
            loc="upper right",
            fontsize=6,
        )
        with atomic_file(Path(path)) as partial:
            figure.savefig(partial, dpi=130, format="png")

    def _step(self, step: int) -> Step:
        if not self._past:
            return self._now
        try:
            return self._past[step]
        except IndexError:
            raise GulliverError(
                f"step {step} is not remembered: the last {len(self._past)} are (-1 is the last)"
            ) from None


def _stays(step: Step) -> tuple[dict[int, tuple[int, str]], list[tuple[int, str, float, float]]]:
    """Returns the row and name of each object, and its stays in the fast tier."""
    names = {n: name for n, (name, _) in step.start.items()}
    names |= {n: name for _, _, n, name, *_ in step.moves}
    names |= {n: name for _, n, name in step.events if n >= 0}
    rows = {number: (row, names[number]) for row, number in enumerate(sorted(names))}
    since = {number: (0.0, kind) for number, (_, kind) in step.start.items()}
    bars = []
    for position, move, number, _, kind, *_ in step.moves:
        if move in (Move.LOAD, Move.MAKE):
            since.setdefault(number, (float(position), kind))
        elif number in since:
            begin, kind = since.pop(number)
            bars.append((number, kind, begin, float(position)))
    end = float(max(len(step.events), 1))
    return rows, bars + [(number, kind, begin, end) for number, (begin, kind) in since.items()]


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.3g} MiB"
