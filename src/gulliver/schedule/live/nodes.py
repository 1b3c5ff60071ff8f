"""Slots on nodes, and the ranks that run on them.

An `Agent` runs on each node and starts ranks. `Nodes` maps slots to nodes and starts an attempt of
a job on several nodes; `RayNodes` finds nodes through Ray.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from gulliver.errors import GulliverError, missing_extra
from gulliver.schedule.live.options import Submission
from gulliver.schedule.live.training import ATTEMPT, BATCH, JOB

IMPORTS_S = 300.0  # seconds for the forking process to import torch
KILLED = -9  # exit code reported for ranks on a lost node


class RankEnd(NamedTuple):
    """Exit of a rank."""

    # Run that the rank belongs to.
    run: str
    rank: int
    # Exit code, negative for a signal.
    code: int
    why: str = ""


@dataclass(frozen=True)
class Launch:
    """An attempt of a job to start."""

    run: str
    # Number of the attempt, starting at 1.
    attempt: int
    # Its slots, one rank each.
    slots: tuple[int, ...]
    # Initial global batch size.
    batch: int
    submission: Submission
    folder: Path

    def log(self, rank: int) -> Path:
        return self.folder / "logs" / f"attempt-{self.attempt:03d}-rank-{rank}.log"


@dataclass(frozen=True)
class RankStart:
    """A rank to start."""

    key: str
    argv: Sequence[str]
    # Environment variables, in addition to the agent's.
    environment: Mapping[str, str]
    folder: str
    # File for its output.
    log: str
    # Whether it gets a new interpreter.
    fresh: bool = False


class Agent:
    """Starts ranks on its node, and reports their exit codes."""

    def __init__(self) -> None:
        self._program: subprocess.Popen[bytes] | None = None
        self._there = threading.Event()
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._ended: dict[str, int] = {}

    def ready(self) -> bool:
        """Starts the forking process unless it is running, and waits until it is ready."""
        if self._program is None or self._program.poll() is not None:
            # As torchrun does if several processes share a node.
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            self._program = subprocess.Popen(
                [sys.executable, "-m", "gulliver.schedule.live.forks"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            self._there = threading.Event()
            threading.Thread(target=self._listen, args=(self._program,), daemon=True).start()
        return self._there.wait(IMPORTS_S)

    def _listen(self, program: subprocess.Popen[bytes]) -> None:
        assert program.stdout is not None
        for line in program.stdout:
            found = json.loads(line)
            if "ready" in found:
                self._there.set()
                continue
            with self._lock:
                self._running.discard(found["key"])
                self._ended[found["key"]] = found["code"]
        with self._lock:
            self._ended |= dict.fromkeys(self._running, KILLED)
            self._running.clear()

    def _describe(self, **command: Any) -> None:
        assert self._program is not None
        assert self._program.stdin is not None
        with suppress(BrokenPipeError):
            self._program.stdin.write(json.dumps(command).encode() + b"\n")
            self._program.stdin.flush()

    def address(self) -> tuple[str, int]:
        """Address of this node, and a currently free port."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return own_address(), probe.getsockname()[1]

    def start(self, ranks: Sequence[RankStart]) -> None:
        self.ready()
        with self._lock:
            self._running |= {rank.key for rank in ranks}
        for rank in ranks:
            self._describe(start=asdict(rank))

    def ended(self) -> dict[str, int]:
        """Exit codes of ranks that ended since the last call."""
        with self._lock:
            found, self._ended = self._ended, {}
        return found

    def kill(self, keys: Sequence[str]) -> None:
        if self._program is not None:
            for key in keys:
                self._describe(kill=key)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self, method)(*arguments)

    def close(self) -> None:
        if self._program is not None and self._program.stdin is not None:
            with suppress(BrokenPipeError):
                self._program.stdin.close()
            self._program.wait()


