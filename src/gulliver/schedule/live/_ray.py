"""Nodes of a Ray cluster: an agent on each holds the node's CPUs or GPUs as slots."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError, missing_extra
from gulliver.schedule.live._backends import Agent, NodeLost, Nodes, own_address

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

    def __init__(self, who: str) -> None:
        self._who = who

    def who(self) -> str:
        """Folder and host of the scheduler."""
        return self._who


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
        self, address: str | None, slots: int | None, who: str, dashboard: bool = False
    ) -> None:
        require_ray()
        super().__init__()
        self._most, self._numbers = slots, dict[str, list[int]]()
        self._pending: dict[str, tuple[Any, Any]] = {}
        self._looked = 0.0
        self._connect(address, slots, dashboard)
        self._hold(who)

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

    def _hold(self, who: str) -> None:
        import ray

        kind = ray.remote(Holder)
        try:
            self._holder: Any = kind.options(name=SCHEDULER, num_cpus=0).remote(who)
            ray.get(self._holder.who.remote(), timeout=START_S)
        except ValueError:
            other = "one that does not answer"
            with suppress(Exception):
                found: Any = ray.get_actor(SCHEDULER)
                other = ray.get(found.who.remote(), timeout=ANSWER_S)
            self.close()
            raise GulliverError(
                f"the cluster at {self.address} has a scheduler: {other}; submit to that one, or "
                "stop it first"
            ) from None

    def slots(self) -> Mapping[int, str]:
        """The slots that are there now, each with its node."""
        if time.monotonic() - self._looked >= SECONDS_BETWEEN_LOOKS:
            self._looked = time.monotonic()
            self._look()
        return self.places

    def _look(self) -> None:
        """Starts agents on new nodes, takes up those that are there, and drops nodes that left."""
        import ray

        there = {n["NodeID"]: n for n in ray.nodes() if n["Alive"]}
        unit = "GPU" if any(n["Resources"].get("GPU") for n in there.values()) else "CPU"
        for node in [n for n in self.nodes if n not in there]:
            self.lose(node)
        for node, reason in there.items():
            count = int(reason["Resources"].get(unit, 0))
            count = count if self._most is None else min(count, self._most)
            if count and node not in self.nodes and node not in self._pending:
                self._begin(node, count, unit)
        for node, (actor, ref) in list(self._pending.items()):
            self._take_up(node, actor, ref, unit)

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

    def _take_up(self, node: str, actor: Any, ref: Any, unit: str) -> None:
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
