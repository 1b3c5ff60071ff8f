"""An STDiT on several ranks is the STDiT on one: outputs and every gradient, whatever is cut."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gulliver.booster.hybrid.stdit import (
    FRAMES,
    PLACES,
    SCHEMES,
    Clip,
    Scheme,
    Width,
    choose_scheme,
    wire_stdit,
)
from gulliver.comm import World, make_axes
from gulliver.comm import messages as wire
from gulliver.comm.groups import RankGroup
from gulliver.errors import GulliverError
from gulliver.hardware import Cluster, described
from gulliver.hardware.cluster import Axis, Device, Link
from gulliver.memory import region_of
from gulliver.models import STDiT3
from gulliver.models.blocks import STDiTBlock
from gulliver.parallel.pipeline import Pipeline, cut, make_stage, stack_of, stages_by_rank
from gulliver.parallel.sequence import SequencePlan, make_groups
from gulliver.parallel.tensor import apply_tensor, plan_tensor
from tests.covering import some
from tests.pool import Pool
from tests.references import computed_once

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
BARS = {torch.float64: 1e-12, torch.float32: 1e-5}


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


def results_of(
    model: STDiT3, inputs: dict[str, Any], rank_group: RankGroup | None
) -> dict[str, Tensor]:
    """Output, gradients of inputs, and those of parameters, averaged over a rank group."""
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
        if rank_group is not None:
            dist.all_reduce(grad, group=rank_group.process_group)
            grad /= rank_group.size
        found[name] = grad
    return found


def largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    assert found.keys() == expected.keys()
    assert all(bool(value.isfinite().all()) for value in found.values())
    return max(
        (float((found[n] - e).abs().max() / e.abs().max().clamp(min=1)), n)
        for n, e in expected.items()
    )


def recompute(model: STDiT3) -> None:
    """Activation checkpointing of every block, from outside."""
    for block in [m for m in model.modules() if isinstance(m, STDiTBlock)]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # pyright: ignore


def _compared(
    world: World,
    plan: SequencePlan,
    mode: str,
    scheme: str | None,
    dtype: torch.dtype,
    again: bool = False,
    cases: Sequence[Case] = CASES,
) -> list[tuple[float, str]]:
    """Errors of each case, run one after the other on one wired model."""
    wired = build(dtype)
    groups = make_groups(plan)
    wire_stdit(wired, groups, mode, scheme=scheme, cluster=described("cpu-loopback"))
    if again:
        recompute(wired)
    errors = []
    for case in cases:
        found = results_of(wired, inputs_of(case, dtype), groups.all)
        errors.append(largest_error(found, _expected(case, dtype)))
    return errors


@computed_once
def _expected(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    return results_of(build(dtype), inputs_of(case, dtype), None)


MODES = {
    "swap 2": (SequencePlan(ulysses=2), "all_to_all", "places-swap"),
    "swap 3": (SequencePlan(ulysses=3), "all_to_all", "places-swap"),
    "swap 4": (SequencePlan(ulysses=4), "all_to_all", "places-swap"),
    "frames swap 3": (SequencePlan(ulysses=3), "all_to_all", "frames-swap"),
    "heads 4": (SequencePlan(ulysses=4), "all_to_all", "places-heads"),
    "frames heads 2": (SequencePlan(ulysses=2), "all_to_all", "frames-heads"),
    "ring 2": (SequencePlan(inner=2), "ring_attn", "places-ring"),
    "ring 4": (SequencePlan(inner=4), "ring_attn", None),
    "ring 2 x 2": (SequencePlan(outer=2, inner=2), "ring_attn", "places-ring"),
    "frames ring 3": (SequencePlan(inner=3), "ring_attn", "frames-ring"),
    "heads 2 x ring 2": (SequencePlan(2, 1, 2), "all_to_all", "places-heads"),
    "chosen 2": (SequencePlan(ulysses=2), "all_to_all", None),
    "chosen 4, zigzag": (SequencePlan(2, 1, 2, "zigzag"), "all_to_all", None),
}


@pytest.mark.parametrize(
    "name",
    some(
        list(MODES),
        ["ring 2 x 2", "frames heads 2", "heads 2 x ring 2", "chosen 4, zigzag", "frames ring 3"],
    ),
)
def test_output_and_every_gradient_are_those_of_one_process(
    pool: Pool, name: str, full: bool
) -> None:
    plan, mode, scheme = MODES[name]
    # By default every other case, beginning with the first or the second in turns.
    cases = CASES if full else CASES[list(MODES).index(name) % 2 :: 2]
    asked = plan, mode, scheme, torch.float64, False, cases
    for result in pool.run(_compared, plan.degree, *asked):
        assert max(result)[0] <= BARS[torch.float64], result


def _with_captions_dropped(world: World) -> float:
    alone = build(class_dropout_prob=0.5).train()
    wired = copy.deepcopy(alone)
    wire_stdit(wired, make_groups(SequencePlan(ulysses=3)), "all_to_all")
    inputs = inputs_of(Case(3, 4, 4, (7,) * 8))
    torch.manual_seed(world.rank)
    found = [wired(**inputs) for _ in range(3)]
    torch.manual_seed(0)
    expected = [alone(**inputs) for _ in range(3)]
    assert not torch.equal(expected[0], expected[1])
    return max(float((f - e).abs().max()) for f, e in zip(found, expected, strict=True))


def test_captions_are_dropped_alike_on_all_ranks_as_the_first_draws(pool: Pool) -> None:
    assert max(pool.run(_with_captions_dropped, 3)) <= 1e-11


def _under_autocast(world: World) -> list[tuple[float, float]]:
    """Errors against float32: of one process under autocast, and of several."""
    alone = build(torch.float32)
    groups = make_groups(SequencePlan(ulysses=2))
    exact = results_of(alone, inputs_of(CASES[1], torch.float32), None)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = results_of(alone, inputs_of(CASES[1], torch.float32), None)
    errors = []
    for scheme in ("places-swap", "places-heads", "frames-swap"):
        wired = copy.deepcopy(alone)
        wire_stdit(wired, groups, "all_to_all", scheme=scheme)
        # A copy of a wired model is wired as well.
        wired = copy.deepcopy(wired)
        with torch.autocast("cpu", torch.bfloat16):
            found = results_of(wired, inputs_of(CASES[1], torch.float32), groups.all)
        errors.append((largest_error(rounded, exact)[0], largest_error(found, exact)[0]))
    return errors


def test_under_autocast_as_near_to_float32_as_one_process(pool: Pool) -> None:
    for errors in pool.run(_under_autocast, 2):
        assert all(shared <= 1.5 * alone for alone, shared in errors), errors


def _beside_tensor_parallelism(world: World, scheme: str) -> list[tuple[float, str]]:
    axes = make_axes({"sp": 2, "tp": 2})
    alone = build()
    wired = copy.deepcopy(alone)
    apply_tensor(wired, plan_tensor(wired, 2), axes.rank_group("tp"))
    groups = make_groups(SequencePlan(ulysses=2), [[0, 2], [1, 3]])
    wire_stdit(wired, groups, "all_to_all", axes.rank_group("tp"), scheme=scheme)
    errors = []
    for case in CASES[:2]:
        expected = results_of(alone, inputs_of(case), None)
        for name, parameter in wired.named_parameters():
            region = region_of(parameter)
            if region is not None:
                whole = expected[name]
                runs = [whole.narrow(region.dim, a, b - a) for a, b in region.runs]
                expected[name] = torch.cat(runs, region.dim)
        found = results_of(wired, inputs_of(case), groups.all)
        errors.append(largest_error(found, expected))
    return errors


@pytest.mark.parametrize("scheme", ["places-swap", "places-heads", "frames-heads"])
def test_heads_may_be_a_tensor_ranks_own(pool: Pool, scheme: str) -> None:
    for result in pool.run(_beside_tensor_parallelism, 4, scheme):
        assert max(result)[0] <= BARS[torch.float64], result


def _mean_of_products(out: Tensor, micro: Any) -> Tensor:
    weights = torch.arange(out[0].numel(), dtype=out.dtype).view(out[0].shape).sin()
    return (out * weights).sum((1, 2, 3, 4)).mean()


def _beside_a_pipeline(world: World, scheme: str) -> list[tuple[float, str]]:
    axes = make_axes({"pp": 2, "sp": 2})
    alone = build()
    wired = copy.deepcopy(alone)
    stack = stack_of(wired)
    stage = make_stage(
        wired, stack, cut(wired, stack, 2), axes.rank_group("pp"), stages_by_rank("1f1b", 2, 1)
    )
    groups = make_groups(SequencePlan(ulysses=2))
    wire_stdit(wired, groups, "all_to_all", scheme=scheme)
    errors = []
    for case in (Case(4, 6, 6, (7, 4, 3, 7)), Case(5, 4, 6, (7, 2), given=True)):
        inputs = {n: v.detach() for n, v in inputs_of(case).items() if v is not None}
        _mean_of_products(alone(**inputs), None).backward()
        Pipeline(stage, "1f1b", 2).run(inputs, _mean_of_products)
        trained = {n: p for n, p in stage.named_parameters().items() if p.requires_grad}
        found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()}
        stage.sum_tied({n: grad for n, grad in found.items() if n in stage.tied})
        for grad in found.values():
            dist.all_reduce(grad, group=groups.all.process_group)
            grad /= 2
        expected = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
        errors.append(largest_error(found, {n: expected[n] for n in found}))
        alone.zero_grad()
        wired.zero_grad()
    return errors


@pytest.mark.parametrize("scheme", ["places-swap", "frames-heads"])
def test_stages_of_a_pipeline_hand_on_parts_of_a_clip(pool: Pool, scheme: str) -> None:
    for result in pool.run(_beside_a_pipeline, 4, scheme):
        assert max(result)[0] <= BARS[torch.float64], result
        assert all(name for _, name in result)


def _bytes_sent(world: World, plan: SequencePlan, mode: str, scheme: str) -> list[list[float]]:
    """Of each case what this rank sent in attention, and what each should send on average."""
    groups = make_groups(plan)
    model = build()
    shown: list[str] = []
    cluster = described("cpu-loopback")
    wire_stdit(model, groups, mode, scheme=scheme, cluster=cluster, show=shown.append)
    post, sent = wire.post, [0]

    def counted(incoming: Any, outgoing: Any, *others: Any) -> Any:
        outgoing = list(outgoing)
        sent[0] += sum(tensor.nbytes for _, tensor in outgoing)
        return post(incoming, outgoing, *others)

    wire.post = counted
    try:
        rows = []
        for case in CASES:
            sent[0] = 0
            inputs = inputs_of(case)
            model(**inputs).sum().backward()
            clip = Clip(len(case.lengths), case.frames, -(-case.rows // 2) * -(-case.columns // 2))
            width = Width(32, 4, 8, 128, 2, "float64")
            chosen = choose_scheme(clip, width, plan, mode, cluster, scheme)
            part = plan.lay(clip.size(chosen.scheme.cut)).sizes()[groups.rank]
            other = clip.size(FRAMES + PLACES - chosen.scheme.cut)
            patches = clip.batch * part * other * 4 * model.out_channels * 8
            rows.append([sent[0] - (plan.degree - 1) * patches, chosen.predicted[0].sent])
    finally:
        wire.post = post
    assert bool(shown) == (groups.rank == 0)
    assert all("MB sent" in text for text in shown)
    return rows


@pytest.mark.parametrize("name", ["swap 3", "heads 4", "frames heads 2", "ring 2", "ring 2 x 2"])
def test_as_many_bytes_are_sent_as_predicted(pool: Pool, name: str) -> None:
    plan, mode, scheme = MODES[name]
    results = pool.run(_bytes_sent, plan.degree, plan, mode, scheme)
    for of_case in zip(*results, strict=True):
        sent = sum(row[0] for row in of_case) / plan.degree
        assert sent == pytest.approx(of_case[0][1], rel=1e-9)


def _cluster(bandwidth: float) -> Cluster:
    device = Device("one", {"float32": 1e13, "bfloat16": 1e14}, 1e12, 1 << 36)
    return Cluster("some", device, (Axis("local", 8, Link(1e-5, bandwidth)),))


WIDE = Width(1152, 16, 72, 4608, 28, "bfloat16")


def _best(clip: Clip, ranks: int, bandwidth: float = 1e10, heads: int = 16) -> Scheme:
    width = replace(WIDE, heads=heads)
    plan = SequencePlan(ulysses=ranks)
    return choose_scheme(clip, width, plan, "all_to_all", _cluster(bandwidth)).scheme


def test_clips_are_swapped_and_pictures_go_by_heads() -> None:
    assert _best(Clip(1, 32, 1024), 8) == SCHEMES["places-swap"]
    assert _best(Clip(1, 1, 4096), 8) == SCHEMES["places-heads"]
    # Over a slow link bytes decide, over a fast one that no rank waits for the one with most.
    assert _best(Clip(1, 9, 1024), 8, 1e8) == SCHEMES["places-swap"]
    assert _best(Clip(1, 9, 1024), 8, 1e13) == SCHEMES["places-heads"]
    # Two places for eight ranks: frames are cut.
    assert _best(Clip(1, 64, 2), 8).cut == FRAMES


@given(
    st.integers(1, 3), st.integers(1, 40), st.integers(1, 200), st.integers(1, 8), st.integers(1, 8)
)
def test_every_clip_has_a_scheme_and_the_best_is_said_first(
    batch: int, frames: int, places: int, ranks: int, heads: int
) -> None:
    width = replace(WIDE, heads=heads)
    plan = SequencePlan(ulysses=ranks)
    chosen = choose_scheme(Clip(batch, frames, places), width, plan, "all_to_all", _cluster(1e10))
    assert len(chosen.predicted) == (4 if ranks <= heads else 2)
    seconds = [p.seconds for p in chosen.predicted]
    assert seconds == sorted(seconds)
    assert chosen.scheme == chosen.predicted[0].scheme
    whole = batch * frames * places * 1152 * 2 * 28
    for predicted in chosen.predicted:
        # Two swaps or four exchanges of all tokens, forward and again backward.
        most = 4 if predicted.scheme.by == "swap" else 8
        assert 0 <= predicted.sent <= most * whole / ranks + 1e-6


def test_unsupported_wiring_is_rejected() -> None:
    groups = make_groups(SequencePlan())
    for changes in ({"hidden_size": 48, "kernel_size": (2, 2, -1)}, {"image_conditioning": True}):
        with pytest.raises(GulliverError, match="kernel_size or image_conditioning"):
            wire_stdit(build(**changes), groups, "all_to_all")
    for mode in ("split_gather", "ring"):
        with pytest.raises(GulliverError, match=r"'all_to_all' or 'ring_attn'.*tensor parallelism"):
            wire_stdit(build(), groups, mode)


def _wired_twice(world: World) -> str:
    model = build()
    groups = make_groups(SequencePlan(ulysses=2))
    wire_stdit(model, groups, "all_to_all")
    with pytest.raises(GulliverError) as error:
        wire_stdit(model, groups, "all_to_all")
    return str(error.value)


def test_a_model_is_wired_once(pool: Pool) -> None:
    assert "already shards sequences" in pool.run(_wired_twice, 2)[0]
