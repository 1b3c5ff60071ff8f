"""What a demanding user tries on checkpoints: nothing is lost silently, nothing hangs."""

from __future__ import annotations

import errno
import json
import multiprocessing as mp
import os
import re
import signal
import struct
import threading
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from gulliver.booster import Booster
from gulliver.checkpoint import (
    AsyncCheckpointer,
    CheckpointFolder,
    PerRank,
    export_huggingface,
    load,
)
from gulliver.checkpoint import folder as folder_module
from gulliver.checkpoint import loading as loading_module
from gulliver.checkpoint.collect import RankContent
from gulliver.checkpoint.files import read_json, read_slots, write_json
from gulliver.checkpoint.manifest import MANIFEST, is_complete, read_manifest, write_manifest
from gulliver.checkpoint.snapshot import Snapshot
from gulliver.checkpoint.tree import join_state
from gulliver.checkpoint.weights import open_weights
from gulliver.comm import World
from gulliver.comm.world import adopt_world
from gulliver.errors import GulliverError
from gulliver.io import Engine
from gulliver.io.engine import StridedView
from gulliver.io.files import hold
from gulliver.io.native import NativeEngine, gather, native_problem
from gulliver.io.python_engine import PythonEngine
from gulliver.memory.pending import storage_of
from tests.guarded import guarded

PAGE = 64 * 2**10


def slow_engine() -> PythonEngine:
    """One whose pool is smaller than the states here, so that a held disk keeps them uncopied."""
    return PythonEngine(page_bytes=PAGE, pages=2)


# Buffers that a forward changes


