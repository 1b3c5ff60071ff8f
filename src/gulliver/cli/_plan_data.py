"""``gulliver plan data``: steps of data-centric training over a table of costs, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gulliver.cli._options import PlanData
from gulliver.data import (
    Budget,
    DataCentricPlanner,
    Samples,
    Seconds,
    StepPlan,
    Tokens,
    draw_shapes,
    least_time,
    shares_of,
    step_lines,
    steps_page,
)
from gulliver.errors import GulliverError
from gulliver.hardware import TableCosts
from gulliver.io import named_errors, write_text


def plan_data(options: PlanData) -> int:
    """Plans an epoch, prints its first steps, its shares, and what other settings would gain."""
    if options.html is not None and (options.html.is_dir() or not options.html.parent.is_dir()):
        raise GulliverError(f"--html {options.html}: name a file in a folder that exists")
    costs = TableCosts.load(options.costs)
    shapes = _shapes(options, costs)
    settings = _settings(options)
    planner = DataCentricPlanner(costs, shapes, options.ranks, _budget(options), **settings)
    plans = list(planner)
    lines = [planner.describe(), *_whole(plans, costs, shapes, options)]
    for shape, count in planner.skipped.items():
        lines.append(f"skipped: {count:,} samples of {shape}, which fit at no degree")
    lines += gains(options, costs, shapes, len(shapes) / shares_of(plans).seconds)
    for plan in plans[: options.steps]:
        print("\n".join(step_lines(plan)))
    print("\n".join(lines))
    if options.html is not None:
        title = f"Steps of {options.ranks} ranks"
        with named_errors(options.html):
            write_text(options.html, steps_page(title, lines, plans))
        print(f"report: {options.html}")
    return 0


def gains(options: PlanData, costs: TableCosts, shapes: Sequence[str], speed: float) -> list[str]:
    """Says what each change of a setting would gain in samples a second, the most first."""
    settings, budget = _settings(options), _budget(options)
    tried: dict[str, tuple[Budget, dict[str, Any]]] = {}
    for name in ("intra", "inter", "together"):
        if not settings[name]:
            tried[f"out --no-{name}"] = (
                budget,
                {**settings, name: True} | ({"degree": None} if name == "intra" else {}),
            )
    if options.tokens is not None and options.arrange is None and options.intra and options.inter:
        tried[f"--arrange {options.ranks}"] = budget, {**settings, "arrange": options.ranks}
    tried["twice the budget of a step"] = _budget(options, 2), dict(settings)
    if options.window is not None:
        tried["twice the window"] = budget, {**settings, "window": 2 * options.window}
    tried["a quarter more memory"] = budget, {**settings, "memory": int(1.25 * costs.memory)}
    found = []
    for name, (other, changed) in tried.items():
        try:
            plans = list(DataCentricPlanner(costs, shapes, options.ranks, other, **changed))
        except GulliverError:
            continue  # such as a step longer than the data
        told = shares_of(plans)
        gain = told.samples / told.seconds / speed - 1
        # The plan of now fits into more memory, too.
        found.append((max(gain, 0.0) if "memory" in changed else gain, name))
    found.sort(key=lambda pair: (-pair[0], pair[1]))
    return [f"with {name}: {100 * gain:+.1f} % samples/s" for gain, name in found]


def _whole(
    plans: Sequence[StepPlan], costs: TableCosts, shapes: Sequence[str], options: PlanData
) -> list[str]:
    told = shares_of(plans)
    used = len({index for plan in plans for _, batch in plan for index in batch.samples})
    fitting = [shape for shape in shapes if _fits(costs, shape, options)]
    least = least_time(costs, fitting, options.ranks) / options.stages
    return [
        f"{len(plans):,} steps: {told}",
        f"{used:,} of {len(shapes):,} samples once each, {len(shapes) - used:,} left out; "
        f"{100 * (told.seconds / least - 1):.1f} % over every sample in its best micro-batch",
    ]


def _fits(costs: TableCosts, shape: str, options: PlanData) -> bool:
    return any(len(costs.batches(shape, d, most=1)) for d in costs.degrees(options.ranks))


def _settings(options: PlanData) -> dict[str, Any]:
    names = ("window", "intra", "inter", "together", "arrange", "degree", "unfit", "seed", "stages")
    return {name: getattr(options, name) for name in names}


def _budget(options: PlanData, times: int = 1) -> Budget:
    given: list[Budget] = []
    if options.samples is not None:
        given.append(Samples(times * options.samples))
    if options.tokens is not None:
        given.append(Tokens(times * options.tokens))
    if options.seconds is not None:
        given.append(Seconds(times * options.seconds))
    if len(given) != 1:
        raise GulliverError("give one budget of a step: --samples, --tokens or --seconds")
    return given[0]


def _shapes(options: PlanData, costs: TableCosts) -> list[str]:
    if options.shapes is None:
        return draw_shapes(costs, options.distribution, options.count, options.seed)
    with named_errors(options.shapes, "read"):
        data = options.shapes.read_bytes()
    try:
        text = data.decode("utf-8-sig")  # editors on Windows begin with a byte order mark
    except UnicodeDecodeError as error:
        raise GulliverError(
            f"--shapes {options.shapes} is no text in UTF-8 ({error.reason} at byte {error.start}):"
            " write a shape on each line"
        ) from None
    found = [line.strip() for line in text.splitlines() if line.strip()]
    if not found:
        raise GulliverError(f"{options.shapes} names no shapes: write one on each line")
    return found
