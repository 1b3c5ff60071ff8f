"""Collectives of ranks on one host, which read each other's memory directly.

Loopback sockets copy each element four times and wake threads on both sides. The extension
`gulliver.comm._host` copies it once, from the other rank's tensor. `open_host_team` checks which
groups can do this; other groups exchange messages.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver.comm.groups import RankGroup, rank_group_of, sends_directly
from gulliver.comm.watchdog import PATIENCE_S, Purpose, count_sent, flight_recorder

_LOG = logging.getLogger("gulliver")
SWITCH = "GULLIVER_SHARED_MEMORY"
"""Environment variable; ``off`` makes ranks on one host exchange messages."""
INTERFACE = 2
SMALL_BYTES = 32 << 10
"""Maximum size of an all-reduce in which every rank reads all terms, which saves an exchange."""
_DTYPES = {
    (torch.float32, torch.float32): 0,
    (torch.float64, torch.float64): 1,
    (torch.bfloat16, torch.float32): 2,
}
"""Codes of the extension's reductions, by dtype of the terms and of the sum."""
_GATHER, _SUM = 0, 1

_teams: WeakKeyDictionary[Any, HostTeam | None] = WeakKeyDictionary()


class HostWork:
    """An operation in flight."""

    def __init__(self, team: HostTeam, number: int) -> None:
        self._team, self._number = team, number

    def wait(self) -> None:
        """Returns once no rank needs the tensors; raises if the ranks disagree."""
        native, waited = self._team.native, PATIENCE_S
        if not native.wait(self._number, PATIENCE_S):
            flight_recorder.waiting += 1
            try:
                while not native.wait(self._number, PATIENCE_S):
                    flight_recorder.check()
                    waited += PATIENCE_S
                    if waited > flight_recorder.timeout_s:
                        raise RuntimeError("a collective timed out: not all ranks called it")
            finally:
                flight_recorder.waiting -= 1
        self._team.let_go()

    def is_completed(self) -> bool:
        return self._team.native.complete(self._number)


