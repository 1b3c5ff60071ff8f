"""Chunks: every element has one place, parameters and gradients are views."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gulliver.errors import GulliverError
from gulliver.memory.buffers import plan_chunks
from gulliver.memory.chunk import Chunk, ReducedGradient, reduced_gradient

SIZES = st.lists(st.integers(0, 90), min_size=1, max_size=12)


@given(SIZES, st.integers(1, 120), st.integers(1, 5), st.sampled_from([1, 4, 16]))
def test_tensors_are_aligned_and_ordered_in_chunks(
    sizes: list[int], capacity: int, parts: int, align: int
) -> None:
    tensors = [(f"t{n}", size) for n, size in enumerate(sizes)]
    layouts = plan_chunks(tensors, capacity, parts, align)
    slots = [slot for layout in layouts for slot in layout.slots]
    assert [(slot.name, slot.numel) for slot in slots] == tensors
    for layout in layouts:
        assert layout.size % (parts * align) == 0
        used = max(1, layout.slots[-1].end)
        assert 0 <= layout.size - used < parts * align
        end = 0
        for slot in layout.slots:
            assert slot.start % align == 0
            assert end <= slot.start < end + align
            end = slot.end
        assert end <= capacity or len(layout.slots) == 1
        assert layout.padding == layout.size - sum(slot.numel for slot in layout.slots)


@given(SIZES, st.integers(1, 120), st.integers(1, 5), st.sampled_from([1, 4, 16]))
def test_the_pieces_of_all_parts_hold_every_element_once(
    sizes: list[int], capacity: int, parts: int, align: int
) -> None:
    tensors = [(f"t{n}", size) for n, size in enumerate(sizes)]
    held = {name: [0] * size for name, size in tensors}
    for layout in plan_chunks(tensors, capacity, parts, align):
        homes = {slot.name: slot for slot in layout.slots}
        for part in range(parts):
            for piece in layout.pieces(part):
                assert 0 <= piece.start < piece.end <= layout.part_size
                in_chunk = part * layout.part_size + piece.start
                assert in_chunk == homes[piece.name].start + piece.offset
                for element in range(piece.offset, piece.offset + piece.numel):
                    held[piece.name][element] += 1
    assert all(count == 1 for counts in held.values() for count in counts)


@given(SIZES, st.integers(1, 120))
def test_a_chunk_is_closed_only_when_the_next_tensor_does_not_fit(
    sizes: list[int], capacity: int
) -> None:
    layouts = plan_chunks([(f"t{n}", s) for n, s in enumerate(sizes)], capacity, 1, 1)
    for before, after in pairwise(layouts):
        assert before.slots[-1].end + after.slots[0].numel > capacity


def _chunk() -> tuple[nn.Module, Chunk]:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    named = dict(model.named_parameters())
    (layout,) = plan_chunks([(n, p.numel()) for n, p in named.items()], 1000, 2)
    return model, Chunk(layout, named, part=1)


def test_parameters_become_views_with_the_same_values() -> None:
    torch.manual_seed(0)
    expected = nn.Linear(5, 3)
    model, chunk = _chunk()
    torch.testing.assert_close(model.weight, expected.weight, rtol=0, atol=0)
    chunk.data.fill_(7.0)
    assert bool((model.weight == 7).all())
    assert bool((model.bias == 7).all())
    assert chunk.shard.data_ptr() == chunk.data[chunk.layout.part_size :].data_ptr()


def test_backward_adds_in_place_to_the_gradient_buffer() -> None:
    model, chunk = _chunk()
    chunk.gradients.begin()
    assert chunk.gradients.buffer is not None
    for _ in range(2):
        model(torch.ones(1, 5)).sum().backward()
        for name in chunk.parameters:
            chunk.gradients.place(name)
    views = chunk.named_views(chunk.gradients.buffer)
    assert bool((views["weight"] == 2).all())
    assert bool((views["bias"] == 2).all())
    assert float(chunk.gradients.buffer.sum()) == 2 * (15 + 3)  # the padding stays zero
    chunk.gradients.complete()


def test_detached_gradient_leaves_placeholder() -> None:
    model, chunk = _chunk()
    chunk.gradients.begin()
    chunk.gradients.mark_reduced()
    chunk.gradients.free()
    assert chunk.gradients.buffer is None
    assert isinstance(model.weight.grad, ReducedGradient)
    assert chunk.gradients.cleared_names() == []
    model.bias.grad = None
    assert chunk.gradients.cleared_names() == ["bias"]


def test_a_deep_copy_does_not_share_the_chunk() -> None:
    model, chunk = _chunk()
    twin = copy.deepcopy(model)
    chunk.data.zero_()
    assert float(twin.weight.detach().abs().sum()) > 0


@pytest.mark.parametrize(
    "spoil",
    [lambda m: m.double(), lambda m: setattr(m.weight, "data", torch.zeros(3, 4))],
    ids=["converted", "reshaped"],
)
def test_a_parameter_that_left_its_chunk_is_refused(spoil) -> None:
    model, chunk = _chunk()
    spoil(model)
    with pytest.raises(GulliverError, match=r"weight.*after boost"):
        chunk.check_parameters()


@pytest.mark.parametrize(
    "use",
    [
        lambda p: nn.utils.clip_grad_norm_([p], 1.0),
        lambda p: nn.utils.clip_grad_value_([p], 1.0),
        lambda p: p.grad.norm(),
        lambda p: p.grad.mul_(0.5),
        lambda p: torch.optim.SGD([p], lr=0.1).step(),
        lambda p: torch.optim.SGD([p], lr=0.1).zero_grad(set_to_none=False),
    ],
)
def test_placeholder_rejects_misuse_with_fix(use) -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    parameter.grad = reduced_gradient(parameter)
    with pytest.raises(GulliverError, match=r"optimizer\.clip_grad_by_norm"):
        use(parameter)


def test_placeholder_reads_as_nan_and_takes_one_element() -> None:
    stand_in = reduced_gradient(torch.ones(100, 100, dtype=torch.float64))
    assert stand_in.shape == (100, 100)
    assert bool(torch.isnan(torch.Tensor.sum(stand_in)))
    assert stand_in.untyped_storage().nbytes() == 8
