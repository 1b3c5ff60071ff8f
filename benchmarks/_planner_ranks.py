"""What each rank does in `benchmarks.planner`: probes its links, predicts grids, and runs them.

[Note: a device that sleeps] Four ranks on two cores would measure how they take turns. Here every
product of matrices takes as long as on a device of a given rate: it is computed, which is over
sooner, and the rank sleeps for the rest. So forward, backward and recomputation of whatever plugin
take what the device would, and the cores are free for messages. Everything else is computed as it
is. The device that the search is told of has this rate, and the memory that was probed.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks._harness import Spread
from benchmarks._tensor_models import DTENSOR, FSDP2, Contestant, Sizes, data_parallel, dtensor
from gulliver._compat import DispatchMode
from gulliver.booster import Booster
from gulliver.booster.search import (
    Axes,
    Engine,
    Facts,
    Found,
    Grid,
    Scored,
    Scorer,
    facts_of,
    plan_of,
    plugin_of,
    search_grids,
)
from gulliver.comm import (
    Choice,
    RankGroup,
    Torus,
    all_gather,
    all_reduce,
    barrier,
    broadcast_object,
    exchange,
    gather_objects,
    init_world,
    make_axes,
    reduce_scatter,
    shift,
)
from gulliver.errors import GulliverError
from gulliver.hardware import (
    Along,
    Axis,
    Cluster,
    Device,
    operator_flops,
    probe_collectives,
    probe_device,
    probe_links,
)

OWED_S = 1e-3
"""Seconds that are slept at once, at least: shorter sleeps are inexact."""
NAMES = ("outer", "inner")
PEERS = (FSDP2, DTENSOR)
GRIDS = (
    *(Grid(Axes(data=4), stage) for stage in range(4)),
    Grid(Axes(data=4), 1, micro_batches=2),
    Grid(Axes(data=4), 1, recomputed=4),
    Grid(Axes(2, tensor=2), 1),
    Grid(Axes(2, tensor=2), 2),
    Grid(Axes(2, tensor=2, mode="split_gather"), 1),
    Grid(Axes(tensor=4)),
    Grid(Axes(2, pipeline=2), 1, 4, "1f1b"),
    Grid(Axes(tensor=2, pipeline=2), 0, 4, "1f1b"),
    Grid(Axes(pipeline=4), 0, 8, "1f1b"),
    Grid(Axes(pipeline=4), 0, 4, "gpipe"),
    Grid(Axes(2, sequence=2, mode="all_to_all"), 1),
    Grid(Axes(2, sequence=2, mode="ring_attn"), 1),
    Grid(Axes(sequence=2, pipeline=2, mode="all_to_all"), 1, 4, "1f1b"),
)


class Slowed(DispatchMode):
    """Lets products of matrices take as long as on a device of a given rate.

    Args:
        rate: FLOP/s of the device.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.owed = rate, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and sleeps for what the device would take besides."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with what this rank has
        begun = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        flops = operator_flops(func, args, kwargs or {}, out)
        if flops:
            self.owed += flops / self.rate - (time.perf_counter() - begun)
            if self.owed > OWED_S:
                begun = time.perf_counter()
                time.sleep(self.owed)
                self.owed -= time.perf_counter() - begun
        return out


@dataclass(frozen=True)
class Row:
    """A grid, as it was predicted and as it ran.

    Attributes:
        grid: the grid in words.
        searched: seconds that the search predicts for a step.
        planned: seconds that `make_plan` predicts with what was measured of one process.
        measured: seconds of a step of the slowest rank, median; None where it does not run.
        why: why it does not run.
    """

    grid: str
    searched: float
    planned: float = 0.0
    measured: float | None = None
    why: str = ""


@dataclass
class Truth:
    """Measurements and predictions on one network with one model.

    Attributes:
        rows: grids that were run.
        peers: seconds of a step of what is put together by hand with torch.
        factor: measured seconds of a forward and backward over those that operators add up to.
        best: grids of the search, best first, in words, with the seconds that it predicts.
        links: latency and bandwidth of each axis, outer to inner.
    """

    rows: list[Row] = field(default_factory=list)
    peers: dict[str, float] = field(default_factory=dict)
    factor: float = 1.0
    best: list[tuple[str, float]] = field(default_factory=list)
    links: list[tuple[float, float]] = field(default_factory=list)


def measure(models: dict[str, Sizes], rate: float, steps: int) -> dict[str, Truth]:
    """One rank's part on one network.

    Args:
        models: models by name.
        rate: FLOP/s of the device that is slept.
        steps: measured steps of each grid.
    """
    world = init_world()
    torch.set_num_threads(1)
    device = max(gather_objects(probe_device(world.device)), key=lambda d: d.memory_rate)
    device = replace(device, matmul={"float32": rate}, matmul_curves={})
    cluster = broadcast_object(probed(device))
    tell("links probed")
    found = {}
    for name, sizes in models.items():
        with Slowed(rate):
            found[name] = _of_model(sizes, cluster, steps)
    barrier()
    return found


def tell(what: str) -> None:
    """Says on rank 0 how far the run is."""
    if dist.get_rank() == 0:
        print(f"{time.strftime('%X')} {what}", file=sys.stderr, flush=True)


