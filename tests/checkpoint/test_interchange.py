"""Hugging Face folders read and written; steps verified, compared and made whole."""

from __future__ import annotations

import errno
import json
import math
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

from gulliver.booster import Booster, LowLevelZeroPlugin
from gulliver.checkpoint import (
    AsyncCheckpointer,
    compare,
    export_huggingface,
    load,
    load_huggingface,
    save_huggingface,
    verify,
)
from gulliver.checkpoint import comparison as compare_module
from gulliver.checkpoint import huggingface as huggingface_module
from gulliver.checkpoint import weights as weights_module
from gulliver.checkpoint import writing as writing_module
from gulliver.checkpoint.files import CODES, read_json, write_json
from gulliver.checkpoint.manifest import write_manifest
from gulliver.checkpoint.weights import open_weights
from gulliver.comm import World
from gulliver.comm.world import adopt_world
from gulliver.errors import GulliverError
from gulliver.io.python_engine import PythonEngine
from gulliver.memory.parts import Part
from tests.pool import Pool


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    adopt_world(World(0, 1, 0, torch.device("cpu")))
    yield
    adopt_world(None)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches and pages so small that every tensor is cut in many."""
    monkeypatch.setattr(weights_module, "BATCH", 256)
    monkeypatch.setattr(huggingface_module, "BATCH", 256)
    monkeypatch.setattr(writing_module, "PAGE", 4096)
    monkeypatch.setattr(writing_module, "PAGES", 2)
    monkeypatch.setattr(compare_module, "SLICE", 7)


def every_dtype() -> dict[str, Tensor]:
    """Random bits of every dtype that the format holds, and odd shapes."""
    draw = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for dtype in CODES:
        top = 2 if dtype == torch.bool else 256
        raw = torch.randint(0, top, (9, 48), generator=draw, dtype=torch.uint8)
        found[f"layer.{str(dtype).removeprefix('torch.')}"] = raw.view(dtype)
    found["layer.empty"] = torch.zeros(0, 3)
    found["layer.scalar"] = torch.tensor(3.5, dtype=torch.float64)
    found["head.weight"] = torch.randn(33, 65, generator=draw)
    return found


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype
        and one[n].shape == other[n].shape
        and torch.equal(
            one[n].reshape(-1).view(torch.uint8), other[n].reshape(-1).view(torch.uint8)
        )
        for n in one
    )


def save_step(run: Path, step: int, **state: Any) -> Path:
    with AsyncCheckpointer(run, keep=0) as checkpointer:
        checkpointer.save(step, state)
    return run / f"step-{step:08d}"


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read_sharded(folder: Path) -> dict[str, Tensor]:
    """As any reader of Hugging Face's index would."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(str(folder / file), framework="pt") as opened:
            found[name] = opened.get_tensor(name)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    return found


