"""Convolutions in pieces: each output once, within the budget, equal to the whole."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.parallel.convolution import chunk_convolutions
from gulliver.parallel.convolution.chunked import (
    IDENTITY,
    INDEX_LIMIT,
    SlidingWindow,
    boxes_of,
)
from gulliver.parallel.convolution.functions import frame_causal_attention

KINDS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(*[st.integers(1, 9)] * 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 200),
    st.integers(1, 900),
)
def test_pieces_cover_the_output_once_within_budget_and_limit(
    outputs: tuple[int, ...], stride: int, span: int, limit: int, room: int
) -> None:
    windows = (IDENTITY, SlidingWindow(-1, stride, span), SlidingWindow(0, 1, span))
    counted = torch.zeros(outputs)
    try:
        for box in boxes_of(outputs, windows, (2, 3), limit, room):
            region = counted
            for dim, (start, stop) in enumerate(box):
                region = region.narrow(dim, start, stop - start)
            region += 1
            read = [w.needs(*sides) for w, sides in zip(windows, box, strict=True)]
            inputs = 2 * math.prod(stop - start for start, stop in read)
            assert max(inputs, 3 * region.numel()) <= limit
            assert inputs + 3 * region.numel() <= room
    except GulliverError:
        # One output position is already too much.
        assert max(2 * span**2, 3) > limit or 2 * span**2 + 3 > room
        return
    assert (counted == 1).all()


def test_the_index_limit_holds_for_the_output_too() -> None:
    sizes, windows = (1, 17, 720, 1280), (IDENTITY, *[SlidingWindow(-1, 1, 3)] * 3)
    assert 3 * math.prod(sizes) < INDEX_LIMIT
    boxes = list(boxes_of(sizes, windows, (3, 512), INDEX_LIMIT, math.inf))
    assert len(boxes) == 4


def _gradients(conv: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    out = conv(x)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, [x, *conv.parameters()], weights)]


@pytest.mark.parametrize("space", [1, 2, 3])
def test_a_convolution_in_pieces_is_the_whole_forward_and_backward(space: int) -> None:
    modes = ("zeros", "reflect", "replicate", "circular")
    number = 0
    for mode, groups, (stride, dilation) in itertools.product(
        modes, (1, 4), ((1, 1), (2, 1), (1, 2))
    ):
        torch.manual_seed(number)
        conv = KINDS[space](
            4, 8, 3, stride, 2 if dilation == 2 else 1, dilation, groups, number % 3 > 0, mode
        ).double()
        x = torch.randn(2, 4, *(6, 4, 3)[:space]).double()
        whole = _gradients(conv, x)
        chunked = chunk_convolutions(conv, budget=8 * (4 * (2 * dilation + 1) ** space + 60))
        for a, b in zip(whole, _gradients(conv, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert len(chunked.plans[""].boxes) >= 2
        assert torch.equal(conv(x[0]), conv(x)[0])
        chunked.off()
        assert "_conv_forward" not in vars(conv)


def test_explain_names_every_convolution_and_wrong_budgets_are_refused() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 1, bias=False))
    chunked = chunk_convolutions(network, budget="2 KiB")
    assert chunked.explain() == "no convolution was called yet"
    network(torch.randn(1, 3, 20, 20))
    first, second = chunked.explain().splitlines()
    assert (first[:2], second[:2]) == ("0:", "2:")
    chunked.off()
    with pytest.raises(GulliverError, match="no convolution"):
        chunk_convolutions(nn.Linear(2, 2))
    chunk_convolutions(network, budget=30)
    with pytest.raises(GulliverError, match="larger budget"):
        network(torch.randn(1, 3, 20, 20))


def test_frame_causal_attention_is_that_with_the_dense_mask() -> None:
    torch.manual_seed(0)
    frames, tokens = 4, 6
    given = [torch.randn(2, 3, frames * tokens, 5).double().requires_grad_() for _ in range(3)]
    number = torch.arange(frames).repeat_interleave(tokens)
    mask = number.unsqueeze(1) >= number
    dense = nn.functional.scaled_dot_product_attention(*given, attn_mask=mask)
    made = frame_causal_attention(*given, tokens)
    torch.testing.assert_close(made, dense, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(dense.square().sum(), given)
    for a, b in zip(wanted, torch.autograd.grad(made.square().sum(), given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
