"""What each rank does in the measured part of the data-centric benchmark."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks._models import llama
from gulliver.hardware import TableCosts


@dataclass(frozen=True)
class Workload:
    """Samples of a few shapes, and a small model for them."""

    model: str  # `llama` or `stdit`
    shapes: dict[str, int]  # tokens of a sample by the name of its shape
    shares: dict[str, float]  # share of the samples that each shape has
    memory: int  # tokens that a rank may hold at once: the longest needs all ranks or half of them
    samples: int = 48  # samples of an epoch
    step: int = 12  # samples of an optimizer step


def workload(model: str, short: bool, ranks: int) -> Workload:
    """A workload where short samples dominate, or long ones; the longest takes all ranks."""
    if model == "llama":
        shapes = {"64": 64, "128": 128, "256": 256, "2048": LONGEST}
    else:
        shapes = {"1x8x8": 64, "2x8x8": 128, "4x8x8": 256, "8x16x16": LONGEST}
    shares = (0.56, 0.3, 0.13, 0.01) if short else (0.1, 0.2, 0.4, 0.3)
    samples, step = (256, 128) if short else (32, 16)
    memory = LONGEST * 5 // 4 // ranks
    return Workload(model, shapes, dict(zip(shapes, shares, strict=True)), memory, samples, step)


LONGEST = 2048  # Tokens of the longest sample


def table(work: Workload, seed: int = 0) -> list[str]:
    """The shape of every sample, equal on all ranks."""
    draw = random.Random(seed)
    found = [n for n, share in work.shares.items() for _ in range(round(share * work.samples))]
    first = next(iter(work.shapes))  # takes what rounding leaves, or has too much
    while len(found) > work.samples:
        found.remove(first)
    found += [first] * (work.samples - len(found))
    draw.shuffle(found)
    return found


class Data:
    """Samples by index."""

    def __init__(self, work: Workload, shapes: list[str]) -> None:
        self.work, self.shapes = work, shapes

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        name, draw = self.shapes[index], torch.Generator().manual_seed(index)
        if self.work.model == "llama":
            ids = torch.randint(3, 512, (int(name),), generator=draw)
            return {"input_ids": ids, "labels": ids}
        frames, rows, columns = map(int, name.split("x"))
        clip = torch.randn(4, frames, 2 * rows, 2 * columns, generator=draw)
        sizes = {"fps": 24.0, "height": 16.0 * rows, "width": 16.0 * columns}
        found = {"x": clip, "y": torch.randn(1, 5, 16, generator=draw), "timestep": 500.0}
        return {k: torch.as_tensor(v, dtype=torch.float32) for k, v in {**found, **sizes}.items()}


def make(work: Workload) -> Any:
    """The small model of a workload."""
    import torch

    torch.manual_seed(0)
    if work.model == "llama":
        return llama(512, 192, 512, 4, 8, 8, LONGEST, use_cache=False).train()
    from gulliver.models import STDiT3

    sizes: dict[str, Any] = {"hidden_size": 192, "depth": 2, "num_heads": 8}
    texts: dict[str, Any] = {"caption_channels": 16, "model_max_length": 8}
    return STDiT3(**sizes, **texts, class_dropout_prob=0.0).train()


def loss_of(model: Any, data: dict[str, Any]) -> Any:
    """The mean loss of a micro-batch."""
    out = model(**data)
    return out.loss if hasattr(out, "loss") else out.float().square().mean()


class OneGroup:
    """Gives plans in which every group runs the same micro-batch again, to be measured."""

    def __init__(self, costs: Any, plans: list[Any], ranks: int, degrees: tuple[int, ...]) -> None:
        self.costs, self.plans, self.ranks, self.degrees = costs, plans, ranks, degrees
        self.seed, self.signature = 0, "measured"

    def __iter__(self) -> Any:
        return iter(self.plans)

    def position(self) -> None:
        """Nothing: it is iterated over once."""


AGAIN, MOST = 4, 12
"""Micro-batches of a step that is measured, of large and of small ones: the first warms up, the
last sends gradients. Ranks that share cores have to run beside each other long enough."""
SMALL = 256  # Tokens of a rank below which a micro-batch is small


@dataclass(frozen=True)
class StepEnds:
    """Seconds of a step before its first and after its last micro-batch, of messages and update.

    They are longer where groups of the first or last phase have messages of their own.
    """

    first_alone: float
    first_shared: float
    last_alone: float
    last_shared: float

    def first(self, groups: Any) -> float:
        return self.first_shared if _shared(groups) else self.first_alone

    def last(self, groups: Any) -> float:
        return self.last_shared if _shared(groups) else self.last_alone


def _shared(groups: Any) -> bool:
    return any(group.degree > 1 and group.micro_batches for group in groups)


Run = Callable[[list[Any]], list[tuple[list[float], float]]]
"""Runs plans one after the other; gives seconds of this rank's micro-batches and of each step."""