class Tied(nn.Module):
    """A language model in small: its head is its embedding."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight


# --- round trips ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("limit", [5e9, 1500.0, 1.0], ids=["one file", "some", "a file each"])
def test_what_is_written_is_read_by_safetensors_bit_for_bit(tmp_path: Path, limit: float) -> None:
    tensors = every_dtype()
    folder = save_huggingface(tensors, tmp_path / "hf", limit, config={"model_type": "tiny"})
    if limit == 5e9:
        assert files_in(folder) == ["config.json", "model.safetensors"]
        assert same_bits(load_file(folder / "model.safetensors"), tensors)
    else:
        shards = [name for name in files_in(folder) if name.startswith("model-")]
        assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
        assert len(shards) == len(tensors) or limit > 1
        assert same_bits(read_sharded(folder), tensors)
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "tiny"}
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assert not load_huggingface(targets, folder)
    assert same_bits(targets, tensors)


@pytest.mark.usefixtures("tiny")
def test_step_to_folder_round_trip_is_bitwise(tmp_path: Path) -> None:
    tensors = every_dtype()
    step = save_step(tmp_path / "run", 7, model=tensors)
    config = {"model_type": "tiny"}
    folder = export_huggingface(step, tmp_path / "hf", max_shard_bytes=1500, config=config)
    assert verify(tmp_path / "run") == []
    assert same_bits(load(tmp_path / "run").values["model"], tensors)
    assert compare(step, folder).equal
    again = export_huggingface(folder, tmp_path / "again", max_shard_bytes=1000)
    assert same_bits(read_sharded(again), tensors)
    assert read_json(again / "config.json") == {"model_type": "tiny"}
    single = export_huggingface(step, tmp_path / "deep" / "x.safetensors")
    assert same_bits(load_file(single), tensors)
    assert files_in(single.parent) == ["x.safetensors"]


def _save_as_ranks_do(world: World, run: str) -> None:
    draw = torch.Generator().manual_seed(0)
    whole = torch.randn(5, 7, generator=draw)
    edges = [35 * rank // world.size for rank in range(world.size + 1)]
    part = whole.reshape(-1)[edges[world.rank] : edges[world.rank + 1]].clone()
    large = torch.randn(2, 2**18, generator=draw)
    state = {
        "model": {
            "cut": Part(part, (5, 7), edges[world.rank]),
            "large": large,
            "also": large + 1,
            "small": torch.arange(3),
        }
    }
    with AsyncCheckpointer(run) as checkpointer:
        checkpointer.save(1, state)


def test_a_step_of_several_ranks_becomes_whole_tensors(pool: Pool, tmp_path: Path) -> None:
    pool.run(_save_as_ranks_do, 3, str(tmp_path / "run"))
    assert verify(tmp_path / "run") == []
    folder = export_huggingface(tmp_path / "run", tmp_path / "hf")
    draw = torch.Generator().manual_seed(0)
    cut, large = torch.randn(5, 7, generator=draw), torch.randn(2, 2**18, generator=draw)
    expected = {"cut": cut, "large": large, "also": large + 1, "small": torch.arange(3)}
    assert same_bits(load_file(folder / "model.safetensors"), expected)
    assert compare(tmp_path / "run", folder).equal


def test_floating_point_is_converted_and_all_else_stays(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(300), "n": torch.arange(5), "c": torch.ones(3, dtype=torch.cfloat)}
    save_step(tmp_path / "run", 1, model=tensors)
    target = export_huggingface(tmp_path / "run", tmp_path / "x.safetensors", dtype=torch.bfloat16)
    expected = {**tensors, "a": tensors["a"].bfloat16()}
    assert same_bits(load_file(target), expected)
    again = export_huggingface(target, tmp_path / "y.safetensors", dtype=torch.float64)
    assert load_file(again)["a"].dtype == torch.float64


def test_a_prefix_takes_a_part_of_a_model(tmp_path: Path) -> None:
    tensors = {"model.a": torch.ones(2), "model.b": torch.zeros(2), "head": torch.ones(1)}
    step = save_step(tmp_path / "run", 1, model=tensors)
    whole = export_huggingface(step, tmp_path / "hf", prefix="model.")
    assert load_file(whole / "model.safetensors").keys() == {"a", "b"}
    targets = {"a": torch.zeros(2), "b": torch.ones(2)}
    assert not load_huggingface(targets, step / "model.safetensors", prefix="model.")
    assert torch.equal(targets["a"], torch.ones(2))
    with pytest.raises(GulliverError, match=r"'modle\.'.*'model\.'"):
        export_huggingface(step, tmp_path / "x", prefix="modle.")


def test_another_entry_can_be_exported_and_one_without_tensors_is_named(tmp_path: Path) -> None:
    step = save_step(tmp_path, 1, model={"a": torch.ones(2)}, ema={"a": torch.zeros(2)}, epoch=3)
    target = export_huggingface(step, tmp_path / "x.safetensors", entry="ema")
    assert torch.equal(load_file(target)["a"], torch.zeros(2))
    with pytest.raises(GulliverError, match=r"'epoch'.*'model', 'ema'"):
        export_huggingface(step, tmp_path / "y", entry="epoch")


# --- loading into models -------------------------------------------------------------------------


def test_a_model_of_another_dtype_layout_and_with_parts_is_filled_in_place(tmp_path: Path) -> None:
    source = {"a": torch.randn(6, 4), "b": torch.randn(6, 4), "c": torch.randn(6, 4)}
    save_file(source, tmp_path / "model.safetensors")
    targets = {
        "a": torch.zeros(6, 4, dtype=torch.float16),
        "b": torch.zeros(4, 6).T,
        "c": Part(torch.zeros(5), (6, 4), 3),
    }
    assert not load_huggingface(targets, tmp_path)
    assert torch.equal(targets["a"], source["a"].half())
    assert torch.equal(targets["b"], source["b"])
    assert torch.equal(targets["c"].value, source["c"].reshape(-1)[3:8])


def _save_sharded(world: World, folder: str) -> str:
    model = nn.Linear(5, 7)
    booster = Booster(LowLevelZeroPlugin(stage=3, verbose=False))
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if world.is_main:
        with pytest.raises(GulliverError) as caught:
            save_huggingface(model, folder)
        return str(caught.value)
    return ""


def test_single_rank_cannot_save_sharded_model(pool: Pool, tmp_path: Path) -> None:
    said = pool.run(_save_sharded, 2, str(tmp_path / "hf"))[0]
    assert "tensor 'weight'" in said
    assert "export_huggingface" in said
    with pytest.raises(GulliverError, match="export_huggingface"):
        save_huggingface({"a": Part(torch.ones(2), (4,))}, tmp_path / "hf")  # type: ignore[dict-item]
    assert files_in(tmp_path) == []


def _boosted_and_loaded(world: World, folder: str, stage: int, ours: bool) -> tuple[Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    plugin = LowLevelZeroPlugin(stage=stage, chunk_mb=0.0003, precision="bf16", verbose=False)
    booster = Booster(plugin)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    boosted, optimizer, *_ = booster.boost(model, inner)
    if ours:
        load_huggingface(model, folder)
    else:
        booster.load_model(boosted, Path(folder) / "model.safetensors")
    before = boosted(torch.ones(2, 5))
    booster.backward(before.float().square().mean(), optimizer)
    optimizer.step()
    return before.detach(), boosted(torch.ones(2, 5)).detach()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_shards_and_replicas_load_huggingface_files(
    pool: Pool, tmp_path: Path, stage: int
) -> None:
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    # Of the dtype that it is trained in: bytes go straight to their place.
    folder = str(save_huggingface(model, tmp_path / "hf", dtype=torch.bfloat16))
    expected = pool.run(_boosted_and_loaded, 2, folder, stage, False)
    found = pool.run(_boosted_and_loaded, 2, folder, stage, True)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_tied_weights_are_written_once_and_need_not_be_in_the_file(tmp_path: Path) -> None:
    model = Tied()
    folder = save_huggingface(model, tmp_path / "hf")
    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        assert set(file.keys()) == {"embed.weight", "norm.weight", "norm.bias"}
        assert file.metadata()["format"] == "pt"
    # As Hugging Face's own writer leaves it out, with no word of it.
    state = model.state_dict()
    del state["head.weight"]
    save_file(state, tmp_path / "plain.safetensors")
    for path in (folder, tmp_path / "plain.safetensors"):
        found = Tied()
        assert not load_huggingface(found, path)
        assert torch.equal(found.head.weight, model.embed.weight)
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(10, 4))
    with pytest.raises(GulliverError, match=r"1 missing from it \(head.weight\)"):
        load_huggingface(untied, tmp_path / "plain.safetensors")
    # The file's text says what the other name's values are.
    assert not load_huggingface(untied, folder)
    assert torch.equal(untied.head.weight, model.embed.weight)


def test_safetensors_own_writer_and_reader_of_models_are_understood(tmp_path: Path) -> None:
    from safetensors.torch import load_model

    model, found = Tied(), Tied()
    save_model(model, str(tmp_path / "theirs.safetensors"))
    assert not load_huggingface(found, tmp_path / "theirs.safetensors")
    assert torch.equal(found.embed.weight, model.embed.weight)
    found = Tied()
    load_model(found, str(save_huggingface(model, tmp_path / "ours") / "model.safetensors"))
    assert torch.equal(found.head.weight, model.embed.weight)


def test_a_foreign_sharded_folder_loads(tmp_path: Path) -> None:
    model, found = Tied(), Tied()
    shards = {
        "model-00001-of-00002.safetensors": ["embed.weight"],
        "model-00002-of-00002.safetensors": ["norm.weight", "norm.bias"],
    }
    state = model.state_dict()
    for file, names in shards.items():
        save_file({name: state[name] for name in names}, tmp_path / file, {"format": "pt"})
    places = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    write_json(tmp_path / "model.safetensors.index.json", index)
    assert not load_huggingface(found, tmp_path)
    assert compare(tmp_path, save_huggingface(found, tmp_path / "hf")).missing == []

    index["weight_map"] = {**places, "lost": "model-00002-of-00002.safetensors"}
    write_json(tmp_path / "model.safetensors.index.json", index)
    with pytest.raises(GulliverError, match=r"00002.safetensors has no tensor 'lost'"):
        load_huggingface(found, tmp_path)
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": places})
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(GulliverError, match=r"lacks 1 of the 2 files .*: model-00001-of-00002"):
        load_huggingface(found, tmp_path)


def test_transformers_reads_what_is_written_and_is_read(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    save_huggingface(model, tmp_path / "ours", 2000, config=config.to_dict())
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    assert same_bits(dict(again.state_dict()), dict(model.state_dict()))
    model.save_pretrained(tmp_path / "theirs", max_shard_size="2KB")
    found = transformers.GPT2LMHeadModel(config)
    assert not load_huggingface(found, tmp_path / "theirs")
    assert same_bits(dict(found.state_dict()), dict(model.state_dict()))


def test_mismatch_is_rejected_before_changes(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "model.safetensors")
    targets = {"a": torch.zeros(2), "c": torch.zeros(1)}
    with pytest.raises(GulliverError, match=r"1 missing from it \(c\); 1 left over \(b\)"):
        load_huggingface(targets, tmp_path)
    assert not targets["a"].any()
    found = load_huggingface(targets, tmp_path, strict=False)
    assert (found.missing, found.unexpected) == (["c"], ["b"])
    assert targets["a"].all()
    with pytest.raises(GulliverError, match=r"b is \(3,\) there, \(4,\) here"):
        load_huggingface({"b": torch.zeros(4)}, tmp_path, strict=False)
    with pytest.raises(GulliverError, match="does not match"):
        load_huggingface({"z": torch.zeros(4)}, tmp_path, strict=False)
    with pytest.raises(GulliverError, match=r"weight .*to_empty\(\)"):
        load_huggingface(nn.Linear(2, 2, device="meta"), tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no checkpoint and no safetensors file"),
        ({"pytorch_model.bin": b""}, r"\*\.bin"),
        ({"a.safetensors": b"", "b.safetensors": b""}, "several safetensors files but no index"),
        ({"model.safetensors": b"\x99"}, r"model\.safetensors is truncated"),
        ({"model.safetensors.index.json": b"{}"}, "has no weight_map"),
        ({"model.safetensors.index.json": b"{"}, "truncated or not JSON"),
    ],
)
def test_non_weight_folder_is_one_line_error(
    tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(GulliverError, match=message) as caught:
        load_huggingface(nn.Linear(2, 2), tmp_path)
    assert "\n" not in str(caught.value)


# --- bad days ------------------------------------------------------------------------------------


def test_an_existing_target_is_refused(tmp_path: Path) -> None:
    folder = save_huggingface({"a": torch.ones(2)}, tmp_path / "hf")
    for make in (
        lambda: save_huggingface({"a": torch.ones(2)}, folder),
        lambda: export_huggingface(folder, folder / "model.safetensors"),
    ):
        with pytest.raises(GulliverError, match="exists already: choose another name"):
            make()


class Stop(BaseException):
    """As Ctrl-C would."""


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("how", ["interrupt", "no space", "broken source"])
def test_failed_export_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    source = save_step(tmp_path / "run", 1, model={"a": torch.randn(40_000)})
    expected: type[BaseException] = GulliverError

    def progress(done: int, total: int) -> None:
        if how == "interrupt" and done > total // 2:
            raise Stop

    if how == "interrupt":
        expected = Stop
    elif how == "no space":

        def full(**kwargs: Any) -> PythonEngine:
            engine = PythonEngine(**kwargs)
            engine.inject("write", 5, errno=errno.ENOSPC, times=100)
            return engine

        monkeypatch.setattr(writing_module, "default_engine", full)
    else:
        _flip(source / "model.safetensors", 90_000)
    before = files_in(tmp_path)
    with pytest.raises(expected):
        export_huggingface(tmp_path / "run", tmp_path / "new" / "hf", progress=progress)
    with pytest.raises(expected):
        export_huggingface(tmp_path / "run", tmp_path / "new" / "x.safetensors", progress=progress)
    assert files_in(tmp_path) == before


def test_missing_space_is_reported_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil
    from collections import namedtuple

    save_file({"a": torch.randn(400)}, tmp_path / "x.safetensors")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 0, 10))
    with pytest.raises(GulliverError, match=r"needs .* free"):
        export_huggingface(tmp_path / "x.safetensors", tmp_path / "hf")
    assert files_in(tmp_path) == ["x.safetensors"]


def test_memory_does_not_grow_with_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "BATCH", 2**16)
    monkeypatch.setattr(writing_module, "PAGE", 2**16)
    path = tmp_path / "x.safetensors"
    save_file({str(n): torch.randn(2**19) for n in range(4)}, path)
    largest = [0]
    empty = torch.empty

    def noted(*size: Any, **kwargs: Any) -> Tensor:
        made = empty(*size, **kwargs)
        if not made.is_meta:
            largest[0] = max(largest[0], made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", noted)
    tracemalloc.start()
    export_huggingface(path, tmp_path / "hf", max_shard_bytes=2**22)
    assert compare(path, tmp_path / "hf").equal
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert largest[0] <= 2**16
    assert peak < 2**22


# --- verifying -----------------------------------------------------------------------------------


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_in_any_file_is_found_and_named(tmp_path: Path) -> None:
    model = {"a": torch.zeros(1_500_000), "b": torch.ones(1_500_000)}
    step = save_step(tmp_path, 1, model=model, ema={"a": torch.ones(5)}, epoch=3)
    assert verify(tmp_path) == []
    sizes = {path.name: path.stat().st_size for path in step.iterdir()}
    for file, at, begin, tensors in (
        ("model.safetensors", 5_000_000, 4 * 2**20, ("model: a", "model: b")),
        ("model.safetensors", sizes["model.safetensors"] - 1, 8 * 2**20, ("model: b",)),
        ("ema.safetensors", sizes["ema.safetensors"] - 1, 0, ("ema: a",)),
        ("state.json", 5, 0, ()),
    ):
        _flip(step / file, at)
        (found,) = verify(step)
        assert (found.file, found.begin, found.tensors) == (file, begin, tensors)
        assert found.begin <= at < found.stop
        _flip(step / file, at)
    # What is broken in the header can hide any tensor.
    _flip(step / "ema.safetensors", 8)
    (found,) = verify(step)
    assert found.tensors == ("ema: a",)
    _flip(step / "ema.safetensors", 8)
    assert verify(step) == []


def test_everything_broken_is_listed_not_only_the_first(tmp_path: Path) -> None:
    step = save_step(tmp_path, 1, model={"a": torch.zeros(4_000_000)}, ema={"a": torch.ones(5)})
    size = (step / "model.safetensors").stat().st_size
    _flip(step / "model.safetensors", size - 1)
    _flip(step / "model.safetensors", 5 * 2**20)
    (step / "ema.safetensors").write_bytes((step / "ema.safetensors").read_bytes()[:-4])
    (step / "state.json").unlink()
    found = {(p.file, p.begin // 2**20, p.tensors): str(p) for p in verify(tmp_path)}
    assert found.keys() == {
        ("model.safetensors", 4, ("model: a",)),
        ("model.safetensors", 12, ("model: a",)),
        ("ema.safetensors", 0, ("ema: a",)),
        ("state.json", 0, ()),
    }
    assert "the file does not exist" in found["state.json", 0, ()]
    assert "bytes, not" in found["ema.safetensors", 0, ("ema: a",)]


def test_a_file_of_another_step_is_found(tmp_path: Path) -> None:
    one = save_step(tmp_path, 1, model={"a": torch.zeros(5)})
    manifest = read_json(one / "manifest.json")
    del manifest["crc32"]
    manifest["tensors"]["model"]["a"]["dtype"] = "F64"
    write_manifest(one, manifest)
    (found,) = verify(one)
    assert found.what == "the header and the manifest disagree"
    manifest["files"]["model.safetensors"]["crc32"] = []
    write_manifest(one, manifest)
    with pytest.raises(GulliverError, match="a file lacks checksums"):
        verify(one)


def test_the_newest_step_is_verified_also_where_it_is_incomplete(tmp_path: Path) -> None:
    save_step(tmp_path, 1, model={"a": torch.zeros(5)})
    step = save_step(tmp_path, 2, model={"a": torch.zeros(5)})
    (step / "model.safetensors").unlink()
    assert [p.file for p in verify(tmp_path)] == ["model.safetensors"]
    assert verify(tmp_path, 1) == []
    with pytest.raises(GulliverError, match=r"has no step 3: it has \[1, 2\]"):
        verify(tmp_path, 3)
    manifest = read_json(step / "manifest.json")
    del manifest["crc32"]
    write_json(step / "manifest.json", {**manifest, "format": 99})
    for look in (verify, open_weights):
        with pytest.raises(GulliverError, match="newer version"):
            look(step)


# --- comparing -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("code", sorted(CODES.values()))
def test_the_smallest_change_of_any_dtype_is_found(tmp_path: Path, code: str) -> None:
    dtype = {c: d for d, c in CODES.items()}[code]
    raw = torch.ones(40 * dtype.itemsize, dtype=torch.uint8)
    save_file({"a": raw.view(dtype), "b": torch.ones(3)}, tmp_path / "a.safetensors")
    changed = raw.clone()
    changed[30 * dtype.itemsize] = 0
    save_file({"a": changed.view(dtype), "b": torch.ones(3)}, tmp_path / "b.safetensors")
    assert compare(tmp_path / "a.safetensors", tmp_path / "a.safetensors").equal
    found = compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert not found.equal
    (difference,) = found.differences
    assert (difference.name, difference.unequal, difference.numel) == ("a", 1, 40)
    assert difference.absolute > 0
    assert difference.relative > 0


def test_differences_are_listed_worst_first(tmp_path: Path) -> None:
    one = {
        "ulp": torch.ones(3),
        "far": torch.ones(3),
        "nan": torch.tensor([math.nan, 1.0]),
        "broken": torch.ones(2),
        "zero": torch.zeros(2),
        "inf": torch.tensor([math.inf, -math.inf]),
        "dtype": torch.ones(2),
        "shape": torch.ones(2),
        "only a": torch.ones(1),
    }
    other = {
        **one,
        "ulp": torch.nextafter(one["ulp"], torch.tensor(2.0)),
        "far": torch.tensor([1.0, 3.0, 1.5]),
        "broken": torch.tensor([1.0, math.nan]),
        "zero": -one["zero"],
        "dtype": one["dtype"].double(),
        "shape": torch.ones(3),
        "only b": torch.ones(1),
    }
    del other["only a"]
    save_file(one, tmp_path / "a.safetensors")
    step = save_step(tmp_path / "run", 1, model=other)
    found = compare(tmp_path / "a.safetensors", step)
    assert found.missing == ["only a"]
    assert found.unexpected == ["only b"]
    assert found.shapes == {"shape": ((2,), (3,))}
    assert found.dtypes == {"dtype": (torch.float32, torch.float64)}
    assert [d.name for d in found.differences] == ["broken", "far", "ulp"]
    broken, far, ulp = found.differences
    assert (broken.absolute, broken.unequal) == (math.inf, 1)
    assert (far.absolute, far.relative, far.unequal) == (2.0, pytest.approx(2 / 3), 2)
    assert ulp.absolute == pytest.approx(2**-23)
    near = compare(tmp_path / "a.safetensors", step, tolerance=2**-20)
    assert [d.name for d in near.differences] == ["broken", "far"]
    near = compare(tmp_path / "a.safetensors", step, relative=0.7)
    assert [d.name for d in near.differences] == ["broken"]


def test_large_integers_one_apart_differ(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([2**62])}, tmp_path / "a.safetensors")
    save_file({"a": torch.tensor([2**62 + 1])}, tmp_path / "b.safetensors")
    (found,) = compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors").differences
    assert found.absolute == 1


def test_steps_are_compared_with_all_their_entries(tmp_path: Path) -> None:
    one = save_step(tmp_path, 1, model={"a": torch.ones(2)}, ema={"a": torch.ones(2)}, epoch=1)
    two = save_step(tmp_path, 2, model={"a": torch.ones(2)}, ema={"a": torch.zeros(2)}, epoch=2)
    assert compare(one, two).equal
    found = compare(tmp_path, tmp_path, None, step=1, other_step=2)
    assert found.values == ["epoch"]
    assert [d.name for d in found.differences] == ["ema: a"]
    with pytest.raises(GulliverError, match="cannot be compared entry by entry"):
        compare(one, two / "ema.safetensors", None)
