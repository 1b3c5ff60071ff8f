"""Blocks of micro-batches that move to the host: chosen exactly, and exact when they run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gulliver.booster import Booster, DataCentricLoader, DataCentricPlugin
from gulliver.comm import World
from gulliver.data import DataCentricPlanner, Samples
from gulliver.data_centric.pictures import shares_of, step_lines, steps_page
from gulliver.data_centric.recompute import RecomputeSwitch, StageSwitch, offload_for, spread
from gulliver.errors import GulliverError
from gulliver.hardware import HostRoom, SampleCosts, SampleShape, TableCosts, place_blocks
from gulliver.hardware.batch_costs import BatchCosts, BlockKind, choice_front, keep_blocks
from gulliver.hardware.offload import TierRates
from gulliver.hardware.samples import SampleFit, SampleModel
from gulliver.memory.activations import ActivationOffload, ActivationStack, HostArena
from gulliver.memory.symbolic import StorageCounter
from gulliver.solve.activations import PassCosts
from tests.data_centric.data_centric_runs import KINDS, Uneven, loss_of, make_model
from tests.memory.test_memory_stores import LateCopier
from tests.pool import Pool

SMALL = st.integers(1, 4)
BYTES = st.integers(1, 40).map(float)
RATE = st.sampled_from([0.5, 3.0, 20.0, 200.0, 1e4])
SHARES = st.sampled_from([(1.0,), (0.5, 0.5), (0.7, 0.3), (0.0, 1.0)])


@st.composite
def kinds_of(draw: Any) -> tuple[BlockKind, ...]:
    shares = draw(SHARES)
    return tuple(BlockKind(str(n), draw(SMALL), draw(BYTES), s) for n, s in enumerate(shares))


def base_costs(kinds: tuple[BlockKind, ...], batches: int, slope: float) -> BatchCosts:
    size = np.arange(1, batches + 1)
    counts = np.tile([kind.count for kind in kinds], (batches, 1))
    forward = slope * (size + 0.3)  # not in proportion, as in a table
    return BatchCosts(10 + 4 * forward, 50.0 * size, np.zeros(batches), forward, counts)


def every_choice(
    costs: BatchCosts, batch: int, kinds: tuple[BlockKind, ...], tokens: float, host: HostRoom
) -> Iterator[tuple[float, float, float]]:
    """Seconds, device bytes and host bytes of all choices, by the solver's model of moves."""
    forward, size = costs.recomputing[batch - 1], tokens * batch
    passes = PassCosts(
        forward, 2 * forward, write_s=1 / host.rates.write_rate, read_s=1 / host.rates.read_rate
    )
    ways = [
        [(kept, away) for kept in range(k.count + 1) for away in range(k.count + 1 - kept)]
        for k in kinds
    ]
    for picked in itertools.product(*ways):
        pairs = list(zip(picked, kinds, strict=True))
        kept = sum(n * k.kept_bytes for (n, _), k in pairs) * size
        moved = sum(n * k.kept_bytes for (_, n), k in pairs) * size
        coming = max((k.kept_bytes for (_, n), k in pairs if n), default=0.0) * size
        saved = sum((n + m) * k.share / k.count for (n, m), k in pairs)
        rest = costs.seconds[batch - 1] - 4 * forward
        seconds = rest + passes.seconds(moved, forward * (1 - saved))  # type: ignore[arg-type]
        yield seconds, costs.bytes[batch - 1] + kept + coming, moved


