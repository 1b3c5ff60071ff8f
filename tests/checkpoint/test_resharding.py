"""One checkpoint of a run, saved while it goes on, loads at any number of ranks, stage and size."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from gulliver.booster import Booster, LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from gulliver.checkpoint import load
from gulliver.checkpoint.manifest import read_manifest
from gulliver.checkpoint.reader import StepReader
from gulliver.comm import World
from gulliver.comm.world import adopt_world
from gulliver.errors import GulliverError
from tests.pool import Pool

GLOBAL_BATCH, SAVED_AT, STEPS = 12, 5, 15


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    adopt_world(World(0, 1, 0, torch.device("cpu")))
    yield
    adopt_world(None)


class Net(nn.Module):
    """Tied, frozen, and with buffers; one parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 5)
        self.back = nn.Linear(5, 7, bias=False)
        self.back.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("scale", torch.tensor([1.5, 0.5]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale[0]
        return self.back(self.last(hidden)) + self.nothing.sum()


def plugin(kind: str) -> Plugin:
    if kind == "DDP":
        return TorchDDPPlugin(verbose=False)
    stage, _, rest = kind.partition(" ")
    size, _, precision = rest.partition(" ")
    return LowLevelZeroPlugin(
        stage=int(stage), chunk_mb=float(size or 0.0003), precision=precision or None, verbose=False
    )


class Job:
    """A run, made anew as a restarted program would."""

    def __init__(self, world: World, kind: str) -> None:
        torch.manual_seed(3)
        model = Net() if "bf16" in kind else Net().double()
        named = dict(model.named_parameters())
        groups = [
            {"params": [named["first.weight"]], "lr": 1e-2},
            {"params": [p for n, p in named.items() if n != "first.weight"], "lr": 3e-3},
        ]
        inner = torch.optim.AdamW(groups, weight_decay=0.1)
        self.world, self.plain = world, model
        self.booster = Booster(plugin(kind))
        self.scheduler = torch.optim.lr_scheduler.StepLR(inner, 4, 0.5)
        self.model, self.optimizer, *_ = self.booster.boost(model, inner)

    def run(self, first: int, last: int, folder: Path | None = None) -> dict[str, Tensor]:
        """Steps; saves after step `SAVED_AT`, and goes on at once."""
        for step in range(first, last):
            whole = torch.randn(GLOBAL_BATCH, 5, generator=torch.Generator().manual_seed(step))
            mine = whole.chunk(self.world.size)[self.world.rank].to(self.plain.scale.dtype)
            self.booster.backward(self.model(mine).square().mean(), self.optimizer)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.plain.calls += 1
            if step + 1 == SAVED_AT and folder is not None:
                self.booster.save(
                    folder, SAVED_AT, self.model, self.optimizer, self.scheduler, {"epoch": 2}
                )
        self.booster.close()
        return {n: v.detach().clone() for n, v in self.plain.state_dict().items()}

    def load(self, folder: Path) -> Any:
        return self.booster.load(
            folder, self.model, self.optimizer, self.scheduler, state={"epoch": None}
        )


def train_and_save(world: World, kind: str, folder: Path) -> dict[str, Tensor]:
    return Job(world, kind).run(0, STEPS, folder)


def resume(world: World, kind: str, folder: Path) -> tuple[dict[str, Tensor], Any]:
    job = Job(world, kind)
    loaded = job.load(folder)
    assert loaded.step == SAVED_AT
    return job.run(SAVED_AT, STEPS), loaded


def same(found: dict[str, Tensor], wanted: dict[str, Tensor], bound: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        scale = value.double().abs().max() if value.numel() else 1.0
        difference = (found[name].double() - value.double()).abs()
        assert difference.numel() == 0 or float(difference.max() / scale) <= bound, name


TARGETS = [(1, "DDP"), (1, "3"), (2, "1 0.001"), (3, "3 0.0005"), (3, "DDP"), (4, "2"), (2, "0")]


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        (4, "2"),
        (3, "3"),
        pytest.param(2, "DDP", marks=pytest.mark.full),
        pytest.param(2, "0", marks=pytest.mark.full),
    ],
)
def test_resumed_steps_equal_uninterrupted_run(
    pool: Pool, tmp_path: Path, ranks: int, kind: str
) -> None:
    wanted = pool.run(train_and_save, ranks, kind, tmp_path)[0]
    for other, target in TARGETS:
        for found, loaded in pool.run(resume, other, target, tmp_path):
            same(found, wanted, 1e-12)
            assert loaded.values == {"epoch": 2}
            assert not loaded.mismatches


@pytest.mark.parametrize(("ranks", "kind"), [(2, "2 0.0003 bf16"), (3, "3 0.0003 bf16")])
def test_float32_copies_survive_a_change_of_ranks(
    pool: Pool, tmp_path: Path, ranks: int, kind: str
) -> None:
    wanted = pool.run(train_and_save, ranks, kind, tmp_path)[0]
    # The same ranks add up gradients alike, so that only what was saved can differ.
    for found, _ in pool.run(resume, ranks, kind, tmp_path):
        same(found, wanted, 0.0)
    for other in (1, 2):
        for found, _ in pool.run(resume, other, "1 0.0003 bf16", tmp_path):
            same(found, wanted, 2e-2)
    reader = StepReader(tmp_path / f"step-{SAVED_AT:08d}")
    assert reader.tensors("model")["first.weight"].dtype == torch.float32


def test_any_safetensors_reader_opens_every_file(pool: Pool, tmp_path: Path) -> None:
    pool.run(train_and_save, 3, "2", tmp_path)
    folder = tmp_path / f"step-{SAVED_AT:08d}"
    manifest = read_manifest(folder)
    whole = load(tmp_path).values["model"]
    rebuilt: dict[str, list[tuple[int, Tensor]]] = {}
    for name, tensor in manifest.tensors["model"].items():
        for part in tensor.parts:
            with safe_open(folder / part.file, "pt") as file:
                piece = file.get_tensor(name).reshape(-1)
            assert piece.numel() == part.stop - part.start
            rebuilt.setdefault(name, []).append((part.start, piece))
    assert rebuilt.keys() == Net().state_dict().keys()
    for name, pieces in rebuilt.items():
        values = torch.cat([piece for _, piece in sorted(pieces, key=lambda p: p[0])])
        assert torch.equal(values, whole[name].reshape(-1))
    assert not list(folder.glob("*.pkl")) + list(folder.glob("*.pt"))
    assert manifest.world_size == 3
    assert manifest.about["plan"]["zero"]["stage"] == 2


def test_a_replicated_model_lies_in_a_hugging_face_layout(pool: Pool, tmp_path: Path) -> None:
    pool.run(train_and_save, 2, "DDP", tmp_path)
    folder = tmp_path / f"step-{SAVED_AT:08d}"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == Net().state_dict().keys()
    whole = sum(
        v.double().nbytes if v.is_floating_point() else 8 for v in Net().state_dict().values()
    )
    assert index["metadata"]["total_size"] == whole
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "pt") as opened:
            assert opened.get_tensor(name).shape == Net().state_dict()[name].shape


