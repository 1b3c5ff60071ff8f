"""The blocks of many ranks on one device: what a ring computes, without its ring.

One process goes through the places of a layout and merges the blocks of all others, as the ranks
would. So kernels, tiles, merges and block gradients are held against full attention on any single
device; the GPU's kernels on a GPU. What moves the blocks is tested elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gulliver.parallel.sequence import Mask, SequencePlan
from gulliver.parallel.sequence.heads import deal_heads
from gulliver.parallel.sequence.kernels import (
    KERNELS,
    AttentionBlock,
    BlockArguments,
    Gradients,
    Partial,
    Rows,
    attend,
    attend_backward,
    precise,
    requirements_of,
    select,
)
from gulliver.parallel.sequence.layout import Layout
from gulliver.parallel.sequence.mask import tiles
from tests.covering import some

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half the distance of two neighbours, over the smaller of them."""
NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """Attention over some virtual ranks."""

    ranks: int
    length: int
    mask: Mask
    layout: str = "contiguous"
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64

    @property
    def held(self) -> Layout:
        """Who has which tokens."""
        return SequencePlan(inner=self.ranks, layout=self.layout).lay(self.length)  # type: ignore[arg-type]

    def tensors(self, dtype: torch.dtype, device: str) -> list[Tensor]:
        """q, k, v and the gradient of the output."""
        draw = torch.Generator().manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(2, h, self.length, self.head_dim) for h in heads]
        return [torch.randn(s, generator=draw).to(device, dtype) for s in shapes]

    def how(self, kernel: str | None) -> BlockArguments:
        """The blocks are computed."""
        rules = self.mask.rules(2, self.length, self.length)
        runs = deal_heads(self.heads, self.kv_heads, 1).runs(0)
        return BlockArguments(self.head_dim**-0.5, rules, runs, kernel)


def virtual(case: Case, tensors: list[Tensor], kernel: str | None) -> list[Tensor]:
    """Output and gradients, block by block as the ranks would compute them."""
    q, k, v, grad = tensors
    how, wide = case.how(kernel), precise(q.dtype)
    held = [case.held.of_place(place) for place in range(case.ranks)]
    rows = [torch.cat([torch.arange(*run) for run in own]).to(q.device) for own in held]
    out = torch.zeros_like(q)
    into = Gradients(*(torch.zeros(t.shape, dtype=wide, device=t.device) for t in (q, k, v)))
    for place, own in enumerate(rows):
        partial = Partial.empty(q[:, :, own], v.shape[3])
        # A rank begins with its own block, and then has those of the ranks before it.
        order = [(place - step) % case.ranks for step in range(case.ranks)]
        blocks = [(rows[o], tiles(held[place], held[o], how.rules)) for o in order]
        for other, found in blocks:
            attend(partial, q[:, :, own], k[:, :, other], v[:, :, other], found, how)
        own_out = partial.out.to(q.dtype)
        out[:, :, own] = own_out
        lse = partial.lse.masked_fill(partial.lse == -torch.inf, 0.0)
        asked = Rows(q[:, :, own], grad[:, :, own].contiguous(), own_out, lse)
        for other, found in blocks:
            part = Gradients(
                torch.zeros_like(partial.out),
                *(torch.zeros_like(t[:, :, other], dtype=wide) for t in (k, v)),
            )
            attend_backward(part, asked, k[:, :, other], v[:, :, other], found, how)
            into.q[:, :, own] += part.q
            into.k[:, :, other] += part.k
            into.v[:, :, other] += part.v
    return [out, *(g.to(q.dtype) for g in (into.q, into.k, into.v))]


def one_call(case: Case, tensors: list[Tensor], kernel: str) -> list[Tensor]:
    """Output and gradients of the kernel, over all tokens at once; without mask, or causal."""
    q, k, v, grad = tensors
    kind = "causal" if case.mask.causal else "plain"
    chosen = select(requirements_of(q, v, kind), kernel)
    block = AttentionBlock(q, k, v, case.head_dim**-0.5, case.mask.causal)
    out, lse = chosen.forward(block)
    out = out.to(q.dtype)
    return [out, *(g.to(q.dtype) for g in chosen.backward(grad, block, out, lse))]