@settings(max_examples=60, deadline=None)
@given(
    kinds=kinds_of(),
    tokens=st.sampled_from([1.0, 7.0]),
    memory=st.floats(0, 3000),
    room=st.floats(1, 2000),
    rates=st.tuples(RATE, RATE),
    slope=st.floats(0.1, 30),
)
def test_no_choice_of_blocks_takes_less_inside_both_memories(
    kinds: tuple[BlockKind, ...],
    tokens: float,
    memory: float,
    room: float,
    rates: tuple[float, float],
    slope: float,
) -> None:
    host = HostRoom(room, TierRates("host", *rates))
    costs = base_costs(kinds, 6, slope)
    found = place_blocks(costs, tokens, memory, kinds, host)
    for batch in range(1, 7):
        fits = [
            choice
            for choice in every_choice(costs, batch, kinds, tokens, host)
            if choice[1] <= max(memory, costs.bytes[batch - 1]) * (1 + 1e-12)
            and choice[2] <= room * (1 + 1e-12)
        ]
        row = batch - 1
        assert found.seconds[row] == pytest.approx(min(fits)[0], rel=1e-9)
        told = found.seconds[row], found.bytes[row], found.host_bytes[row]
        assert any(told == pytest.approx(choice, rel=1e-9, abs=1e-9) for choice in fits)
        left = np.array([k.count for k in kinds]) - found.recomputed[row] - found.offloaded[row]
        assert (left >= 0).all()
        assert found.recomputing[row] >= -1e-9
        assert found.moving[row] >= 0


def test_choices_that_another_beats_in_all_three_are_no_part_of_the_front() -> None:
    front = choice_front((BlockKind("a", 3, 10.0, 0.6), BlockKind("b", 2, 25.0, 0.4)))
    rows = np.column_stack((front.device, front.moved, -front.saved))
    for number, row in enumerate(rows):
        others = np.delete(rows, number, axis=0)
        assert not (others <= row).all(axis=1).any(), row
    assert (np.diff(front.moved) >= 0).all()


def test_without_host_memory_nothing_changes_and_with_more_of_it_nothing_gets_slower() -> None:
    kinds = (BlockKind("a", 6, 10.0, 0.5), BlockKind("b", 6, 14.0, 0.5))
    costs = base_costs(kinds, 9, 2.0)
    plain = keep_blocks(costs, 3.0, 800.0, kinds)
    same = place_blocks(costs, 3.0, 800.0, kinds, None)
    for name in ("seconds", "bytes", "recomputing", "recomputed", "offloaded", "moving"):
        assert np.array_equal(getattr(plain, name), getattr(same, name))
    before = plain.seconds
    for room in (1.0, 50.0, 200.0, 1000.0, 1e6):
        host = HostRoom(room, TierRates("host", 200.0, 200.0))
        found = place_blocks(costs, 3.0, 800.0, kinds, host).seconds
        assert (found <= before + 1e-9).all()
        before = found
    assert (before < plain.seconds - 1e-3).any()
    for memory in (900.0, 1300.0, 3000.0):
        found = place_blocks(costs, 3.0, memory, kinds, host).seconds
        assert (found <= before + 1e-9).all()
        before = found


def test_host_memory_without_bytes_or_rates_is_refused() -> None:
    for room, rate in ((0.0, 1.0), (math.inf, 1.0), (1.0, 0.0), (1.0, math.nan)):
        with pytest.raises(GulliverError, match="needs bytes and rates above 0, and finite"):
            HostRoom(room, TierRates("host", rate, 1.0))
    room = HostRoom.within(17e9, TierRates("host", 1.0, 1.0))
    assert room.bytes == 16e9
    assert room.locked == 17e9


def switched(
    model: nn.Module, kinds: list[tuple[str, int]], least: int = 256
) -> tuple[RecomputeSwitch, ActivationStack]:
    """A model's switch, with copies to the host that are as late as a stream could be."""
    arena = HostArena(1 << 22, torch.device("cpu"), LateCopier())
    stack = ActivationStack(arena, torch.device("cpu"))
    arena.free(arena.allocate(1), 1)  # the memory is taken now, and not counted below
    return RecomputeSwitch(model, kinds, ActivationOffload(stack, least)), stack


