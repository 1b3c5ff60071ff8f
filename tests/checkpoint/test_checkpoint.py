"""Files and folders of checkpoints: whole or not at all, and errors in one line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load as load_bytes

from gulliver.checkpoint import AsyncCheckpointer, CheckpointFolder, load
from gulliver.checkpoint.comparison import any_step
from gulliver.checkpoint.files import (
    CODES,
    Image,
    read_json,
    read_metadata,
    read_tensors,
    write_json,
    write_tensors,
)
from gulliver.checkpoint.loading import step_folder
from gulliver.checkpoint.tree import join_state, merge_skeletons, names_in, split_state
from gulliver.errors import GulliverError

DTYPES = sorted(CODES, key=str)
# From bytes, the reference does not read the scales of microscaling formats.
READ_AS_BYTES = [dtype for dtype in DTYPES if dtype != torch.float8_e8m0fnu]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_round_trips_bitwise(tmp_path: Path, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (4, 48), generator=draw)
    tensor = raw.to(torch.uint8).view(dtype)
    write_tensors(tmp_path / "x", {"a": tensor})
    (found,) = read_tensors(tmp_path / "x").values()
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


def test_every_tensor_kind_round_trips(tmp_path: Path) -> None:
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
    # The umask says who may read it, as of any file.
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
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
def test_unsupported_values_are_rejected(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(GulliverError, match=r"tensor 'a' is .*safetensors"):
        write_tensors(tmp_path / "x", {"b": torch.ones(2), "a": tensor})
    assert list(tmp_path.iterdir()) == []


def test_broken_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(GulliverError, match="does not exist"):
        read_tensors(path)
    write_tensors(path, {"a": torch.ones(1000)})
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(GulliverError, match=r"x\.safetensors is truncated"):
        read_tensors(path)
    path.write_text("something else")
    with pytest.raises(GulliverError, match=r"x\.safetensors is truncated"):
        read_metadata(path)
    (tmp_path / "x.json").write_text('{"a": ')
    with pytest.raises(GulliverError, match="truncated or not JSON"):
        read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GulliverError, match="truncated or not JSON"):
        read_json(tmp_path / "x.json")


def test_unwritable_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(GulliverError, match=r"file.* cannot be written: (Not a directory|File ex)"):
        write_tensors(tmp_path / "file" / "x", {"a": torch.ones(2)})
    (tmp_path / "folder").mkdir()
    with pytest.raises(GulliverError, match="cannot be written: Is a directory"):
        write_json(tmp_path / "folder", 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


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
def test_nested_state_round_trips_through_strict_json(state: object) -> None:
    tensors, skeleton = split_state(state)
    found = join_state(tensors, json.loads(json.dumps(skeleton, allow_nan=False)))
    assert _same(found, state)


def test_similar_tensor_paths_do_not_collide() -> None:
    state = {
        "a.b": torch.zeros(1),
        "a": {"b": torch.ones(1)},
        1: {"": torch.full((1,), 2.0)},
        "1": {"": torch.full((1,), 3.0)},
        "1.": torch.full((1,), 4.0),
    }
    assert _same(join_state(*split_state(state)), state)


def test_unknown_state_structure_is_rejected() -> None:
    with pytest.raises(GulliverError, match="'pickle'"):
        join_state({}, {"pickle": "..."})
    with pytest.raises(GulliverError, match="is not a saved state"):
        join_state({}, {"a": 1, "b": 2})
    with pytest.raises(GulliverError, match="'a' is missing"):
        join_state({}, split_state({"a": torch.ones(1)})[1])


def save(root: Path, *steps: int, **options: Any) -> CheckpointFolder:
    """Steps that each hold their own number."""
    with AsyncCheckpointer(root, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"model": {"x": torch.full((9,), float(step))}})
    return checkpointer.folder


def test_folder_keeps_newest_steps(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "c", keep=2)
    assert folder.latest() is None
    save(tmp_path / "c", 5, 10, 15, keep=2)
    assert folder.steps() == [10, 15]
    latest = folder.latest()
    assert latest is not None
    assert load(latest).values["model"]["x"][0] == 15
    assert (tmp_path / "c" / "latest").read_text().strip() == latest.name


def held(root: Path, step: int | None = None) -> float:
    return load(root, step=step).values["model"]["x"][0].item()


def test_latest_follows_the_last_saved_branch(tmp_path: Path) -> None:
    folder = save(tmp_path, 100, 200, 300, keep=3)
    for step, kept in ((110, [110, 200, 300]), (120, [110, 120, 300]), (300, [110, 120, 300])):
        assert save(tmp_path, step, keep=3).steps() == kept
        assert folder.latest() == folder.path(step) == any_step(tmp_path)
        assert held(tmp_path) == step
    assert held(tmp_path, 120) == 120


def test_the_order_survives_copies_and_crashes(tmp_path: Path) -> None:
    save(tmp_path / "a", 10, 20, 30, keep=0)
    folder = save(tmp_path / "a", 15, keep=0)
    # An archive that is copied back is as old as it was, whatever its files say.
    shutil.move(folder.path(30), tmp_path / "archive")
    shutil.copytree(tmp_path / "archive", folder.path(30), copy_function=shutil.copyfile)
    assert folder.latest() == folder.path(15)
    # A process that was killed before it could move the pointer, or left a step unfinished.
    (folder.root / "latest").write_text("step-00000030\n")
    (folder.root / "step-00000017.partial").mkdir()
    assert step_folder(folder.root) == folder.path(15)
    # A broken newest step is passed over for the one saved before it.
    (folder.path(15) / "model.safetensors").unlink()
    assert folder.latest() == folder.path(30)


def test_a_step_may_be_replaced(tmp_path: Path) -> None:
    save(tmp_path, 5)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(5, {"other": torch.ones(3)})
    assert sorted(p.name for p in (tmp_path / "step-00000005").iterdir()) == [
        "manifest.json",
        "other.safetensors",
        "state.json",
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "latest", "step-00000005"]


def test_latest_falls_back_to_the_newest_complete_step_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save(tmp_path, 1, 2)
    caplog.clear()
    assert folder.latest() == folder.path(2)
    assert caplog.text == ""
    (folder.path(2) / "model.safetensors").unlink()
    assert folder.latest() == folder.path(1)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "step-00000002 is not complete: taking" in message
    assert "step-00000001" in message


def test_leftovers_of_killed_save_are_removed_by_next_save(tmp_path: Path) -> None:
    (tmp_path / "step-00000003.partial" / "deep").mkdir(parents=True)
    (tmp_path / ".latest.123.partial").write_text("half")
    assert CheckpointFolder(tmp_path).latest() is None
    save(tmp_path, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "latest", "step-00000004"]


def test_broken_steps_are_skipped_and_other_formats_rejected(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, 2, 3, keep=0)
    (folder.path(3) / "model.safetensors").write_bytes(b"short")
    (folder.path(2) / "manifest.json").unlink()
    assert folder.latest() == folder.path(1)
    for foreign in ([], {"files": 3}, {"format": 2, "files": None}):
        write_json(folder.path(2) / "manifest.json", foreign)
        assert folder.steps() == [1]
    manifest = read_json(folder.path(1) / "manifest.json")
    del manifest["crc32"]
    write_json(folder.path(1) / "manifest.json", {**manifest, "format": 1})
    with pytest.raises(GulliverError, match="another version"):
        load(folder.path(1))
    write_json(folder.path(1) / "manifest.json", {**manifest, "format": 99})
    with pytest.raises(GulliverError, match="newer version"):
        folder.latest()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "shade"}, "mode='shade' is not known: did you mean 'shadow'?"),
        ({"ring_mb": 4}, "ring_mb=4 is too small; use at least 8"),
        ({"keep": 1.5}, "keep"),
        ({"keep": -1}, "keep=-1"),
        ({"silence_s": 0}, "silence_s"),
        (
            {"about": {"a": torch.ones(1)}},
            "about must be a dict of JSON values: Object of type T",
        ),
    ],
)
def test_invalid_options_are_rejected(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(GulliverError, match=re.escape(message)):
        AsyncCheckpointer(tmp_path, **options)


@pytest.mark.parametrize("step", [1.0, "1", None, True, torch.tensor(1.0)])
def test_steps_are_whole_numbers_of_any_library(tmp_path: Path, step: Any) -> None:
    with AsyncCheckpointer(tmp_path) as checkpointer:
        for known in (np.int64(3), torch.tensor(4)):
            checkpointer.save(known, {"a": 1})  # type: ignore[arg-type]
        with pytest.raises(GulliverError, match="step must be a whole number"):
            checkpointer.save(step, {"a": 1})
    assert checkpointer.folder.steps() == [3, 4]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a/b": 1}, "'a/b' is not a valid entry name"),
        ({"a": {"__metadata__": torch.ones(2)}}, "a: a tensor is called '__metadata__', which"),
        ({"a": {"f": object()}}, "f is a object"),
        ({"a": {"m": torch.ones(2, device="meta")}}, "a: tensor 'm' is meta"),
        ({"a": {"m": torch.ones(2, dtype=torch.complex128)}}, "a: tensor 'm' is torch.strided"),
        ({"a": {"m": torch.eye(2).to_sparse()}}, "a: tensor 'm' is torch.sparse_coo"),
    ],
)
def test_unsavable_value_is_named_and_nothing_is_left(
    state: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save(tmp_path, 1)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        with pytest.raises(GulliverError, match=re.escape(message)):
            checkpointer.save(2, state)
        checkpointer.save(3, {"a": 1})
    assert checkpointer.folder.steps() == [1, 3]
    assert not list(tmp_path.glob("*.partial"))


def test_state_structures_of_ranks_are_merged() -> None:
    shared = torch.ones(1)
    ranks = [
        split_state({"state": {"a": {"m": shared}}, "step": 3, "groups": [{"lr": 0.1}]})[1],
        split_state({"state": {"b": {"m": shared}, "a": {"v": shared}}, "step": 4})[1],
    ]
    merged = merge_skeletons(ranks)
    assert sorted(names_in(merged)) == ["state.a.m", "state.a.v", "state.b.m"]
    joined = join_state({name: name for name in names_in(merged)}, merged)
    assert joined == {
        "state": {"a": {"m": "state.a.m", "v": "state.a.v"}, "b": {"m": "state.b.m"}},
        "step": 3,
        "groups": [{"lr": 0.1}],
    }


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.sampled_from(READ_AS_BYTES)), max_size=8),
    st.integers(1, 40),
)
def test_file_image_equals_reference(sizes: list[tuple[int, torch.dtype]], pages: int) -> None:
    generator = torch.Generator().manual_seed(len(sizes))
    tensors = {
        f"t{n}": torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype)
        if dtype != torch.bool
        else torch.randint(0, 2, (count,), generator=generator).bool()
        for n, (count, dtype) in enumerate(sizes)
    }
    image = Image(tensors, {"format": "pt"})
    page, content = 64 * pages, b""
    for offset, runs in image.pages(page):
        assert offset == len(content)
        assert offset % page == 0
        for number, begin, count in runs:
            flat = image.sources[number].reshape(-1).view(torch.uint8)
            content += bytes(flat[begin : begin + count].numpy())
    assert len(content) == image.nbytes
    found = load_bytes(content)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