class HostTeam:
    """A group of ranks that read each other's memory directly."""

    def __init__(self, native: Any, rank_group: RankGroup, group: Any) -> None:
        self.native, self.rank, self.size = native, rank_group.rank, rank_group.size
        self._group = weakref.ref(group)  # the key under which the team is cached
        # Tensors of operations that are not complete on all ranks, whether waited for or not.
        self._read: deque[tuple[int, tuple[Tensor, ...]]] = deque()
        self._lock = threading.Lock()

    def let_go(self) -> None:
        """Drops references to tensors that no rank needs any more."""
        with self._lock:
            while self._read and self.native.complete(self._read[0][0]):
                self._read.popleft()

    def takes(self, output: Tensor, input: Tensor, op: str) -> bool:
        cpu = input.device.type == "cpu"
        return cpu and op != "max" and (input.dtype, output.dtype) in _DTYPES

    def reduce_terms(
        self,
        output: Tensor,
        terms: Iterable[tuple[int, Tensor | None, int]],
        size: int,
        dtype: torch.dtype,
        purpose: Purpose,
    ) -> HostWork:
        """Averages an operand whose elements are in several contiguous tensors."""
        # Address and end of each run, in bytes; those without an address are zeros.
        runs, last, tensors = list[int](), 0, list[Tensor]()
        for start, tensor, end in (*terms, (size, None, size)):
            if start > last:
                runs += 0, start * dtype.itemsize
            if tensor is not None:
                tensors.append(tensor)
            if end > start:
                runs += 0 if tensor is None else tensor.data_ptr(), end * dtype.itemsize
            last = end
        nbytes = size * dtype.itemsize // self.size
        count_sent(nbytes * (self.size - 1))
        kind = _SUM, _DTYPES[dtype, output.dtype], True, False
        return self._post(kind, tensors, output, nbytes, self._tag(purpose), False, runs)

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str, purpose: Purpose) -> HostWork:
        count_sent(input.nbytes * (1 - 1 / self.size))
        return self._sum(output.detach(), input.detach(), op, self._tag(purpose))

    def all_gather(
        self, output: Tensor, input: Tensor, purpose: Purpose, here: bool = False
    ) -> HostWork:
        count_sent(input.nbytes * (self.size - 1))
        return self._gather(output.detach(), input.detach(), self._tag(purpose), here=here)

    def all_reduce(
        self, tensor: Tensor, op: str, purpose: Purpose, now: bool
    ) -> list[HostWork] | None:
        """Reduces a tensor in place; returns the operations to wait for, or None if unsupported."""
        tensor = tensor.detach()
        if now and tensor.nbytes <= SMALL_BYTES:
            terms = tensor.new_empty(self.size, *tensor.shape)
            self.all_gather(terms, tensor, purpose, here=True).wait()
            tensor.copy_(reduce(torch.maximum if op == "max" else torch.add, terms))
            if op == "mean":
                tensor.div_(self.size)
            return []
        if not self.takes(tensor, tensor, op) or tensor.numel() % self.size:
            return None
        count_sent(2 * tensor.nbytes * (1 - 1 / self.size))
        flat, tag = tensor.view(-1), self._tag(purpose)
        part = flat.view(self.size, -1)[self.rank]
        self._sum(part, flat, op, tag)
        return [self._gather(flat, part, tag, follows=True)]

    def drain(self, until: float) -> bool:
        """Waits for all operations in flight, up to a deadline; returns whether they finished."""
        number = self._read[-1][0] if self._read else None
        try:
            return number is None or self.native.wait(number, max(0.0, until - time.monotonic()))
        except RuntimeError:  # a rank is gone, so nothing can arrive from it
            return True

    def _tag(self, purpose: Purpose) -> int:
        return flight_recorder.next_tag(self._group(), 1, purpose)

    def _sum(self, output: Tensor, input: Tensor, op: str, tag: int) -> HostWork:
        kind = _DTYPES[input.dtype, output.dtype], op == "mean", False
        return self._post((_SUM, *kind), [input], output, input.nbytes // self.size, tag, False)

    def _gather(
        self, output: Tensor, input: Tensor, tag: int, follows: bool = False, here: bool = False
    ) -> HostWork:
        return self._post((_GATHER, 0, False, follows), [input], output, input.nbytes, tag, here)

    def _post(
        self,
        kind: tuple[int, int, bool, bool],
        read: Sequence[Tensor],
        written: Tensor,
        nbytes: int,
        tag: int,
        here: bool,
        runs: Sequence[int] = (),
    ) -> HostWork:
        first = 0 if runs else read[0].data_ptr()
        number = self.native.post(*kind, first, written.data_ptr(), nbytes, tag, here, runs)
        self.let_go()
        with self._lock:
            self._read.append((number, (*read, written)))
        return HostWork(self, number)


def host_team(group: Any) -> HostTeam | None:
    return _teams.get(group or dist.group.WORLD) if _teams else None


def open_host_team(group: dist.ProcessGroup | None) -> str:
    """Opens the host team of a group (collective); returns the reason if that fails, else ""."""
    key = group or dist.group.WORLD
    if key is None or not sends_directly(group, torch.empty(0)):
        return "tensors do not travel over gloo"
    if _teams.get(key) is not None:
        return ""
    rank_group = rank_group_of(group)
    native, problem = _load()
    team: Any = None
    # Ranks in other namespaces have other process ids, or links that were set up deliberately.
    own = (problem, os.getpid(), socket.gethostname(), *map(_namespace, ("pid", "net")))
    found = _gathered(own, group)
    problem = next((other[0] for other in found if other[0]), "")
    if not problem and len({other[2:] for other in found}) > 1:
        problem = "the ranks are not all on one host"
    if problem:
        return problem
    name = _make_page(native, rank_group) if rank_group.rank == 0 else ""
    name = _gathered(name, group)[0]
    marker = torch.full((1,), 0x6775_6C6C, dtype=torch.int64)
    try:
        pids = [other[1] for other in found]
        team = native.Team(name, rank_group.rank, pids) if name else None
        problem = "" if team else "there is no room for a shared page"
    except RuntimeError as error:
        problem = str(error)
    addresses = _gathered(marker.data_ptr(), group)
    if team is not None:
        errors = {team.probe(peer, at, int(marker)) for peer, at in enumerate(addresses)} - {0}
        problem = f"reading is refused ({os.strerror(max(errors))})" if errors else ""
    problem = next((found for found in _gathered(problem, group) if found), "")
    if rank_group.rank == 0 and name:
        Path(name).unlink(missing_ok=True)
    _teams[key] = None if problem else HostTeam(team, rank_group, key)
    return problem


def log_host_team(group: dist.ProcessGroup | None) -> None:
    """Opens a group's host team; the first rank logs the reason if that fails."""
    problem = open_host_team(group)
    if problem and rank_group_of(group).rank == 0:
        _LOG.info("ranks exchange messages instead of sharing memory: %s", problem)


def drain_host_teams(until: float) -> bool:
    """Waits until no rank needs this rank's memory; returns False after the deadline."""
    return all(team.drain(until) for team in list(_teams.values()) if team is not None)


def close_host_teams(seconds: float) -> None:
    """Closes all teams when the world ends, waiting at most `seconds`."""
    drain_host_teams(time.monotonic() + seconds)
    _teams.clear()


def _load() -> tuple[Any, str]:
    if os.environ.get(SWITCH, "") == "off":
        return None, f"{SWITCH}=off"
    try:
        from gulliver.comm import _host  # type: ignore[attr-defined]
    except ImportError as error:
        return None, f"the extension gulliver.comm._host is not built ({error})"
    if _host.INTERFACE != INTERFACE:
        return None, "this system has no process_vm_readv, or the extension is of another version"
    yama = Path("/proc/sys/kernel/yama/ptrace_scope")
    if yama.is_file() and yama.read_text(encoding="ascii").strip() == "1":
        _host.allow_reading()  # otherwise only a parent process may read another one
    return _host, ""


def _make_page(native: Any, rank_group: RankGroup) -> str:
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    try:
        handle, name = tempfile.mkstemp(prefix="gulliver-", dir=folder)
        # Written instead of truncated: on a full file system, SIGBUS would end the process later.
        with os.fdopen(handle, "wb") as file:
            file.write(bytes(native.page_bytes(rank_group.size)))
    except OSError:
        return ""
    return name


def _namespace(kind: str) -> str:
    try:
        return str(Path(f"/proc/self/ns/{kind}").readlink())
    except OSError:
        return ""


def _gathered(value: Any, group: dist.ProcessGroup | None) -> Sequence[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found
