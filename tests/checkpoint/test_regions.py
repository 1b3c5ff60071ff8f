"""Parts of regions: what two of them have in common, and what together is a whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from gulliver.checkpoint import AsyncCheckpointer, load, load_huggingface
from gulliver.checkpoint import weights as weights_module
from gulliver.checkpoint.regions import (
    PartOffset,
    copy_bytes,
    missing,
    overlap,
    region_from_json,
    region_to_json,
)
from gulliver.comm import World
from gulliver.comm.world import adopt_world
from gulliver.errors import GulliverError
from gulliver.memory.parts import Part, Region, set_region


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    adopt_world(World(0, 1, 0, torch.device("cpu")))
    yield
    adopt_world(None)


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region | None:
    if draw(st.booleans()) or not shape:
        return None
    dim = draw(st.integers(0, len(shape) - 1))
    edges = draw(st.lists(st.integers(0, shape[dim]), max_size=6).map(sorted))
    edges = edges[: len(edges) // 2 * 2]
    return Region(shape, dim, tuple(zip(edges[::2], edges[1::2], strict=True)))


@st.composite
def places(draw: st.DrawFn, shape: tuple[int, ...]) -> PartOffset:
    region = draw(regions(shape))
    numel = math.prod(shape) if region is None else region.numel
    start, stop = sorted((draw(st.integers(0, numel)), draw(st.integers(0, numel))))
    return PartOffset(shape, start, stop, region)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[PartOffset, PartOffset]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    return draw(places(shape)), draw(places(shape))


def elements(place: PartOffset) -> np.ndarray:
    """Numbers, in the whole, of a part's elements: the naive way."""
    numbers = np.arange(math.prod(place.shape)).reshape(place.shape)
    if place.region is not None:
        chosen = [index for a, b in place.region.runs for index in range(a, b)]
        numbers = numbers.take(chosen, axis=place.region.dim)
    return numbers.reshape(-1)[place.start : place.stop]


@settings(max_examples=400, deadline=None)
@given(pairs(), st.sampled_from([torch.int8, torch.int16, torch.int32, torch.int64]))
def test_only_the_intersection_is_copied(
    pair: tuple[PartOffset, PartOffset], dtype: torch.dtype
) -> None:
    one, other = pair
    ours, theirs = elements(one), elements(other)
    shared = set(ours.tolist()) & set(theirs.tolist())
    source = torch.tensor((ours % 100).tolist(), dtype=dtype)
    target = torch.full((len(theirs),), -1, dtype=dtype)
    copies = overlap(one, other)
    assert copies.total == len(shared)
    size = dtype.itemsize
    if copies.total:
        copy_bytes(target.view(torch.uint8), source.view(torch.uint8), copies.scaled(size))
    wanted = [number % 100 if number in shared else -1 for number in theirs.tolist()]
    assert target.tolist() == wanted


