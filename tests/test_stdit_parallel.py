"""An STDiT on several ranks is the STDiT on one: outputs and every gradient, whatever is cut."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gulliver.booster.hybrid._stdit import wire_stdit
from gulliver.comm import World
from gulliver.hardware import described
from gulliver.models import STDiT3
from gulliver.models.stdit import Block
from gulliver.parallel.sequence import SequencePlan, make_groups
from tests.pool import Pool

MODEL: dict[str, Any] = {
    "hidden_size": 32,
    "depth": 2,
    "num_heads": 4,
    "in_channels": 3,
    "caption_channels": 10,
    "model_max_length": 7,
    "input_sq_size": 24,
    "class_dropout_prob": 0.0,
    "temporal_positions": True,
}
BARS = {torch.float64: 1e-11, torch.float32: 1e-5}


@dataclass(frozen=True)
class Case:
    """A clip: latent frames, rows and columns; caption lengths; whether frames are given."""

    frames: int
    rows: int
    columns: int
    lengths: tuple[int, ...] = (7, 4)
    given: bool = False


CASES = (
    Case(4, 8, 8),
    Case(5, 6, 5, given=True),
    Case(3, 2, 6, (7, 7, 2), given=True),
    Case(1, 6, 4),
    Case(1, 2, 2, (5,)),
    Case(6, 2, 4, (1,), given=True),
)
"""Even; uneven in both; fewer frames than ranks; a picture; nearly nothing; few places."""


def build(dtype: torch.dtype = torch.float64, **changes: Any) -> STDiT3:
    torch.manual_seed(0)
    model = STDiT3(**{**MODEL, **changes}).to(dtype)
    with torch.no_grad():
        # Zeros and ones of the initialisation would hide mistakes.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def inputs_of(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(case.frames * 100 + case.rows * 10 + case.columns)
    count = len(case.lengths)
    x_mask = torch.rand(count, case.frames, generator=draw) > 0.4

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()

    return {
        "x": randn(count, 3, case.frames, case.rows, case.columns),
        "timestep": (torch.rand(count, generator=draw) * 1000).to(dtype),
        "y": randn(count, 1, 7, 10),
        "mask": torch.arange(7)[None] < torch.tensor(case.lengths)[:, None],
        "x_mask": x_mask if case.given else None,
        "fps": (torch.rand(count, generator=draw) * 100).to(dtype),
        "height": torch.full((count,), 8.0 * case.rows),
        "width": torch.full((count,), 8.0 * case.columns),
    }


def results_of(model: STDiT3, inputs: dict[str, Any], average: bool) -> dict[str, Tensor]:
    """Output, gradients of inputs, and those of parameters, averaged over the world if told."""
    model.zero_grad()
    out = model(**inputs)
    weights = torch.arange(out.numel(), dtype=out.dtype).view_as(out).sin()
    (out * weights).sum().backward()
    found = {"out": out.detach(), "x": inputs["x"].grad, "y": inputs["y"].grad}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, name
        grad = parameter.grad.clone()
        if average:
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
        found[name] = grad
    return found


def largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    assert found.keys() == expected.keys()
    return max(
        (float((found[n] - e).abs().max() / e.abs().max().clamp(min=1)), n)
        for n, e in expected.items()
    )


def recompute(model: STDiT3) -> None:
    """Activation checkpointing of every block, from outside."""
    for block in [m for m in model.modules() if isinstance(m, Block)]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # pyright: ignore


def _compared(
    world: World,
    plan: SequencePlan,
    mode: str,
    scheme: str | None,
    dtype: torch.dtype,
    again: bool = False,
) -> list[tuple[float, str]]:
    """Errors of each case, run one after the other on one wired model."""
    alone = build(dtype)
    wired = copy.deepcopy(alone)
    wire_stdit(wired, make_groups(plan), mode, scheme=scheme, cluster=described("cpu-loopback"))
    if again:
        recompute(wired)
    errors = []
    for case in CASES:
        expected = results_of(alone, inputs_of(case, dtype), False)
        errors.append(largest_error(results_of(wired, inputs_of(case, dtype), True), expected))
    return errors


MODES = {
    "swap 2": (SequencePlan(ulysses=2), "all_to_all", "places-swap"),
    "swap 3": (SequencePlan(ulysses=3), "all_to_all", "places-swap"),
    "swap 4": (SequencePlan(ulysses=4), "all_to_all", "places-swap"),
    "frames swap 3": (SequencePlan(ulysses=3), "all_to_all", "frames-swap"),
    "heads 3": (SequencePlan(ulysses=3), "all_to_all", "places-heads"),
    "heads 4": (SequencePlan(ulysses=4), "all_to_all", "places-heads"),
    "frames heads 2": (SequencePlan(ulysses=2), "all_to_all", "frames-heads"),
    "frames heads 4": (SequencePlan(ulysses=4), "all_to_all", "frames-heads"),
    "ring 2": (SequencePlan(inner=2), "ring_attn", "places-ring"),
    "ring 4": (SequencePlan(inner=4), "ring_attn", None),
    "ring 2 x 2": (SequencePlan(outer=2, inner=2), "ring_attn", "places-ring"),
    "frames ring 3": (SequencePlan(inner=3), "ring_attn", "frames-ring"),
    "heads 2 x ring 2": (SequencePlan(2, 1, 2), "all_to_all", "places-heads"),
    "chosen 2": (SequencePlan(ulysses=2), "all_to_all", None),
    "chosen 4, zigzag": (SequencePlan(2, 1, 2, "zigzag"), "all_to_all", None),
}


@pytest.mark.parametrize("name", MODES)
def test_output_and_every_gradient_are_those_of_one_process(pool: Pool, name: str) -> None:
    plan, mode, scheme = MODES[name]
    for result in pool.run(_compared, plan.degree, plan, mode, scheme, torch.float64):
        assert max(result)[0] <= BARS[torch.float64], result


@pytest.mark.parametrize("name", ["swap 3", "heads 4", "ring 2 x 2"])
def test_in_float32_up_to_rounding_and_with_recomputed_blocks(pool: Pool, name: str) -> None:
    plan, mode, scheme = MODES[name]
    for dtype in BARS:
        for result in pool.run(_compared, plan.degree, plan, mode, scheme, dtype, True):
            assert max(result)[0] <= BARS[dtype], result
