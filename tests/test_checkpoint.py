"""Files and folders of checkpoints: whole or not at all, and errors in one line."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing as mp
import os
import random
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
from gulliver.checkpoint._files import _DTYPES
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.io import atomic_file, require_space
from tests.pool import Pool

DTYPES = sorted(_DTYPES, key=str)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (4, 48), generator=draw)
    tensor = raw.to(torch.uint8).view(dtype)
    write_tensors(tmp_path / "x", {"a": tensor})
    (found,) = read_tensors(tmp_path / "x").values()
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


def test_tensors_of_every_kind_come_back_as_they_were(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    tensors = {
        "tied a": base,
        "tied b": base,
        "slice": base[1:3, 2:5],
        "transposed": base.T,
        "expanded": base[:1].expand(3, 6),
        "empty": torch.zeros(0, 3),
        "also empty": torch.zeros(2, 0),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "conjugated": torch.complex(base, base).conj(),
        "negated": torch.complex(base, base).conj().imag,
        "parameter": torch.nn.Parameter(base[0]),
    }
    path = tmp_path / "deep" / "x.safetensors"
    write_tensors(path, tensors, {"note": "hello"})
    found = read_tensors(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert read_metadata(path) == {"note": "hello"}
    with safe_open(str(path), framework="pt") as file:
        assert set(file.keys()) == set(tensors)
    assert [p.name for p in path.parent.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, dtype=torch.complex128),
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
    ],
    ids=["complex128", "meta", "sparse"],
)
def test_what_the_format_cannot_hold_is_refused(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(GulliverError, match=r"tensor 'a' is .*: the safetensors format cannot"):
        write_tensors(tmp_path / "x", {"b": torch.ones(2), "a": tensor})
    assert list(tmp_path.iterdir()) == []


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
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GulliverError, match="truncated or no JSON"):
        read_json(tmp_path / "x.json")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(GulliverError, match=r"file.* cannot be written: (Not a directory|File ex)"):
        write_tensors(tmp_path / "file" / "x", {"a": torch.ones(2)})
    (tmp_path / "folder").mkdir()
    with pytest.raises(GulliverError, match="cannot be written: Is a directory"):
        write_json(tmp_path / "folder", 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


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


def _same(one: object, other: object) -> bool:
    """Equality that looks into tensors and takes nan for itself."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and _same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return (
            type(one) is type(other)
            and len(one) == len(other)
            and all(_same(a, b) for a, b in zip(one, other, strict=True))
        )
    return type(one) is type(other) and (one == other or (one != one and other != other))


# A key that equals another of a different kind (1, 1.0 and True) is the same key to a dict.
KEYS = st.recursive(st.integers() | st.text(max_size=3), lambda k: st.tuples(k, k), max_leaves=3)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([torch.float32, torch.bfloat16, torch.int64])
    | st.lists(st.integers(0, 255)).map(lambda v: torch.tensor(v, dtype=torch.uint8))
)
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
)


@given(STATES)
def test_any_nested_state_comes_back_through_strict_json(state: object) -> None:
    tensors, skeleton = split_state(state)
    found = join_state(tensors, json.loads(json.dumps(skeleton, allow_nan=False)))
    assert _same(found, state)


def test_tensors_whose_paths_look_alike_are_kept_apart() -> None:
    state = {
        "a.b": torch.zeros(1),
        "a": {"b": torch.ones(1)},
        1: {"": torch.full((1,), 2.0)},
        "1": {"": torch.full((1,), 3.0)},
        "1.": torch.full((1,), 4.0),
    }
    assert _same(join_state(*split_state(state)), state)


def test_a_foreign_skeleton_is_refused() -> None:
    with pytest.raises(GulliverError, match="'pickle' is no part of a saved state"):
        join_state({}, {"pickle": "..."})
    with pytest.raises(GulliverError, match="is no part of a saved state"):
        join_state({}, {"a": 1, "b": 2})
    with pytest.raises(GulliverError, match=r"'state\.a' is missing"):
        join_state({}, split_state({"a": torch.ones(1)})[1])


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

    with pytest.raises(GulliverError, match=r"no space left for .*x: .* MiB are free"):
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


