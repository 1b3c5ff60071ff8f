"""Files and folders of checkpoints: whole or not at all, and errors in one line."""

from __future__ import annotations

import errno
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from gulliver.checkpoint import (
    CheckpointFolder,
    join_state,
    read_json,
    read_metadata,
    read_tensors,
    split_state,
    write_json,
    write_tensors,
)
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.io import atomic_file, require_space
from tests.pool import Pool


def test_tensors_of_every_kind_come_back_as_they_were(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    tensors = {
        "tied a": base,
        "tied b": base,
        "slice": base[1:3, 2:5],
        "transposed": base.T,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "bf16": base.bfloat16(),
        "fp8": base.to(torch.float8_e4m3fn),
        "int": torch.arange(5, dtype=torch.int16),
        "bool": torch.tensor([True, False]),
    }
    path = tmp_path / "deep" / "x.safetensors"
    write_tensors(path, tensors, {"note": "hello"})
    found = read_tensors(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].double(), tensor.double())
    assert read_metadata(path) == {"note": "hello"}
    with safe_open(str(path), framework="pt") as file:
        assert set(file.keys()) == set(tensors)
    assert [p.name for p in path.parent.iterdir()] == ["x.safetensors"]


def test_broken_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(GulliverError, match="does not exist"):
        read_tensors(path)
    write_tensors(path, {"a": torch.ones(1000)})
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(GulliverError, match="truncated or no safetensors file"):
        read_tensors(path)
    path.write_text("something else")
    with pytest.raises(GulliverError, match="truncated or no safetensors file"):
        read_metadata(path)
    (tmp_path / "x.json").write_text('{"a": ')
    with pytest.raises(GulliverError, match="truncated or no JSON"):
        read_json(tmp_path / "x.json")


def test_a_nested_state_survives_without_pickle(tmp_path: Path) -> None:
    state = {
        0: {"step": torch.tensor(3.0), "parts": [torch.ones(2), (1, None, "x")]},
        "nan": math.nan,
        "inf": -math.inf,
        "flag": True,
        "dtype": torch.bfloat16,
        "rng": torch.get_rng_state(),
        "empty": {},
    }
    tensors, skeleton = split_state(state)
    write_tensors(tmp_path / "t", tensors)
    write_json(tmp_path / "s", skeleton)
    found = join_state(read_tensors(tmp_path / "t"), read_json(tmp_path / "s"))
    assert found.keys() == state.keys()
    assert torch.equal(found[0]["parts"][0], torch.ones(2))
    assert found[0]["parts"][1] == (1, None, "x")
    assert math.isnan(found["nan"])
    assert found["inf"] == -math.inf
    assert found["flag"] is True
    assert found["dtype"] is torch.bfloat16
    assert torch.equal(found["rng"], state["rng"])
    with pytest.raises(GulliverError, match="cannot be saved"):
        split_state({"f": print})


def test_a_full_disk_is_named_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_text("before")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def write() -> None:
        with atomic_file(path) as partial:
            partial.write_text("after")
            monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(GulliverError, match="no space left"):
        write()
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    with pytest.raises(GulliverError, match="are free"):
        require_space(tmp_path / "not" / "yet", 1 << 60)


def test_a_folder_keeps_the_newest_and_finds_them(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "c", keep=2)
    assert folder.latest() is None
    for step in (5, 10, 15):
        folder.save(step, lambda path, step=step: write_json(path / "x.json", step))
    assert folder.steps() == [10, 15]
    latest = folder.latest()
    assert latest is not None
    assert read_json(latest / "x.json") == 15
    assert (tmp_path / "c" / "latest").read_text().strip() == latest.name


def test_broken_steps_are_passed_over_and_newer_formats_refused(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=0)
    for step in (1, 2, 3):
        folder.save(step, lambda path: write_tensors(path / "x", {"a": torch.ones(9)}))
    (folder.path(3) / "x").write_bytes(b"short")
    (folder.path(2) / "manifest.json").unlink()
    assert folder.latest() == folder.path(1)
    manifest = read_json(folder.path(1) / "manifest.json")
    write_json(folder.path(1) / "manifest.json", {**manifest, "format": 99})
    with pytest.raises(GulliverError, match="newer version"):
        folder.latest()


def test_a_failing_save_changes_nothing(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, lambda path: write_json(path / "x", 1))

    def fail(path: Path) -> None:
        write_json(path / "x", 2)
        raise KeyError("in the middle")

    with pytest.raises(KeyError):
        folder.save(2, fail)
    assert folder.steps() == [1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]


def _save_together(world: World, root: str, failing: int) -> str:
    folder = CheckpointFolder(Path(root))

    def write(path: Path) -> None:
        if world.rank == failing:
            raise GulliverError("this rank cannot")
        write_json(path / f"rank-{world.rank}.json", world.rank)

    try:
        folder.save(7, write, world)
    except GulliverError as error:
        return str(error)
    return "saved"


def test_ranks_save_together_or_not_at_all(pool: Pool, tmp_path: Path) -> None:
    answers = pool.run(_save_together, 3, str(tmp_path), 1)
    assert answers == ["step 7 was not saved: another rank failed", "this rank cannot",
                       "step 7 was not saved: another rank failed"]  # fmt: skip
    assert CheckpointFolder(tmp_path).steps() == []
    assert pool.run(_save_together, 3, str(tmp_path), -1) == ["saved"] * 3
    step = CheckpointFolder(tmp_path).path(7)
    assert sorted(p.name for p in step.glob("rank-*")) == [f"rank-{n}.json" for n in range(3)]


WRITER = """
import sys, torch
from pathlib import Path
from gulliver.checkpoint import CheckpointFolder, write_json, write_tensors
folder = CheckpointFolder(Path(sys.argv[1]), keep=2)
step = (folder.steps() or [0])[-1]
print("ready", flush=True)
while True:
    step += 1
    def write(path):
        write_tensors(path / "x.safetensors", {"a": torch.full((50_000,), float(step))})
        write_json(path / "x.json", step)
    folder.save(step, write)
"""


def test_a_writer_killed_at_any_moment_leaves_a_complete_newest_step(tmp_path: Path) -> None:
    draw = random.Random(0)
    newest = 0
    for _ in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(draw.uniform(0.05, 0.4))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        latest = CheckpointFolder(tmp_path).latest()
        if latest is None:
            continue
        step = read_json(latest / "x.json")
        assert step >= newest
        newest = step
        assert (read_tensors(latest / "x.safetensors")["a"] == step).all()
    assert newest > 0
