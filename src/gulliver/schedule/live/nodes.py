"""Slots on nodes, and the ranks that run there.

An `Agent` runs on each node and starts ranks. `Nodes` knows which slot is on which node and starts
an attempt of a job over several nodes; `nodes.py` finds nodes by Ray.
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

IMPORTS_S = 300.0
"""Seconds that the program that forks ranks may take to import torch."""
KILLED = -9
"""Exit code of ranks whose node is gone."""


class RankEnd(NamedTuple):
    """A rank that has ended."""

    # LiveRun that it was of.
    run: str
    rank: int
    # Exit code, negative for a signal.
    code: int
    why: str = ""


@dataclass(frozen=True)
class Launch:
    """An attempt of a job."""

    run: str
    # Number of the attempt, from 1.
    attempt: int
    # Slots that it gets, a rank on each.
    slots: tuple[int, ...]
    # Global batch size to begin with.
    batch: int
    submission: Submission
    folder: Path

    def log(self, rank: int) -> Path:
        """File of what a rank prints."""
        return self.folder / "logs" / f"attempt-{self.attempt:03d}-rank-{rank}.log"


@dataclass(frozen=True)
class RankStart:
    """A rank to be started."""

    key: str
    argv: Sequence[str]
    # Environment variables, in addition to those of the agent.
    environment: Mapping[str, str]
    folder: str
    # File for what it prints.
    log: str
    # Whether it gets an interpreter of its own.
    fresh: bool = False


class Agent:
    """Starts ranks on its node, and reports how they end."""

    def __init__(self) -> None:
        self._program: subprocess.Popen[bytes] | None = None
        self._there = threading.Event()
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._ended: dict[str, int] = {}

    def ready(self) -> bool:
        """Starts the program that forks ranks unless it runs, and waits until it is ready."""
        if self._program is None or self._program.poll() is not None:
            # As torchrun does where several processes share a node.
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
        """Address of this node, and a port that is free there now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return own_address(), probe.getsockname()[1]

    def start(self, ranks: Sequence[RankStart]) -> None:
        """Starts ranks."""
        self.ready()
        with self._lock:
            self._running |= {rank.key for rank in ranks}
        for rank in ranks:
            self._describe(start=asdict(rank))

    def ended(self) -> dict[str, int]:
        """Exit codes of the ranks that have ended since the last call."""
        with self._lock:
            found, self._ended = self._ended, {}
        return found

    def kill(self, keys: Sequence[str]) -> None:
        """Kills ranks, with what they have started."""
        if self._program is not None:
            for key in keys:
                self._describe(kill=key)

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method, as `RayNode.call` does elsewhere."""
        return getattr(self, method)(*arguments)

    def close(self) -> None:
        """Ends the program, and so all ranks."""
        if self._program is not None and self._program.stdin is not None:
            with suppress(BrokenPipeError):
                self._program.stdin.close()
            self._program.wait()


def own_address() -> str:
    """Address that other nodes reach this one by; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


class NodeLost(Exception):
    """A node, named by the error, does not answer any more."""


@dataclass
class LiveRun:
    """Ranks of an attempt: the node of each, and which have not ended."""

    nodes: list[str]
    alive: set[int] = field(default_factory=set)


class Nodes:
    """Runs over nodes that have agents; subclasses find the nodes."""

    def __init__(self) -> None:
        # Agents by name of their node; those of Ray may raise `NodeLost`.
        self.nodes: dict[str, Agent | RayNode] = {}
        # Node of each slot.
        self.places: dict[int, str] = {}
        # Device of each slot, of nodes with GPUs.
        self.gpus: dict[int, str] = {}
        self.runs: dict[str, LiveRun] = {}
        self._lost: list[RankEnd] = []

    def slots(self) -> Mapping[int, str]:
        """The slots that are there now, each with its node."""
        return self.places

    def start(self, launch: Launch) -> None:
        """Starts the ranks of a run; where a node is lost meanwhile they have ended."""
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
            # Some were never started, and no agent would tell of their end.
            for rank in sorted(run.alive):
                self._lost += self._end(launch.run, rank, KILLED, f"node {lost} left")

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
        """The ranks that have ended since the last call."""
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
        """Removes a lost node with its slots and ranks."""
        self.nodes.pop(node, None)
        self.places = {slot: where for slot, where in self.places.items() if where != node}
        for name, run in list(self.runs.items()):
            for rank in [r for r in run.alive if run.nodes[r] == node]:
                self._lost += self._end(name, rank, KILLED, f"node {node} left")

    def kill(self, run: str) -> None:
        """Kills what is left of a run."""
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
        """Ends all agents, and so all ranks."""
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


