"""Joint search of shardings and recomputation against the two stages, executed under budgets.

Four ranks run the plans of operators that each search finds for budgets between the least that
works and what the fastest shardings take. Two stages, as planners do it: shardings first, with all
activations kept and room for one, one and a half, two times the budget, or any; recomputation for
these shardings afterwards; the best of the four counts. Ranks of the machine's two cores take turns
in what is computed: products of matrices are slept at the rate of a device (`_planner_ranks.py`).
Bytes are those of all tensors of a rank that are alive at once: state, activations, messages, and
what the optimizer's step makes for a while.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import tyro
from tests.operator_models import Llama, LocalBytes

from benchmarks._harness import Report, Spread, at_least, at_most, finish
from benchmarks._planner_ranks import Slowed
from benchmarks.netlab import run
from gulliver.booster import Booster
from gulliver.booster.operators import Problem, batch_of, form_of, plan_from, problem_of
from gulliver.comm import barrier, gather_objects
from gulliver.errors import GulliverError
from gulliver.hardware import Axis, Cluster, Link, described
from gulliver.plan import Mesh, Plan
from gulliver.solve import (
    Block,
    EdgeSeconds,
    JointPlan,
    OffloadLink,
    Pick,
    joint_cost,
    least_memory,
    solve_joint,
)

RANKS, WIDTH, HEADS, INNER, WORDS = 4, 256, 8, 512, 512
FIRST = (1.0, 1.5, 2.0, 1e9)
"""Room of the first stage, in budgets."""
SHARES = (0.02, 0.1, 0.2, 0.35, 0.55, 0.8, 1.0)
"""Budgets: so much of the way from the least memory to that of the fastest picks."""
QUICKLY: dict[str, Any] = {"states": 8, "tolerance": 0.01}
"""Width of the searches, both alike."""
MIB = 2**20


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    blocks: int = 4
    samples: int = 8
    length: int = 128
    steps: int = 3
    """Measured steps of each plan."""
    rate: float = 4e9
    """FLOP/s of the device that is slept."""
    keep: bool = False
    """Write benchmarks/results."""


@dataclass(frozen=True)
class Point:
    """A plan of one search for one budget; without a text where there is none."""

    search: str
    budget: int
    seconds: float = 0.0
    peak: int = 0
    text: str = ""


def model_of(options: Options) -> Llama:
    """The model, of float32."""
    torch.manual_seed(0)
    return Llama(options.blocks, WIDTH, HEADS, HEADS, INNER, WORDS).float()


def batch(options: Options) -> dict[str, torch.Tensor]:
    """The batch of all ranks."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (options.samples, options.length + 1), generator=draw)
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def cluster_of(options: Options) -> Cluster:
    """Devices that sleep, and the links of the loopback."""
    found = described("cpu-loopback")
    device = replace(found.device, matmul={"float32": options.rate}, matmul_curves={})
    link = found.axes[-1].link if found.axes else Link(3e-4, 5e8)
    return Cluster("ranks that sleep, loopback", device, (Axis("data", RANKS, link),))


def fixed(block: Block, picks: tuple[Pick, ...], entry: int | None) -> Block:
    """A block whose operators have one strategy each."""
    operators = []
    for operator, pick in zip(block.operators, picks, strict=True):
        edges = []
        for source, edge in zip(operator.inputs, operator.conversions, strict=True):
            row = entry if source < 0 else picks[source].strategy
            if edge is None or row is None:
                edges.append(None)
                continue
            forward, backward = (
                ((rows[row][pick.strategy],),) for rows in (edge.forward_s, edge.backward_s)
            )
            saved = edge.saved and ((edge.saved[row][pick.strategy],),)
            edges.append(EdgeSeconds(forward, backward, saved))
        only = (operator.strategies[pick.strategy],)
        operators.append(replace(operator, strategies=only, conversions=tuple(edges)))
    return Block(tuple(operators))


def jointly(blocks: list[Block], budget: int, link: OffloadLink | None) -> JointPlan:
    """All at once."""
    return solve_joint(blocks, budget, link, **QUICKLY)


def two_stages(blocks: list[Block], budget: int, link: OffloadLink | None) -> JointPlan:
    """Shardings first, then recomputation; the best of several first stages.

    Raises:
        GulliverError: no shardings of a first stage fit the budget, whatever is recomputed.
    """
    best, why = None, ""
    for room in FIRST:
        try:
            first = solve_joint(blocks, int(room * budget), link, ("keep",), **QUICKLY).picks
            before = [None, *(row[-1].strategy for row in first)]
            rest = [fixed(*parts) for parts in zip(blocks, first, before, strict=False)]
            found = solve_joint(rest, budget, link, **QUICKLY)
        except GulliverError as error:
            why = str(error)
            continue
        picks = tuple(
            tuple(Pick(a.strategy, b.choice) for a, b in zip(*rows, strict=True))
            for rows in zip(first, found.picks, strict=True)
        )
        found = replace(found, picks=picks, cost=joint_cost(blocks, picks, link))
        if best is None or found.cost.seconds < best.cost.seconds:
            best = found
    if best is None:
        raise GulliverError(why)
    return best


