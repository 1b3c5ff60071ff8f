"""Draws the pictures of the documentation: `python -m tools.draw_docs` (also part of `make docs`).

Each picture comes from the code that it explains: schedules from `gulliver.parallel.pipeline`, the
memory limit from a replayed step, the data-centric step from its planner, jobs from the simulator.
`tests/test_docs.py` compares the files with what this script draws.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

ASSETS = Path(__file__).resolve().parent.parent / "docs" / "assets"
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#999933")
RESULTS = ASSETS.parent.parent / "benchmarks" / "results"
PUBLISHED = 0.95  # PowerAI DDL (Cho et al. 2017), Caffe on 256 GPUs
Point = tuple[float, float]
IDLE, TEXT = "#eeeeee", "#222222"


class Svg:
    """Rectangles and text on a white page."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="sans-serif">\n'
            f"<title>{escape(title)}</title>\n"
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n'
        )
        self._parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        label: str = "",
        *,
        dark: bool = True,
        size: int = 11,
    ) -> None:
        """Adds a rectangle, with a label in its middle."""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{fill}" stroke="#ffffff" stroke-width="0.8"/>\n'
        )
        if label:
            self.text(
                x + width / 2,
                y + height / 2 + size * 0.36,
                label,
                size,
                "#ffffff" if dark else TEXT,
                "middle",
            )

    def text(
        self,
        x: float,
        y: float,
        label: str,
        size: int = 12,
        fill: str = TEXT,
        anchor: str = "start",
    ) -> None:
        """Adds a line of text."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" '
            f'text-anchor="{anchor}">{escape(label)}</text>\n'
        )

    def line(self, points: Sequence[Point], color: str, dashed: bool = False) -> None:
        """Adds lines from point to point."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = ' stroke-dasharray="6 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>\n'
        )

    def __str__(self) -> str:
        return self._head + "".join(self._parts) + "</svg>\n"


def rank_grid() -> str:
    """Sixteen ranks as pipeline 2 x data 2 x sequence 2 x tensor 2."""
    from gulliver.plan.tree import AXES

    assert AXES == ("pipeline", "data", "sequence", "tensor")  # outer to inner, as drawn
    svg = Svg(760, 240, "Sixteen ranks: pipeline 2, data 2, sequence 2, tensor 2")
    for rank in range(16):
        tensor, rest = rank % 2, rank // 2
        sequence, rest = rest % 2, rest // 2
        data, stage = rest % 2, rest // 2
        x = 130 + data * 320 + sequence * 150 + tensor * 68
        y = 50 + stage * 82
        svg.box(x, y, 62, 46, COLORS[2 * data + sequence], f"rank {rank}", size=13)
    for data in range(2):
        x = 130 + data * 320
        svg.text(x + 140, 20, f"data replica {data}", 13, anchor="middle")
        for sequence in range(2):
            svg.text(x + sequence * 150 + 65, 40, f"sequence part {sequence}", 11, anchor="middle")
    for stage in range(2):
        svg.text(10, 78 + stage * 82, f"pipeline stage {stage}", 13)
    svg.text(10, 212, "Adjacent boxes of one color share each layer (tensor axis, fastest links).")
    svg.text(
        10, 230, "Ranks of one stage sum gradients over data and sequence; ZeRO shards over these."
    )
    return str(svg)


def chunk_life() -> str:
    """States of one chunk in a step at ZeRO stages 1 to 3."""
    shard, whole, moving, gradient = "#bbccdd", COLORS[0], COLORS[4], COLORS[1]
    update = COLORS[2]
    adds = [("", 40, IDLE), ("adds up", 16, gradient), ("reduce-scatter", 14, moving)]
    moves = [("gather", 8, moving), ("whole", 12, whole), ("shard", 12, shard)]
    moves += [("gather", 8, moving), ("whole", 16, whole), ("shard", 14, shard)]
    lines = {
        "stage 1 parameters": [
            ("whole", 62, whole),
            ("update", 8, update),
            ("all-gather", 30, moving),
        ],
        "stage 1 gradient": [*adds, ("whole + shard", 30, gradient)],
        "stage 2 gradient": [*adds, ("shard", 30, shard)],
        "stage 3 parameters": [*moves, ("update", 8, update), ("shard", 22, shard)],
        "stage 3 gradient": [*adds, ("shard", 30, shard)],
    }
    svg = Svg(760, 220, "One chunk during a training step")
    for n, (name, spans) in enumerate(lines.items()):
        x, y = 140.0, 34 + n * 34
        svg.text(10, y + 18, name)
        for label, share, fill in spans:
            svg.box(x, y, 6 * share, 26, fill, label, dark=fill not in (shard, moving, IDLE))
            x += 6 * share
    for label, at in (("forward", 16), ("backward", 50), ("step", 74), ("next forward", 90)):
        svg.text(140 + 6 * at, 24, label, 12, anchor="middle")
    return str(svg)


