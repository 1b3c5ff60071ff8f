"""A control group of its own with a limit of memory and rates of a disk; removed when it is left.

Both versions of control groups name the same things differently: `Place` is where they are mounted
and `FILES` what they call each. What is charged is what the kernel counts: anonymous memory, and
the page cache until it is reclaimed; what is read and written past the page cache is not charged.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path("/sys/fs/cgroup")
PREFIX = "gulliver-"
NO_LIMIT = {1: "-1", 2: "max"}
FILES = {
    "limit": {1: "memory.limit_in_bytes", 2: "memory.max"},
    "usage": {1: "memory.usage_in_bytes", 2: "memory.current"},
    "peak": {1: "memory.max_usage_in_bytes", 2: "memory.peak"},
    "kills": {1: "memory.oom_control", 2: "memory.events"},
    "anonymous": {1: "total_rss", 2: "anon"},
    "swapped": {1: "total_swap", 2: "memory.swap.current"},
}
ENDLESS = 1 << 50  # Bytes per second that no disk does
_numbers = itertools.count()


class LimitsError(Exception):
    """Limits cannot be set here, or a group cannot be made; the message says what is missing."""


@dataclass(frozen=True)
class Place:
    """The folders that groups are made in."""

    version: int  # 1 or 2, of the control groups
    memory: Path  # folder of the groups that limit memory
    disk: Path  # folder of those that shape disks, the same one with version 2


def places(root: Path = ROOT) -> Place:
    """Finds where groups can be made."""
    if (root / "memory" / "memory.limit_in_bytes").exists():
        return Place(1, root / "memory", root / "blkio")
    controllers = root / "cgroup.controllers"
    if controllers.exists() and "memory" in controllers.read_text().split():
        return Place(2, root, root)
    raise LimitsError(f"no control group under {root} limits memory: mount cgroup v1 or v2")


def check_limits() -> Place:
    """Refuses to go on where limits cannot be set."""
    if os.geteuid() != 0:
        raise LimitsError("limits of memory need root: run as root, or in a privileged container")
    return places()


class Group:
    """A control group; leaving it ends what still runs inside, and removes it."""

    def __init__(
        self,
        memory: int | None = None,
        read_bps: int | None = None,
        write_bps: int | None = None,
        disk: Path | str | None = None,
        place: Place | None = None,
    ) -> None:
        self.place = check_limits() if place is None else place
        self.memory, self.read_bps, self.write_bps = memory, read_bps, write_bps
        self._device = None if disk is None else device_of(Path(disk))
        if (read_bps or write_bps) and self._device is None:
            raise LimitsError("rates need a path on the disk that they are of")
        name = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
        self._memory, self._disk = self.place.memory / name, self.place.disk / name

    @property
    def folders(self) -> list[Path]:
        """Folders of the group: one with version 2, one for each controller with version 1."""
        return list(dict.fromkeys([self._memory, self._disk]))

    def __enter__(self) -> Group:
        remove_left_behind(self.place)
        try:
            for folder in self.folders:
                folder.mkdir()
            if self.memory is not None:
                self.set_limit(self.memory)
            self._shape()
        except OSError as error:
            self.close()
            raise LimitsError(f"cannot make a control group: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command that is in the group before its first instruction."""
        # A shell enters and becomes the command: nothing of ours runs between fork and exec.
        enter = "".join(f"echo $$ > '{folder}/cgroup.procs' && " for folder in self.folders)
        shell = ["sh", "-c", enter + 'exec "$@"', "sh", *command]
        process = subprocess.Popen(shell, **options)
        while process.poll() is None and process.pid not in self.processes():
            time.sleep(0.001)
        return process

    def set_limit(self, nbytes: int | None) -> None:
        """Changes the limit of memory; None for none."""
        text = NO_LIMIT[self.place.version] if nbytes is None else str(nbytes)
        try:
            (self._memory / FILES["limit"][self.place.version]).write_text(text)
        except OSError as error:
            raise LimitsError(f"cannot set a limit of {text} bytes: {error}") from error

    @property
    def usage(self) -> int:
        """Bytes charged now."""
        return self._number("usage")

    @property
    def peak(self) -> int:
        """Most bytes that were charged at once, page cache included."""
        return self._number("peak")

    @property
    def anonymous(self) -> int:
        """Bytes of anonymous memory now: what a process has allocated and touched."""
        return self._fields("memory.stat")[FILES["anonymous"][self.place.version]]

    @property
    def swapped(self) -> int:
        """Bytes in swap now."""
        if self.place.version == 1:
            return self._fields("memory.stat").get("total_swap", 0)
        return self._number("swapped")

    @property
    def kills(self) -> int:
        """Processes that were killed for memory."""
        return self._fields(FILES["kills"][self.place.version]).get("oom_kill", 0)

    @property
    def disk_bytes(self) -> tuple[int, int]:
        """Bytes that were read from and written to the disk so far."""
        return disk_bytes(self._disk, self._device or "", self.place.version)

    @property
    def disk_folder(self) -> Path:
        """Folder whose files count bytes of disks, for `disk_bytes` in another process."""
        return self._disk

    @property
    def device(self) -> str:
        """Numbers of the disk, ``MAJOR:MINOR``; empty without one."""
        return self._device or ""

    def processes(self) -> list[int]:
        """Ids of the processes inside."""
        found: set[int] = set()
        for folder in self.folders:
            with suppress(OSError):
                found.update(int(line) for line in (folder / "cgroup.procs").read_text().split())
        return sorted(found)

    def close(self) -> None:
        """Ends what still runs inside, and removes the group."""
        for _ in range(200):
            for process in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            if not self.processes() and _removed(self.folders):
                return
            time.sleep(0.02)
        raise LimitsError(f"cannot remove {', '.join(map(str, self.folders))}")

    def _shape(self) -> None:
        if self._device is None:
            return
        for name, rate in (("read", self.read_bps), ("write", self.write_bps)):
            if self.place.version == 1:
                # Without a rate nothing is counted, either.
                file = self._disk / f"blkio.throttle.{name}_bps_device"
                file.write_text(f"{self._device} {rate or ENDLESS}")
            elif rate is not None:
                (self._disk / "io.max").write_text(f"{self._device} {name[0]}bps={rate}")

    def _number(self, what: str) -> int:
        return int((self._memory / FILES[what][self.place.version]).read_text())

    def _fields(self, file: str) -> dict[str, int]:
        lines = (self._memory / file).read_text().splitlines()
        return {name: int(value) for name, value in (line.split()[:2] for line in lines)}