def test_only_the_bytes_of_a_rank_are_read(tmp_path: Path) -> None:
    from gulliver.checkpoint import AsyncCheckpointer
    from gulliver.memory.parts import Part

    table = torch.arange(8 * 2**20, dtype=torch.float32).reshape(1024, -1)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": {"table": table, "other": torch.ones(4, 2**20)}})
    with StepReader(tmp_path / "step-00000001") as reader:
        part = torch.empty(1000)
        reader.read_into("model", {"table": Part(part, tuple(table.shape), 6 * 2**20 + 7)})
        assert torch.equal(part, table.reshape(-1)[6 * 2**20 + 7 :][:1000])
        assert reader.bytes_read <= 3 * 4 * 2**20, "the header's page, and those around the part"


def wrong_model(world: World, folder: Path) -> list[str]:
    said = []
    job = Job(world, "2")
    other = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)).double()
    booster = Booster(plugin("1"))
    model, optimizer, *_ = booster.boost(other, torch.optim.SGD(other.parameters(), 0.1))
    for call in (
        lambda: booster.load(folder, model),
        lambda: booster.load(folder, None, optimizer),
        lambda: job.booster.load(folder, job.model, step=77),
        lambda: job.booster.load(folder / "nowhere", job.model),
        lambda: job.booster.save(folder, 1, job.model, state={"model": 1}),
        lambda: job.booster.save(folder, 1, job.model, kept=3),
    ):
        with pytest.raises(GulliverError) as info:
            call()
        said.append(str(info.value))
    return said


