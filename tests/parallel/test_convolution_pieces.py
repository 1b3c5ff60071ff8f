"""Convolutions in pieces: each output once, within the budget, equal to the whole."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.parallel.convolution import chunk_convolutions
from gulliver.parallel.convolution.chunked import INDEX_LIMIT, Convolution, plan_convolution
from gulliver.parallel.convolution.functions import frame_causal_attention

KINDS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@st.composite
def _sizes(draw: Any) -> Convolution:
    space, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dims = range(space)
    kernel = tuple(draw(st.integers(1, 3)) for _ in dims)
    dilation = tuple(draw(st.integers(1, 2)) for _ in dims)
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    return Convolution(
        draw(st.integers(1, 3)),
        groups * draw(st.integers(1, 4)),
        groups * draw(st.integers(1, 4)),
        tuple(draw(st.integers(r, r + 8)) for r in reach),
        kernel,
        tuple(draw(st.integers(1, 3)) for _ in dims),
        tuple((draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in dims),
        dilation,
        groups,
        draw(st.sampled_from([2, 4, 8])),
    )


@settings(max_examples=60, deadline=None)
@given(_sizes(), st.integers(1, 4000), st.integers(1, 800))
def test_pieces_cover_the_output_once_within_budget_and_limit(
    sizes: Convolution, budget: int, limit: int
) -> None:
    try:
        plan = plan_convolution(sizes, budget, limit)
    except GulliverError:
        # One output of one channel from one input channel is already too much.
        around = math.prod(w.span for w in sizes.windows)
        assert (around + 1) * sizes.item > budget or around > limit
        return
    assert plan.nbytes <= budget
    assert max(plan.largest) <= limit
    counted = torch.zeros(sizes.batch, sizes.outputs, *sizes.out_extents)
    width = sizes.inputs // sizes.groups
    for piece in plan.pieces():
        region = counted[slice(*piece.batch), slice(*piece.outputs)]
        for dim, (start, stop) in enumerate(piece.box):
            region = region.narrow(2 + dim, start, stop - start)
        region += 1
        # Its terms are all inputs that its groups have, each once.
        inputs = sorted(itertools.chain(*(range(a, b) for a, b, _, _ in piece.terms)))
        first = piece.outputs[0] // (sizes.outputs // sizes.groups)
        assert inputs == list(range(first * width, (first + piece.groups) * width))
        read = [w.needs(*box) for w, box in zip(sizes.windows, piece.box, strict=True)]
        around = math.prod(stop - start for start, stop in read)
        widest = max(b - a for a, b, _, _ in piece.terms)
        samples = piece.batch[1] - piece.batch[0]
        assert samples * (widest * around) + region.numel() <= sum(plan.largest)
    assert (counted == 1).all()


def test_the_index_limit_holds_for_the_output_too() -> None:
    sizes = Convolution(1, 3, 512, (17, 720, 1280), (3, 3, 3), (1,) * 3, ((1, 1),) * 3, (1,) * 3)
    assert sizes.batch * sizes.inputs * math.prod(sizes.extents) < INDEX_LIMIT
    plan = plan_convolution(sizes)
    assert plan.counts == {"dim 2": 4}
    assert max(plan.largest) <= INDEX_LIMIT


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
        # Little room cuts channels too; more dims would then take thousands of pieces.
        room = {1: 40 * (number % 2), 2: 100, 3: 400}[space]
        chunked = chunk_convolutions(conv, budget=8 * ((2 * dilation + 1) ** space + 2 + room))
        for a, b in zip(whole, _gradients(conv, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert next(iter(chunked.plans.values())).number >= 4
        assert torch.equal(conv(x[0]), conv(x)[0])
        chunked.off()
        assert "_conv_forward" not in vars(conv)


def test_partial_sums_of_half_precision_are_rounded_once() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(64, 2, 3, padding=1, bias=False)
    x = torch.randn(1, 64, 5, 5).bfloat16()
    exact = conv.double()(x.double())
    conv = conv.bfloat16()
    exact = nn.functional.conv2d(x.double(), conv.weight.double(), padding=1)
    chunk_convolutions(conv, budget=2 * 30)
    rounded = (conv(x).double() - exact).abs().max()
    assert rounded <= (exact.bfloat16().double() - exact).abs().max() * 1.01


def test_explain_names_every_convolution_and_wrong_budgets_are_refused() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 1, bias=False))
    chunked = chunk_convolutions(network, budget="2 KiB")
    assert chunked.explain() == "no convolution was called yet"
    network(torch.randn(1, 3, 20, 20))
    first, second = chunked.explain().splitlines()
    assert first.startswith("0: dim 0 in")
    assert second.startswith("2: dim 0 in")
    chunked.off()
    with pytest.raises(GulliverError, match="no known unit"):
        chunk_convolutions(network, budget="2 GiC")
    with pytest.raises(GulliverError, match="no convolution"):
        chunk_convolutions(nn.Linear(2, 2))
    chunk_convolutions(network, budget=30)
    with pytest.raises(GulliverError, match="bytes would do"):
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