def own_address() -> str:
    """Address at which other nodes reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


class NodeLost(Exception):
    """A node no longer responds; the message is its name."""


@dataclass
class LiveRun:
    """Ranks of a running attempt: their nodes, and which of them are alive."""

    nodes: list[str]
    alive: set[int] = field(default_factory=set)


class Nodes:
    """Runs attempts on nodes with agents; subclasses discover the nodes."""

    def __init__(self) -> None:
        # Agents by node name; Ray's may raise `NodeLost`.
        self.nodes: dict[str, Agent | RayNode] = {}
        # Node of each slot.
        self.places: dict[int, str] = {}
        # Device of each slot, on nodes with GPUs.
        self.gpus: dict[int, str] = {}
        self.runs: dict[str, LiveRun] = {}
        self._lost: list[RankEnd] = []

    def slots(self) -> Mapping[int, str]:
        return self.places

    def start(self, launch: Launch) -> None:
        """Starts the ranks of an attempt; if a node is lost meanwhile, its ranks count as ended."""
        run = LiveRun([self.places[slot] for slot in launch.slots])
        run.alive = set(range(len(run.nodes)))
        self.runs[launch.run] = run
        try:
            host, port = self.nodes[run.nodes[0]].call("address")
            if len(set(run.nodes)) == 1:
                host = "127.0.0.1"
            for node in dict.fromkeys(run.nodes):
                self.nodes[node].call("start", self._ranks(launch, run, node, host, port))
        except NodeLost as lost:
            self.remove_lost(str(lost))
            self.kill(launch.run)
            # Some ranks were never started, so no agent would report their end.
            for rank in sorted(run.alive):
                self._lost += self._end(launch.run, rank, KILLED, f"node {lost} was lost")

    def _ranks(
        self, launch: Launch, run: LiveRun, node: str, host: str, port: int
    ) -> list[RankStart]:
        given, mine = launch.submission, [r for r, n in enumerate(run.nodes) if n == node]
        devices = [self.gpus[launch.slots[r]] for r in mine if launch.slots[r] in self.gpus]
        shared = {
            **given.environment,
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(len(run.nodes)),
            "LOCAL_WORLD_SIZE": str(len(mine)),
            JOB: str(launch.folder.absolute()),
            ATTEMPT: str(launch.attempt),
            BATCH: str(launch.batch),
            **({"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}),
        }
        folder = os.path.abspath(given.directory)
        argv = [os.path.join(folder, given.script), *given.arguments]
        return [
            RankStart(
                f"{launch.run}:{rank}",
                argv,
                {**shared, "RANK": str(rank), "LOCAL_RANK": str(local)},
                folder,
                str(launch.log(rank).absolute()),
                given.fresh,
            )
            for local, rank in enumerate(mine)
        ]

    def ended(self) -> list[RankEnd]:
        found, self._lost = self._lost, []
        for name in list(self.nodes):
            try:
                codes = self.nodes[name].call("ended")
            except NodeLost:
                self.remove_lost(name)
                continue
            for key, code in codes.items():
                run, _, rank = key.rpartition(":")
                found += self._end(run, int(rank), code)
        lost, self._lost = self._lost, []
        return found + lost

    def _end(self, name: str, rank: int, code: int, why: str = "") -> list[RankEnd]:
        run = self.runs.get(name)
        if run is None or rank not in run.alive:
            return []
        run.alive.discard(rank)
        if not run.alive:
            del self.runs[name]
        return [RankEnd(name, rank, code, why)]

    def remove_lost(self, node: str) -> None:
        self.nodes.pop(node, None)
        self.places = {slot: where for slot, where in self.places.items() if where != node}
        for name, run in list(self.runs.items()):
            for rank in [r for r in run.alive if run.nodes[r] == node]:
                self._lost += self._end(name, rank, KILLED, f"node {node} was lost")

    def kill(self, run: str) -> None:
        found = self.runs.get(run)
        for node in dict.fromkeys(found.nodes if found else ()):
            assert found is not None
            keys = [f"{run}:{r}" for r in sorted(found.alive) if found.nodes[r] == node]
            if node in self.nodes and keys:
                try:
                    self.nodes[node].call("kill", keys)
                except NodeLost:
                    self.remove_lost(node)

    def close(self) -> None:
        for node in self.nodes.values():
            with suppress(NodeLost):
                node.call("close")
        self.nodes.clear()


class LocalNodes(Nodes):
    """Slots of this machine, without Ray."""

    def __init__(self, slots: int, agent: Agent | None = None) -> None:
        super().__init__()
        self.nodes["here"] = here = agent or Agent()
        self.places = dict.fromkeys(range(slots), "here")
        here.ready()


# Nodes of a Ray cluster: an agent on each reserves the node's CPUs or GPUs as slots.


AUTH_MODE = "RAY_AUTH_MODE"  # environment variable that enables Ray's token authentication
NAMESPACE, SCHEDULER = "gulliver", "gulliver-scheduler"
SECONDS_BETWEEN_LOOKS = 1.0  # seconds between checks for new or lost nodes
ANSWER_S = 30.0  # seconds until an unresponsive agent counts as lost
START_S = 180.0  # seconds for the first process of a new Ray cluster to start
STORE_BYTES = 80 << 20  # bytes of a local cluster's object store, which is hardly used


def show_token(address: str) -> None:
    """Lets Ray use its token to authenticate with a cluster on this machine."""
    # Ray requires one on every cluster that it starts, but does not send it to an explicit address.
    # It is never sent to other machines automatically, because they may belong to another cluster.
    host, token = address.rpartition(":")[0], Path.home() / ".ray" / "auth_token"
    if token.is_file() and host in ("127.0.0.1", "localhost", socket.gethostname(), own_address()):
        os.environ.setdefault(AUTH_MODE, "token")


def require_ray() -> None:
    if find_spec("ray") is None:
        raise missing_extra(
            "ray is not installed; --address here runs processes on this machine without Ray", "ray"
        )


class Holder:
    """Ray actor that marks a cluster as having a scheduler."""

    def __init__(self, scheduler: str) -> None:
        self._scheduler = scheduler

    def scheduler(self) -> str:
        return self._scheduler


class RayNode:
    """Client of an agent on a Ray node."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self.actor = name, actor

    def call(self, method: str, *arguments: Any) -> Any:
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            return ray.get(getattr(self.actor, method).remote(*arguments), timeout=ANSWER_S)
        except RayError as error:
            if isinstance(error, RayTaskError):
                raise
            # An agent that was only slow would hold the slots that the next one waits for.
            with suppress(Exception):
                ray.kill(self.actor)
            raise NodeLost(self.name) from error