def test_mismatch_is_one_line_error(pool: Pool, tmp_path: Path) -> None:
    pool.run(train_and_save, 2, "2", tmp_path)
    for said in pool.run(wrong_model, 2, tmp_path):
        assert re.search(r"does not match: \d missing", said[0])  # each rank lists its own
        assert "state of AdamW, but the optimizer is SGD" in said[1]
        assert "no complete step 77: it has [5]" in said[2]
        assert "does not exist" in said[3]
        assert "is reserved" in said[4]
        assert "did you mean 'keep'?" in said[5]


def test_part_of_a_model_loads_by_prefix(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    job = Job(World(0, 1, 0, torch.device("cpu")), "DDP")
    job.run(0, SAVED_AT, tmp_path)
    layer = nn.Linear(7, 5).double()
    loaded = load(tmp_path, {"model": layer}, prefix="last.")
    assert torch.equal(layer.weight, job.plain.last.weight)
    assert not loaded.mismatches
    wider = nn.ModuleDict({"last": nn.Linear(7, 5).double(), "new": nn.Linear(2, 2)})
    loaded = load(tmp_path, {"model": wider, "ema": {}}, strict=False)
    assert torch.equal(wider["last"].bias, job.plain.last.bias)
    assert loaded.mismatches["model"].missing == ["new.bias", "new.weight"]
    assert loaded.absent == ["ema"]
    assert "missing from it (new.bias, new.weight)" in str(loaded)
    with pytest.raises(GulliverError, match="does not match"):
        load(tmp_path, {"model": wider})


def step_against_a_hanging_disk(world: World, kind: str, folder: Path) -> dict[str, Tensor]:
    """Steps while most of the state waits for a page of the pool, until the disk comes back."""
    import threading

    from gulliver.io.python_engine import PythonEngine

    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).double()
    booster = Booster(plugin(kind))
    inner = torch.optim.AdamW(model.parameters(), 1e-2)
    boosted, optimizer, *_ = booster.boost(model, inner)
    engine = PythonEngine(page_bytes=4096, pages=2)
    for step in range(3):
        booster.backward(boosted(torch.ones(2, 64).double()).square().mean(), optimizer)
        if step == 2:
            engine.hold(True)
            booster.save(folder, 2, boosted, optimizer, engine=engine)
            wanted = {n: v.detach().clone() for n, v in model.state_dict().items()}
            threading.Timer(0.3, lambda: engine.hold(False)).start()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(model.state_dict()["0.weight"], wanted["0.weight"])
    booster.close()
    engine.close()
    return wanted


@pytest.mark.parametrize("kind", ["0 0.01", "1 0.01", "2 0.01", "3 0.01", "DDP"])
def test_a_step_waits_for_what_it_is_about_to_change(pool: Pool, tmp_path: Path, kind: str) -> None:
    wanted = pool.run(step_against_a_hanging_disk, 2, kind, tmp_path)[0]
    saved = load(tmp_path)
    for name, value in wanted.items():
        assert torch.equal(saved.values["model"][name], value), name


def save_file(world: World, kind: str, path: Path, use_async: bool) -> tuple[Any, Any]:
    job = Job(world, kind)
    job.run(0, 2)
    before = {n: v.detach().clone() for n, v in job.plain.state_dict().items()}
    job.booster.save_model(job.model, path, use_async=use_async)
    job.run(2, 4)
    job.booster.wait()
    # Reading goes on as before.
    job.booster.load_model(job.model, path)
    return before, {n: v.detach().clone() for n, v in job.plain.state_dict().items()}