def expected(case: Case, tensors: list[Tensor]) -> list[Tensor]:
    """Output and gradients in float64, by torch's autograd."""
    *inputs, grad = (t.double() for t in tensors)
    q, k, v = (t.requires_grad_() for t in inputs)
    times = case.heads // case.kv_heads
    logits = q @ k.repeat_interleave(times, 1).mT * case.head_dim**-0.5
    positions = torch.arange(case.length)
    allowed = case.how(None).rules.dense(positions, positions).unsqueeze(1).to(q.device)
    weights = logits.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
    out = weights @ v.repeat_interleave(times, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def errors(found: list[Tensor], of: list[Tensor]) -> dict[str, float]:
    """The largest difference of each, over the largest element."""
    return {
        name: float((a.double() - b).abs().max() / b.abs().max())
        for name, a, b in zip(NAMES, found, of, strict=True)
    }


DOCUMENTS = torch.repeat_interleave(torch.arange(3), torch.tensor([70, 100, 70]))
EXACT: dict[str, Case] = {
    "full": Case(3, 250, Mask(), head_dim=16),
    "causal zigzag": Case(4, 243, Mask(causal=True), "zigzag", kv_heads=2, head_dim=16),
    "window": Case(3, 240, Mask(causal=True, window=(30, None)), "zigzag", head_dim=16),
    "documents": Case(4, 240, Mask(documents=DOCUMENTS), head_dim=16),
}
HALVES: dict[str, Case] = {
    "full of 2": Case(2, 1024, Mask()),
    "full of 8": Case(8, 1024, Mask(), kv_heads=2),
    "causal zigzag of 4": Case(4, 1024, Mask(causal=True), "zigzag"),
    "causal of 4": Case(4, 1024, Mask(causal=True), kv_heads=1),
}


def mean_errors(found: list[Tensor], of: list[Tensor]) -> dict[str, float]:
    """The root mean square difference of each, over the root mean square."""
    return {
        name: float((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt())
        for name, a, b in zip(NAMES, found, of, strict=True)
    }


def gpu(*values: Any) -> Any:
    """Of a case that needs a GPU."""
    return pytest.param(*values, marks=pytest.mark.gpu)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("device", ["cpu", gpu("cuda")])
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_virtual_ranks_are_full_attention(
    name: str, device: str, dtype: torch.dtype, bar: float
) -> None:
    case = EXACT[name]
    tensors = case.tensors(dtype, device)
    found = errors(virtual(case, tensors, None), expected(case, tensors))
    assert max(found.values()) <= bar, found


@pytest.mark.parametrize("name", some(list(HALVES), ["causal zigzag of 4"]))
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize(
    ("device", "kernel"),
    [
        ("cpu", "cpu flash"),
        ("cpu", "reference"),
        gpu("cuda", "cuda flash"),
        gpu("cuda", "cuda efficient"),
    ],
)
def test_merged_blocks_lose_no_more_than_one_rounding_to_one_call(
    name: str, dtype: torch.dtype, device: str, kernel: str
) -> None:
    case = HALVES[name]
    tensors = case.tensors(dtype, device)
    reason = _reason(case, tensors, kernel)
    if reason:
        pytest.skip(reason)
    truth = expected(case, tensors)
    whole, merged = one_call(case, tensors, kernel), virtual(case, tensors, kernel)
    for of, extra in ((mean_errors, 1), (errors, 2)):
        one, many = of(whole, truth), of(merged, truth)
        for part in NAMES:
            # Kernels round each block's gradients: the largest of so many may lie further out.
            allowed = 1 if part == "out" else extra
            assert many[part] <= one[part] + allowed * ROUNDING[dtype], (of, many, one)


def _reason(case: Case, tensors: list[Tensor], kernel: str) -> str | None:
    """What this device lacks for a kernel."""
    kinds = ("plain", "causal") if case.mask.causal else ("plain",)
    found = (KERNELS[kernel].lacks(requirements_of(tensors[0], tensors[2], kind)) for kind in kinds)
    return next((reason for reason in found if reason), None)