class RayAgent(Agent):
    """An agent as a Ray actor."""

    def devices(self) -> list[str]:
        given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return [device for device in given.split(",") if device]


class RayNodes(Nodes):
    """Slots of a Ray cluster."""

    def __init__(
        self, address: str | None, slots: int | None, scheduler: str, dashboard: bool = False
    ) -> None:
        require_ray()
        super().__init__()
        self._most, self._numbers = slots, dict[str, list[int]]()
        self._pending: dict[str, tuple[Any, Any]] = {}
        self._looked = 0.0
        self._connect(address, slots, dashboard)
        self._hold(scheduler)

    def _connect(self, address: str | None, slots: int | None, dashboard: bool) -> None:
        if address is not None:
            show_token(address)
        import ray

        options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False}
        if address is None:
            # Ray's workers run with niceness 15, which ranks would inherit.
            os.environ.setdefault("RAY_worker_niceness", "0")
            options |= {"num_cpus": slots, "include_dashboard": dashboard}
            options |= {"object_store_memory": STORE_BYTES, "address": "local"}
        else:
            options["address"] = address
        try:
            context: Any = ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            if address is not None and os.environ.get(AUTH_MODE) != "token":
                reason += f"; if it requires a token, set {AUTH_MODE}=token and RAY_AUTH_TOKEN_PATH"
            raise GulliverError(
                f"cannot connect to Ray on {address or 'this machine'}: {reason}"
            ) from None
        self.address: str = context.address_info.get("gcs_address") or str(address)
        self.dashboard: str | None = context.dashboard_url or None

    def _hold(self, scheduler: str) -> None:
        import ray

        kind = ray.remote(Holder)
        try:
            self._holder: Any = kind.options(name=SCHEDULER, num_cpus=0).remote(scheduler)
            ray.get(self._holder.scheduler.remote(), timeout=START_S)
        except ValueError:
            other = "an unresponsive one"
            with suppress(Exception):
                found: Any = ray.get_actor(SCHEDULER)
                other = ray.get(found.scheduler.remote(), timeout=ANSWER_S)
            self.close()
            raise GulliverError(
                f"the cluster at {self.address} already has a scheduler: {other}; submit to that "
                "one, or stop it first"
            ) from None

    def slots(self) -> Mapping[int, str]:
        if time.monotonic() - self._looked >= SECONDS_BETWEEN_LOOKS:
            self._looked = time.monotonic()
            self._poll_nodes()
        return self.places

    def _poll_nodes(self) -> None:
        """Starts agents on new nodes, adopts existing ones, and drops lost nodes."""
        import ray

        there = {n["NodeID"]: n for n in ray.nodes() if n["Alive"]}
        unit = "GPU" if any(n["Resources"].get("GPU") for n in there.values()) else "CPU"
        for node in [n for n in self.nodes if n not in there]:
            self.remove_lost(node)
        for node, reason in there.items():
            count = int(reason["Resources"].get(unit, 0))
            count = count if self._most is None else min(count, self._most)
            if count and node not in self.nodes and node not in self._pending:
                self._begin(node, count, unit)
        for node, (actor, ref) in list(self._pending.items()):
            self._adopt_node(node, actor, ref, unit)

    def _begin(self, node: str, count: int, unit: str) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(node, soft=False)
        needs = {"num_gpus": count, "num_cpus": 0} if unit == "GPU" else {"num_cpus": count}
        kind: Any = ray.remote(RayAgent)
        actor = kind.options(scheduling_strategy=here, max_restarts=0, **needs).remote()
        self._pending[node] = actor, actor.ready.remote()
        if node not in self._numbers:
            # A slot keeps its number when its node comes back.
            used = [number for numbers in self._numbers.values() for number in numbers]
            first = max(used, default=-1) + 1
            self._numbers[node] = list(range(first, first + count))

    def _adopt_node(self, node: str, actor: Any, ref: Any, unit: str) -> None:
        import ray
        from ray.exceptions import RayError

        done, _ = ray.wait([ref], timeout=0)
        if not done:
            return
        del self._pending[node]
        try:
            ray.get(ref, timeout=0)
            devices = ray.get(actor.devices.remote(), timeout=ANSWER_S) if unit == "GPU" else []
        except RayError:
            return
        self.nodes[node] = RayNode(node, actor)
        self.places |= dict.fromkeys(self._numbers[node], node)
        self.gpus |= dict(zip(self._numbers[node], devices, strict=False))

    def close(self) -> None:
        """Stops all agents and disconnects; also stops a cluster that was started here."""
        import ray

        super().close()
        ray.shutdown()


def own_name(folder: str) -> str:
    return f"folder {folder} on {socket.gethostname()}, process {os.getpid()}"
