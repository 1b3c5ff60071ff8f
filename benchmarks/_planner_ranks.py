"""What each rank does in `benchmarks.planner`: probes its links, predicts grids, and runs them.

[Note: a device that sleeps] Four ranks on two cores would measure how they take turns. Here every
product of matrices takes as long as on a device of a given rate: the rank sleeps instead, and the
product is zeros. So forward, backward and recomputation of whatever plugin take what the device
would, and the cores are free for messages. Everything else is computed as it is, attention too.

[Note: two figures of this device are fitted] The device that the search is told of has the rate
that is slept. What launching an operator takes, and bytes/s of the memory, are those of passes of
one process on the whole model, of one sample and of half, on every rank at once: a straight line
through both. Nothing is fitted to a step of several ranks.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks._tensor_models import DTENSOR, FSDP2, Contestant, Sizes, data_parallel, dtensor
from gulliver._compat import DispatchMode
from gulliver.booster import Booster
from gulliver.booster.auto import AutoEngine, plan_of, plugin_of
from gulliver.comm import (
    Torus,
    all_gather,
    all_reduce,
    barrier,
    gather_objects,
    init_world,
    make_axes,
    reduce_scatter,
)
from gulliver.comm.collectives import backend_all_reduce, broadcast_object
from gulliver.comm.groups import RankGroup
from gulliver.comm.messages import exchange, shift
from gulliver.errors import GulliverError
from gulliver.hardware import Cluster
from gulliver.hardware.cluster import Along, Axis, Device
from gulliver.hardware.links import probe_collectives, probe_links
from gulliver.hardware.operators import operator_flops
from gulliver.hardware.probe import kept_path, probe_device
from gulliver.plan.tree import Work
from gulliver.planner.search.facts import Axes, Facts, Grid, facts_of
from gulliver.planner.search.grids import Found, search_grids
from gulliver.planner.search.score import Scored, Scorer

ROUNDS = 2  # Rounds in which passes of one process are measured
TURNS = 3
PROBED = (1 << 12, 1 << 18, 1 << 22)
"""Turns and bytes of each collective that is probed: fewer than `gulliver probe` takes."""
OWED_S = 1e-3  # Seconds that are slept at once, at least: shorter sleeps are inexact
NAMES = ("outer", "inner")
PEERS = (FSDP2, DTENSOR)
GRIDS = (
    Grid(Axes(data=4), 0),
    Grid(Axes(data=4), 1),
    Grid(Axes(data=4), 3),
    Grid(Axes(2, tensor=2), 1),
    Grid(Axes(2, tensor=2, mode="split_gather"), 1),
    Grid(Axes(tensor=4)),
    Grid(Axes(2, pipeline=2), 1, 4, "1f1b"),
    Grid(Axes(tensor=2, pipeline=2), 0, 4, "1f1b"),
    Grid(Axes(pipeline=4), 0, 8, "1f1b"),
    Grid(Axes(2, sequence=2, mode="all_to_all"), 1),
    Grid(Axes(2, sequence=2, mode="ring_attn"), 1),
)


class Slowed(DispatchMode):
    """Lets products of matrices take as long as on a device of a given rate."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.owed = rate, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with what this rank has
        if func is torch.ops.aten.mm.default:
            (rows, inner), columns = args[0].shape, args[1].shape[1]
            self._sleep(2 * rows * inner * columns, 0.0)
            return args[0].new_zeros(rows, columns)
        begun = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        flops = operator_flops(func, args, kwargs or {}, out)
        if flops:
            self._sleep(flops, time.perf_counter() - begun)
        return out

    def _sleep(self, flops: int, done: float) -> None:
        self.owed += flops / self.rate - done
        if self.owed > OWED_S:
            begun = time.perf_counter()
            time.sleep(self.owed)
            self.owed -= time.perf_counter() - begun


@dataclass(frozen=True)
class Row:
    """A grid, as it was predicted and as it ran."""

    grid: str  # the grid in words
    searched: float  # seconds that the search predicts for a step
    planned: float = 0.0  # seconds that the plan of the grid predicts
    # seconds of a step of the slowest rank; None where it does not run
    measured: float | None = None
    why: str = ""  # why it does not run
    # seconds between the quartiles of its measured steps, on the slowest rank
    spread: float = 0.0