def gradients(model: nn.Module, data: dict[str, Tensor]) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    loss_of(model, data).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", ["llama", "stdit3"])
def test_gradients_are_those_of_kept_blocks_bit_for_bit(family: str) -> None:
    model, sample = make_model(family, wired=False), Uneven(family)[0]
    data = {name: value[None] for name, value in sample.items()}
    kinds = [(kind.name, kind.count) for kind in KINDS[family]]
    wanted = gradients(model, data)
    switch, stack = switched(model, kinds)
    counts = [range(count + 1) for _, count in kinds]
    moved = set()
    for away in itertools.product(*counts):
        again = [min(1, count - n) for n, (_, count) in zip(away, kinds, strict=True)]
        before = switch._offload.moved  # type: ignore[union-attr]
        switch.set(again, away)
        found = gradients(model, data)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        moved.add(switch._offload.moved - before)  # type: ignore[union-attr]
        assert stack.held == 0
    assert len(moved) > 2
    switch.settle()
    assert stack.store.used == 0


class Blocks(nn.Module):
    """Layers whose activations are far larger than what goes into a layer and comes out."""

    def __init__(self, count: int, wide: int = 512) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, wide), nn.GELU(), nn.Linear(wide, 8)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def live_bytes(model: nn.Module, x: Tensor, backward: bool = True) -> tuple[int, int]:
    """Bytes that are on the device after a forward, and at most in forward and backward."""
    with StorageCounter() as counter:
        loss = model(x)
        live = counter.live
        if backward:
            loss.backward()
    return live, counter.peak


def test_what_blocks_save_leaves_the_device() -> None:
    model, x, count = Blocks(6), torch.randn(16, 8), 6
    block = 2 * 16 * 512 * 4  # before and after GELU
    gradients = 4 * sum(p.numel() for p in model.parameters())
    switch, stack = switched(model, [("blocks", count)])
    switch.set([0], [0])
    kept, most_kept = live_bytes(model, x)
    for away in (1, 3, 6):
        switch.set([0], [away])
        live, peak = live_bytes(model, x)
        # Of those that moved the last one's is there, as it is needed first.
        assert kept - live == (away - 1) * block
        assert peak <= max(most_kept - (away - 2) * block, gradients + 4 * block)
        assert stack.most <= 2 * block
        assert stack.held == 0
    switch.set([0], [count])
    loss = model(x)
    assert stack.held == block
    assert stack.store.used == count * block
    switch.settle()  # as where a step is left
    assert stack.held == 0
    assert stack.store.used == count * block, "its graph may have a backward yet"
    loss.backward()
    del loss
    loss = model(x)
    del loss
    switch.settle()
    assert stack.store.used == 0
    assert stack.held == 0


def test_a_forward_that_raises_leaves_nothing_behind() -> None:
    model, x = Blocks(3), torch.randn(16, 8)
    switch, stack = switched(model, [("blocks", 3)])
    switch.set([0], [3])
    handle = model.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    handle.remove()
    switch.set([1], [1])
    assert stack.held == 0
    assert stack.store.used == 0
    model(x).backward()
    with pytest.raises(GulliverError, match="no memory for them"):
        RecomputeSwitch(Blocks(3), [("blocks", 3)]).set([0], [1])


def test_more_than_the_host_holds_stays_on_the_device() -> None:
    model, x = Blocks(3, wide=4096), torch.randn(64, 8)
    wanted = gradients_of(model, x)
    switch, _ = switched(model, [("blocks", 3)])
    switch.set([0], [3])
    found = gradients_of(model, x)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert switch._offload.kept > 0  # type: ignore[union-attr]
    assert switch._offload.moved > 0  # type: ignore[union-attr]


def gradients_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_host_memory_of_a_plan_needs_a_gpu_and_no_memory_limit() -> None:
    planner = SimpleNamespace(costs=SimpleNamespace(host=HostRoom(1e6, TierRates("host", 1, 1))))
    plain: Any = SimpleNamespace(shards=SimpleNamespace(manager=None))
    limited: Any = SimpleNamespace(shards=SimpleNamespace(manager=object()))
    with pytest.raises(GulliverError, match="beside a memory limit, which moves them"):
        offload_for(planner, limited, LateCopier())
    with pytest.raises(GulliverError, match=r"computes on its cpu, whose memory is the host's"):
        offload_for(planner, plain, None)
    assert offload_for(SimpleNamespace(costs=planner.costs, pac=False), plain, None) is None
    offload: Any = object()
    stage: Any = object()
    with pytest.raises(GulliverError, match="not supported with stages of a pipeline"):
        StageSwitch(stage, [("blocks", 1)], offload)