def measured_costs(work: Workload, run: Run, ranks: int) -> tuple[TableCosts, StepEnds]:
    """Seconds of micro-batches by shape, degree and batch, all ranks busy as in a step.

    Returns:
        The costs, and what a step takes besides at both ends.
    """
    from gulliver.comm import gather_objects
    from gulliver.comm.collectives import broadcast_object
    from gulliver.data_centric.steps import MicroBatch, RankGroup, StepPlan

    shapes = table(work)
    seconds: dict[str, dict[int, dict[int, float]]] = {}
    ends: dict[tuple[str, bool], list[float]] = {}
    for name, tokens in work.shapes.items():
        index = shapes.index(name)
        for degree in (d for d in (1, 2, 4) if d <= ranks):
            most = min(work.step, work.memory * degree // tokens)
            for batch in sorted({1, most} if most else ()):
                micro = MicroBatch(name, (index,) * batch)
                rows = [tuple(range(n, n + degree)) for n in range(0, ranks, degree)]
                times = AGAIN if batch * tokens > SMALL * degree else MOST
                plan = StepPlan(
                    0, 0, tuple(RankGroup(row, (micro,) * times) for row in rows), 0.0, 0.0
                )
                # Of two steps the second begins while parameters are on their way.
                found = gather_objects(run([plan, plan] if batch == most else [plan]))
                # The mean over all ranks: cores that are shared serve one after the other.
                middle = statistics.mean(s for rank in found for one, _ in rank for s in one[1:-1])
                seconds.setdefault(name, {}).setdefault(degree, {})[batch] = middle
                if batch == most:
                    begin = statistics.mean(rank[1][0][0] for rank in found) - middle
                    last = max(whole - sum(one[:-1]) for rank in found for one, whole in rank[1:])
                    ends.setdefault(("first", degree > 1), []).append(begin)
                    ends.setdefault(("last", degree > 1), []).append(last - middle)
    # Of the first rank: plans must be equal on all.
    order = [(name, shared) for name in ("first", "last") for shared in (False, True)]
    told = [max(0.0, statistics.median(ends.get(key, [0.0]))) for key in order]
    found, told = broadcast_object((_ordered(seconds), told))
    return TableCosts(found, work.shapes, memory=float(work.memory), model=work.model), StepEnds(
        *told
    )


def _ordered(seconds: dict[str, dict[int, dict[int, float]]]) -> Any:
    """The same, where noise lets more samples take less time not less than fewer."""
    return {
        name: {
            degree: dict(zip(row, itertools.accumulate(row.values(), max), strict=True))
            for degree, row in degrees.items()
        }
        for name, degrees in seconds.items()
    }


@dataclass(frozen=True)
class Measured:
    """Measurements of a workload under each planner."""

    speeds: dict[str, list[float]]  # samples a second of each epoch, by planner
    ratios: list[float]  # measured over predicted seconds of our steps
    predicted: dict[str, float]  # predicted samples a second, by planner
    imbalance: dict[str, float]  # mean imbalance, by planner
    step: dict[str, float]  # mean samples of a step, by planner
    ends: StepEnds  # what a step takes besides
    # samples a second that no plan of these costs could be above: each step as short as its bound,
    # and the shorter of its ends at both
    limit: float


def run_workloads(works: list[Workload], rounds: int) -> list[Measured]:
    """Trains epochs of workloads of one model, under each planner in turn, on all ranks."""
    import torch

    from gulliver.booster import Booster, DataCentricLoader, DataCentricPlugin
    from gulliver.comm import barrier, init_world

    world, model = init_world(), make(works[0])
    plugin = DataCentricPlugin(1, chunk_mb=4, verbose=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, *_ = Booster(plugin=plugin).boost(model, optimizer)

    def epoch(planner: Any, work: Workload) -> tuple[float, list[Ran]]:
        loader = DataCentricLoader(planner, Data(work, table(work)), model, optimizer)
        steps: list[Ran] = []
        barrier()
        begun = time.perf_counter()
        for step in loader:
            started = time.perf_counter()
            for batch in step:
                step.backward(loss_of(model, batch.data))
            optimizer.step()
            optimizer.zero_grad()
            taken = [seconds for *_, seconds in step.measured]
            steps.append(Ran(step.plan, taken, time.perf_counter() - started))
        barrier()
        return time.perf_counter() - begun, steps

    def run(plans: list[Any]) -> list[tuple[list[float], float]]:
        _, steps = epoch(OneGroup(None, plans, world.size, (1, 2, 4)), works[0])
        return [(step.taken, step.whole) for step in steps]

    costs, ends = measured_costs(works[0], run, world.size)
    return [_compared(work, costs, ends, epoch, world.size, rounds) for work in works]


@dataclass(frozen=True)
class Ran:
    """A step that this rank ran: its plan, seconds of its micro-batches, and of all of it."""

    plan: Any
    taken: list[float]
    whole: float


def _compared(
    work: Workload,
    costs: TableCosts,
    ends: StepEnds,
    epoch: Callable[[Any, Workload], tuple[float, list[Ran]]],
    ranks: int,
    rounds: int,
) -> Measured:
    """Epochs of a workload under each planner in turn; bucketing, which is far off, only once."""
    from gulliver.comm import gather_objects
    from gulliver.comm.collectives import broadcast_object
    from gulliver.data import DataCentricPlanner, Samples

    shapes, budget = table(work), Samples(work.step)
    longest = max(work.shapes.values())
    fixed = next(d for d in (1, 2, 4) if d * work.memory >= longest)
    one: dict[str, Any] = {"pac": False, "intra": False, "degree": fixed}
    planners = {
        "ours": DataCentricPlanner(costs, shapes, ranks, budget, pac=False),
        "fixed degree, packed": DataCentricPlanner(costs, shapes, ranks, budget, **one),
        "bucketing": DataCentricPlanner(costs, shapes, ranks, budget, inter=False, **one),
    }
    speeds: dict[str, list[float]] = {name: [] for name in planners}
    ratios = []
    for number in range(rounds):  # the costs have warmed all of them up
        for name in planners if number % 2 == 0 else reversed(planners):
            if number and name == "bucketing":
                continue
            seconds, steps = epoch(planners[name], work)
            speeds[name].append(broadcast_object(len(shapes) / seconds))
            if name == "ours":
                took = gather_objects([step.whole for step in steps])
                most = [max(found) for found in zip(*took, strict=True)]
                ratios += [
                    real / _predicted(step.plan, ends, n == 0)
                    for n, (real, step) in enumerate(zip(most, steps, strict=True))
                ]
    predicted, imbalance, samples, limit = {}, {}, {}, 0.0
    first = min(ends.first_alone, ends.first_shared)
    least = first + min(ends.last_alone, ends.last_shared)
    for name, planner in planners.items():
        plans = list(planner)
        seconds = sum(_predicted(plan, ends, n == 0) for n, plan in enumerate(plans))
        predicted[name] = len(shapes) / seconds
        imbalance[name] = statistics.mean(plan.imbalance for plan in plans)
        samples[name] = len(shapes) / len(plans)
        if name == "ours":
            # Before the first step of an epoch nothing is on its way.
            limit = len(shapes) / (sum(plan.bound + least for plan in plans) - first)
    return Measured(speeds, ratios, predicted, imbalance, samples, ends, limit)


def _predicted(plan: Any, ends: StepEnds, is_first: bool) -> float:
    """Predicted seconds of a step; at the first of an epoch no stage is busy yet."""
    begin = 0.0 if is_first else ends.first(plan.phases[0])
    return plan.seconds + begin + ends.last(plan.phases[-1])