@dataclass
class Truth:
    """Measurements and predictions on one network with one model."""

    rows: list[Row] = field(default_factory=list)  # grids that were run
    # seconds of a step of what is put together by hand with torch
    peers: dict[str, float] = field(default_factory=dict)
    # seconds of launching an operator and bytes/s of the memory, from one process
    fitted: tuple[float, float] = (0.0, 0.0)
    # seconds of the optimizer's step of the whole model, predicted and measured
    update_s: tuple[float, float] = (0.0, 0.0)
    # grids of the search, best first, in words, with the seconds that it predicts
    best: list[tuple[str, float]] = field(default_factory=list)
    # latency and bandwidth of each axis, outer to inner
    links: list[tuple[float, float]] = field(default_factory=list)
    # machines as they were probed, as text: predictions can be made again from it
    cluster: str = ""


def measure(models: dict[str, Sizes], rate: float, steps: int) -> dict[str, Truth]:
    """One rank's part on one network."""
    world = init_world()
    torch.set_num_threads(1)
    device = max(gather_objects(probe_device(world.device)), key=lambda d: d.memory_rate)
    # Cores are free while a rank sleeps: whatever is on its way travels.
    device = replace(device, matmul={"float32": rate}, matmul_curves={}, overlap=1.0)
    with Slowed(rate):  # ranks sleep before a collective, as they do in a step
        cluster = broadcast_object(probed(device))
    keep(cluster)
    tell("links probed")
    found = {}
    for name, sizes in models.items():
        with Slowed(rate):
            found[name] = _of_model(sizes, cluster, steps)
    barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(os.environ["GULLIVER_CACHE"])
    return found