def probed(device: Device) -> Cluster:
    """Measures the two axes of two ranks each, and all ranks at once."""
    named = make_axes(dict.fromkeys(NAMES, 2))
    pairs = probe_links()
    links = dict(zip(NAMES, (pairs[0, 2], pairs[0, 1]), strict=True))

    def along(torus: Torus, group: RankGroup) -> Along:
        made = _collectives(torus, group)
        busy = probe_collectives(made, torus.size, busy=True)
        return Along(torus.size, probe_collectives(made, torus.size), busy)

    found: dict[str, tuple[Along, ...]] = {
        name: (along(named.torus(name), named.rank_group(name)),) for name in NAMES
    }
    flat = named.torus(choose=lambda collective, count: Choice(collective, count, "flat", 0.0, 0.0))
    found["outer"] += (along(flat, make_axes({"all": flat.size}).rank_group("all")),)
    axes = tuple(Axis(name, 2, replace(links[name], along=found[name])) for name in NAMES)
    return Cluster("shaped links", device, axes, measured=True)


def _collectives(torus: Torus, group: RankGroup) -> dict[str, Any]:
    size = torus.size

    def reducing(count: int) -> Any:
        whole = torch.zeros(count // 4)
        return lambda: all_reduce(whole, group=torus)

    def gathering(count: int) -> Any:
        whole, part = torch.zeros(count // 4), torch.zeros(count // 4 // size)
        return lambda: all_gather(whole, part, group=torus)

    def scattering(count: int) -> Any:
        whole, part = torch.zeros(count // 4), torch.zeros(count // 4 // size)
        return lambda: reduce_scatter(part, whole, group=torus)

    def exchanging(count: int) -> Any:
        parts = [torch.zeros(count // 4 // size) for _ in range(size)]
        return lambda: exchange(group, parts, [part.numel() for part in parts])

    def sending(count: int) -> Any:
        out, into = torch.zeros(count // 4), torch.empty(count // 4)
        return lambda: shift(group, out, into, 7).wait()

    made = {"all_reduce": reducing, "all_gather": gathering, "reduce_scatter": scattering}
    return made | {"all_to_all": exchanging, "sends": sending}


def _of_model(sizes: Sizes, cluster: Cluster, steps: int) -> Truth:
    model, sample = sizes.model(), _batch(sizes, 0, 1)
    inner = _adamw(model)
    facts = facts_of(model, inner, sample, cluster.device, "fp32", True)
    own = plugin_of(Grid(Axes(data=4), 1)).make_plan(model, inner, cluster, sample)
    work = own.work
    counted = sizes.batch * (facts.forward_s + facts.backward_s)
    factor = broadcast_object((work.forward_s + work.backward_s) / counted)
    facts = calibrated(facts, factor)
    found = search_grids(model, inner, sample, cluster, sizes.batch, precision="fp32", facts=facts)
    scorer = Scorer(facts, cluster, sizes.batch, "cpu", 0.0)
    truth = Truth(factor=factor, best=[(str(s.grid), s.seconds.step) for s in found.best])
    truth.links = [(axis.link.alpha_s, axis.link.bandwidth) for axis in cluster.axes]
    chosen = found.best[0].grid
    for grid in dict.fromkeys((chosen, *GRIDS)):
        truth.rows.append(_row(grid, sizes, scorer, found, steps))
        tell(str(truth.rows[-1]))
    for name in PEERS:
        truth.peers[name] = _peer(name, sizes, steps)
    return truth


def calibrated(facts: Facts, factor: float) -> Facts:
    """Facts with a device that takes so many times as long for every operator."""
    device = facts.device
    slower = replace(
        device,
        matmul={dtype: rate / factor for dtype, rate in device.matmul.items()},
        memory_rate=device.memory_rate / factor,
        launch_s=device.launch_s * factor,
        memory_curve=None,
    )
    return replace(facts, device=slower, refused={}, _shared={})


def _batch(sizes: Sizes, place: int, places: int) -> dict[str, torch.Tensor]:
    tokens, _ = sizes.batch_of(0, place, places)
    return {"input_ids": tokens, "labels": tokens}


def _adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def _row(grid: Grid, sizes: Sizes, scorer: Scorer, found: Found, steps: int) -> Row:
    why = scorer.refuses(grid.axes)
    if why:
        return Row(str(grid), 0.0, why=why)
    grid = replace(grid, recomputed=min(grid.recomputed, sizes.blocks))
    scored = scorer.score(grid)
    try:
        planned, seconds = _run(scored, sizes, scorer, found, steps)
    except GulliverError as error:
        return Row(str(grid), scored.seconds.step, why=str(error))
    return Row(str(grid), scored.seconds.step, planned, seconds)


def _run(
    scored: Scored, sizes: Sizes, scorer: Scorer, found: Found, steps: int
) -> tuple[float, float]:
    """Seconds of a step as the plan predicts them, and as they are."""
    grid, model = scored.grid, sizes.model()
    inner = _adamw(model)
    plan = plan_of(scored, found, model, inner, "fp32")
    booster = Booster(plan=plan, verbose=False)
    boosted, optimizer, *_ = booster.boost(model, inner)
    accumulate = 1 if grid.axes.pipeline > 1 else grid.micro_batches
    each = sizes.batch // grid.axes.data
    engine = Engine(booster, boosted, optimizer, found, grid, accumulate, each, ())
    batch = _batch(sizes, *booster.plugin.data_place())

    def step() -> None:
        engine.run(batch)
        optimizer.step()
        optimizer.zero_grad()

    return plan.predicted.seconds.step, _median(step, steps)


def _peer(name: str, sizes: Sizes, steps: int) -> float:
    peer: Contestant = (data_parallel if name == FSDP2 else dtensor)(name, sizes)
    return _median(peer.advance, steps)


def _median(step: Any, steps: int) -> float:
    """Seconds of the slowest rank, the median of some steps, after two that are not counted."""
    took = []
    for _ in range(steps + 2):
        barrier()
        begun = time.perf_counter()
        step()
        took.append(time.perf_counter() - begun)
    slowest = map(max, zip(*gather_objects(took[2:]), strict=True))
    return Spread(tuple(slowest)).median