def test_a_step_just_saved_stays_though_higher_ones_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    for step in (20, 10):
        folder.save(step, lambda path: write_json(path / "x", 0))
    assert folder.steps() == [10, 20]
    with pytest.raises(GulliverError, match="-1 checkpoints cannot be kept"):
        CheckpointFolder(tmp_path, keep=-1)


def test_a_step_may_be_replaced(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for value in (1, 2):
        folder.save(5, lambda path, value=value: write_json(path / f"{value}.json", value))
    assert sorted(p.name for p in folder.path(5).iterdir()) == ["2.json", "manifest.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000005"]


def test_latest_falls_back_to_the_newest_complete_step_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(step, lambda path: write_json(path / "x", 0))
    assert folder.latest() == folder.path(2)
    assert caplog.text == ""
    (folder.path(2) / "x").unlink()
    assert folder.latest() == folder.path(1)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "step-00000002 is not complete: taking" in message
    assert "step-00000001" in message


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "step-00000003.partial" / "deep").mkdir(parents=True)
    (tmp_path / ".latest.123.partial").write_text("half")
    folder = CheckpointFolder(tmp_path)
    assert folder.latest() is None
    folder.save(4, lambda path: write_json(path / "x", 0))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000004"]


def test_broken_steps_are_passed_over_and_newer_formats_refused(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=0)
    for step in (1, 2, 3):
        folder.save(step, lambda path: write_tensors(path / "x", {"a": torch.ones(9)}))
    (folder.path(3) / "x").write_bytes(b"short")
    (folder.path(2) / "manifest.json").unlink()
    assert folder.latest() == folder.path(1)
    for foreign in ([], {"files": 3}, {"format": 1, "files": None}):
        write_json(folder.path(2) / "manifest.json", foreign)
        assert folder.steps() == [1]
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
    other = "step 7 was not saved: rank 1 failed (this rank cannot)"
    assert pool.run(_save_together, 3, str(tmp_path), 1) == [other, "this rank cannot", other]
    assert list(tmp_path.iterdir()) == []
    assert pool.run(_save_together, 3, str(tmp_path), -1) == ["saved"] * 3
    step = CheckpointFolder(tmp_path).path(7)
    assert sorted(p.name for p in step.glob("rank-*")) == [f"rank-{n}.json" for n in range(3)]


def test_ranks_learn_that_the_main_rank_could_not_begin(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    answers = pool.run(_save_together, 3, str(tmp_path / "file"), -1)
    assert all("cannot be written: File exists" in answer for answer in answers)
    assert all("rank 0 failed" in answer for answer in answers[1:])


def test_ranks_learn_that_the_main_rank_could_not_finish(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "step-00000007").write_text("in the way")
    answers = pool.run(_save_together, 3, str(tmp_path), -1)
    assert all("cannot be written: Not a directory" in answer for answer in answers)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000007"]


def _keep_saving(root: str, ready: Connection, same: bool) -> None:
    folder = CheckpointFolder(Path(root), keep=2)
    number = 0
    newest = folder.latest()
    if newest is not None:
        number = read_json(newest / "x.json")
    while True:
        number += 1

        def write(path: Path, number: int = number) -> None:
            write_tensors(path / "x.safetensors", {"a": torch.full((5_000,), float(number))})
            write_json(path / "x.json", number)

        folder.save(1 if same else number, write)
        ready.send(number)


@pytest.mark.parametrize("same", [False, True], ids=["new steps", "the same step"])
def test_a_writer_killed_at_any_moment_leaves_a_complete_newest_step(
    tmp_path: Path, same: bool
) -> None:
    context, draw, newest = mp.get_context("forkserver"), random.Random(0), 0
    for _ in range(30):
        here, there = context.Pipe(duplex=False)
        writer = context.Process(target=_keep_saving, args=(str(tmp_path), there, same))
        writer.start()
        there.close()
        reached = here.recv()  # its first step is saved: from here on some step is complete
        writer.join(draw.uniform(0.0, 0.05))
        writer.kill()
        writer.join()
        while here.poll():
            try:
                reached = here.recv()
            except EOFError:
                break
        latest = CheckpointFolder(tmp_path).latest()
        assert latest is not None
        number = read_json(latest / "x.json")
        assert number >= max(reached, newest)
        newest = number
        assert (read_tensors(latest / "x.safetensors")["a"] == number).all()
        assert len(CheckpointFolder(tmp_path).steps()) <= 3
