"""Runs a policy on live jobs.

A `tick` collects events, asks the policy for a decision if there are any, and acts on it. Acting
only compares the current with the desired state, so the order of events does not matter. Times are
seconds since the start of the schedule.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gulliver.errors import GulliverError
from gulliver.schedule.jobs import JobCluster, check_job
from gulliver.schedule.live.nodes import Launch, Nodes, RankEnd
from gulliver.schedule.live.tracking import (
    LiveJob,
    MeasuredSeconds,
    Phase,
    Spool,
    read_object,
    write_object,
)
from gulliver.schedule.simulator import Change, Round, Segment
from gulliver.schedule.state import Policy, View, limits_of, placed

ROUNDS = 1000  # number of decisions to keep
LEAST_SECONDS = 0.5  # minimum seconds between decisions that are triggered only by time


@dataclass
class Controller:
    """Runs a schedule of live jobs."""

    spool: Spool
    backend: Nodes
    policy: Policy
    clock: Callable[[], float]
    quotas: Mapping[str, int]
    begun: float

    def __post_init__(self) -> None:
        self.jobs: dict[str, LiveJob] = {}
        self.slots: dict[int, str] = {}
        self.rounds: deque[Round] = deque(maxlen=ROUNDS)
        self.measured = MeasuredSeconds([], [], [])
        self.wake: float | None = None
        self.refused: dict[str, str] = {}
        self.changed, self.draining = True, False
        self._last_tick = self._now()
        self.policy.begin(JobCluster(max(1, sum(self.quotas.values())), self.quotas))

    def _now(self) -> float:
        return self.clock() - self.begun

    @property
    def busy(self) -> bool:
        return any(not job.phase.over for job in self.jobs.values())

    def tick(self) -> None:
        now = self._now()
        self._account(now)
        # Ends first: an unresponsive rank is how a lost node is noticed.
        causes = self._follow_ends(now) + self._follow_nodes() + self._follow_submissions(now)
        causes += self._follow_reports(now)
        causes += self._apply_requests(now) + self._follow_time(now)
        due = self.wake is not None and now >= self.wake
        if causes or due:
            self._decide(now, "; ".join(causes) or "the policy woke")
        self._act(now)
        self.changed |= bool(causes)

    def _account(self, now: float) -> None:
        """Updates slot-seconds, and records the slots that jobs have held since the last tick."""
        for job in self.jobs.values():
            if job.held and now > self._last_tick:
                job.state.service += len(job.held) * (now - self._last_tick)
                runs = job.heard and job.phase in (Phase.RUNNING, Phase.LEAVING)
                rate = job.state.job.goodput(len(job.held), job.batch) if runs else 0.0
                _draw(job, self._last_tick, now, rate)
        self._last_tick = now

    # --- Events ---------------------------------------------------------------------------------

    def _follow_nodes(self) -> list[str]:
        found, before = dict(self.backend.slots()), self.slots
        if found == before:
            return []
        self.slots = found
        causes = []
        for node in dict.fromkeys([*before.values(), *found.values()]):
            count = sum(n == node for n in found.values()) - sum(n == node for n in before.values())
            if count:
                report = f"joined with {count}" if count > 0 else f"left with {-count}"
                causes.append(f"node {node} {report} slots")
        for job in self.jobs.values():
            job.assigned = tuple(slot for slot in job.assigned if slot in found)
        return causes

    def _follow_submissions(self, now: float) -> list[str]:
        causes = []
        for name in self.spool.names():
            if name in self.jobs or name in self.refused:
                continue
            try:
                submission = self.spool.read(name)
                tenant, slots = submission.tenant, submission.slots
                check_job(name, tenant, slots, len(self.slots), self.quotas)
            except GulliverError as error:
                self.refused[name] = str(error)
                causes.append(f"{name} was rejected")
                continue
            self.jobs[name] = LiveJob(submission, min(now, submission.submitted - self.begun))
            causes.append(f"{name} arrived")
        return causes

    def _follow_ends(self, now: float) -> list[str]:
        causes = []
        for end in self.backend.ended():
            job = self.jobs.get(end.run.rpartition("/")[0])
            if job is None or end.run != job.run or end.rank not in job.alive:
                continue
            job.alive.discard(end.rank)
            job.codes[end.rank] = end.code
            if end.code and not job.first_failed:
                job.first_failed, job.blameless = self._reason(job, end), bool(end.why)
                # The other ranks could not continue, and would notice later.
                self.backend.kill(job.run)
            if not job.alive:
                causes += self._over(job, now)
        return causes

    def _reason(self, job: LiveJob, end: RankEnd) -> str:
        report = f"rank {end.rank} " + (
            end.why or (f"was killed by signal {-end.code}" if end.code < 0 else "")
        )
        if end.code > 0:
            log = self.spool.job(job.name) / "logs"
            line = last_line(log / f"attempt-{job.attempt:03d}-rank-{end.rank}.log")
            report += f"exited with code {end.code}: {line}"
        return report

    def _over(self, job: LiveJob, now: float) -> list[str]:
        """Handles the end of an attempt: the job is done, has left, or has failed."""
        self._read_progress(job, now)
        left = bool(job.progress.get("leaving")) and job.progress.get("attempt") == job.attempt
        asked, job.held, job.asked = job.asked, (), None
        if job.stopping:
            return self._finish(job, Phase.STOPPED, now, job.note or "stopped on request")
        if job.first_failed:
            return self._failed(job, now)
        if left:
            job.saving = max(0.0, now - (job.progress["time"] - self.begun))
            if asked is not None:
                job.leaves.append(now - asked)
                self.measured.leaves.append(job.leaves[-1])
            job.set_phase(Phase.WAITING, "saved and left its slots")
            self.changed = True
            return []
        return self._ended(job, now)

    def _ended(self, job: LiveJob, now: float) -> list[str]:
        """Handles the end of all ranks without an error or a stop request."""
        if not job.starts:
            note = "ended without a report; call job.report of elastic() in every step"
            return self._finish(job, Phase.ENDED, now, note)
        done, samples = float(job.progress.get("done", 0)), job.submission.samples
        if samples is not None and done < samples * (1 - 1e-9):
            note = f"ended early, after {done:g} of {samples:g} samples"
            return self._finish(job, Phase.ENDED, now, note)
        more = samples is not None and done > samples + job.batch
        note = f"done after {done:g} samples ({samples:g} were submitted)" if more else "done"
        return self._finish(job, Phase.ENDED, now, note)

    def _finish(self, job: LiveJob, phase: Phase, now: float, note: str) -> list[str]:
        job.set_phase(phase, note)
        job.ended, job.assigned = now, ()
        job.state.slots, job.state.batch = (), 0
        if phase is Phase.ENDED and job.submission.samples is not None:
            job.state.done = job.submission.samples
        return [f"{job.name} {phase.value}"]

    def _failed(self, job: LiveJob, now: float) -> list[str]:
        # The loss of a node is not the job's fault.
        job.failures += not job.blameless
        why, job.first_failed = job.first_failed, ""
        job.saving = None
        if job.failures >= job.submission.tries:
            times = f"{job.failures} times" if job.failures > 1 else "once"
            return self._finish(
                job, Phase.FAILED, now, f"failed {times} from the same checkpoint: {why}"
            )
        job.set_phase(Phase.WAITING, f"restarts from its last checkpoint: {why}")
        self.changed = True
        return []

    def _follow_reports(self, now: float) -> list[str]:
        return [
            cause
            for job in self.jobs.values()
            if job.phase in (Phase.STARTING, Phase.RUNNING, Phase.LEAVING)
            for cause in self._read_progress(job, now)
        ]

    def _read_progress(self, job: LiveJob, now: float) -> list[str]:
        report = read_object(self.spool.job(job.name) / "progress.json")
        if report is None or report == job.progress or report.get("attempt") != job.attempt:
            return []
        job.progress = report
        if report["first"] > job.base:
            job.base, job.failures = report["first"], 0
        if report["steps"] and not job.heard:
            self._begins(job, report["begun"] - self.begun)
        return [f"{job.name} was measured"] if job.measure() else []

    def _begins(self, job: LiveJob, begun: float) -> None:
        """Handles the first step of an attempt, which ends its start-up or resize."""
        job.heard, job.silent = True, False
        seconds = max(0.0, begun - job.launched)
        if job.attempt == 1:
            job.starts = [seconds]
            self.measured.starts.append(seconds)
        elif job.saving is not None:
            job.resizes.append(seconds + job.saving)
            self.measured.resizes.append(job.resizes[-1])
        job.saving = None
        if job.phase is Phase.STARTING:
            job.set_phase(Phase.RUNNING, f"running after {begun:.4g} s")
        self.changed = True

    def _apply_requests(self, now: float) -> list[str]:
        causes = []
        for job in self.jobs.values():
            if job.phase.over or job.stopping or not (self.spool.job(job.name) / "stop").is_file():
                continue
            job.stopping = True
            job.note = "stopped on request"
            if not job.alive:
                causes += self._finish(job, Phase.STOPPED, now, job.note)
            elif job.phase is Phase.STARTING:
                # It has not made or reported any progress yet.
                self.backend.kill(job.run)
        return causes

    def _follow_time(self, now: float) -> list[str]:
        """Reports silent jobs, and kills jobs that exceed their grace period."""
        causes = []
        for job in self.jobs.values():
            given = job.submission
            late = job.phase is Phase.STARTING and now - job.launched > given.report_within
            if late and not job.silent and not job.stopping:
                job.silent = True
                job.note = (
                    f"has not reported for {given.report_within:g} s; call job.report of "
                    "gulliver.schedule.elastic() in every step; it keeps its slots"
                )
                causes.append(f"{job.name} is silent")
            if job.asked is not None and now - job.asked > given.grace and job.alive:
                job.first_failed = job.first_failed or (
                    f"did not leave within {given.grace:g} s of the request"
                )
                job.asked = math.inf
                self.backend.kill(job.run)
        return causes

    # --- Decisions ------------------------------------------------------------------------------

    def _decide(self, now: float, cause: str) -> None:
        taken = {s for job in self.jobs.values() if job.silent for s in job.held}
        here = sorted(set(self.slots) - taken)
        present = [job for job in self.jobs.values() if not (job.phase.over or job.silent)]
        present = [job for job in present if not job.stopping and not self.draining]
        self.wake = None
        if not here or not present:
            return
        view = self.view(now, present, here, cause)
        decision = self.policy.decide(view)
        chosen = placed(view.jobs, decision, range(len(here)))
        changes = []
        for job, state in zip(present, view.jobs, strict=True):
            places, batch = chosen.get(job.name, ((), 0))
            slots = tuple(here[place] for place in places)
            if set(slots) != set(job.assigned):
                changes.append(Change(job.name, len(job.assigned), len(slots)))
                state.changed, job.since = now, state.done
                if slots:
                    state.resizes += state.started is not None
                    state.started = now if state.started is None else state.started
                job.assigned = slots
            job.batch = batch or job.batch
            state.slots, state.batch = places, batch
        if decision.wake is not None:
            self.wake = max(decision.wake, now + LEAST_SECONDS)
        self.rounds.append(
            Round(now, cause, tuple(changes), decision.why, decision.predicted, decision.bound)
        )
        self.changed = True

    def view(self, now: float, present: list[LiveJob], here: list[int], cause: str) -> View:
        """The policy's view, in which available slots are numbered from 0."""
        places = {slot: place for place, slot in enumerate(here)}
        states = [job.seen(now, places, self.measured) for job in present]
        room = sum(self.quotas.values())
        # If nodes are lost, the quotas may not add up: all tenants share then.
        cluster = JobCluster(len(here), self.quotas if room <= len(here) else {})
        over = [job.state for job in self.jobs.values() if job.phase is Phase.ENDED]
        limits = limits_of(states, cluster, self.policy)
        return View(now, cluster, states, over, limits, cause)

    # --- Actions --------------------------------------------------------------------------------

    def _act(self, now: float) -> None:
        # Only the job itself releases its slots, at the end of a step and after its checkpoint is
        # complete. So a resize decided during another resize or a save waits for it, without extra
        # state.
        held = {slot for job in self.jobs.values() for slot in job.held}
        for job in self.jobs.values():
            if job.phase is Phase.WAITING and job.assigned and not job.stopping:
                # Checked again: the start of another job may have detected a lost node.
                there = set(self.backend.slots())
                if not held & set(job.assigned) and set(job.assigned) <= there:
                    self._launch(job, now)
                    held |= set(job.held)
            elif job.phase is Phase.RUNNING and (
                job.stopping or set(job.held) != set(job.assigned)
            ):
                job.asked = now
                wanted = "to stop" if job.stopping else f"to resize to {len(job.assigned)} slots"
                job.set_phase(Phase.LEAVING, f"asked to save and leave, {wanted}")
                self._request_change(job, True)
            elif job.phase is Phase.RUNNING and job.progress.get("batch") != job.batch:
                self._request_change(job, False)

    def _request_change(self, job: LiveJob, leave: bool) -> None:
        asked = {"attempt": job.attempt, "leave": leave, "batch": job.batch}
        path = self.spool.job(job.name) / "control.json"
        if read_object(path) != asked:
            write_object(path, asked)
            self.changed = True

    def _launch(self, job: LiveJob, now: float) -> None:
        job.attempt += 1
        job.held, job.alive = job.assigned, set(range(len(job.assigned)))
        job.codes, job.heard, job.silent = {}, False, False
        job.looked, job.launched = 0, now
        job.set_phase(Phase.STARTING, f"starting on {len(job.held)} slots")
        self.backend.start(
            Launch(
                job.run, job.attempt, job.held, job.batch, job.submission, self.spool.job(job.name)
            )
        )
        self.changed = True

    def drain(self) -> bool:
        """Asks all jobs to save and leave; the folder's next scheduler continues them."""
        self.draining = True
        for job in self.jobs.values():
            job.assigned = ()
            if job.alive and not job.heard:
                self.backend.kill(job.run)
        self.tick()
        return not any(job.alive for job in self.jobs.values())

    def close(self) -> None:
        """Kills all running jobs; the folder's next scheduler continues them."""
        for job in self.jobs.values():
            if job.alive:
                self.backend.kill(job.run)
        self.backend.close()


def _draw(job: LiveJob, begin: float, end: float, rate: float) -> None:
    log = job.segments
    known = (job.held, job.batch, rate)
    if log and log[-1].end == begin and (log[-1].slots, log[-1].batch, log[-1].rate) == known:
        log[-1] = replace(log[-1], end=end)
    else:
        log.append(Segment(job.name, begin, end, job.held, job.batch, rate))


def last_line(log: Path) -> str:
    # Terminal control characters are escaped.
    try:
        lines = log.read_text(encoding="utf-8", errors="replace")[-4000:].splitlines()
    except OSError:
        return "no output"
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in last)
    return "".join(shown)
