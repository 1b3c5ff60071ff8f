"""Seconds of the transformers of `benchmarks.long_video`, from sizes and the rates of a device.

Products of matrices and attention are formulas of `gulliver.hardware`. What else a block moves
between processor and memory (norms, gates, activations) is counted, operation by operation, on a
small model, and grows with tokens times channels. Rates of described devices are those of data
sheets, so their seconds are a floor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gulliver._compat import DispatchMode
from gulliver.hardware import attention_seconds, linear_seconds
from gulliver.hardware.cluster import Device
from gulliver.hardware.costs import memory_seconds
from gulliver.models import MMDiT, STDiT3

PRODUCTS = ("mm", "addmm", "bmm", "convolution", "scaled_dot_product")
"""Words in the names of operations that formulas know."""
ITEMS = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Tokens:
    """Sizes of a call.

    Attributes:
        batch: number of clips.
        frames: tokens along time.
        spatial: tokens of a frame.
        words: caption tokens.
    """

    batch: int
    frames: int
    spatial: int
    words: int

    @property
    def all(self) -> int:
        """Video tokens of all clips."""
        return self.batch * self.frames * self.spatial


@dataclass(frozen=True)
class Cost:
    """Seconds of a forward, and of its backward.

    Attributes:
        forward: seconds of a forward.
        backward: seconds of a backward, nothing computed again.
    """

    forward: float
    backward: float


class MovedBytes(DispatchMode):
    """Counts bytes that operations read and write, without views and products of matrices.

    Attributes:
        read: bytes read.
        written: bytes written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read = self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and counts."""
        out = func(*args, **(kwargs or {}))
        given = [x for x in _flat((args, kwargs or {})) if isinstance(x, Tensor)]
        made = [x for x in _flat(out) if isinstance(x, Tensor)]
        known = {x.untyped_storage()._cdata for x in given}
        fresh = [x for x in made if x.untyped_storage()._cdata not in known]
        if (fresh or func._schema.is_mutable) and not any(p in str(func) for p in PRODUCTS):
            self.read += sum(x.nbytes for x in given)
            self.written += sum(x.nbytes for x in fresh or made)
        return out


def _flat(value: Any) -> list[Any]:
    return pytree.tree_leaves(value)


def small_step(kind: str, counts: dict[str, Any]) -> Callable[[], tuple[Callable[[], Tensor], int]]:
    """A forward of a small model, and its tokens times channels times bytes."""

    def build() -> tuple[Callable[[], Tensor], int]:
        width = 48
        if kind == "MMDiT":
            joint = MMDiT(hidden_size=width, num_heads=2, axes_dim=(8, 8, 8), in_channels=8,
                          vec_in_dim=8, context_in_dim=8, fused_qkv=False, **counts)  # fmt: skip
            ids = torch.zeros(1, 512, 3)
            words = torch.zeros(1, 8, 3)
            img, txt = torch.randn(1, 512, 8), torch.randn(1, 8, 8)

            def run() -> Tensor:
                return joint(img, ids, txt, words, torch.rand(1), torch.randn(1, 8))
        else:
            model = STDiT3(hidden_size=width, num_heads=2, caption_channels=8, **counts)
            x, y = torch.randn(1, 4, 8, 16, 16), torch.randn(1, 1, 8, 8)

            def run() -> Tensor:
                told = {n: torch.ones(1) for n in ("fps", "height", "width")}
                return model(x, torch.rand(1), y, **told)

        return run, 512 * width * 4

    return build


@cache
def moved(kind: str, field: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """Reads and writes of one more block of a kind, in tokens x channels: forward, and backward."""
    ones = {"depth": 1, "depth_single_blocks": 1} if kind == "MMDiT" else {"depth": 1}
    found = []
    for counts in (ones, {**ones, field: 2}):
        torch.manual_seed(0)
        run, unit = small_step(kind, counts)()
        with MovedBytes() as forward:
            out = run()
        with MovedBytes() as backward:
            out.square().mean().backward()
        found.append([n / unit for n in (forward.read, forward.written)])
        found[-1] += [n / unit for n in (backward.read, backward.written)]
    one, two = found
    more = [b - a for a, b in zip(one, two, strict=True)]
    return (more[0], more[1]), (more[2], more[3])


def cost(model: Any, tokens: Tokens, device: Device, dtype: str, cpu: bool = False) -> Cost:
    """Predicts a model's forward and backward.

    Args:
        model: STDiT3 or MMDiT, perhaps on meta.
        tokens: sizes of the call.
        device: device that computes.
        dtype: dtype of its products.
        cpu: whether what is written counts twice, since cache lines are fetched before.
    """
    joint = isinstance(model, MMDiT)
    totals = []
    for backward in (False, True):
        parts = _joint if joint else _factored
        products = parts(model, tokens, device, dtype, backward)
        fields = ("depth", "depth_single_blocks") if joint else ("depth",)
        unit = tokens.all * model.hidden_size * ITEMS[dtype]
        nbytes = 0.0
        for field in fields:
            ways = moved(type(model).__name__, field)[: 2 if backward else 1]
            each = sum(read + (2 if cpu else 1) * written for read, written in ways)
            nbytes += getattr(model, field) * each * unit
        totals.append(products + memory_seconds(device, int(nbytes)))
    return Cost(totals[0], totals[1] - totals[0])


def _linears(device: Device, dtype: str, backward: bool, *sizes: tuple[int, int, int]) -> float:
    return sum(linear_seconds(device, *size, dtype, backward) for size in sizes)


def _factored(model: STDiT3, n: Tokens, device: Device, dtype: str, backward: bool) -> float:
    """Products of matrices of the pairs of blocks: attention along space, and along time."""
    c, heads = model.hidden_size, model.num_heads
    dims = (c // heads, c // heads)
    hidden = int(c * model.mlp_ratio)
    block = _linears(
        device, dtype, backward,
        (n.all, c, 3 * c), *[(n.all, c, c)] * 3, (n.all, c, hidden), (n.all, hidden, c),
        (n.batch * n.words, c, 2 * c),
    )  # fmt: skip

    def attend(rows: int, queries: int, keys: int) -> float:
        return attention_seconds(device, rows * heads, queries, keys, dims, dtype, backward)

    both = attend(n.batch * n.frames, n.spatial, n.spatial)
    both += attend(n.batch * n.spatial, n.frames, n.frames)
    both += 2 * attend(n.batch, n.frames * n.spatial, n.words)
    return model.depth * (2 * block + both)


def _joint(model: MMDiT, n: Tokens, device: Device, dtype: str, backward: bool) -> float:
    """Products of matrices of double and single blocks: attention over everything."""
    c, heads, hidden = model.hidden_size, model.num_heads, int(model.hidden_size * model.mlp_ratio)
    whole = n.all + n.batch * n.words
    dims = (c // heads, c // heads)
    sizes = ((whole, c, 4 * c), (whole, c, hidden), (whole, hidden, c))
    one = _linears(device, dtype, backward, *sizes)
    length = math.ceil(whole / n.batch)
    one += attention_seconds(device, n.batch * heads, length, length, dims, dtype, backward)
    return (model.depth + model.depth_single_blocks) * one