# Nodes of a Ray cluster: an agent on each holds the node's CPUs or GPUs as slots.


AUTH_MODE = "RAY_AUTH_MODE"
"""Variable that says whether Ray asks for tokens, and shows its own."""
NAMESPACE, SCHEDULER = "gulliver", "gulliver-scheduler"
SECONDS_BETWEEN_LOOKS = 1.0
"""Seconds between two looks at which nodes there are."""
ANSWER_S = 30.0
"""Seconds after which an agent that does not answer is gone."""
START_S = 180.0
"""Seconds that the first process of a cluster that was just started may take."""
STORE_BYTES = 80 << 20
"""Bytes of the object store of a local cluster: no object of any size is put there."""


def show_token(address: str) -> None:
    """Makes Ray send its token to a cluster of this machine."""
    # Ray asks for one on every cluster that it starts, but does not show it to an address that is
    # spelt out; to another machine it is not shown unasked, which need not be the one that it is
    # of.
    host, token = address.rpartition(":")[0], Path.home() / ".ray" / "auth_token"
    if token.is_file() and host in ("127.0.0.1", "localhost", socket.gethostname(), own_address()):
        os.environ.setdefault(AUTH_MODE, "token")


def require_ray() -> None:
    """Refuses to go on without Ray."""
    if find_spec("ray") is None:
        raise missing_extra(
            "ray is not installed (--address here runs processes of this machine without it)", "ray"
        )


class Holder:
    """Tells a second scheduler who is there; an actor."""

    def __init__(self, scheduler: str) -> None:
        self._scheduler = scheduler

    def scheduler(self) -> str:
        """Folder and host of the scheduler."""
        return self._scheduler


class RayNode:
    """An agent on a node of the cluster."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self.actor = name, actor

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the agent."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            return ray.get(getattr(self.actor, method).remote(*arguments), timeout=ANSWER_S)
        except RayError as error:
            if isinstance(error, RayTaskError):
                raise
            # One that only was too slow would hold the slots that the next agent waits for.
            with suppress(Exception):
                ray.kill(self.actor)
            raise NodeLost(self.name) from error


class RayAgent(Agent):
    """The agent as an actor."""

    def devices(self) -> list[str]:
        """GPUs that Ray has given it."""
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
            # Ray's workers are nice to others by default (15), and ranks would inherit that.
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
                reason += f"; if it asks for a token, set {AUTH_MODE}=token and RAY_AUTH_TOKEN_PATH"
            raise GulliverError(
                f"no Ray cluster at {address or 'this machine'}: {reason}"
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
            other = "one that does not answer"
            with suppress(Exception):
                found: Any = ray.get_actor(SCHEDULER)
                other = ray.get(found.scheduler.remote(), timeout=ANSWER_S)
            self.close()
            raise GulliverError(
                f"the cluster at {self.address} has a scheduler: {other}; submit to that one, or "
                "stop it first"
            ) from None

    def slots(self) -> Mapping[int, str]:
        """The slots that are there now, each with its node."""
        if time.monotonic() - self._looked >= SECONDS_BETWEEN_LOOKS:
            self._looked = time.monotonic()
            self._poll_nodes()
        return self.places

    def _poll_nodes(self) -> None:
        """Starts agents on new nodes, takes up those that are there, and drops nodes that left."""
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
            # A slot keeps its number, also when its node comes back.
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
        """Ends all agents, and leaves the cluster; one that was started here ends."""
        import ray

        super().close()
        ray.shutdown()


def own_name(folder: str) -> str:
    """What a scheduler tells a second one."""
    return f"folder {folder} on {socket.gethostname()}, process {os.getpid()}"
