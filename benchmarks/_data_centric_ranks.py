"""What each rank does in the measured part of the data-centric benchmark."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gulliver.hardware import TableCosts


@dataclass(frozen=True)
class Workload:
    """Samples of a few shapes, and a small model for them.

    Attributes:
        model: ``llama`` or ``stdit``.
        shapes: tokens of a sample by the name of its shape.
        shares: share of the samples that each shape has.
        memory: tokens that a rank may hold at once: the longest needs all ranks or half of them.
        samples: samples of an epoch.
        step: samples of an optimizer step.
    """

    model: str
    shapes: dict[str, int]
    shares: dict[str, float]
    memory: int
    samples: int = 48
    step: int = 12


def workload(model: str, short: bool, ranks: int) -> Workload:
    """A workload where short samples dominate, or long ones; the longest takes all ranks."""
    if model == "llama":
        shapes = {"64": 64, "128": 128, "256": 256, "2048": LONGEST}
    else:
        shapes = {"1x8x8": 64, "2x8x8": 128, "4x8x8": 256, "8x16x16": LONGEST}
    shares = (0.55, 0.3, 0.13, 0.02) if short else (0.1, 0.2, 0.4, 0.3)
    samples, step = (96, 48) if short else (32, 16)
    memory = LONGEST * 5 // 4 // ranks
    return Workload(model, shapes, dict(zip(shapes, shares, strict=True)), memory, samples, step)


LONGEST = 2048
"""Tokens of the longest sample."""


def table(work: Workload, seed: int = 0) -> list[str]:
    """The shape of every sample, equal on all ranks."""
    draw = random.Random(seed)
    found = [n for n, share in work.shares.items() for _ in range(round(share * work.samples))]
    found += [next(iter(work.shapes))] * (work.samples - len(found))
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
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=512,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=2048,
            use_cache=False,
        )
        return LlamaForCausalLM(config).train()
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


AGAIN, MOST = 4, 12
"""Micro-batches of a step that is measured, of large and of small ones: the first warms up, the
last sends gradients. Ranks that share cores have to run beside each other long enough."""
SMALL = 256
"""Tokens of a rank below which a micro-batch is small."""


def measured_costs(
    work: Workload, run: Callable[[Any], tuple[list[float], float]], ranks: int
) -> tuple[TableCosts, float]:
    """Seconds of micro-batches by shape, degree and batch, all ranks busy as in a step.

    Args:
        work: workload.
        run: runs a plan; gives seconds of this rank's micro-batches and of the whole step.
        ranks: all of them.

    Returns:
        The costs, and the seconds that a step takes besides: gradients and update.
    """
    from gulliver.comm import broadcast_object, gather_objects
    from gulliver.data import MicroBatch, RankGroup, StepPlan

    shapes = table(work)
    seconds: dict[str, dict[int, dict[int, float]]] = {}
    besides = []
    for name, tokens in work.shapes.items():
        index = shapes.index(name)
        for degree in (d for d in (1, 2, 4) if d <= ranks):
            most = min(work.step, work.memory * degree // tokens)
            for batch in sorted({1, -(-most // 4), most} if most else ()):
                micro = MicroBatch(name, (index,) * batch)
                rows = [tuple(range(n, n + degree)) for n in range(0, ranks, degree)]
                times = AGAIN if batch * tokens > SMALL * degree else MOST
                groups = tuple(RankGroup(row, (micro,) * times) for row in rows)
                found, whole = run(StepPlan(0, 0, groups, 0.0, 0.0))
                # The mean over all ranks: cores that are shared serve one after the other.
                middle = statistics.mean(s for rank in gather_objects(found) for s in rank[1:-1])
                seconds.setdefault(name, {}).setdefault(degree, {})[batch] = middle
                besides.append(whole - sum(found[:-1]) - middle)
    # Of the first rank: plans must be equal on all.
    found, rest = broadcast_object((_ordered(seconds), statistics.median(besides)))
    return TableCosts(found, work.shapes, memory=float(work.memory), model=work.model), rest


def _ordered(seconds: dict[str, dict[int, dict[int, float]]]) -> Any:
    """The same, where noise lets more samples take less time not less than fewer."""
    return {
        name: {
            degree: dict(zip(row, itertools.accumulate(row.values(), max), strict=True))
            for degree, row in degrees.items()
        }
        for name, degrees in seconds.items()
    }


def run_workload(
    work: Workload, rounds: int
) -> tuple[dict[str, list[float]], list[float], dict[str, tuple[float, float, float]]]:
    """Trains epochs under each planner in turn, on all ranks of a network.

    Returns:
        Samples a second of each planner and round, measured over predicted seconds of our steps,
        and of each planner predicted samples a second, imbalance, and samples of a step.
    """
    import torch

    from gulliver.booster import Booster, DataCentricLoader, DataCentricPlugin
    from gulliver.comm import barrier, broadcast_object, gather_objects, init_world
    from gulliver.data import DataCentricPlanner, Samples

    world, model = init_world(), make(work)
    plugin = DataCentricPlugin(1, chunk_mb=4, verbose=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, *_ = Booster(plugin=plugin).boost(model, optimizer)
    shapes = table(work)
    data = Data(work, shapes)

    def epoch(planner: Any) -> tuple[float, list[Any], list[tuple[float, float]]]:
        loader = DataCentricLoader(planner, data, model, optimizer)
        measured, steps = [], []
        barrier()
        begun = time.perf_counter()
        for step in loader:
            started = time.perf_counter()
            for batch in step:
                step.backward(loss_of(model, batch.data))
            optimizer.step()
            optimizer.zero_grad()
            measured += step.measured
            steps.append((step.plan.seconds, time.perf_counter() - started))
        barrier()
        return time.perf_counter() - begun, measured, steps

    def run(plan: Any) -> tuple[list[float], float]:
        _, found, ((_, whole),) = epoch(OneGroup(None, [plan], world.size, (1, 2, 4)))
        return [seconds for *_, seconds in found], whole

    costs, besides = measured_costs(work, run, world.size)
    longest = max(work.shapes.values())
    fixed = next(d for d in (1, 2, 4) if d * work.memory >= longest)
    budget = Samples(work.step)
    planners = {
        "ours": DataCentricPlanner(costs, shapes, world.size, budget, pac=False),
        "fixed degree, packed": DataCentricPlanner(
            costs, shapes, world.size, budget, pac=False, intra=False, degree=fixed
        ),
        "bucketing": DataCentricPlanner(
            costs, shapes, world.size, budget, pac=False, intra=False, degree=fixed, inter=False
        ),
    }
    speeds: dict[str, list[float]] = {name: [] for name in planners}
    ratios = []
    for number in range(rounds):  # the costs have warmed all of them up
        for name in planners if number % 2 == 0 else reversed(planners):
            seconds, _, steps = epoch(planners[name])
            speeds[name].append(broadcast_object(len(shapes) / seconds))
            if name == "ours":
                ranks = gather_objects([took for _, took in steps])
                most = [max(took) for took in zip(*ranks, strict=True)]
                ratios += [m / (p + besides) for m, (p, _) in zip(most, steps, strict=True)]
    told = {}
    for name, planner in planners.items():
        plans = list(planner)
        predicted = sum(plan.seconds + besides for plan in plans)
        imbalance = statistics.mean(plan.imbalance for plan in plans)
        told[name] = len(shapes) / predicted, imbalance, len(shapes) / len(plans)
    return speeds, ratios, told