def search(options: Options) -> list[Point]:
    """Plans of both searches for all budgets."""
    model, given = model_of(options), batch_of(batch(options))
    problem = problem_of(model, given, (RANKS,), cluster_of(options))
    blocks = problem.blocks
    least = least_memory(blocks).peak
    most = solve_joint(blocks, 1 << 60, None, ("keep",), **QUICKLY).cost.peak
    points = list[Point]()
    for share in SHARES:
        budget = int(least + share * (most - least))
        for name, solve in (("joint", jointly), ("two stages", two_stages)):
            try:
                found = solve(blocks, budget, None)
            except GulliverError:
                points.append(Point(name, budget))
                continue
            points.append(_point(name, budget, problem, found, form_of(given)))
    return points


def _point(
    name: str, budget: int, problem: Problem, found: JointPlan, form: dict[str, str]
) -> Point:
    plan = plan_from(problem, found, Mesh("cpu", {"data": RANKS}), form, budget)
    return Point(name, budget, found.cost.seconds, found.cost.peak, plan.to_yaml())


def measure(options: Options, points: list[Point]) -> list[tuple[float, int]]:
    """One rank's part: seconds and most bytes of each plan; zeros where there is none."""
    torch.set_num_threads(1)
    return [_measured(options, point) if point.text else (0.0, 0) for point in points]


def _measured(options: Options, point: Point) -> tuple[float, int]:
    model, given = model_of(options), batch(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    booster = Booster(plan=Plan.from_yaml(point.text), verbose=False)
    boosted, stepper, *_ = booster.boost(model, optimizer)

    def step() -> None:
        booster.backward(boosted(**given), stepper)

    step()
    stepper.step()
    stepper.zero_grad()
    took = []
    with Slowed(options.rate):
        for _ in range(options.steps):
            barrier()
            begun = time.perf_counter()
            step()
            took.append(time.perf_counter() - begun)
            stepper.zero_grad()
    there = stepper.parameter_bytes(boosted) + booster.compare()["optimizer_state"].measured
    with LocalBytes() as live:
        step()
        stepper.step()
    seconds = map(max, zip(*gather_objects(took), strict=True))
    peak = max(gather_objects(int(there) + live.peak))
    booster.close()
    return Spread(tuple(seconds)).median, peak


def fill(report: Report, points: list[Point], found: list[tuple[float, int]]) -> None:
    """Rows, figures and bars of what was measured."""
    by_budget: dict[int, dict[str, tuple[Point, float, int]]] = {}
    for point, (seconds, peak) in zip(points, found, strict=True):
        by_budget.setdefault(point.budget, {})[point.search] = point, seconds, peak
        cells = ("does not fit", "", "", "")
        if point.text:
            cells = (
                f"{1e3 * point.seconds:.0f} ms",
                f"{1e3 * seconds:.0f} ms",
                f"{point.peak / MIB:.2f} MiB",
                f"{peak / MIB:.2f} MiB",
            )
        report.rows.append((f"{point.budget / MIB:.2f} MiB: {point.search}", *cells))
    figures: list[Any] = [
        {**asdict(replace(p, text="")), "measured_s": s, "measured_peak": b}
        for p, (s, b) in zip(points, found, strict=True)
    ]
    report.figures["points"] = figures
    pairs = [(row["joint"], row["two stages"]) for row in by_budget.values()]
    both = [(a, b) for a, b in pairs if a[0].text and b[0].text]
    over = max(peak / point.budget for point, (_, peak) in zip(points, found, strict=True))
    gains = [b[1] / a[1] for a, b in both]
    report.bars += [
        at_least("budgets executed", sum(bool(a[0].text) for a, _ in pairs), 6),
        at_most("measured peak over the budget, the worst", over, 1.0),
        at_most(
            "predicted seconds of the joint search over those of two stages, the worst",
            max((a[0].seconds / b[0].seconds for a, b in both), default=0.0),
            1.01,
        ),
        at_least("measured: two stages over joint, the best budget", max(gains, default=0.0), 1.02),
        at_least(
            "measured: two stages over joint, the worst budget", min(gains, default=0.0), 0.97
        ),
    ]
    report.notes += [
        f"two stages find nothing for {sum(not b[0].text for _, b in pairs)} of {len(pairs)}",
        "seconds of forward and backward of the slowest rank, medians",
    ]


def main() -> None:
    """Searches in a process of its own, runs the plans, and reports."""
    if sys.argv[1:2] == ["--search"]:
        options = Options(**json.loads(sys.argv[2]))
        print(json.dumps([asdict(point) for point in search(options)]))
        return
    options = tyro.cli(Options, description=__doc__)
    command = [sys.executable, "-m", "benchmarks.joint", "--search", json.dumps(asdict(options))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    points = [Point(**values) for values in json.loads(done.stdout.splitlines()[-1])]
    found = run(measure, None, options, points, ranks=RANKS)[0]
    report = Report(
        "joint",
        "Shardings and recomputation jointly, and in two stages, under budgets",
        ("budget", "predicted", "measured", "peak predicted", "peak measured"),
    )
    fill(report, points, found)
    finish(report, options.keep)


if __name__ == "__main__":
    main()