class Queue(nn.Module):
    """A queue of keys as in Momentum Contrast: every forward writes the next rows of it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(32, 64)
        self.register_buffer("queue", torch.zeros(2000, 64))
        self.register_buffer("table", torch.rand(2000, 64))
        self.next = 0

    def forward(self, x: Tensor) -> Tensor:
        keys = self.encoder(x)
        queue: Tensor = self.queue  # type: ignore[assignment]
        scores = keys @ queue.clone().T
        queue[self.next : self.next + len(keys)] = keys.detach()
        self.next += len(keys)
        return scores.sum() + keys.sum()


@pytest.mark.parametrize("boosted", [False, True])
def test_buffers_changed_by_forward_are_saved_unchanged(tmp_path: Path, boosted: bool) -> None:
    adopt_world(World(0, 1, 0, torch.device("cpu")))
    model = Queue()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, booster = slow_engine(), Booster()
    trained: Any = model
    if boosted:
        trained, optimizer, *_ = booster.boost(model, optimizer)
    checkpointer = AsyncCheckpointer(tmp_path, keep=0, engine=engine)
    wanted = []
    for step in range(3):
        wanted.append({name: value.clone() for name, value in model.state_dict().items()})
        engine.hold(True)
        threading.Timer(0.1, engine.hold, (False,)).start()
        if boosted:
            booster.save(tmp_path, step, trained, optimizer, keep=0, engine=engine)
        else:
            checkpointer.save(step, {"model": model, "optimizer": optimizer})
        loss = trained(torch.rand(8, 32))
        loss.backward()
        optimizer.step()
        (booster if boosted else checkpointer).wait()
    for step, state in enumerate(wanted):
        found = load(tmp_path, step=step).values["model"]
        assert all(torch.equal(found[name], value) for name, value in state.items())
    (booster if boosted else checkpointer).close()
    engine.close()
    adopt_world(None)


def test_tensor_changed_during_a_save_is_then_copied_eagerly(
    tmp_path: Path,
) -> None:
    values, engine = torch.zeros(40_000), slow_engine()
    checkpointer = AsyncCheckpointer(tmp_path, engine=engine)
    for step in (1, 2, 3):
        engine.hold(True)
        if step > 1:
            threading.Timer(0.1, engine.hold, (False,)).start()
        with guarded([values]):
            checkpointer.save(step, {"mine": {"values": values}})
        values += 1
        engine.hold(False)
        if step == 1:
            with pytest.raises(GulliverError, match="mine: values was modified"):
                checkpointer.wait()
        else:
            checkpointer.wait()
            assert load(tmp_path).values["mine"]["values"].eq(step - 1).all()
    checkpointer.close()
    engine.close()


class Watched:
    """Stands for a tensor: while its version is compared, another thread asks for its memory."""

    def __init__(self, snapshot: Snapshot, storage: int) -> None:
        self._asking = threading.Thread(target=snapshot.release, args=({storage},))
        self.let_through: bool | None = None

    @property
    def _version(self) -> int:
        self._asking.start()
        self._asking.join(0.2)
        self.let_through = not self._asking.is_alive()
        return 0


def test_writes_wait_for_version_check(tmp_path: Path) -> None:
    values, engine = torch.zeros(40_000), PythonEngine(page_bytes=PAGE, pages=8)
    snapshot, storage = Snapshot(RankContent({"mine": {"values": values}})), storage_of(values)
    snapshot.submit(engine, tmp_path)
    watched: Any = Watched(snapshot, storage)
    snapshot._versions = {storage: [("mine: values", watched, 0)]}
    snapshot.release(None)
    assert watched.let_through is False
    snapshot.finish(engine)
    engine.close()


# What lies in the folder


def state_of(number: int, count: int = 1000) -> dict[str, Any]:
    """Tensors that follow from a number."""
    return {"model": {"w": torch.arange(count, dtype=torch.float32) * number}, "number": number}


def assert_good(root: Path, step: int) -> None:
    """A step is what `state_of` its number is."""
    found = load(root, step=step).values
    assert found["number"] == step
    assert torch.equal(found["model"]["w"], state_of(step)["model"]["w"])


def save(root: Path, *steps: int, **options: Any) -> None:
    """Saves some steps."""
    with AsyncCheckpointer(root, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of(step))
            checkpointer.wait()


def test_pruning_symlinked_step_removes_only_the_link(tmp_path: Path) -> None:
    root, archive = tmp_path / "run", tmp_path / "archive"
    save(root, 1, 2, keep=2)
    (root / "step-00000001").rename(archive)
    (root / "step-00000001").symlink_to(archive)
    assert_good(root, 1)
    save(root, 3, 4, keep=2)
    assert sorted(path.name for path in root.glob("step-*")) == ["step-00000003", "step-00000004"]
    assert_good(archive, 1)
    # A step of that number is saved again beside the archive, not into it; broken links go, too.
    (root / "step-00000005").symlink_to(archive)
    (root / "step-00000006").symlink_to(tmp_path / "nowhere")
    save(root, 5, 6, keep=4)
    assert_good(root, 5)
    assert_good(root, 6)
    assert_good(archive, 1)
    assert not list(root.glob("*.partial"))


def test_newest_complete_step_loads_despite_bad_latest(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    pointer = tmp_path / "latest"
    said = pointer.read_bytes()
    for bit in range(8 * len(said)):
        flipped = bytearray(said)
        flipped[bit // 8] ^= 1 << bit % 8
        pointer.write_bytes(flipped)
        assert CheckpointFolder(tmp_path).latest() == tmp_path / "step-00000002"
    pointer.unlink()
    pointer.mkdir()
    assert load(tmp_path).step == 2


def test_full_disk_error_names_steps_to_fit(tmp_path: Path) -> None:
    engine = slow_engine()
    checkpointer = AsyncCheckpointer(tmp_path, keep=2, engine=engine)
    engine.inject("fallocate", 1, errno.ENOSPC)
    checkpointer.save(3, state_of(3))
    with pytest.raises(GulliverError, match=r"No space left .*keep=2 needs room for 3"):
        checkpointer.close()
    engine.close()


# Files that are not believed blindly


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.full)])
def test_a_flipped_bit_of_a_manifest_is_noticed(tmp_path: Path, step: int) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step-00000001" / MANIFEST
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), step):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(GulliverError, match=r"manifest\.json"):
            read_manifest(path.parent)
    assert not is_complete(path.parent)
    write_json(path, {k: v for k, v in json.loads(content).items() if k != "crc32"})
    with pytest.raises(GulliverError, match=r"manifest\.json"):
        read_manifest(path.parent)


MANIFESTS: list[Callable[[dict[str, Any]], Any]] = [
    lambda m: m["files"].update({"../out.safetensors": m["files"]["model.safetensors"]}),
    lambda m: m["files"].update({"/etc/passwd": m["files"]["model.safetensors"]}),
    lambda m: m["files"]["model.safetensors"].update(page_bytes=0),
    lambda m: m["files"]["model.safetensors"].update(crc32=[]),
    lambda m: m["tensors"]["model"]["w"].update(dtype="load"),
    lambda m: m["tensors"]["model"]["w"].update(dtype="float32"),
    lambda m: m["tensors"]["model"]["w"].update(shape=[-1, -1000]),
    lambda m: m["tensors"]["model"]["w"].update(shape=[10, 100.0]),
    lambda m: m["tensors"]["model"]["w"]["parts"].append(["model.safetensors", 0, 1000]),
    lambda m: m["tensors"]["model"]["w"]["parts"][0].__setitem__(0, "../model.safetensors"),
    lambda m: m["tensors"]["model"]["w"].update(dtype="F16"),
    lambda m: m["tensors"]["model"]["w"]["parts"][0].__setitem__(2, 999),
]


@pytest.mark.parametrize("number", range(len(MANIFESTS)))
def test_inconsistent_manifest_is_rejected(tmp_path: Path, number: int) -> None:
    save(tmp_path, 1)
    step = tmp_path / "step-00000001"
    manifest = read_json(step / MANIFEST)
    del manifest["crc32"]
    MANIFESTS[number](manifest)
    write_manifest(step, manifest)
    with pytest.raises(GulliverError):
        load(step)


def test_unsupported_value_is_named_before_writing(tmp_path: Path) -> None:
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
        with (
            AsyncCheckpointer(tmp_path) as checkpointer,
            pytest.raises(GulliverError, match="x: tensor 'a' is a nested tensor"),
        ):
            checkpointer.save(1, {"x": {"a": nested}})
    assert not list(tmp_path.glob("step-*"))


def test_malformed_optimizer_state_is_rejected() -> None:
    model = torch.nn.Linear(2, 2)
    _, optimizer, *_ = Booster().boost(model, torch.optim.AdamW(model.parameters()))
    for state in (None, {}, {"state": {}}):
        with pytest.raises(GulliverError, match="not the state of an optimizer"):
            optimizer.load_state_dict(state)


def test_dtypes_of_a_state_are_dtypes() -> None:
    assert join_state({}, {"dtype": "bfloat16"}) is torch.bfloat16
    for name in ("load", "nn", "__name__", "float33"):
        with pytest.raises(GulliverError, match=name):
            join_state({}, {"dtype": name})


def _entry(begin: int, end: int, shape: Any = (2,), dtype: str = "F32") -> str:
    fields = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("header", "nbytes"),
    [
        (f'{{"a": {_entry(0, 8)}, "b": {_entry(4, 12)}}}', 12),  # overlaps
        (f'{{"a": {_entry(0, 8)}, "b": {_entry(12, 20)}}}', 20),  # leaves a gap
        (f'{{"a": {_entry(0, 8)}}}', 9),  # does not reach the end
        (f'{{"a": {_entry(0, 8)}}}', 7),  # reaches beyond it
        (f'{{"a": {_entry(0, 8, (-1, -2))}}}', 8),
        (f'{{"a": {_entry(0, 8, dtype="load")}}}', 8),
        (f'{{"a": {_entry(0, 3, (6,), "F4")}}}', 3),  # known to safetensors, not to torch
        (f'{{"a": {_entry(-8, 0)}}}', 8),
        ("[]", 0),
        ("{", 0),
    ],
)
def test_inconsistent_header_is_rejected(tmp_path: Path, header: str, nbytes: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(nbytes))
    with pytest.raises(GulliverError, match=r"x\.safetensors"):
        read_slots(path)


def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file({"a": torch.ones(2)}, str(tmp_path / "x.safetensors"))
    for name in ("../x.safetensors", str(tmp_path / "x.safetensors"), ".."):
        index = {"metadata": {}, "weight_map": {"a": name}}
        write_json(tmp_path / "hf" / "model.safetensors.index.json", index)
        with pytest.raises(GulliverError, match=r"index.json names"):
            open_weights(tmp_path / "hf")


# Processes that end, and processes that fork


def _save_and_end(rank: int, root: str, store: str, ends: int, said: Connection) -> None:
    """Saves with a plain process group; one rank is killed while it still writes."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    engine = slow_engine()
    checkpointer = AsyncCheckpointer(root, engine=engine)
    for step in (1, 2):
        if step == 2 and rank == ends:
            engine.hold(True)
        own = torch.rand(100_000)
        with guarded([own]):
            checkpointer.save(step, {"model": {}, "own": PerRank(own)})
        if step == 2 and rank == ends:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            checkpointer.wait()
            said.send("fine")
        except GulliverError as error:
            said.send(str(error))
    os._exit(0)


