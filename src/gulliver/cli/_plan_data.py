"""``gulliver plan data``: steps of data-centric training over a table of costs, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gulliver.cli._plan_costs import LoadedCosts, load_costs
from gulliver.cli._plan_data_options import PlanData
from gulliver.data import (
    Budget,
    DataCentricPlanner,
    Samples,
    Seconds,
    StepPlan,
    Tokens,
    least_time,
    shares_of,
    step_lines,
    steps_page,
)
from gulliver.errors import GulliverError
from gulliver.hardware import HostRoom
from gulliver.io import named_errors, write_text

MORE = "a quarter more memory"
HOST = "--offload, as much host memory as a rank has of its own"


def plan_data(options: PlanData) -> int:
    """Plans an epoch, prints its first steps, its shares, and what other settings would gain."""
    if options.html is not None and (options.html.is_dir() or not options.html.parent.is_dir()):
        raise GulliverError(f"--html {options.html}: name a file in a folder that exists")
    loaded = load_costs(options)
    shapes = _shapes(options, loaded)
    settings, known = _settings(options), loaded.costs.known
    planner = DataCentricPlanner(loaded.costs, shapes, options.ranks, _budget(options), **settings)
    plans = list(planner)
    lines = [planner.describe(), *loaded.lines, *_whole(plans, loaded, shapes, options)]
    for shape, count in planner.skipped.items():
        lines.append(f"skipped: {count:,} samples of {shape}, which fit at no degree")
    now = shares_of(plans)
    lines += gains(options, loaded, shapes, now.samples / now.seconds)
    for plan in plans[: options.steps]:
        print("\n".join(step_lines(plan, known=known)))
    print("\n".join(lines))
    if options.html is not None:
        title = f"Steps of {options.ranks} ranks"
        with named_errors(options.html):
            write_text(options.html, steps_page(title, lines, plans, known=known))
        print(f"report: {options.html}")
    return 0


def gains(options: PlanData, loaded: LoadedCosts, shapes: Sequence[Any], speed: float) -> list[str]:
    """Says what each change of a setting would gain in samples a second, the most first."""
    settings, budget, costs = _settings(options), _budget(options), loaded.costs
    tried: dict[str, tuple[Any, Budget, dict[str, Any]]] = {}
    for name in ("intra", "inter", "together"):
        if not settings[name]:
            changed = {**settings, name: True} | ({"degree": None} if name == "intra" else {})
            tried[f"out --no-{name}"] = costs, budget, changed
    if options.tokens is not None and options.arrange is None and options.intra and options.inter:
        tried[f"--arrange {options.ranks}"] = costs, budget, {**settings, "arrange": options.ranks}
    tried["twice the budget of a step"] = costs, _budget(options, 2), dict(settings)
    if options.window is not None:
        tried["twice the window"] = costs, budget, {**settings, "window": 2 * options.window}
    tried[MORE] = costs, budget, {**settings, "memory": int(1.25 * costs.memory)}
    if loaded.keeps and loaded.rates is not None and options.stages == 1 and costs.host is None:
        host = HostRoom.within(costs.memory, loaded.rates)
        tried[HOST] = replace(costs, host=host), budget, dict(settings)
    found = []
    for name, (costs, other, changed) in tried.items():
        try:
            plans = list(DataCentricPlanner(costs, shapes, options.ranks, other, **changed))
        except GulliverError:
            continue  # such as a step longer than the data
        summary = shares_of(plans)
        gain = summary.samples / summary.seconds / speed - 1
        # The plan of now fits into more memory, too.
        found.append((max(gain, 0.0) if name in (MORE, HOST) else gain, name))
    found.sort(key=lambda pair: (-pair[0], pair[1]))
    return [f"with {name}: {100 * gain:+.1f} % samples/s" for gain, name in found]


def _whole(
    plans: Sequence[StepPlan], loaded: LoadedCosts, shapes: Sequence[Any], options: PlanData
) -> list[str]:
    costs = loaded.costs
    summary = shares_of(plans, costs.known)
    used = len({index for plan in plans for _, batch in plan for index in batch.samples})
    fits = [shape for shape in shapes if _fits(costs, shape, options)]
    least = least_time(costs, fits, options.ranks)
    least /= options.stages
    return [
        f"{len(plans):,} steps: {summary}",
        f"{used:,} of {len(shapes):,} samples once each, {len(shapes) - used:,} left out; "
        f"{100 * (summary.seconds / least - 1):.1f} % over every sample in its best micro-batch",
    ]


def _fits(costs: Any, shape: Any, options: PlanData) -> bool:
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


def _shapes(options: PlanData, loaded: LoadedCosts) -> list[Any]:
    if options.shapes is None:
        return loaded.drawn(options)
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
    return [loaded.named(line) for line in found]