@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("kind", ["DDP", "1", "3", "2 0.0003 bf16"])
def test_a_model_is_one_file_at_every_stage(
    pool: Pool, tmp_path: Path, kind: str, use_async: bool
) -> None:
    from gulliver.checkpoint.files import read_tensors

    path = tmp_path / "model.safetensors"
    for before, after in pool.run(save_file, 2, kind, path, use_async):
        for name, value in before.items():
            assert torch.equal(after[name], value), name
    saved = read_tensors(path)
    assert saved.keys() == before.keys()
    assert all(torch.equal(saved[name], value) for name, value in before.items())
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def fail_to_save_file(world: World, path: Path) -> list[str]:
    job = Job(world, "1")
    said = []
    for use_async in (False, True):
        with pytest.raises(GulliverError) as info:
            job.booster.save_model(job.model, path / "file" / "m", use_async=use_async)
        said.append(str(info.value))
    return said


def test_a_file_that_cannot_be_written_fails_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    main, other = pool.run(fail_to_save_file, 2, tmp_path)
    assert all("cannot be written" in text for text in main)
    assert all("rank 0" in text for text in other)


def test_chunked_parameters_are_saved_by_booster(tmp_path: Path) -> None:
    from gulliver.checkpoint import AsyncCheckpointer

    job = Job(World(0, 1, 0, torch.device("cpu")), "3")
    with AsyncCheckpointer(tmp_path) as checkpointer:
        with pytest.raises(GulliverError, match=r"ZeRO chunk; use booster.save"):
            checkpointer.save(1, {"model": job.plain})
        checkpointer.save(2, {"model": Net().double()})
    with pytest.raises(GulliverError, match=r"ZeRO chunk; use booster.load"):
        load(tmp_path, {"model": job.plain})
    # Another booster does not know either what each rank has.
    with pytest.raises(GulliverError, match=r"booster.save of the booster"):
        Booster(plugin("3")).save(tmp_path, 3, job.plain)
    with pytest.raises(GulliverError, match=r"booster.load of the booster"):
        Booster(plugin("3")).load(tmp_path, job.plain)


def test_a_model_is_saved_without_its_optimizer(pool: Pool, tmp_path: Path) -> None:
    wanted = pool.run(save_weights_alone, 2, tmp_path)[0]
    saved = load(tmp_path).values
    assert "optimizer" not in saved
    assert all(torch.equal(saved["model"][name], value) for name, value in wanted.items())


def save_weights_alone(world: World, folder: Path) -> dict[str, Tensor]:
    job = Job(world, "3")
    job.run(0, 2)
    job.booster.save(folder, 2, job.model)
    job.booster.close()
    return {n: v.detach().clone() for n, v in job.plain.state_dict().items()}


def loaded_samples(world: World, folder: Path, resume: bool) -> list[int]:
    """Samples of an epoch and a half; the position is saved after two batches."""
    job = Job(world, "1")
    data = torch.utils.data.TensorDataset(torch.arange(40))
    loader = job.booster.plugin.prepare_dataloader(data, 4, shuffle=True, seed=5)
    if resume:
        job.booster.load(folder, job.model, state={"loader": loader})
    seen: list[int] = []
    while len(seen) < 30:
        for (part,) in loader:
            seen += part.tolist()
            if len(seen) == 8 and not resume:
                job.booster.save(folder, 2, job.model, job.optimizer, state={"loader": loader})
            if len(seen) >= 30:
                break
    job.booster.close()
    return seen


def test_checkpoint_restores_data_position(pool: Pool, tmp_path: Path) -> None:
    whole = pool.run(loaded_samples, 2, tmp_path, False)
    rest = pool.run(loaded_samples, 2, tmp_path, True)
    for before, after in zip(whole, rest, strict=True):
        assert after[:22] == before[8:30]
    assert set(whole[0][:20]).isdisjoint(whole[1][:20])
