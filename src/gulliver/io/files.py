"""Files and folders that appear whole or not at all.

All is written under a temporary name next to the final one, forced to the disk, and renamed.
Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import mmap
import os
import re
import secrets
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError
from gulliver.options import size_text

LEFT = re.compile(r"\..*\.([0-9]+)(?:-[0-9a-f]+)?\.partial", re.DOTALL)
"""Temporary names, with the number of the process that writes."""
PARTIAL = ".partial"
"""Ending of temporary names: whatever carries it may be deleted when nobody is writing."""


def sync(path: Path) -> None:
    """Forces a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_file(path: Path, needed: int = 0, durable: bool = True) -> Iterator[Path]:
    """Yields a temporary path in the folder of `path`, renamed to it when the block ends well."""
    require_space(path.parent, needed)
    # A name that nobody can guess, or a link planted there would be followed.
    token = f"{os.getpid()}-{secrets.token_hex(6)}"
    partial = path.with_name(f".{path.name}.{token}{PARTIAL}")
    with named_errors(path, needed=needed):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            if durable:
                sync(partial)
            os.replace(partial, path)
            # The new name is an entry of the folder, which reaches the disk separately.
            if durable:
                sync(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """Writes a text file, whole or not at all; see `atomic_file`."""
    content = text.encode("utf-8")
    with atomic_file(path, len(content), durable) as partial:
        partial.write_bytes(content)


def finish_folder(partial: Path, path: Path) -> None:
    """Forces everything in a folder to the disk and gives it its final name."""
    # A folder that has this name is replaced: at every moment there is one of the two.
    name_folder(partial, path)
    with named_errors(path):
        sync(path.parent)


def name_folder(partial: Path, path: Path) -> None:
    """Does what `finish_folder` does, without forcing the new name to the disk."""
    with named_errors(path):
        # Contents before the name: after a crash the final name must not lead to half a folder.
        for found in sorted(partial.rglob("*")):
            sync(found)
        sync(partial)
        if path.is_dir() or path.is_symlink():
            _swap(partial, path)
            remove_all(partial)
        else:
            os.replace(partial, path)


def remove_folder(path: Path) -> None:
    """Removes a folder: it is there as a whole, or under a temporary name, or not at all."""
    # Of a link to a folder only the link goes.
    with named_errors(path, "removed"):
        doomed = path.with_name(path.name + PARTIAL)
        os.replace(path, doomed)
        remove_all(doomed)


def remove_all(path: Path) -> None:
    """Removes a file, a link (not what it leads to) or a folder with all that is in it."""
    # What cannot be removed stays, and so does the folder that it is in.
    if path.is_symlink() or not path.is_dir():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def remove_leftovers(folder: Path) -> list[Path]:
    """Removes what processes that were killed have left half written in a folder."""
    # Removes only what is named for a process that does not run on this machine, and that nobody
    # has locked (`hold`): the lock keeps what another machine is writing.
    removed = []
    for path in folder.glob(f".*{PARTIAL}") if folder.is_dir() else ():
        found = LEFT.fullmatch(path.name)
        if found and not _is_alive(int(found[1])):
            with suppress(OSError), hold(path):
                remove_all(path)
                removed.append(path)
    return removed


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Locks a file or folder for as long as it is written."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield
    finally:
        os.close(handle)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def require_space(folder: Path, needed: int) -> None:
    """Refuses to begin what the disk has no room for."""
    free = _free(folder)
    if free < needed:
        raise GulliverError(
            f"no space for {size_text(needed)} in {folder}: {size_text(free)} are free, nothing "
            "was changed"
        )


@contextmanager
def named_errors(path: Path, action: str = "written", needed: int = 0) -> Iterator[None]:
    """Turns the system's refusals into one line that names the path."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            wanted = f"{size_text(needed)} needed, " if needed else ""
            raise GulliverError(
                f"no space left for {path}: {wanted}{size_text(_free(path))} are free, nothing was "
                "changed"
            ) from error
        raise GulliverError(
            f"{error.filename or path} cannot be {action}: {error.strerror}"
        ) from error


def _free(path: Path) -> int:
    return shutil.disk_usage(_existing(path)).free


def _existing(path: Path) -> Path:
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return existing


def _swap(one: Path, other: Path) -> None:
    """Exchanges the names of two folders, in one move where the system has it (Linux)."""
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None and not rename(
        here, os.fsencode(one), here, os.fsencode(other), exchange
    ):
        return
    # Two moves: a process killed between them leaves both under temporary names.
    aside = other.with_name(f"{other.name}.old{PARTIAL}")
    os.replace(other, aside)
    os.replace(one, other)
    with suppress(OSError):
        os.replace(aside, one)


def cache_folder() -> Path:
    """Folder that keeps results from job to job: ``$GULLIVER_CACHE`` or ``~/.cache/gulliver``."""
    chosen = os.environ.get("GULLIVER_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "gulliver"


# Memory that is a file: where it lies, and how its pages go back to the system.


PAGEOUT = 21
"""`MADV_PAGEOUT` of Linux 5.4 and later."""


# [Note: mapped files] State that does not fit into memory lies in files that are mapped: a page is
# read when it is touched, and stays until the system needs the room. Whoever goes once through a
# file larger than memory would push out what is used all the time, and under a limit of the system
# have it made room for page by page. So what has been gone through is given back (`MADV_PAGEOUT`),
# which writes what was changed and loses nothing; `MADV_DONTNEED` would empty memory that is no
# file.
class FileMappings:
    """Files that are mapped into this process, as the system tells it now."""

    def __init__(self, maps: str = "/proc/self/maps") -> None:
        self._begins: list[int] = []
        self._stops: list[int] = []
        try:
            lines = Path(maps).read_text(errors="replace").splitlines()
        except OSError:
            return  # no Linux: nothing is known to be a file
        for line in lines:
            # Libraries are mapped privately; shared memory without a file is /dev/zero or /dev/shm.
            if "s " not in line[:50] or " /" not in line or " /dev/" in line:
                continue
            begin, stop = (int(edge, 16) for edge in line.split(maxsplit=1)[0].split("-"))
            self._begins.append(begin)
            self._stops.append(stop)

    def hold(self, address: int, nbytes: int) -> bool:
        """Whether memory is that of a file."""
        number = bisect_right(self._begins, address) - 1
        return number >= 0 and 0 < nbytes <= self._stops[number] - address

    def release_pages(self, address: int, nbytes: int) -> None:
        """Gives the whole pages of memory back to the system, where they are a file's."""
        # It is advice: where the system does not take it nothing happens.
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
        if size > 0 and self.hold(address, nbytes):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), PAGEOUT)


def to_yaml(value: dict[str, Any]) -> str:
    """Writes a dict as YAML for people to edit; tuples become lists."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True  # what occurs twice is written twice

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, indentless=False)

    def text(dumper: Dumper, value: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"')

    def row(dumper: Dumper, items: Sequence[Any]) -> yaml.Node:
        numbers = all(isinstance(item, int | float) for item in items)
        return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=numbers)

    def mapping(dumper: Dumper, items: dict[str, Any]) -> yaml.Node:
        node = dumper.represent_mapping("tag:yaml.org,2002:map", items)
        for key, _ in node.value:
            key.style = None if key.value.isidentifier() else '"'
        return node

    represented: list[tuple[type, Any]] = [(str, text), (list, row), (tuple, row), (dict, mapping)]
    for kind, represent in represented:
        Dumper.add_representer(kind, represent)
        # Their subclasses too, such as `torch.__version__`, which is no plain text.
        Dumper.add_multi_representer(kind, represent)
    Dumper.add_multi_representer(float, lambda dumper, value: dumper.represent_float(float(value)))
    return yaml.dump(
        value,
        Dumper=Dumper,
        default_flow_style=False,
        sort_keys=False,
        allow_unicode=True,
        width=math.inf,
    )