def test_host_memory_is_one_piece_that_is_locked_once_and_given_back() -> None:
    copier = LateCopier()
    arena = HostArena(10 * 4096 + 1, torch.device("cpu"), copier)
    assert not copier.locked
    places = [arena.allocate(3 * 4096), arena.allocate(4 * 4096 + 1)]
    assert places == [0, 3 * 4096]
    assert list(copier.locked.values()) == [11 * 4096]
    with pytest.raises(GulliverError, match="host memory for activations are full"):
        arena.allocate(4 * 4096)
    arena.free(places[0], 3 * 4096)
    assert arena.allocate(2 * 4096) == 0
    arena.close()
    assert not copier.locked


def test_blocks_that_move_lie_evenly() -> None:
    assert spread(8, 2) == [0, 4]
    assert spread(8, 2, 0.5) == [2, 6]
    for count in range(1, 30):
        for chosen in range(count + 1):
            for shift in (0.0, 0.5, 0.99):
                found = spread(count, chosen, shift)
                assert len(set(found)) == chosen
                assert all(0 <= place < count for place in found)


def scheduled(count: int, away: int, again: int, move: float) -> float:
    """Time of forward and backward as the stack runs them, in forwards of a block.

    A block's tensors leave as they are saved, half a block before its end on the mean, and have
    left when the next one that moves has saved as many. They come back in the reverse order, each
    block's when backward begins with the one after it.
    """
    moving = spread(count, away)
    rest = [place for place in range(count) if place not in moving]
    repeated, clock, left = set(rest[:again]), 0.0, 0.0
    for place in range(count):
        clock += 1
        if place in moving:
            clock = max(clock, left)
            left = max(clock - 0.5, left) + move
    link, ready = left, dict.fromkeys(moving, 0.0)  # the last one is still there
    for place in reversed(range(count)):
        clock = max(clock, ready.get(place, 0.0))
        before = [other for other in moving if other < place]
        if place in moving and before:
            ready[before[-1]] = link = max(clock, link) + move
        clock += 2 + (place in repeated)
    return clock


