"""``gulliver plan data``: plans data-centric steps from a table of costs or a run's costs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gulliver.cli.options import PlanData
from gulliver.data_centric.costs import (
    Budget,
    Samples,
    Seconds,
    Tokens,
    draw_samples,
    draw_shapes,
    least_time,
)
from gulliver.data_centric.pictures import shares_of, step_lines
from gulliver.data_centric.planner import DataCentricPlanner
from gulliver.data_centric.steps import StepPlan
from gulliver.errors import GulliverError, UsageError, nearest
from gulliver.hardware.probe import memory_bytes, named_cluster, planned_memory
from gulliver.hardware.sample_tables import TableCosts
from gulliver.hardware.samples import SampleCosts, SampleShape, holds_samples, read_samples
from gulliver.io.files import named_errors
from gulliver.jobs.display import print_json, working
from gulliver.options import byte_size, size_text


@dataclass(frozen=True)
class LoadedCosts:
    """Costs loaded from a file, and lines that describe them."""

    costs: Any
    # Origin of the costs, and settings used with them.
    lines: list[str]
    # Shapes that the file lists; empty if it lists none.
    shapes: tuple[Any, ...]

    def drawn(self, options: PlanData) -> list[Any]:
        """Draws shapes that the file covers, if the user passes none."""
        if isinstance(self.costs, TableCosts):
            return draw_shapes(self.costs, options.distribution, options.count, options.seed)
        if not self.shapes:
            raise UsageError(f"{options.costs} does not list the shapes: pass --shapes")
        return draw_samples(
            self.costs, self.shapes, options.distribution, options.count, options.seed
        )

    def named(self, text: str) -> Any:
        if isinstance(self.costs, TableCosts):
            return text
        named = {str(shape): shape for shape in self.shapes}
        if text in named:
            return named[text]
        if re.fullmatch(r"[1-9]\d*", text):
            return SampleShape.document(int(text))
        if re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2}", text):
            frames, rows, columns = map(int, text.split("x"))
            return SampleShape.clip(frames, rows, columns)
        hint = f": {nearest(text, named)}" if named else ""
        raise UsageError(
            f"--shapes: {text!r} is not a shape: use one with known costs, a number of tokens, "
            f"or latent frames x rows x columns such as 16x30x40{hint}"
        )


def load_costs(options: PlanData) -> LoadedCosts:
    return _samples(options) if holds_samples(options.costs) else _table(options)


def _table(options: PlanData) -> LoadedCosts:
    if options.memory_limit is not None:
        raise UsageError(
            f"--memory-limit {options.memory_limit} needs costs saved by a run: the table "
            f"{options.costs} itself determines how many tokens fit"
        )
    if options.cluster != "here":
        raise UsageError(
            f"--cluster {options.cluster} only applies to costs saved by a run; the table "
            f"{options.costs} already contains the times"
        )
    costs = TableCosts.load(options.costs)
    return LoadedCosts(costs, [], tuple(costs.seconds))


def _samples(options: PlanData) -> LoadedCosts:
    saved = read_samples(options.costs)
    cluster = named_cluster(options.cluster, options.ranks)
    kind = "cpu" if cluster.device.to_device_rate is None else "cuda"
    # A described cluster has a memory size per rank; for the local machine, the system is asked.
    size = None if options.cluster == "here" else cluster.device.memory_bytes
    memory, why = planned_memory(kind, size)
    if options.memory_limit is not None:
        total = size or memory_bytes(kind)
        limit = byte_size("--memory-limit", options.memory_limit, total)
        memory, why = limit, "as --memory-limit says"
    lines = [
        f"costs of {saved.model.name}, {saved.model.dtype}, measured on {saved.machine}: error "
        f"{saved.fit.error:.1%}, {saved.fit.worst:.1%} at most; links of {options.cluster}",
        f"memory of a rank: {size_text(memory)}, {why}",
    ]
    costs = SampleCosts(saved.model, saved.fit, memory, cluster, encoded_alike=True)
    return LoadedCosts(costs, lines, saved.shapes)


# ``gulliver plan data``: plans data-centric steps from a table of costs, and draws them.


MORE = "a quarter more memory"


def plan_data(options: PlanData) -> int:
    with working(f"planning the steps of {options.costs}"):
        values, lines = _planned(options)
    if options.json:
        print_json(values)
    else:
        print("\n".join(lines))
    return 0


def _planned(options: PlanData) -> tuple[dict[str, Any], list[str]]:
    """Returns the output as plain values and as lines."""
    loaded = load_costs(options)
    shapes = _shapes(options, loaded)
    settings = _settings(options)
    planner = DataCentricPlanner(loaded.costs, shapes, options.ranks, _budget(options), **settings)
    plans = list(planner)
    lines = [planner.describe(), *loaded.lines, *_whole(plans, loaded, shapes, options)]
    for shape, count in planner.skipped.items():
        lines.append(f"skipped: {count:,} samples of {shape}, which fit at no degree")
    now = shares_of(plans)
    found = gains(options, loaded, shapes, now.samples / now.seconds)
    lines += [f"with {name}: {100 * gain:+.1f} % samples/s" for gain, name in found]
    steps = [line for plan in plans[: options.steps] for line in step_lines(plan)]
    values = {
        **{"steps": len(plans), "samples": now.samples, "seconds": now.seconds},
        "skipped": {str(shape): count for shape, count in planner.skipped.items()},
        "gains": {name: gain for gain, name in found},
    }
    return values, [*steps, *lines]


def gains(
    options: PlanData, loaded: LoadedCosts, shapes: Sequence[Any], speed: float
) -> list[tuple[float, str]]:
    """Lists the gain of each change of a setting in samples per second, largest first."""
    settings, budget, costs = _settings(options), _budget(options), loaded.costs
    tried: dict[str, tuple[Any, Budget, dict[str, Any]]] = {}
    for name in ("intra", "inter"):
        if not settings[name]:
            changed = {**settings, name: True} | ({"degree": None} if name == "intra" else {})
            tried[f"out --no-{name}"] = costs, budget, changed
    tried["twice the budget of a step"] = costs, _budget(options, 2), dict(settings)
    if options.window is not None:
        tried["twice the window"] = costs, budget, {**settings, "window": 2 * options.window}
    tried[MORE] = costs, budget, {**settings, "memory": int(1.25 * costs.memory)}
    found = []
    for name, (costs, other, changed) in tried.items():
        try:
            plans = list(DataCentricPlanner(costs, shapes, options.ranks, other, **changed))
        except GulliverError:
            continue  # such as a step longer than the data
        summary = shares_of(plans)
        gain = summary.samples / summary.seconds / speed - 1
        # The current plan also fits into more memory, so there is no loss.
        found.append((max(gain, 0.0) if name == MORE else gain, name))
    found.sort(key=lambda pair: (-pair[0], pair[1]))
    return found


def _whole(
    plans: Sequence[StepPlan], loaded: LoadedCosts, shapes: Sequence[Any], options: PlanData
) -> list[str]:
    costs = loaded.costs
    summary = shares_of(plans)
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
    names = ("window", "intra", "inter", "degree", "unfit", "seed", "stages")
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
        raise UsageError("set one budget per step: --samples, --tokens or --seconds")
    return given[0]


def _shapes(options: PlanData, loaded: LoadedCosts) -> list[Any]:
    if options.shapes is None:
        return loaded.drawn(options)
    with named_errors(options.shapes, "read"):
        data = options.shapes.read_bytes()
    try:
        text = data.decode("utf-8-sig")  # editors on Windows write a byte order mark
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--shapes {options.shapes} is not UTF-8 text ({error.reason} at byte {error.start}): "
            "use one shape per line"
        ) from None
    found = [line.strip() for line in text.splitlines() if line.strip()]
    if not found:
        raise UsageError(f"{options.shapes} has no shapes: use one shape per line")
    return [loaded.named(line) for line in found]