@pytest.mark.parametrize("ends", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_rank_that_is_killed_while_it_saves_is_named_at_once(tmp_path: Path, ends: int) -> None:
    context = mp.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    processes = [
        context.Process(
            target=_save_and_end,
            args=(rank, str(tmp_path / "run"), str(tmp_path / "store"), ends, there),
        )
        for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    there.close()
    said = [here.recv() for _ in range(3)]
    for process in processes:
        process.join()
    assert said[:2] == ["fine", "fine"]
    wanted = "rank 1 ended" if ends == 1 else "cannot agree"
    assert wanted in said[2]
    assert CheckpointFolder(tmp_path / "run").steps() == [1]


def _in_a_fork(call: Callable[[], object]) -> str:
    """What a call raises in a child of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
            os.write(write, b"fine")
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with open(read, "rb") as file:
        return file.read().decode()


def test_a_forked_child_is_refused_and_can_train(tmp_path: Path) -> None:
    engine = slow_engine()
    checkpointer = AsyncCheckpointer(tmp_path, engine=engine)
    weight = nn.Parameter(torch.rand(100_000))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight])
    engine.hold(True)
    checkpointer.save(1, {"model": {"w": weight}, "optimizer": optimizer})
    for call in (
        lambda: checkpointer.save(2, {}),
        checkpointer.wait,
        checkpointer.wait_copied,
        checkpointer.close,
    ):
        assert f"belongs to process {os.getpid()}, which forked" in _in_a_fork(call)
    assert _in_a_fork(optimizer.step) == "fine"
    assert _in_a_fork(checkpointer._finalize) == "fine"
    with pytest.raises(GulliverError, match=f"process {os.getpid()}"):
        folder_module.FolderLock(tmp_path).take()
    engine.hold(False)
    checkpointer.close()
    engine.close()
    assert load(tmp_path).step == 1


# A reader beside a writer


def test_reader_falls_back_if_its_step_is_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, keep=1)
    step_folder, number = loading_module.step_folder, [1]

    def late(path: Path, step: int | None = None) -> Path:
        found = step_folder(path, step)
        if number[0] % 4:
            number[0] += 1
            save(tmp_path, number[0], keep=1)
        return found

    monkeypatch.setattr(loading_module, "step_folder", late)
    found = load(tmp_path)
    assert (found.step, found.values["number"]) == (4, 4)
    number[0] = 5
    with open_weights(tmp_path) as weights:
        assert weights.path.name == "step-00000008"
    # What is broken, and not being replaced, is told at once.
    (tmp_path / "step-00000008" / "model.safetensors").write_bytes(b"")
    with pytest.raises(GulliverError, match="contains no complete checkpoint"):
        load(tmp_path)


# Conversions that are killed


def _convert_and_die(source: str, target: str) -> None:
    def die(done: int, total: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    export_huggingface(source, target, progress=die)


@pytest.mark.parametrize("name", ["hf", "one.safetensors"])
def test_leftovers_of_killed_conversion_are_removed(tmp_path: Path, name: str) -> None:
    save(tmp_path / "run", 1)
    out = tmp_path / "out"
    out.mkdir()
    child = os.fork()
    if child == 0:
        _convert_and_die(str(tmp_path / "run"), str(out / name))
        os._exit(0)
    os.waitpid(child, 0)
    (left,) = out.iterdir()
    assert re.fullmatch(rf"\.{name}\.{child}(-[0-9a-f]+)?\.partial", left.name)
    # What somebody still writes stays, whether by its number or, on another machine, by its lock.
    mine, other = out / f".x.{os.getpid()}.partial", out / f".y.{child}.partial"
    for path in (mine, other):
        path.mkdir()
    with hold(other):
        export_huggingface(tmp_path / "run", out / f"2{name}")
        assert {path.name for path in out.iterdir()} == {mine.name, other.name, f"2{name}"}


# Memory that lies apart


def views_of(draw: torch.Generator) -> list[Tensor]:
    """Tensors of every size of element and many kinds of strides."""
    found = []
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64):
        base = torch.randint(-99, 99, (5, 7, 12, 11), generator=draw).to(dtype)
        found += [
            base.to(memory_format=torch.channels_last),
            base.permute(3, 0, 2, 1),
            base[:, 1::2, ::3, 2:-1],
            base[:1, :1].expand(4, 3, 12, 11),
            base[..., 3],
            base[0, :, 0, 0],
            base.transpose(2, 3)[1:2],
            base.flatten()[::2],
            base[2, 3, 4, 5].expand(1000),
        ]
    return found


@pytest.mark.parametrize("kind", [PythonEngine, NativeEngine])
def test_scattered_memory_is_gathered_in_order(tmp_path: Path, kind: type[Engine]) -> None:
    if kind is NativeEngine and (problem := native_problem()) is not None:
        pytest.skip(problem)
    draw = torch.Generator().manual_seed(0)
    with kind(page_bytes=4096, pages=3) as engine:  # type: ignore[call-arg]
        for number, tensor in enumerate(views_of(draw)):
            wanted = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            view = StridedView(
                tensor.data_ptr(), tensor.itemsize, tuple(tensor.shape), tuple(tensor.stride())
            )
            path = tmp_path / str(number)
            file = engine.create(path, len(wanted))
            tickets = []
            # Pieces of odd numbers of elements, two of them in each page.
            at, step = 0, 61 * tensor.itemsize
            while at < len(wanted):
                sizes = [min(step, len(wanted) - at), 0]
                sizes[1] = min(step, len(wanted) - at - sizes[0])
                table = np.array([[at, sizes[0]], [at + sizes[0], sizes[1]]])
                tickets.append(engine.stage(file, at, table, views={0: view, 1: view}))
                at += sum(sizes)
            for ticket, begin in zip(tickets, range(0, len(wanted), 2 * step), strict=True):
                ticket.wait()
                assert ticket.checksum == zlib.crc32(wanted[begin : begin + 2 * step])
            engine.close_file(file)
            assert path.read_bytes() == wanted


@pytest.mark.parametrize("native", ["native", "python"])
def test_small_tensors_are_copied_together(native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GULLIVER_IO", native)
    pieces = [torch.randint(256, (n,), dtype=torch.uint8) for n in (0, 1, 7, 64, 3)] * 50
    pieces += [torch.randint(256, (9 * 2**20,), dtype=torch.uint8) for _ in range(3)]
    target = torch.zeros(sum(p.numel() for p in pieces), dtype=torch.uint8)
    gather(target.data_ptr(), np.array([(p.data_ptr(), p.numel()) for p in pieces]))
    assert torch.equal(target, torch.cat(pieces))


def test_strided_and_many_tensors_do_not_delay_save(tmp_path: Path) -> None:
    """What is large is not copied by the call, whatever its strides; what is small is, once."""
    large = torch.rand(8, 64, 20, 20).to(memory_format=torch.channels_last)
    turned = torch.rand(300, 200).T
    small = {f"s{n}": torch.full((5,), float(n)) for n in range(500)}
    state = {"model": {"large": large, "turned": turned, **small}}
    wanted = {name: value.clone() for name, value in state["model"].items()}
    with AsyncCheckpointer(tmp_path, engine=(engine := slow_engine())) as checkpointer:
        engine.hold(True)
        with guarded([large, turned]):
            checkpointer.save(1, state)
        snapshot = checkpointer._snapshot
        assert snapshot is not None
        snapshot._submitted.wait()
        kept = snapshot._waiting.keys() & {v.data_ptr() for v in state["model"].values()}
        assert kept == {large.data_ptr(), turned.data_ptr()}
        for value in small.values():
            value.zero_()
        engine.hold(False)
        checkpointer.wait_copied()
        large.zero_()
    engine.close()
    found = load(tmp_path).values["model"]
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