def test_seconds_that_are_told_are_those_of_a_schedule_block_by_block() -> None:
    for count in (28, 56):
        for away, move in itertools.product(range(count // 2 + 1), np.arange(0.25, 15, 0.25)):
            for again in (0, (count - away) // 2, count - away):
                forward, moved = float(count), int(away * move * 100)
                passes = PassCosts(forward, 2 * forward, write_s=0.01, read_s=0.01)
                told = passes.seconds(moved, again)
                if told > passes.seconds(0, again + away):
                    continue  # nobody would move these
                took = scheduled(count, away, again, moved / max(1, away) / 100)
                assert took <= 1.01 * told, (count, away, again, move)


KIND = BlockKind("layers", 8, 4000.0)
MODEL = SampleModel("small", 12 * 256**2, 256, (KIND,), "bfloat16")
FIT = SampleFit(1e-3, 1e-5, 1e-12, 1e-8, 0.0, 1e6, 5000.0, 512.0)


def sample_costs(room: float | None, **changes: Any) -> SampleCosts:
    host = None if room is None else HostRoom(room, TierRates("host", 5e9, 5e9))
    return SampleCosts(MODEL, FIT, 3e7, host=host, **changes)


def test_plans_say_what_moves_and_pictures_show_it() -> None:
    shapes = [SampleShape.document(length) for length in (256, 512, 1024)] * 4
    plain = DataCentricPlanner(sample_costs(None), shapes, 1, Samples(4), seed=1)
    moving = DataCentricPlanner(sample_costs(1e9), shapes, 1, Samples(4), seed=1)
    less = DataCentricPlanner(sample_costs(5e5), shapes, 1, Samples(4), seed=1)
    assert len({planner.signature for planner in (plain, moving, less)}) == 3
    assert "of a rank's host memory" in moving.describe()
    assert "host" not in plain.describe()
    before, plans = list(plain), list(moving)
    assert sum(plan.seconds for plan in plans) < sum(plan.seconds for plan in before)
    batches = [batch for plan in plans for _, batch in plan]
    assert any(batch.offload for batch in batches)
    for batch in batches:
        row = moving.costs.batches(batch.shape, 1)
        place = len(batch.samples) - 1
        assert batch.offloaded == tuple(row.offloaded[place])
        assert batch.offload == sum(batch.offloaded)
        assert batch.moving == pytest.approx(row.moving[place])
        assert batch.host_bytes == math.ceil(row.host_bytes[place])
        assert batch.bytes <= 3e7 + 1
    told = shares_of(plans)
    assert told.offloaded > 0
    assert "off-load some" in str(told)
    assert any("off-load" in line for plan in plans for line in step_lines(plan))
    page = steps_page("t", [], plans)
    assert "blocks off-loaded" in page
    assert "<th>off-load</th>" in page
    assert "off-load" not in steps_page("t", [], before)
    assert not shares_of(
        list(DataCentricPlanner(moving.costs, shapes, 1, Samples(4), pac=False))
    ).offloaded


def test_tables_move_nothing_unless_they_are_told_where_to() -> None:
    seconds = {"a": {1: {1: 4.0, 2: 8.0, 4: 16.0}}}
    kinds = (BlockKind("layers", 4, 10.0),)
    table = TableCosts(
        seconds, {"a": 10}, 10.0, 500.0, kinds, lambda shape, degree, batch: (0.0, 1.0 * batch)
    )
    plain = table.batches("a", 1)
    assert not plain.offloaded.any()
    host = HostRoom(1e6, TierRates("host", 1000.0, 1000.0))
    found = replace(table, host=host).batches("a", 1)
    assert found.offloaded.any()
    assert (found.seconds <= plain.seconds + 1e-12).all()


def _steps_as_planned(world: World) -> list[float]:
    """Errors of the gradients of steps that a planner has chosen to move activations in."""
    kind = BlockKind("blocks", 6, 2 * 512 * 8.0)
    known = SampleModel("blocks", 8192, 8, (kind,), "float32")
    fit = SampleFit(1e-3, 1e-5, 1e-9, 1e-8, 0.0, 1e6, 16384.0, 64.0, 0.1, 0.1, 1e-12, 1e-12)
    lengths = [16, 32] * 8
    costs = SampleCosts(known, fit, 3e6, host=fit.host_room(1 << 22))
    shapes = [SampleShape.document(length) for length in lengths]
    planner = DataCentricPlanner(costs, shapes, 1, Samples(8))
    data = [torch.randn(n, 8, dtype=torch.float64) for n in lengths]
    plain, model = Blocks(6).double(), Blocks(6).double()
    booster = Booster(plugin=DataCentricPlugin(1, verbose=False))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader: Any = DataCentricLoader(planner, data, model, optimizer, copier=LateCopier())
    stack, worst = loader._context.switch._stack, list[float]()
    for step in loader:
        loss = None
        for batch in step:
            loss = model(batch.data)
            assert stack.held
            break
        assert stack.held == 0, "a step was left in the middle"
        assert stack.store.used > 0
        del loss
        break
    optimizer.zero_grad()
    for step in loader:
        assert any(batch.offload for _, batch in step.plan)
        indices = [index for _, batch in step.plan for index in batch.samples]
        for batch in step:
            step.backward(model(batch.data))
        plain.zero_grad()
        for index in indices:
            (plain(data[index]) / len(indices)).backward()
        found = optimizer.full_gradients()
        wanted = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        worst += [float((found[n] - g).abs().max() / g.abs().max()) for n, g in wanted.items()]
        assert stack.held == 0
        optimizer.zero_grad()
    return worst


def test_steps_move_what_their_planner_chose_also_after_one_that_was_left(pool: Pool) -> None:
    (worst,) = pool.run(_steps_as_planned, 1)
    assert len(worst) == 2 * 24
    assert max(worst) < 1e-12