def disk_bytes(folder: Path, device: str, version: int) -> tuple[int, int]:
    """Bytes that a group's processes read from and wrote to a disk; see `Group.disk_bytes`."""
    if version == 1:
        text = (folder / "blkio.throttle.io_service_bytes_recursive").read_text()
        rows = [line.split() for line in text.splitlines()]
        found = {row[1]: int(row[2]) for row in rows if len(row) == 3 and row[0] == device}
        return found.get("Read", 0), found.get("Write", 0)
    for line in (folder / "io.stat").read_text().splitlines():
        name, *values = line.split()
        if name == device:
            counts = dict(value.split("=") for value in values)
            return int(counts["rbytes"]), int(counts["wbytes"])
    return 0, 0


def device_of(path: Path) -> str:
    """Numbers of the disk that a path is on; rates are of whole disks, not of partitions."""
    number = path.stat().st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    block = Path("/sys/dev/block") / name
    if not block.exists():
        raise LimitsError(f"{path} is not on a disk: name a folder on one")
    if (block / "partition").exists():
        return (block.resolve().parent / "dev").read_text().strip()
    return name


def remove_left_behind(place: Place) -> None:
    """Removes groups of processes that were killed."""
    for folder in (place.memory, place.disk):
        for group in folder.glob(f"{PREFIX}*"):
            owner = group.name.removeprefix(PREFIX).split("-")[0]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                _removed([group])


def _removed(folders: Iterable[Path]) -> bool:
    for folder in folders:
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError:  # what was killed has not ended yet
            return False
    return True