def tiers() -> str:
    """Draws the memory of a replayed step under a limit, visit by visit."""
    import torch
    from torch import nn

    from gulliver import GeminiPlugin
    from gulliver.hardware import described
    from gulliver.planner.ranks import rank_states
    from gulliver.planner.replay import Replay
    from gulliver.planner.resolve import resolve

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))
    optimizer = torch.optim.AdamW(model.parameters())
    plugin = GeminiPlugin("80MiB", disk="/scratch:1GiB", chunk_mb=4, verbose=False)
    cluster = described("8xh100-infiniband").resized(1)
    plan = plugin.make_plan(model, optimizer, cluster)
    (state,) = rank_states(resolve(plan, model, optimizer))
    budget = 80 * 2**20
    assert plan.zero is not None
    assert plan.zero.tiers is not None
    replay = Replay(state, budget, True, plan.zero.tiers)
    names = {"master": "parameters", "gradient": "gradients", "moment": "optimizer state"}
    kinds = {key: (COLORS[n], name) for n, (key, name) in enumerate(names.items())}
    seen: list[tuple[str, dict[str, float], float]] = []
    sizes = {one.key: one.nbytes for one in state.objects()}
    visit = replay.visit

    def recorded(phase: str, number: int) -> None:
        now = dict.fromkeys(kinds, 0.0)
        for key in replay.held.keys:
            now[key[0]] += sizes[key]
        seen.append((phase, now, 0.0))
        visit(phase, number)

    replay.visit = recorded  # type: ignore[method-assign]
    for _ in range(6):
        seen.clear()
        replay.step()
    svg = Svg(760, 300, "Memory of a step under a limit, by kind of state")
    steps, total = len(seen), sum(sizes.values())
    scale, base, width = 200 / budget, 240, 600 / steps
    svg.box(140, base - 200, 600, 200, IDLE)
    for n, (_, held, _) in enumerate(seen):
        y = float(base)
        for kind, (fill, _) in kinds.items():
            height = held[kind] * scale
            y -= height
            svg.box(140 + n * width, y, width, height, fill)
    for phase in ("forward", "backward", "update"):
        places = [n for n, (name, _, _) in enumerate(seen) if name == phase]
        middle = 140 + width * (places[0] + places[-1] + 1) / 2
        svg.text(middle, base + 18, phase, 13, anchor="middle")
    svg.text(10, base - 188, "80 MiB limit")
    svg.text(10, base, "0")
    x = 140.0
    for fill, name in kinds.values():
        svg.box(x, 272, 14, 14, fill)
        svg.text(x + 20, 284, name)
        x += 140
    svg.text(140, 24, f"in memory; the rest of {total / 2**20:.0f} MiB of state is on the disk", 13)
    return str(svg)


