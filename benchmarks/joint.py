"""Joint search of shardings and recomputation against the two stages, executed under budgets.

Four ranks run the plans of operators that each search finds for budgets between the least that
works and what the fastest shardings take. Two stages (`solve_in_stages`): shardings first, with all
activations kept, for several rooms; recomputation for these shardings afterwards; the best counts.

Ranks of the machine's two cores take turns in what is computed: products of matrices are slept at
the rate of a device (`_planner_ranks.py`); all else is computed, and all messages are sent. Plans
of a budget run in turns. Beside the clock, which other work on the machine disturbs, stands what
the rank that does most has executed: products at the device's rate, messages by their number and
bytes on the described link; what is recomputed counts as often as it ran. Bytes are those of all
tensors of a rank that are alive at once: state, activations, messages, and what the optimizer's
step makes for a while.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import torch
import tyro
from tests.operators.operator_models import Llama, LocalBytes
from torch.utils._pytree import tree_leaves

from benchmarks._harness import Report, Spread, at_least, at_most, finish
from benchmarks._planner_ranks import Slowed
from benchmarks.netlab import run
from gulliver.booster import Booster
from gulliver.comm import barrier, gather_objects
from gulliver.errors import GulliverError
from gulliver.hardware import Cluster, described
from gulliver.hardware.cluster import Axis, Link
from gulliver.hardware.costs import point_to_point_seconds
from gulliver.operators.plans import batch_of, form_of, plan_from, problem_of
from gulliver.operators.problem import Problem
from gulliver.plan import Plan
from gulliver.plan.tree import Mesh
from gulliver.solve import Block, Operator, least_memory, solve_joint
from gulliver.solve.joint import EdgeSeconds, Pick, joint_cost
from gulliver.solve.joint_search import JointPlan

RANKS, WIDTH, HEADS, INNER, WORDS = 4, 256, 8, 512, 512
APART = 0.01  # Relative difference of predicted seconds from which on plans are told apart
MIB = 2**20
ROOMS = (1.0, 1.2, 1.5, 2.0, 3.0)  # Memory of the first of two stages, in budgets


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    blocks: int = 4
    samples: int = 8
    length: int = 128
    steps: int = 4  # Measured steps of each plan
    rate: float = 2e9  # FLOP/s of the device that is slept
    budgets: tuple[float, ...] = (0.02, 0.06, 0.1, 0.15, 0.2, 0.35)
    """So much of the way from the least memory to that of the fastest picks."""
    keep: bool = False  # Write benchmarks/results


@dataclass(frozen=True)
class Point:
    """A plan of one search for one budget; without a text where there is none."""

    search: str
    budget: int
    seconds: float = 0.0
    peak: int = 0
    text: str = ""


@dataclass(frozen=True)
class Measured:
    """Measured time and memory of a plan."""

    steps: tuple[float, ...] = ()  # seconds of the slowest rank, of each step
    # seconds of products and of messages, of the rank that has most of both
    executed: tuple[float, float] = (0.0, 0.0)
    peak: int = 0  # most bytes of a rank

    @property
    def seconds(self) -> float:
        """The middle one of the steps."""
        return Spread(self.steps).median if self.steps else 0.0


def model_of(options: Options) -> Llama:
    torch.manual_seed(0)
    return Llama(options.blocks, WIDTH, HEADS, HEADS, INNER, WORDS).float()


def batch(options: Options) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (options.samples, options.length + 1), generator=draw)
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def cluster_of(options: Options) -> Cluster:
    """Devices that sleep, and the links of the loopback."""
    found = described("cpu-loopback")
    device = replace(found.device, matmul={"float32": options.rate}, matmul_curves={})
    link = found.axes[-1].link if found.axes else Link(3e-4, 5e8)
    return Cluster("ranks that sleep, loopback", device, (Axis("data", RANKS, link),))


def search(options: Options) -> list[Point]:
    """Plans of both searches for all budgets."""
    model, given = model_of(options), batch_of(batch(options))
    problem = problem_of(model, given, (RANKS,), cluster_of(options))
    blocks = problem.blocks
    least = least_memory(blocks).peak
    most = solve_joint(blocks, 1 << 60, ("keep",)).cost.peak
    points = list[Point]()
    for share in options.budgets:
        budget = int(least + share * (most - least))
        for name, solve in (("joint", solve_joint), ("two stages", solve_in_stages)):
            try:
                found = solve(blocks, budget)
            except GulliverError:
                points.append(Point(name, budget))
                continue
            points.append(_point(name, budget, problem, found, form_of(given)))
    return points


def solve_in_stages(blocks: Sequence[Block], budget: int) -> JointPlan:
    """Shardings with everything kept, for several rooms; then recomputation for each of them."""
    lean = least_memory(blocks, ("keep",)).peak
    rooms = {max(lean, int(room * budget)) for room in ROOMS} | {lean, 1 << 60}
    found = list[JointPlan]()
    for room in sorted(rooms):
        first = solve_joint(blocks, room, ("keep",)).picks
        before = [None, *(row[-1].strategy for row in first)]
        alone = [_fixed(*parts) for parts in zip(blocks, first, before, strict=False)]
        if least_memory(alone).peak > budget:
            continue
        rows = zip(first, solve_joint(alone, budget).picks, strict=True)
        picks = tuple(
            tuple(Pick(a.strategy, b.choice) for a, b in zip(*row, strict=True)) for row in rows
        )
        found.append(JointPlan(picks, joint_cost(blocks, picks), 0.0, False, 0.0))
    if not found:
        raise GulliverError(f"no shardings of a first stage fit {budget} bytes")
    return min(found, key=lambda plan: plan.cost.seconds)


def _fixed(block: Block, picks: Sequence[Pick], entry: int | None) -> Block:
    """A block whose operators have one strategy each."""
    operators = list[Operator]()
    for operator, pick in zip(block.operators, picks, strict=True):
        edges = list[EdgeSeconds | None]()
        for source, edge in zip(operator.inputs, operator.conversions, strict=False):
            row = entry if source < 0 else picks[source].strategy
            if edge is None or row is None:
                edges.append(None)
                continue
            costs = (edge.forward_s, edge.backward_s, edge.saved)
            edges.append(EdgeSeconds(*(c and ((c[row][pick.strategy],),) for c in costs)))  # type: ignore[arg-type]
        only = (operator.strategies[pick.strategy],)
        operators.append(replace(operator, strategies=only, conversions=tuple(edges)))
    return Block(tuple(operators))


def _point(
    name: str, budget: int, problem: Problem, found: JointPlan, form: dict[str, str]
) -> Point:
    plan = plan_from(problem, found, Mesh("cpu", {"data": RANKS}), form, budget)
    return Point(name, budget, found.cost.seconds, found.cost.peak, plan.to_yaml())


def measure(options: Options, points: list[Point]) -> list[Measured]:
    """One rank's part: what each plan takes; nothing where there is none.

    The plans of a budget take turns; equal ones run once.
    """
    torch.set_num_threads(1)
    found = list[Measured]()
    for _, group in groupby(points, key=lambda point: point.budget):
        some = list(group)
        texts = dict.fromkeys(point.text for point in some if point.text)
        runs = {text: _Run(options, text) for text in texts}
        took: dict[str, list[float]] = {text: [] for text in runs}
        for turn in range(options.steps):
            # Each goes first in turn.
            for text in list(runs)[:: -1 if turn % 2 else 1]:
                took[text].append(runs[text].timed())
        made = {t: Measured(tuple(took[t]), r.executed, r.peak()) for t, r in runs.items()}
        found += [made.get(point.text, Measured()) for point in some]
    return found


class Executed(Slowed):
    """Lets products take as long as on a device; adds up seconds of products and messages."""

    def __init__(self, rate: float, cluster: Cluster) -> None:
        super().__init__(rate)
        self.cluster, self.products_s, self.messages_s = cluster, 0.0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.send.default:
            count = sum(t.nbytes for t in tree_leaves(args[0]) if isinstance(t, torch.Tensor))
            self.messages_s += point_to_point_seconds(self.cluster.axes[-1].link, count)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _sleep(self, flops: int, done: float) -> None:
        self.products_s += flops / self.rate
        super()._sleep(flops, done)


class _Run:
    """A model that runs as a plan says."""

    def __init__(self, options: Options, text: str) -> None:
        self._given, self._options, self.executed = batch(options), options, (0.0, 0.0)
        model = model_of(options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        self._booster = Booster(plan=Plan.from_yaml(text), verbose=False)
        self._model, self._stepper, *_ = self._booster.boost(model, optimizer)
        self._step()
        self._stepper.step()
        self._stepper.zero_grad()

    def _step(self) -> None:
        self._booster.backward(self._model(**self._given), self._stepper)

    def timed(self) -> float:
        """Seconds of forward and backward of the slowest rank, products slept."""
        with Executed(self._options.rate, cluster_of(self._options)) as counted:
            barrier()
            begun = time.perf_counter()
            self._step()
            took = time.perf_counter() - begun
        each = gather_objects((counted.products_s, counted.messages_s))
        self.executed = max(each, key=sum)
        self._stepper.zero_grad()
        return max(gather_objects(took))

    def peak(self) -> int:
        """Most bytes of a step, of the rank that has most; the run ends with it."""
        state = self._booster.compare()["optimizer_state"].measured
        there = self._stepper.parameter_bytes(self._model) + state
        with LocalBytes() as live:
            self._step()
            self._stepper.step()
        peak = max(gather_objects(int(there) + live.peak))
        self._booster.close()
        return peak


def fill(report: Report, points: list[Point], found: list[Measured]) -> None:
    """Rows, figures and bars of what was measured."""
    for point, one in zip(points, found, strict=True):
        cells = ("does not fit", "", "", "", "")
        if point.text:
            products, messages = (1e3 * seconds for seconds in one.executed)
            cells = (
                f"{1e3 * point.seconds:.0f} ms",
                f"{products:.0f} + {messages:.0f} ms",
                f"{1e3 * one.seconds:.0f} ms",
                f"{point.peak / MIB:.2f} MiB",
                f"{one.peak / MIB:.2f} MiB",
            )
        report.rows.append((f"{point.budget / MIB:.2f} MiB: {point.search}", *cells))
    both = list(zip(points, found, strict=True))
    report.figures["points"] = [{**asdict(replace(p, text="")), **asdict(m)} for p, m in both]
    pairs = [(a, b) for a, b in zip(both[::2], both[1::2], strict=True) if a[0].text and b[0].text]
    missing = sum(not point.text for point in points[1::2])
    over = max(one.peak / point.budget for point, one in both)
    report.bars += [
        at_least("budgets executed", sum(bool(point.text) for point in points[::2]), 6),
        at_most("measured peak over the budget, the worst", over, 1.0),
    ]
    report.notes += [
        f"two stages find nothing for {missing} of {len(points) // 2}",
        "seconds of forward and backward; executed: products + messages; measured: medians",
        "where both searches find the same plan, it runs once",
    ]
    _compare(report, pairs)


def _compare(report: Report, pairs: list[Any]) -> None:
    """Bars of two stages over the joint search: predicted, executed, and by the clock."""
    predicted = [b.seconds / a.seconds for (a, _), (b, _) in pairs]
    executed = [sum(b.executed) / sum(a.executed) for (_, a), (_, b) in pairs]
    # Where both found the same plan, or nearly, what differs by the clock is the machine.
    apart = [pair for pair, ratio in zip(pairs, predicted, strict=True) if ratio > 1 + APART]
    clock = [y / x for (_, a), (_, b) in apart for x, y in zip(a.steps, b.steps, strict=True)]
    name = "two stages over joint"
    report.bars += [
        at_least(f"predicted: {name}, the worst budget", min(predicted), 1 - 1e-9),
        at_least(f"executed: {name}, the worst budget", min(executed), 0.99),
        at_least(f"executed: {name}, the best budget", max(executed), 1.02),
        at_least("budgets at which plans differ by 1 % or more", len(apart), 3),
    ]
    if clock:
        middle = statistics.median(clock)
        report.bars.append(at_least(f"by the clock, where they differ: {name}", middle, 1.01))


def main() -> None:
    if sys.argv[1:2] == ["--search"]:
        options = Options(**json.loads(sys.argv[2]))
        print(json.dumps([asdict(point) for point in search(options)]))
        return
    options = tyro.cli(Options, description=__doc__)
    points = _points(options)
    found = run(measure, None, options, points, ranks=RANKS)[0]
    report = Report(
        "joint",
        "Shardings and recomputation jointly, and in two stages, under budgets",
        ("budget", "predicted", "executed", "measured", "peak predicted", "peak measured"),
    )
    fill(report, points, found)
    finish(report, options.keep)


def _points(options: Options) -> list[Point]:
    """Plans, searched for in a process of its own: ranks are forked from this one."""
    command = [sys.executable, "-m", "benchmarks.joint", "--search", json.dumps(asdict(options))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [Point(**values) for values in json.loads(done.stdout.splitlines()[-1])]


if __name__ == "__main__":
    main()