@settings(max_examples=200, deadline=None)
@given(pairs(), st.integers(1, 40))
def test_paged_copy_equals_whole_copy(pair: tuple[PartOffset, PartOffset], page: int) -> None:
    one, other = pair
    if not one.numel:
        return
    source = torch.arange(1, one.numel + 1, dtype=torch.int32).view(torch.uint8)
    copies = overlap(one, other).scaled(4)
    at_once, paged = (torch.zeros(other.numel * 4, dtype=torch.uint8) for _ in range(2))
    copy_bytes(at_once, source, copies)
    touched = copies.pages(page) if len(copies) else set()
    for number in range(-(-source.numel() // page)):
        low = number * page
        content = source[low : low + page]
        here = copies.within(low, low + content.numel())
        assert (number in touched) == (here.total > 0)
        copy_bytes(paged, content, here)
    assert torch.equal(at_once, paged)


def test_a_slice_along_the_last_dim_is_one_box_per_run() -> None:
    shape = (4096, 96)
    region = Region(shape, 1, ((0, 8), (32, 40), (64, 72)))
    copies = overlap(PartOffset(shape, 0, 4096 * 96), PartOffset(shape, 0, region.numel, region))
    assert len(copies) == 3 * 4096
    assert len(list(copies.boxes())) == 3


def split(shape: tuple[int, ...], dim: int, edges: list[int]) -> list[Region]:
    bounds = [0, *edges, shape[dim]]
    return [Region(shape, dim, ((a, b),)) for a, b in itertools.pairwise(bounds)]


def whole(region: Region) -> PartOffset:
    return PartOffset(region.shape, 0, region.numel, region)


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_regions_make_a_whole(dim: int) -> None:
    shape = (6, 8)
    first, second, none = split(shape, dim, [4, shape[dim]])
    assert missing(shape, [whole(first), whole(second)]) is None
    # A rank without a share says so, or says nothing.
    assert missing(shape, [whole(none), whole(second), whole(first)]) is None
    # Cut further, as ZeRO does; a region twice, as heads that several ranks hold are.
    cut = [PartOffset(shape, 0, 5, first), PartOffset(shape, 5, first.numel, first)]
    assert missing(shape, [*cut, whole(second), whole(second)]) is None
    assert missing(shape, [*cut, whole(first), whole(second)]) is None
    wider = Region(shape, dim, ((2, shape[dim]),))
    assert missing(shape, [*cut, whole(wider)]) is None


def test_incomplete_regions_are_reported() -> None:
    shape = (6, 8)
    first, second, _ = split(shape, 1, [4, 8])
    assert missing(shape, [whole(first)]) == "lacks index 4 along dim 1"
    assert missing(shape, [whole(second)]) == "lacks index 0 along dim 1"
    cut = PartOffset(shape, 0, 5, first)
    assert missing(shape, [cut, whole(second)]) == "lacks element 5 of its region 0:4 along dim 1"
    everything = PartOffset(shape, 0, 48)
    assert missing(shape, [everything]) is None
    assert missing(shape, [everything, whole(second)]) == (
        "is complete on some ranks and split into regions on others"
    )
    assert missing(shape, [everything, everything]) == "has element 0 not once"
    assert missing(shape, [PartOffset(shape, 0, 20)]) == "ends at element 20"
    rows = split(shape, 0, [3])
    assert missing(shape, [whole(first), whole(second), *map(whole, rows)]) == (
        "is sliced along dims [0, 1]: one is supported"
    )
    assert missing(shape, [whole(Region(shape, 0, ()))]) == "lacks all elements"
    assert missing((0, 3), [whole(Region((0, 3), 1, ((0, 2),)))]) is None


def test_regions_are_written_as_they_are_read() -> None:
    region = Region((6, 8), 1, ((0, 2), (4, 5)))
    assert region_from_json((6, 8), region_to_json(region)) == region
    for broken in ([2, []], [1, [[0, 9]]], [1, [[3, 2]]]):
        with pytest.raises(ValueError, match="not a region"):
            region_from_json((6, 8), broken)


REGIONS = [
    Region((40, 30), 0, ((3, 9), (20, 21))),
    Region((40, 30), 1, ((0, 4), (10, 11), (29, 30))),
    Region((40, 30), 1, ((7, 7),)),
    Region((40, 30), 1, ((0, 30),)),
]


@pytest.mark.parametrize("region", REGIONS, ids=str)
@pytest.mark.parametrize("gap", [0, 4, 2**16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8])
def test_slices_of_files_are_read_in_pieces_of_any_size(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    region: Region,
    gap: int,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(weights_module, "GAP", gap)
    monkeypatch.setattr(weights_module, "READ", 128)
    whole = (torch.arange(1200) % 251).view(40, 30).to(dtype)
    save_file({"odd": torch.ones(3, dtype=torch.uint8), "whole": whole}, tmp_path / "m.safetensors")
    index = torch.cat([torch.arange(a, b) for a, b in region.runs])
    wanted = whole.index_select(region.dim, index)
    held = nn.Parameter(torch.zeros(region.local_shape, dtype=dtype), requires_grad=False)
    set_region(held, region)
    # A tensor that holds the region, elements of it, and another dtype.
    first = min(1, wanted.numel())
    some = Part(torch.zeros(wanted.numel() // 2, dtype=dtype), (40, 30), first, region=region)
    other = Part(torch.zeros(wanted.numel(), dtype=torch.float64), (40, 30), 0, region=region)
    for leaf in (held, some, other):
        load_huggingface({"whole": leaf}, tmp_path / "m.safetensors", strict=False)
    assert torch.equal(held, wanted)
    flat = wanted.reshape(-1)
    assert torch.equal(some.value, flat[first : first + some.value.numel()])
    assert torch.equal(other.value, flat.double())


class Slice(nn.Module):
    def __init__(self, region: Region) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(region.local_shape))
        set_region(self.weight, region)


def test_a_plain_module_with_a_slice_loads_by_itself(tmp_path: Path) -> None:
    whole = torch.arange(1200.0).view(40, 30)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": {"weight": whole}})
        checkpointer.save(2, {"model": Slice(REGIONS[1])})
        with pytest.raises(GulliverError, match="lacks index 4 along dim 1"):
            checkpointer.wait()
    model = Slice(REGIONS[1])
    load(tmp_path, {"model": model})
    assert torch.equal(model.weight, whole[:, [0, 1, 2, 3, 10, 29]])
    with pytest.raises(GulliverError, match="cannot hold a region"):
        set_region(model.weight, REGIONS[0])