def schedules() -> str:
    """All pipeline schedules on four ranks with eight micro-batches."""
    from gulliver.parallel.pipeline.schedules import STYLES, computations, predict, stages_by_rank

    ranks, micro = 4, 8
    svg = Svg(760, 40 + 120 * len(STYLES), "Pipeline schedules on 4 ranks with 8 micro-batches")
    fills = {"F": COLORS[0], "B": COLORS[2], "I": COLORS[2], "W": COLORS[3]}
    for n, style in enumerate(STYLES):
        numbers = stages_by_rank(style, ranks)
        stages = sum(map(len, numbers))
        forward = [4 / stages] * stages
        found = predict(style, ranks, micro, forward)
        orders = [list(computations(style, place, numbers, micro)) for place in range(ranks)]
        times = {"F": forward, "B": [2 * f for f in forward], "I": forward, "W": forward}
        rank_of = {stage: place for place, held in enumerate(numbers) for stage in held}
        y = 40 + 120 * n
        svg.text(10, y - 6, f"{style}: {found.seconds:g} units, ranks idle {found.bubble:.0%}", 13)
        for rank, (kind, _, number), begin, end in spans(orders, times, rank_of):
            svg.box(
                60 + 18.5 * begin, y + 22 * rank, 18.5 * (end - begin), 20, fills[kind],
                str(number), size=10 if end - begin > 0.9 else 8,
            )  # fmt: skip
        for rank in range(ranks):
            svg.text(10, y + 14 + 22 * rank, f"rank {rank}", 11)
    y = 34 + 120 * len(STYLES) - 10
    for n, (fill, name) in enumerate(
        (
            (COLORS[0], "forward"),
            (COLORS[2], "backward, or its input half"),
            (COLORS[3], "weight gradients"),
        )
    ):
        svg.box(60 + 220 * n, y, 14, 14, fill)
        svg.text(80 + 220 * n, y + 12, name)
    return str(svg)


Work = tuple[str, int, int]


def spans(
    orders: Sequence[Sequence[Work]],
    times: Mapping[str, Sequence[float]],
    rank_of: Mapping[int, int],
) -> Iterator[tuple[int, Work, float, float]]:
    """Yields rank, work, begin and end of all that the ranks compute."""
    from gulliver.solve.timeline import inputs_of, output_of

    clocks, following, done = [0.0] * len(orders), [0] * len(orders), {}
    while any(at < len(order) for at, order in zip(following, orders, strict=True)):
        for rank, order in enumerate(orders):
            while following[rank] < len(order):
                work = order[following[rank]]
                needs = inputs_of(work, len(rank_of))
                if any(need not in done for need in needs):
                    break
                begin = max(clocks[rank], *(done[need] for need in needs), 0.0)
                clocks[rank] = done[output_of(work)] = begin + times[work[0]][work[1]]
                following[rank] += 1
                yield rank, work, begin, clocks[rank]


def data_centric() -> str:
    """A planned step of uneven samples on four ranks, next to one degree for all."""
    import random

    from gulliver.data import DataCentricPlanner, Samples
    from gulliver.hardware import TableCosts

    draw = random.Random(3)
    shapes = [draw.choice((256, 256, 256, 512, 512, 1024, 4096)) for _ in range(400)]
    costs = TableCosts.from_functions(
        set(shapes),
        cost=lambda n: n + n * n / 4000,
        length=lambda n: n,
        memory=4096,
        allowed=(1, 2, 4),
        lost=0.12,
    )
    settings = {
        "planned: each sample at its own degree": {},
        "one degree for all samples": {"intra": False, "degree": 4},
    }
    steps = {
        name: next(iter(DataCentricPlanner(costs, shapes, ranks=4, budget=Samples(40), **extra)))
        for name, extra in settings.items()
    }
    longest = max(step.seconds for step in steps.values())
    svg = Svg(760, 330, "A data-centric step on four ranks")
    fills = {length: COLORS[n] for n, length in enumerate(sorted(set(shapes)))}
    for n, (name, step) in enumerate(steps.items()):
        y = 40 + 135 * n
        svg.text(70, y - 8, f"{name}: {step.seconds / longest:.2f} of the time", 13)
        svg.box(70, y, 670 * step.seconds / longest, 100, IDLE)
        begin = dict.fromkeys(range(4), 0.0)
        for group, batch in step:
            x = 70 + 670 * begin[group.ranks[0]] / longest
            width, height = 670 * batch.seconds / longest, 25 * group.degree
            label = f"{len(batch.samples)} x {batch.shape}" if width > 50 else ""
            svg.box(x, y + 25 * group.ranks[0], width, height, fills[batch.shape], label)
            for rank in group.ranks:
                begin[rank] += batch.seconds
        for rank in range(4):
            svg.text(10, y + 17 + 25 * rank, f"rank {rank}", 11)
    for n, (length, fill) in enumerate(fills.items()):
        svg.box(70 + 140 * n, 304, 14, 14, fill)
        svg.text(90 + 140 * n, 316, f"{length} tokens")
    return str(svg)


