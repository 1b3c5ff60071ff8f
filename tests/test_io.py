"""Files and folders appear whole or not at all, and refusals are one line."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from gulliver.errors import GulliverError
from gulliver.io import atomic_file, write_text
from gulliver.io.files import finish_folder, named_errors, remove_folder, require_space


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_file_is_replaced_when_the_block_ends_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x"
    write_text(path, "before")
    with atomic_file(path) as partial:
        partial.write_text("after")
        assert path.read_text() == "before"
        assert partial.parent == path.parent  # a rename across disks would not be one move
    assert path.read_text() == "after"
    assert _names(path.parent) == ["x"]


def test_a_block_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_text(path, "before")

    def write() -> None:
        with atomic_file(path) as partial:
            partial.write_text("half")
            raise KeyError("in the middle")

    with pytest.raises(KeyError):
        write()
    assert path.read_text() == "before"
    assert _names(tmp_path) == ["x"]


def test_the_bytes_are_on_the_disk_before_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(handle: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        fsync(handle)

    def noted_replace(one: Path, other: Path) -> None:
        done.append("rename")
        replace(one, other)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    write_text(tmp_path / "x", "bytes")
    assert re.fullmatch(rf"sync \.x\.{os.getpid()}-\w+\.partial", done.pop(0))
    assert done == ["rename", f"sync {tmp_path.name}"]
    done.clear()
    (tmp_path / "f.partial" / "a").mkdir(parents=True)
    (tmp_path / "f.partial" / "a" / "b").write_text("bytes")
    finish_folder(tmp_path / "f.partial", tmp_path / "f")
    assert done == ["sync a", "sync b", "sync f.partial", "rename", f"sync {tmp_path.name}"]


@pytest.mark.parametrize("one_move", [True, False], ids=["exchanged", "two moves"])
def test_a_folder_is_replaced_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_move: bool
) -> None:
    if not one_move:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())
    for content in ("old", "new"):
        (tmp_path / "f.partial").mkdir()
        (tmp_path / "f.partial" / content).write_text(content)
        finish_folder(tmp_path / "f.partial", tmp_path / "f")
        assert _names(tmp_path) == ["f"]
        assert _names(tmp_path / "f") == [content]


def test_a_folder_does_not_replace_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("in the way")
    (tmp_path / "f.partial").mkdir()
    with pytest.raises(GulliverError, match="Not a directory"):
        finish_folder(tmp_path / "f.partial", tmp_path / "f")
    assert (tmp_path / "f").read_text() == "in the way"


def test_a_folder_is_removed_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f" / "deep").mkdir(parents=True)
    seen: list[str] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: seen.append(Path(path).name))
    remove_folder(tmp_path / "f")
    assert seen == _names(tmp_path) == ["f.partial"]
    with pytest.raises(GulliverError, match=r"absent.*No such file"):
        remove_folder(tmp_path / "absent")


def test_no_space_is_one_line_with_the_bytes_needed_and_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=3 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(GulliverError, match=r"deep needs 5\.0 MiB.* 3\.0 MiB"):
        require_space(tmp_path / "not" / "yet" / "deep", 5 * 2**20)
    require_space(tmp_path, 3 * 2**20)
    usage.free = 512
    with pytest.raises(GulliverError, match=r"700 B.* 512 B"):
        require_space(tmp_path, 700)
    usage.free = 3 * 2**20
    with pytest.raises(GulliverError, match=r"5\.0 MiB"), atomic_file(tmp_path / "x", 5 * 2**20):
        raise AssertionError("it was refused before anything was written")

    def fill() -> None:
        with named_errors(tmp_path / "x", needed=2**20):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(GulliverError) as caught:
        fill()
    for told in (str(tmp_path / "x"), "1.0 MiB", "3.0 MiB"):
        assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert _names(tmp_path) == []


def test_only_os_errors_become_one_line_errors(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    with (
        pytest.raises(GulliverError, match="absent"),
        named_errors(tmp_path, "read"),
    ):
        absent.read_text()
    with pytest.raises(OSError, match="not from the system"), named_errors(tmp_path):
        raise OSError("not from the system")