def keep(cluster: Cluster) -> None:
    """Keeps what was probed where plugins look for it, for this run alone; all ranks call it."""
    first = dist.get_rank() == 0
    folder = tempfile.mkdtemp(prefix="gulliver-truth-") if first else None
    os.environ["GULLIVER_CACHE"] = broadcast_object(folder)
    path = kept_path(cluster.size)
    if first:
        path.parent.mkdir(parents=True, exist_ok=True)
        cluster.save(path)
    barrier()


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
        options: dict[str, Any] = {"turns": TURNS, "sizes": PROBED}
        alone = probe_collectives(made, torus.size, **options)
        return Along(torus.size, alone, probe_collectives(made, torus.size, busy=True, **options))

    found: dict[str, tuple[Along, ...]] = {
        name: (along(named.torus(name), named.rank_group(name)),) for name in NAMES
    }
    flat = named.torus(flat=True)
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

    def ringing(count: int) -> Any:
        whole = torch.zeros(count // 4)
        return lambda: backend_all_reduce(whole, group=group.process_group)

    made = {"all_reduce": reducing, "all_gather": gathering, "reduce_scatter": scattering}
    # Among more than two ranks tensor parallelism takes the faster of the two.
    made |= {"ring_all_reduce": ringing} if size > 2 else {}
    return made | {"all_to_all": exchanging, "sends": sending}


def _of_model(sizes: Sizes, cluster: Cluster, steps: int) -> Truth:
    model, sample = sizes.model(), _batch(sizes, 0, 1)
    inner = _adamw(model)
    facts = facts_of(model, inner, sample, cluster.device, "fp32", True)
    plugin, works = plugin_of(Grid(Axes(data=4), 1)), dict[int, list[Work]]()
    for samples in (1, sizes.batch // 2) * ROUNDS:
        part = {name: value[:samples] for name, value in sample.items()}
        works.setdefault(samples, []).append(plugin.make_plan(model, inner, cluster, part).work)
    facts, update_s = calibrated(facts, works), works[1][0].update_s
    cluster = replace(cluster, device=facts.device)
    found = search_grids(model, inner, sample, cluster, sizes.batch, precision="fp32", facts=facts)
    scorer = Scorer(facts, cluster, sizes.batch, "cpu", 1.0)
    fitted = facts.device.launch_s, facts.device.memory_rate
    best = [(str(scored.grid), scored.seconds.step) for scored in found.best]
    truth = Truth(fitted=fitted, update_s=(facts.update_s, update_s), best=best)
    truth.cluster = cluster.to_yaml()
    truth.links = [(axis.link.alpha_s, axis.link.bandwidth) for axis in cluster.axes]
    chosen = found.best[0].grid
    for grid in dict.fromkeys((chosen, *GRIDS)):
        truth.rows.append(_row(grid, sizes, scorer, found, steps))
        tell(str(truth.rows[-1]))
    for name in PEERS:
        # DTensor cuts heads of keys and values, half as many, and cannot share one.
        if name == FSDP2 or sizes.heads // 2 % dist.get_world_size() == 0:
            truth.peers[name] = _peer(name, sizes, steps)[0]
            tell(f"{name}: {truth.peers[name]:.3f} s")
    return truth


def calibrated(facts: Facts, works: dict[int, list[Work]]) -> Facts:
    """Facts with launches and memory fitted to passes of two sizes; all ranks call it."""
    own = {n: [work.forward_s + work.backward_s for work in found] for n, found in works.items()}
    told = gather_objects(own)
    few, many = sorted(works)
    begun, ended = (statistics.median(s for one in told for s in one[n]) for n in (few, many))
    each = (ended - begun) / (many - few)
    launches = sum(facts.launches) / facts.device.launch_s
    endless = facts.on(replace(facts.device, memory_rate=math.inf, memory_curve=None))
    products = endless.forward_s + endless.backward_s
    moved = facts.on(replace(facts.device, memory_curve=None))
    moving = moved.forward_s + moved.backward_s - products
    launch_s = max(1e-6, (begun - few * each) / launches)
    rate = facts.device.memory_rate * min(1.0, moving / max(1e-9, each - products))
    launch_s, rate = broadcast_object((launch_s, rate))
    found = replace(facts.device, launch_s=launch_s, memory_rate=rate, memory_curve=None)
    return facts.on(found)


def _batch(sizes: Sizes, place: int, places: int) -> dict[str, torch.Tensor]:
    tokens, _ = sizes.batch_of(0, place, places)
    return {"input_ids": tokens, "labels": tokens}


def _adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def _row(grid: Grid, sizes: Sizes, scorer: Scorer, found: Found, steps: int) -> Row:
    why = scorer.why_unsupported(grid.axes)
    if why:
        return Row(str(grid), 0.0, why=why)
    grid = replace(grid, recomputed=min(grid.recomputed, sizes.blocks))
    scored = scorer.score(grid)
    try:
        planned, (seconds, spread) = _run(scored, sizes, scorer, found, steps)
    except GulliverError as error:
        return Row(str(grid), scored.seconds.step, why=str(error))
    return Row(str(grid), scored.seconds.step, planned, seconds, "", spread)


def _run(
    scored: Scored, sizes: Sizes, scorer: Scorer, found: Found, steps: int
) -> tuple[float, tuple[float, float]]:
    """Seconds of a step as the plan predicts them, and as they are, with their spread."""
    grid, model = scored.grid, sizes.model()
    inner = _adamw(model)
    plan = plan_of(scored, found, model, inner, "fp32")
    booster = Booster(plan=plan, verbose=False)
    boosted, optimizer, *_ = booster.boost(model, inner)
    accumulate = 1 if grid.axes.pipeline > 1 else grid.micro_batches
    each = sizes.batch // grid.axes.data
    engine = AutoEngine(booster, boosted, optimizer, found, grid, accumulate, each, ())
    batch = _batch(sizes, *booster.plugin.data_place())

    def step() -> None:
        engine.run(batch)
        optimizer.step()
        optimizer.zero_grad()

    return plan.predicted.seconds.step, _seconds(step, steps)


def _peer(name: str, sizes: Sizes, steps: int) -> tuple[float, float]:
    peer: Contestant = (data_parallel if name == FSDP2 else dtensor)(name, sizes)
    return _seconds(peer.advance, steps)


def _seconds(step: Callable[[], object], steps: int) -> tuple[float, float]:
    """Median seconds of consecutive steps and their interquartile range, of the slowest rank.

    Nothing is waited for between steps: messages that a step leaves in flight delay the next.
    """
    barrier()
    step()
    ends = [time.perf_counter()]
    for _ in range(steps):
        step()
        ends.append(time.perf_counter())
    each = [later - earlier for earlier, later in itertools.pairwise(ends)]
    barrier()
    quartiles = statistics.quantiles(each, n=4, method="inclusive")
    return max(gather_objects((quartiles[1], quartiles[2] - quartiles[0])))
