"""Atomic writing of files and folders.

Content is written under a temporary name in the same folder, synced, and renamed.
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
"""Pattern of temporary names, which contain the writer's process id."""
PARTIAL = ".partial"
"""Suffix of temporary names; such files may be deleted when no process is writing."""


def sync(path: Path) -> None:
    """Syncs a file, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_file(path: Path, needed: int = 0, durable: bool = True) -> Iterator[Path]:
    """Yields a temporary path next to `path`, which is renamed to `path` if the block succeeds."""
    require_space(path.parent, needed)
    # An unpredictable name; otherwise a link planted there would be followed.
    token = f"{os.getpid()}-{secrets.token_hex(6)}"
    partial = path.with_name(f".{path.name}.{token}{PARTIAL}")
    with named_errors(path, needed=needed):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            if durable:
                sync(partial)
            os.replace(partial, path)
            # The new name is an entry of the folder, which needs its own sync.
            if durable:
                sync(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """Writes a text file atomically; see `atomic_file`."""
    content = text.encode("utf-8")
    with atomic_file(path, len(content), durable) as partial:
        partial.write_bytes(content)


def finish_folder(partial: Path, path: Path) -> None:
    """Syncs everything in a folder and renames the folder to its final name."""
    # Replaces an existing folder of this name: at every moment one of the two exists.
    name_folder(partial, path)
    with named_errors(path):
        sync(path.parent)


def name_folder(partial: Path, path: Path) -> None:
    """Renames a folder to its final name without syncing the rename."""
    with named_errors(path):
        # Contents before the name: after a crash the final name must not refer to a partial folder.
        for found in sorted(partial.rglob("*")):
            sync(found)
        sync(partial)
        if path.is_dir() or path.is_symlink():
            _swap(partial, path)
            remove_all(partial)
        else:
            os.replace(partial, path)


def remove_folder(path: Path) -> None:
    """Removes a folder; after a crash it is either intact, under a temporary name, or gone."""
    # For a link to a folder only the link is removed.
    with named_errors(path, "removed"):
        doomed = path.with_name(path.name + PARTIAL)
        os.replace(path, doomed)
        remove_all(doomed)


def remove_all(path: Path) -> None:
    """Removes a file, a symbolic link (not its target) or a folder tree."""
    # Files that cannot be removed stay, together with their folder.
    if path.is_symlink() or not path.is_dir():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def remove_leftovers(folder: Path) -> list[Path]:
    """Removes temporary files that killed processes have left in a folder."""
    # Removes only files of processes that do not run on this machine and that are not locked
    # (`hold`): the lock protects files that another machine is writing.
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
    free = _free(folder)
    if free < needed:
        raise GulliverError(
            f"{folder} needs {size_text(needed)}, but only {size_text(free)} are free; nothing was "
            "changed"
        )


@contextmanager
def named_errors(path: Path, action: str = "written", needed: int = 0) -> Iterator[None]:
    """Converts operating system errors to one-line errors that name the path."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            wanted = f"{size_text(needed)} needed, " if needed else ""
            raise GulliverError(
                f"no space left for {path}: {wanted}{size_text(_free(path))} are free; nothing "
                "was changed"
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
    """Exchanges the names of two folders, atomically if the system can (Linux)."""
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None and not rename(
        here, os.fsencode(one), here, os.fsencode(other), exchange
    ):
        return
    # Two renames: a process killed between them leaves both under temporary names.
    aside = other.with_name(f"{other.name}.old{PARTIAL}")
    os.replace(other, aside)
    os.replace(one, other)
    with suppress(OSError):
        os.replace(aside, one)


def cache_folder() -> Path:
    """Returns the cache folder shared by all jobs: ``$GULLIVER_CACHE`` or ``~/.cache/gulliver``."""
    chosen = os.environ.get("GULLIVER_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "gulliver"


# File-backed memory: where it is mapped, and how its pages return to the system.


PAGEOUT = 21
"""`MADV_PAGEOUT` of Linux 5.4 and later."""


# [Note: mapped files] State that does not fit into memory is stored in mapped files: a page is read
# on first use and stays until the system needs the memory. One pass through a file larger than
# memory would evict pages that are in constant use, and under a memory limit the system would
# reclaim page by page. So pages are released after the pass (`MADV_PAGEOUT`), which writes modified
# pages and loses nothing; `MADV_DONTNEED` would clear memory that is not file-backed.
class FileMappings:
    """Snapshot of the files mapped into this process."""

    def __init__(self, maps: str = "/proc/self/maps") -> None:
        self._begins: list[int] = []
        self._stops: list[int] = []
        try:
            lines = Path(maps).read_text(errors="replace").splitlines()
        except OSError:
            return  # not Linux: no mappings are known
        for line in lines:
            # Libraries are mapped privately; shared memory without a file is /dev/zero or /dev/shm.
            if "s " not in line[:50] or " /" not in line or " /dev/" in line:
                continue
            begin, stop = (int(edge, 16) for edge in line.split(maxsplit=1)[0].split("-"))
            self._begins.append(begin)
            self._stops.append(stop)

    def hold(self, address: int, nbytes: int) -> bool:
        number = bisect_right(self._begins, address) - 1
        return number >= 0 and 0 < nbytes <= self._stops[number] - address

    def release_pages(self, address: int, nbytes: int) -> None:
        """Releases the full pages in a memory range to the system, if they are file-backed."""
        # Only a hint: nothing happens if the system does not support it.
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
        if size > 0 and self.hold(address, nbytes):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), PAGEOUT)


def to_yaml(value: dict[str, Any]) -> str:
    """Formats a dict as editable YAML; tuples become lists."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True  # no anchors: repeated values are written out

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
        # Their subclasses too, such as `torch.__version__`, which is not a plain str.
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
