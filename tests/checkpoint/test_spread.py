"""Models that no rank has all of: saved by parts, loaded by any other cut.

The models are cut by hand: slices along either dim, three runs, uneven and empty ones; stages with
names of their own and a tied weight in two of them; ZeRO over subgroups of the ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from gulliver.booster import Booster, LowLevelZeroPlugin
from gulliver.booster.checkpoint import LoadPlan, boosted_state
from gulliver.checkpoint import (
    AsyncCheckpointer,
    compare,
    export_huggingface,
    load,
    load_huggingface,
    verify,
)
from gulliver.checkpoint.files import read_tensors
from gulliver.checkpoint.loading import step_folder
from gulliver.checkpoint.manifest import read_manifest
from gulliver.checkpoint.reader import StepReader
from gulliver.comm import World
from gulliver.comm.world import adopt_world
from gulliver.errors import GulliverError
from gulliver.memory import region_of
from gulliver.memory.parts import Part, Region, set_region
from gulliver.parallel import ZeroOptimizer
from gulliver.parallel.optimizer import named_groups
from tests.covering import some
from tests.pool import Pool

WIDTH, TOKENS = 6, 10


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    adopt_world(World(0, 1, 0, torch.device("cpu")))
    yield
    adopt_world(None)


class Whole(nn.Module):
    """Two blocks between an embedding and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("table", torch.zeros(WIDTH), persistent=False)


TRAINED = ("embed", "qkv", "out", "norm")


def filled(dtype: torch.dtype = torch.float64) -> Whole:
    """The whole model, every element of it another number."""
    model = Whole().to(dtype)
    start = 1
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(torch.arange(start, start + value.numel()).view(value.shape) / 64)
            start += value.numel()
        model.head.weight = model.embed.weight
    return model


@dataclass(frozen=True)
class Cut:
    """How ranks share a model: stages x replicas x slices, the outermost first."""

    stages: int = 1
    replicas: int = 1
    slices: int = 1
    zero: int = 1
    dtype: torch.dtype = torch.float64

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas * self.slices


