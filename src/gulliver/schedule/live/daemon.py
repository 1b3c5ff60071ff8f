"""The scheduler process: one per folder, started by the first submission."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gulliver.errors import GulliverError
from gulliver.io.files import hold, named_errors, write_text
from gulliver.jobs.stop import StopRequest
from gulliver.options import from_plain, resolved
from gulliver.schedule.live.controller import Controller, last_line
from gulliver.schedule.live.history import (
    ScheduleHistory,
    live_page,
    read_history,
    take_up,
    write_history,
)
from gulliver.schedule.live.nodes import LocalNodes, Nodes, RayNodes, own_name, require_ray
from gulliver.schedule.live.options import HERE, LOCAL, SchedulerOptions
from gulliver.schedule.live.tracking import Spool, write_object
from gulliver.schedule.policies import make_policy

PROGRAM = "from gulliver.schedule.live.daemon import main; main()"
TICK_S = 0.1
SECONDS_BETWEEN_WRITES = 0.5
DRAIN_S = 60.0  # seconds for jobs to save when the scheduler is stopped
START_S = 300.0  # seconds for a new scheduler to report that it is running


@contextmanager
def only_one(spool: Spool) -> Iterator[None]:
    path = spool.path / "scheduler.lock"
    with named_errors(path):
        path.touch()
    try:
        with hold(path):
            yield
    except BlockingIOError:
        about = spool.scheduler() or {}
        raise GulliverError(
            f"{spool.path} already has a scheduler: process {about.get('pid', '?')} on "
            f"{about.get('host', '?')}; submit to it, or stop it first"
        ) from None


def has_scheduler(spool: Spool) -> bool:
    path = spool.path / "scheduler.lock"
    if not path.exists():
        return False
    try:
        with hold(path):
            return False
    except BlockingIOError:
        return True


def make_nodes(options: SchedulerOptions) -> Nodes:
    if options.address == HERE:
        return LocalNodes(options.cluster_slots or os.cpu_count() or 1)
    address = None if options.address == LOCAL else options.address
    return RayNodes(address, options.cluster_slots, own_name(str(options.path)), options.dashboard)


def serve(options: SchedulerOptions) -> None:
    """Runs the scheduler until it has been idle for some time, or receives a signal."""
    spool = Spool(options.path)
    spool.make()
    policy = make_policy(options.policy, options.seed)
    with only_one(spool):
        # Left by a scheduler that was killed.
        (spool.path / "scheduler.json").unlink(missing_ok=True)
        nodes = make_nodes(options)
        try:
            before = read_history(spool)
            begun = time.time() if before is None else before.begun
            controller = Controller(spool, nodes, policy, time.time, options.quotas, begun)
            for job in before.jobs.values() if before else ():
                take_up(job)
                controller.jobs[job.name] = job
            controller.rounds.extend(before.rounds if before else ())
            while not controller.slots:
                controller.tick()
                time.sleep(TICK_S)
            _announce(spool, options, controller, nodes)
            with StopRequest().listening() as stop:
                _loop(controller, options, stop)
        finally:
            (spool.path / "scheduler.json").unlink(missing_ok=True)
            nodes.close()


def _announce(
    spool: Spool, options: SchedulerOptions, controller: Controller, nodes: Nodes
) -> None:
    about = {"pid": os.getpid(), "host": socket.gethostname(), "slots": len(controller.slots)}
    about |= {"policy": options.policy, "begun": controller.begun, "quotas": options.quotas}
    about |= {"address": getattr(nodes, "address", options.address)}
    about["dashboard"] = getattr(nodes, "dashboard", None)
    write_object(spool.path / "scheduler.json", about)


def _loop(controller: Controller, options: SchedulerOptions, stop: StopRequest) -> None:
    written, busy, until = 0.0, time.monotonic(), 0.0
    while True:
        now = time.monotonic()
        if stop.wanted and not until:
            until = now + DRAIN_S
        if until:
            if controller.drain() or now > until:
                break
        else:
            controller.tick()
        if controller.busy:
            busy = now
        if now - busy > options.idle:
            break
        if controller.changed and now - written > SECONDS_BETWEEN_WRITES:
            keep(controller, options)
            written, controller.changed = now, False
        time.sleep(TICK_S)
    keep(controller, options)


def keep(controller: Controller, options: SchedulerOptions) -> ScheduleHistory:
    history = ScheduleHistory(
        controller.begun,
        controller.clock() - controller.begun,
        options.policy,
        options.seed,
        dict(controller.slots),
        options.quotas,
        controller.jobs,
        list(controller.rounds),
        controller.refused,
    )
    write_history(controller.spool, history)
    page = controller.spool.path / "schedule.html"
    with named_errors(page):
        write_text(page, live_page(history), durable=False)
    return history


def has_new(spool: Spool) -> bool:
    """Whether a job was submitted while the idle scheduler was shutting down."""
    history = read_history(spool)
    known = set() if history is None else {*history.jobs, *history.refused}
    return bool(set(spool.names()) - known)


def ensure_scheduler(options: SchedulerOptions) -> bool:
    """Starts a scheduler if the folder has none; returns whether it did."""
    spool = Spool(options.path)
    spool.make()
    if has_scheduler(spool):
        return False
    if options.address != HERE:
        require_ray()
    make_policy(options.policy)
    log = spool.path / "scheduler.log"
    with named_errors(log), open(log, "ab") as file:
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(resolved(options))],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    due = time.monotonic() + START_S
    while time.monotonic() < due:
        about = spool.scheduler()
        if about is not None and has_scheduler(spool):
            return True
        if program.poll() is not None:
            raise GulliverError(f"the scheduler did not start: {last_line(log)}")
        time.sleep(TICK_S)
    raise GulliverError(f"the scheduler did not start within {START_S:g} s; see {log}")


def stop_scheduler(folder: Path) -> None:
    """Stops the scheduler of a folder; its jobs save, leave, and wait for the next scheduler."""
    spool = Spool(folder)
    about = spool.scheduler()
    if about is None or not has_scheduler(spool):
        raise GulliverError(f"no scheduler is running in {folder}")
    if about["host"] != socket.gethostname():
        raise GulliverError(f"the scheduler of {folder} runs on {about['host']}; stop it there")
    with suppress(ProcessLookupError):
        os.kill(about["pid"], signal.SIGTERM)


def main() -> None:
    options = from_plain(json.loads(sys.argv[1]), SchedulerOptions)
    try:
        serve(options)
        while has_new(Spool(options.path)):
            serve(options)
    except GulliverError as error:
        print(f"gulliver: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
