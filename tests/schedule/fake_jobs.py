"""Jobs of a scheduler without processes: a backend in virtual time that speaks through the files.

A fake job does what a script does with `gulliver.schedule.elastic`: it tells its steps, leaves when
it is asked to, at the end of a step and of a save, and goes on from its last checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gulliver.hardware import Scaling
from gulliver.schedule.live.controller import Controller
from gulliver.schedule.live.nodes import KILLED, Launch, RankEnd
from gulliver.schedule.live.options import Submission
from gulliver.schedule.live.tracking import LiveJob, Phase, Spool, read_object, write_object
from gulliver.schedule.policies import make_policy

TICK = 0.1


@dataclass
class Behaviour:
    """What a fake job does.

    Attributes:
        scaling: seconds of a step.
        start: seconds from a start to the first step.
        save: seconds of a save.
        tail: seconds from the last step to the end.
        every: steps between two checkpoints.
        silent: whether it says nothing.
        deaf: whether it never leaves.
        fails: whether its ranks end with an error at once.
    """

    scaling: Scaling = field(default_factory=lambda: Scaling(0.05))
    start: float = 1.0
    save: float = 0.5
    tail: float = 0.0
    every: int = 10
    silent: bool = False
    deaf: bool = False
    fails: bool = False


@dataclass
class Attempt:
    """A run of a fake job."""

    launch: Launch
    first: int
    begun: float
    step: int
    next: float
    leaves_at: float | None = None
    seconds: float = 0.0
    counted: list[int] = field(default_factory=list)


class FakeBackend:
    """Slots and ranks in virtual time."""

    def __init__(self, slots: int) -> None:
        self.now = 0.0
        self.places = dict.fromkeys(range(slots), "a")
        self.behaviours: dict[str, Behaviour] = {}
        self.attempts: dict[str, Attempt] = {}
        self.saved: dict[str, int] = {}
        self.drawn: dict[str, list[int]] = {}
        self.saving: list[str] = []
        self._ended: list[RankEnd] = []

    def slots(self) -> dict[int, str]:
        return dict(self.places)

    def start(self, launch: Launch) -> None:
        busy = {s for a in self.attempts.values() for s in a.launch.slots}
        assert not busy & set(launch.slots), "a slot has two ranks"
        assert set(launch.slots) <= set(self.places), "a slot is gone"
        name = launch.submission.name
        acts = self.behaviours.setdefault(name, Behaviour())
        first = self.saved.get(name, -1) + 1
        begun = self.now + acts.start
        found = Attempt(launch, first, begun, first, begun)
        self.attempts[name] = found
        self.drawn[name] = self.drawn.get(name, [])[:first]
        found.next = begun + self._seconds(found)
        if acts.fails:
            (launch.folder / "logs" / f"attempt-{launch.attempt:03d}-rank-0.log").write_text(
                "Traceback\nValueError: no data\n"
            )
            self._end(name, 1)

    def _seconds(self, found: Attempt) -> float:
        acts = self.behaviours[found.launch.submission.name]
        return acts.scaling.seconds(len(found.launch.slots), found.launch.batch)

    def ended(self) -> list[RankEnd]:
        found, self._ended = self._ended, []
        return found

    def _end(self, name: str, code: int, why: str = "") -> None:
        found = self.attempts.pop(name)
        ranks = range(len(found.launch.slots))
        self._ended += [RankEnd(found.launch.run, r, code, why) for r in ranks]

    def kill(self, run: str) -> None:
        name = run.rpartition("/")[0]
        if name in self.attempts and self.attempts[name].launch.run == run:
            self._end(name, KILLED)

    def remove_lost(self, node: str) -> None:
        """A node leaves."""
        gone = {slot for slot, place in self.places.items() if place == node}
        self.places = {slot: place for slot, place in self.places.items() if place != node}
        for name, found in list(self.attempts.items()):
            if gone & set(found.launch.slots):
                self._end(name, KILLED, f"node {node} left")

    def close(self) -> None:
        self.attempts.clear()

    def advance(self, to: float) -> None:
        """Lets jobs run until `to`."""
        for name, found in list(self.attempts.items()):
            while name in self.attempts and found.next <= to:
                self._step(name, found)
        self.now = to

    def _step(self, name: str, found: Attempt) -> None:
        acts, launch = self.behaviours[name], found.launch
        if found.leaves_at is not None:
            self.saved[name] = found.step - 1
            self._end(name, 0)
            return
        at = found.next
        self.drawn[name].append(found.step)
        found.step += 1
        samples = launch.submission.samples
        done = found.step * launch.batch
        complete = samples is not None and done >= samples
        control = read_object(launch.folder / "control.json") or {}
        asked = bool(control.get("leave")) and control.get("attempt") == launch.attempt
        leaving = asked and not complete and not acts.deaf
        if not acts.silent:
            self._tell(found, at, done, leaving)
        if complete and acts.tail:
            found.leaves_at = found.next = at + acts.tail
            return
        if complete:
            self._end(name, 0)
            return
        saves = leaving or found.step % acts.every == 0
        if saves and not leaving:
            self.saved[name] = found.step - 1
        if leaving:
            found.leaves_at = at + acts.save
        found.next = at + (acts.save if saves else 0) + (0 if leaving else self._seconds(found))

    def _tell(self, found: Attempt, at: float, done: int, leaving: bool) -> None:
        launch, steps = found.launch, found.step - found.first
        told: dict[str, Any] = {"attempt": launch.attempt, "drawn": done, "done": done}
        told |= {"noise": 0.0, "batch": launch.batch, "leaving": leaving}
        told |= {"ranks": len(launch.slots), "first": found.first, "step": found.step - 1}
        told |= {"steps": steps, "begun": found.begun, "time": at}
        told["seconds"] = self._seconds(found) if steps > 1 else None
        write_object(launch.folder / "progress.json", told)


class FakeCluster:
    """A controller on a fake backend, and the time that both share."""

    def __init__(
        self, folder: Path, slots: int = 4, policy: str = "rollout", quotas: dict | None = None
    ) -> None:
        self.spool = Spool(folder)
        self.spool.make()
        self.script = folder / "script.py"
        self.script.write_text("")
        self.backend = FakeBackend(slots)
        self.controller = Controller(
            self.spool,
            self.backend,
            make_policy(policy),
            lambda: self.backend.now,
            quotas or {},
            0.0,
        )

    def submit(self, name: str, behaviour: Behaviour | None = None, **values: Any) -> None:
        """Submits a job now."""
        given = {"batch": 16, "samples": 1600.0, "slots": 2} | values
        given |= {"submitted": self.backend.now or 1e-9}
        told = Submission(name=name, script=str(self.script), **given)
        if behaviour is not None:
            self.backend.behaviours[name] = behaviour
        self.spool.submit(replace(told))

    def run(self, seconds: float) -> None:
        """Lets time pass."""
        end = self.backend.now + seconds
        while self.backend.now < end - 1e-9:
            self.controller.tick()
            self.backend.advance(self.backend.now + TICK)

    def finish(self, within: float = 2000.0) -> None:
        """Lets time pass until nothing is to be done."""
        self.controller.tick()
        end = self.backend.now + within
        while self.controller.busy:
            assert self.backend.now < end, {n: j.note for n, j in self.jobs.items()}
            self.run(TICK)

    @property
    def jobs(self) -> dict[str, LiveJob]:
        return self.controller.jobs

    def phase(self, name: str) -> Phase:
        """Where a job stands."""
        return self.jobs[name].phase