def jobs() -> str:
    """A simulated schedule: slots over time under two policies."""
    from gulliver.schedule import generate, simulate
    from gulliver.schedule.policies import POLICIES

    trace, cluster = generate("steady", 0)
    trace = trace[:12]
    results = [simulate(trace, cluster, POLICIES[name](0)) for name in ("fifo", "rollout")]
    end = max(max(result.ends.values()) for result in results)
    svg = Svg(760, 430, "Twelve jobs on sixteen slots under two policies")
    color = {job.name: COLORS[n % len(COLORS)] for n, job in enumerate(trace)}
    for n, result in enumerate(results):
        y = 34 + 200 * n
        svg.text(70, y - 8, f"{result.policy}: mean completion {result.summary().mean:.0f} s", 13)
        svg.box(70, y, 670, 160, IDLE)
        for segment in result.segments:
            x, width = 70 + 670 * segment.begin / end, 670 * (segment.end - segment.begin) / end
            for slot in segment.slots:
                fill = color[segment.job] if segment.rate else "#cccccc"
                svg.box(x, y + 10 * slot, width, 10, fill)
        svg.text(10, y + 12, "slot 0", 11)
        svg.text(10, y + 158, "slot 15", 11)
    svg.text(70, 420, f"0 to {end:.0f} s; each color is a job, grey is a job that resizes", 12)
    return str(svg)


def weak_scaling() -> str:
    """Efficiency by number of ranks, as kept by `benchmarks.scaling`."""
    kept = sorted(RESULTS.glob("scaling_*.md"))[-1].read_text(encoding="utf-8")
    figures = json.loads(kept.split("```json\n")[1].split("\n```")[0])["figures"]
    svg = Svg(760, 330, "Weak scaling: samples per second and rank, relative to one rank")
    left, top, width, height = 60, 20, 480, 250
    names = [name for name in figures if "Llama" in name]
    lowest = min(point[0] for name in names for point in figures[name].values())
    base = min(0.6, math.floor(10 * lowest) / 10)

    def at(ranks: str | int, efficiency: float) -> tuple[float, float]:
        x = left + width * math.log2(int(ranks)) / 10
        return x, top + height * (1.05 - efficiency) / (1.05 - base)

    for tenth in range(round(10 * base), 11):
        _, y = at(1, tenth / 10)
        svg.line([(left, y), (left + width, y)], IDLE)
        svg.text(left - 8, y + 4, f"{tenth * 10} %", 11, anchor="end")
    for power in range(0, 11, 2):
        svg.text(at(2**power, 1)[0], top + height + 18, f"{2**power:,}", 11, anchor="middle")
    svg.text(left + width / 2, top + height + 38, "ranks", 12, anchor="middle")
    svg.line([at(1, PUBLISHED), at(1024, PUBLISHED)], TEXT, dashed=True)
    svg.text(left + width + 12, at(1, PUBLISHED)[1] + 4, "95 % published, 256 GPUs", 11)
    for number, name in enumerate(names):
        color, points = COLORS[number], figures[name]
        svg.line([at(ranks, point[0]) for ranks, point in points.items()], color)
        y = top + 60 + 22 * number
        svg.box(left + width + 12, y, 14, 14, color)
        svg.text(left + width + 32, y + 12, name, 11)
        for ranks, (_, measured) in points.items():
            if measured:
                x, place = at(ranks, measured)
                svg.box(x - 4, place - 4, 8, 8, color)
    if any(measured for name in names for _, measured in figures[name].values()):
        svg.text(left + width + 12, top + 60 + 22 * len(names) + 12, "squares: measured", 11)
    return str(svg)


DRAWINGS = {
    "rank-grid": rank_grid,
    "chunk-life": chunk_life,
    "memory-limit": tiers,
    "pipeline-schedules": schedules,
    "data-centric-step": data_centric,
    "jobs-on-slots": jobs,
    "weak-scaling": weak_scaling,
}


def main() -> None:
    """Writes all pictures."""
    for name, draw in DRAWINGS.items():
        (ASSETS / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