def region_for(name: str, shape: tuple[int, ...], place: int, size: int) -> Region | None:
    """Uneven slices: of 3 ranks the last has nothing of what is cut by pairs of rows."""

    def run(count: int, unit: int, offset: int = 0) -> tuple[int, int]:
        units = -(-(count // unit) // size)
        begin, stop = (min(count, unit * units * n) for n in (place, place + 1))
        return offset + begin, offset + stop

    if size == 1:
        return None
    if "qkv" in name:
        return Region(shape, 0, tuple(run(WIDTH, 3, WIDTH * n) for n in range(3)))
    if name.endswith("out.weight"):
        return Region(shape, 1, (run(WIDTH, 3),))
    if name.startswith(("embed", "head")):
        return Region(shape, 0, (run(TOKENS, 1),))
    return None


def sliced(whole: Tensor, region: Region) -> Tensor:
    runs = [whole.narrow(region.dim, a, b - a) for a, b in region.runs]
    return torch.cat(runs, region.dim)


class Job:
    """A share of the model on this rank, and an optimizer over its replicas."""

    def __init__(self, world: World, cut: Cut, fill: bool) -> None:
        assert world.size == cut.ranks
        self.slice = world.rank % cut.slices
        replica = world.rank // cut.slices % cut.replicas
        self.stage = world.rank // cut.slices // cut.replicas
        self.model = filled(cut.dtype)
        names = {p: n for n, p in self.model.named_parameters()}
        groups = [
            {"params": [p for p, n in names.items() if "norm" in n], "lr": 0.5},
            {"params": [p for p, n in names.items() if "norm" not in n], "lr": 0.25},
        ]
        inner = torch.optim.AdamW(groups, weight_decay=0.0)
        whole_groups = named_groups(self.model, inner)
        if cut.stages == 2:
            self._drop(("embed", "blocks.0") if self.stage else ("head", "norm", "blocks.1"))
        self._slice(cut)
        if not fill:
            for value in self.model.state_dict().values():
                value.zero_()
        canonical = {"head.weight": "embed.weight"}
        held = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        held = {canonical.get(n, n): p for n, p in held.items()}
        frozen = {p: n for n, p in self.model.named_parameters() if not p.requires_grad}
        for group, members in zip(inner.param_groups, whole_groups, strict=True):
            group["params"] = [held[n] for n in members if n in held]
        mine: Any = None
        for stage in range(cut.stages):
            for place in range(cut.slices):
                first = stage * cut.replicas * cut.slices + place
                ranks = [first + n * cut.slices for n in range(cut.replicas)]
                made = dist.new_group(ranks) if cut.ranks > 1 else None
                mine = made if world.rank in ranks else mine
        self.optimizer = ZeroOptimizer(
            inner,
            {p: n for n, p in held.items()},
            stage=cut.zero,
            chunk_bytes=256,
            group=mine,
            frozen=frozen,
        )
        assert self.optimizer.rank == replica
        if cut.ranks > 1:
            self.optimizer.checkpoint.describe_model(
                responsible=lambda name: self.slice == 0,
                written_elsewhere={"embed.weight"} if self.stage else (),
                whole_groups=whole_groups,
            )
        self.optimizer.watch(self.model)
        self.booster = Booster(LowLevelZeroPlugin(verbose=False))
        self.booster._optimizers[self.model] = self.optimizer
        if fill:
            self._fill_state()

    def _drop(self, gone: tuple[str, ...]) -> None:
        for name in gone:
            if name.startswith("blocks."):
                self.model.blocks[int(name[-1])] = nn.Identity()
            else:
                setattr(self.model, name, None)

    def _slice(self, cut: Cut) -> None:
        shared: dict[Tensor, nn.Parameter] = {}
        for name, parameter in list(self.model.named_parameters(remove_duplicate=False)):
            region = region_for(name, tuple(parameter.shape), self.slice, cut.slices)
            if region is None:
                continue
            if parameter not in shared:
                local = sliced(parameter.detach(), region).contiguous()
                shared[parameter] = nn.Parameter(local)
                set_region(shared[parameter], region)
            parent, _, child = name.rpartition(".")
            setattr(self.model.get_submodule(parent), child, shared[parameter])

    def _fill_state(self) -> None:
        """State that tells elements apart: what a whole model's would be at each place."""
        wanted = filled().state_dict()
        entries = {
            name: {"step": counter(), "exp_avg": 1, "exp_avg_sq": 2}
            for name in wanted
            if name.startswith(("embed", "norm", "blocks")) and "frozen" not in name
        }
        for (name, key), part in self.optimizer.checkpoint.make_state(entries).items():
            assert isinstance(part, Part)
            whole = wanted[name] * entries[name][key]
            value = whole if part.region is None else sliced(whole, part.region)
            part.value.copy_(value.reshape(-1)[part.start : part.stop])

    def save(self, folder: Path) -> None:
        state = boosted_state(self.model, self.optimizer, self.optimizer, None, {"epoch": 3})
        with AsyncCheckpointer(folder) as checkpointer:
            checkpointer.save(1, state)

    def load(self, folder: Path, strict: bool = True) -> Any:
        with StepReader(step_folder(folder)) as reader:
            holder = self.optimizer
            return LoadPlan(reader, self.model, self.optimizer, holder, strict=strict).load()

    def check(self, dtype: torch.dtype = torch.float64) -> None:
        """What this rank has is what the whole model's would be, bit for bit."""
        wanted = filled(dtype).state_dict()
        for name, value in self.model.state_dict(keep_vars=True).items():
            held = value.detach().clone()
            region = region_of(value)
            whole = wanted[name] if region is None else sliced(wanted[name], region)
            assert torch.equal(held, whole), name
        self._check_state()

    def _check_state(self) -> None:
        wanted, chosen = filled().state_dict(), self.optimizer.checkpoint._responsible
        self.optimizer.checkpoint._responsible = None
        # As if this rank wrote all that it has.
        leaves = self.optimizer.checkpoint.state_leaves()
        if chosen is not None:
            self.optimizer.checkpoint.describe_model(responsible=chosen)
        held = {piece.name for c in self.optimizer.chunks for piece, _ in c.pieces}
        assert leaves.keys() == held
        for name, entries in leaves.items():
            assert entries["step"].value == 7
            for key, factor in (("exp_avg", 1), ("exp_avg_sq", 2)):
                part: Any = entries[key]
                whole = wanted[name] * factor
                region = getattr(part, "region", None)
                value = (whole if region is None else sliced(whole, region)).reshape(-1)
                if not isinstance(part, Tensor):
                    value, part = value[part.start : part.stop], part.value
                assert torch.equal(part.reshape(-1).double(), value), (name, key)


def counter() -> Any:
    from gulliver.parallel.optimizer import Counter

    return Counter(7.0, torch.float32)


def save(world: World, cut: Cut, folder: Path) -> None:
    Job(world, cut, fill=True).save(folder)


def save_and_go_on(world: World, cut: Cut, folder: Path) -> None:
    """Everything changes while it is saved."""
    job = Job(world, cut, fill=True)
    state = boosted_state(job.model, job.optimizer, job.optimizer, None, None)
    with AsyncCheckpointer(folder) as checkpointer:
        checkpointer.save(1, state)
        for buffer in job.model.buffers():
            buffer.add_(1)
        parameters = [p for p in job.model.parameters() if p.requires_grad]
        job.optimizer.backward(sum((p * p).sum() for p in parameters))  # type: ignore[arg-type]
        job.optimizer.step()
    with pytest.raises(AssertionError):
        job.check()


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_save_is_consistent_while_training_continues(pool: Pool, tmp_path: Path, zero: int) -> None:
    cut = Cut(slices=2, replicas=2, zero=zero)
    pool.run(save_and_go_on, 4, cut, tmp_path)
    pool.run(load_and_check, 1, Cut(), tmp_path)


def load_and_check(world: World, cut: Cut, folder: Path) -> None:
    job = Job(world, cut, fill=False)
    loaded = job.load(folder)
    assert not loaded.mismatches
    job.check(cut.dtype)


CUTS = [
    Cut(slices=2, zero=0),
    Cut(slices=3, zero=1),
    Cut(slices=2, replicas=2, zero=2),
    Cut(slices=2, replicas=2, zero=0),
    Cut(stages=2, zero=1),
    Cut(stages=2, replicas=2, zero=3),
    Cut(stages=2, slices=2, zero=1),
]
TARGETS = [Cut(), Cut(slices=3, zero=3), Cut(stages=2, replicas=2, zero=2), Cut(stages=2, slices=2)]


@pytest.mark.parametrize("cut", some(CUTS, [CUTS[n] for n in (1, 2, 5, 6)]), ids=str)
def test_step_of_any_grid_loads_into_any_other(
    pool: Pool, tmp_path: Path, cut: Cut, full: bool
) -> None:
    pool.run(save, cut.ranks, cut, tmp_path)
    wanted = filled().state_dict()
    saved = load(tmp_path).values
    assert saved["model"].keys() == wanted.keys()
    assert all(torch.equal(saved["model"][name], value) for name, value in wanted.items())
    assert saved["optimizer"]["groups"][0]["names"] == ["norm.weight", "norm.bias"]
    moments = saved["optimizer"]["state"]["blocks.1.out.weight"]
    assert torch.equal(moments["exp_avg_sq"], wanted["blocks.1.out.weight"] * 2)
    for target in (cut, *(TARGETS if full else TARGETS[CUTS.index(cut) % 2 :: 2])):
        pool.run(load_and_check, target.ranks, target, tmp_path)


@pytest.mark.parametrize("target", some(CUTS, [CUTS[n] for n in (1, 2, 6)]), ids=str)
def test_a_step_of_one_process_loads_at_any_cut(pool: Pool, tmp_path: Path, target: Cut) -> None:
    pool.run(save, 1, Cut(), tmp_path)
    pool.run(load_and_check, target.ranks, target, tmp_path)


def test_every_element_is_written_once_and_whole_again_by_convert(
    pool: Pool, tmp_path: Path
) -> None:
    cut = Cut(stages=2, slices=2)
    pool.run(save, 4, cut, tmp_path / "run")
    step = tmp_path / "run" / "step-00000001"
    manifest = read_manifest(step)
    for tensors in manifest.tensors.values():
        for name, tensor in tensors.items():
            assert sum(part.stop - part.start for part in tensor.parts) == tensor.numel, name
    assert verify(step) == []
    export_huggingface(step, tmp_path / "whole.safetensors")
    wanted = filled().state_dict()
    with safe_open(tmp_path / "whole.safetensors", "pt") as file:
        for name, value in wanted.items():
            assert torch.equal(file.get_tensor(name), value), name
    pool.run(save, 1, Cut(), tmp_path / "plain")
    for entry in ("model", "optimizer"):
        assert compare(tmp_path / "run", tmp_path / "plain", entry).equal
    broken = step / "model-00002-of-00004.safetensors"
    content = bytearray(broken.read_bytes())
    content[-3] ^= 1
    broken.write_bytes(content)
    (problem,) = verify(step)
    assert problem.file == broken.name


def save_and_load_files(world: World, cut: Cut, folder: Path) -> None:
    job = Job(world, cut, fill=True)
    job.booster.save_model(job.model, folder / "model.safetensors")
    job.booster.save_optimizer(job.optimizer, folder / "optimizer")
    options = {"max_shard_bytes": 700, "config": {"model_type": "tiny"}}
    job.booster.save_huggingface(job.model, folder / "hf", use_async=True, **options)
    job.booster.wait()
    again = Job(world, cut, fill=False)
    assert again.booster.load_model(again.model, folder / "model.safetensors") == []
    again.booster.load_optimizer(again.optimizer, folder / "optimizer")
    again.check(cut.dtype)
    again = Job(world, cut, fill=False)
    assert again.booster.load_model(again.model, folder / "hf") == []
    again.booster.load_optimizer(again.optimizer, folder / "optimizer")
    again.check(cut.dtype)


def load_files(world: World, cut: Cut, folder: Path) -> None:
    job = Job(world, cut, fill=False)
    job.booster.load_model(job.model, folder / "model.safetensors")
    job.booster.load_optimizer(job.optimizer, folder / "optimizer")
    job.check(cut.dtype)


FILES = [
    *(CUTS[n] for n in (2, 3, 5, 6)),
    Cut(stages=2, slices=2, zero=1, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("cut", some(FILES, FILES[2:]), ids=str)
def test_files_of_one_model_are_whole(pool: Pool, tmp_path: Path, cut: Cut) -> None:
    pool.run(save_and_load_files, cut.ranks, cut, tmp_path)
    wanted = filled(cut.dtype).state_dict()
    found = read_tensors(tmp_path / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    # Tied weights are there once.
    assert index["weight_map"].keys() == wanted.keys() - {"head.weight"}
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "hf" / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), wanted[name])
    model = Whole().to(cut.dtype)
    assert not load_huggingface(model, tmp_path / "hf")
    assert torch.equal(model.head.weight, wanted["embed.weight"])
    for other in (Cut(dtype=cut.dtype), Cut(slices=3, zero=3, dtype=cut.dtype)):
        pool.run(load_files, other.ranks, other, tmp_path)


def fail_behind_the_back(world: World, cut: Cut, folder: Path) -> list[str]:
    job = Job(world, cut, fill=True)
    said = []
    # A folder is in the way, which rank 0 finds when it has all parts.
    job.booster.save_model(job.model, folder / "taken", use_async=True)
    under_a_file = folder / "taken" / "file" / "m"
    for call in (
        job.booster.wait,
        lambda: job.booster.save_model(job.model, under_a_file, use_async=True),
    ):
        with pytest.raises(GulliverError) as info:
            call()
        said.append(str(info.value))
    job.check()
    return said


def test_write_failures_are_raised_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("in the way")
    first, second = pool.run(fail_behind_the_back, 2, Cut(slices=2), tmp_path)
    assert "taken was not written: " in first[0]
    assert "rank 0 failed" in second[0]
    assert "rank 0" in second[1]
    assert [p.name for p in tmp_path.rglob("*")] == ["taken", "file"]


def load_slices(world: World, cut: Cut, folder: Path) -> None:
    """Also of parameters that ZeRO has away."""
    model = Job(world, cut, fill=False).model
    aliases = {"head.weight": "embed.weight"}
    odd = load_huggingface(model, folder, elsewhere=set(Whole().state_dict()), aliases=aliases)
    assert not odd
    wanted = filled().state_dict()
    for name, value in model.state_dict(keep_vars=True).items():
        region = region_of(value)
        whole = wanted[name] if region is None else sliced(wanted[name], region)
        assert torch.equal(value.detach().clone(), whole), name


@pytest.mark.parametrize("cut", [CUTS[1], CUTS[5], CUTS[6]], ids=str)
def test_each_rank_reads_its_slices_of_a_hugging_face_folder(
    pool: Pool, tmp_path: Path, cut: Cut
) -> None:
    from gulliver.checkpoint import save_huggingface

    save_huggingface(filled(), tmp_path / "hf", 500)
    pool.run(load_slices, cut.ranks, cut, tmp_path / "hf")


def wrong(world: World, cut: Cut, folder: Path) -> list[str]:
    job = Job(world, cut, fill=True)
    said = []
    (folder / "taken").mkdir(exist_ok=True)
    (folder / "taken" / "file").write_text("in the way")
    calls = [
        lambda: job.booster.save_huggingface(job.model, folder / "taken"),
        lambda: job.booster.save_model(job.model, folder / "taken" / "file" / "m.safetensors"),
        lambda: job.booster.load_model(job.model, folder / "nowhere"),
        lambda: job.booster.load_optimizer(job.optimizer, folder / "nowhere"),
    ]
    for call in calls:
        with pytest.raises(GulliverError) as info:
            call()
        said.append(str(info.value))
    job.optimizer.checkpoint.describe_model(responsible=lambda name: True)
    with pytest.raises(GulliverError) as info:
        job.save(folder / "twice")
    said.append(str(info.value))
    job.check()
    return said


def test_load_failures_are_raised_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(wrong, 2, Cut(slices=2), tmp_path)
    assert "exists already" in first[0]
    assert "exists already" in second[0]
    assert "rank 0" in second[1]
    assert all("does not exist" in said for said in (*first[2:4], *second[2:4]))
    assert "not once; all ranks must save the same state" in first[4]
    assert "rank 0 failed" in second[4]
    assert not list((tmp_path / "twice").glob("step-*"))
