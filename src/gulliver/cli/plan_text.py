"""Formats the results of ``gulliver plan``, including ``--why MODULE``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from gulliver.cli.options import Search
from gulliver.cli.plan_models import Subject
from gulliver.errors import GulliverError
from gulliver.hardware.costs import all_reduce_seconds
from gulliver.hardware.offload import flops_text, rate_text, seconds_text
from gulliver.jobs.display import report_console
from gulliver.options import DTYPES, size_at_least, size_text
from gulliver.parallel.tensor.plan import plan_tensor
from gulliver.plan.analysis.records import BACKWARD, FORWARD
from gulliver.planner.search.grids import (
    Found,
    MinimumResources,
)
from gulliver.planner.search.score import Scored
from gulliver.planner.search.simulate import ScalingPoint

SIZES = (1, 2, 4, 8, 16)
ADDED_UP = ("row", "vocabulary")
"""Kinds of modules whose outputs are summed over tensor ranks."""


NOT_BEST = "not among the best"
"""Label of a number of tensor ranks that none of the best grids uses."""


@dataclass(frozen=True)
class TensorChoice:
    """A way to shard a module over tensor ranks."""

    tensor: int
    # How tensor ranks shard it.
    how: str
    # Seconds of the module on a rank, forward and backward, for one sample.
    compute_s: float = 0.0
    # Seconds to sum its outputs over the ranks, for one sample.
    message_s: float = 0.0
    # Step seconds of the fastest of the best grids with as many tensor ranks; 0 if there is none.
    step_s: float = 0.0
    refused: str = ""


@dataclass(frozen=True)
class ModuleDecision:
    """Chosen sharding of a module, and its alternatives."""

    path: str
    kind: str
    parameters: int
    # FLOPs of the module, forward and backward, for one sample.
    flops: int
    # Bytes per sample that it saves for backward.
    saved: int
    # Number of tensor ranks of the fastest grid; 0 if none fits.
    chosen: int
    # Number of recomputed blocks, and number of all blocks.
    recomputed: tuple[int, int]
    # Possible ways to shard it.
    choices: tuple[TensorChoice, ...]
    # Source of the rates.
    source: str


def why_module(found: Found, path: str) -> ModuleDecision:
    facts = found.facts
    costs = facts.analysis.module(path)
    module = facts.model.get_submodule(path)
    best = found.best[0].grid if found.best else None
    sizes = [size for size in SIZES if found.cluster.size % size == 0]
    device = facts.device
    rates = ", ".join(f"{dtype} {rate / 1e12:g}" for dtype, rate in device.matmul.items())
    return ModuleDecision(
        path,
        type(module).__name__,
        sum(p.numel() for p in module.parameters()),
        costs.flops // facts.samples,
        costs.saved // facts.samples,
        best.axes.tensor if best else 0,
        (best.recomputed if best else 0, len(facts.blocks)),
        tuple(_choice(found, path, size) for size in sizes),
        f"{'measured' if found.cluster.measured else 'described, not measured'}: {device.name}, "
        f"TFLOP/s {rates}, {device.memory_rate / 1e9:,.0f} GB/s of memory; {found.cluster.source}",
    )


def _choice(found: Found, path: str, size: int) -> TensorChoice:
    """Describes how `size` tensor ranks shard a module, and the cost."""
    facts = found.facts
    try:
        tensor = plan_tensor(facts.model, size, None, True, True)
    except GulliverError as error:
        return TensorChoice(size, "", refused=str(error))
    placed = tensor.modules.get(path) if size > 1 else None
    inside = [p for p in tensor.modules if p.startswith(f"{path}.")] if size > 1 else []
    how = placed.style if placed else f"{len(inside)} submodules sharded" if inside else "whole"
    analysis, n = facts.analysis, facts.samples
    seconds = analysis.seconds(facts.device, None, path) / n
    cut = bool(inside or (placed and placed.dims))
    message = 0.0
    if placed is not None and placed.how.kind in ADDED_UP:
        links = found.cluster.crossed(1, size)
        message = all_reduce_seconds(links, analysis.module(path).output // n)
    steps = [s.seconds.step for s in found.best if s.grid.axes.tensor == size]
    return TensorChoice(
        size,
        how,
        seconds / size if cut else seconds,
        message,
        steps[0] if steps else 0.0,
        "" if steps else NOT_BEST,
    )


# All results of ``gulliver plan MODEL`` as values; `plan_text.py` formats them as text.


@dataclass(frozen=True)
class Answer:
    """All results of a search."""

    subject: Subject
    found: Found
    minimum_resources: MinimumResources
    # Result on the changed cluster; None if nothing was changed.
    changed: Found | None = None
    # Decision about a module; None if none was requested.
    why: ModuleDecision | None = None
    # The fastest grid on fewer replicas; empty if not requested.
    scaling: tuple[ScalingPoint, ...] = ()


# Text that `gulliver plan MODEL` prints.


WIDTH = 50
"""Width of a step's timeline in characters."""
NOT_COUNTED = (
    "input",
    "workspace of kernels",
    "allocator fragmentation",
    "text encoders and autoencoders",
)
GENERATED = "token generation: seconds are those of one forward, the prefill"
CACHE = "keys and values, whose size is unknown"
SAMPLES = (1, 8, 64)
"""Batch sizes for which inference memory is printed."""


def show_answer(answer: Answer, options: Search) -> None:
    console = report_console()
    found = answer.found
    for line in lines_of(answer, options):
        console.print(line)
    if found.best:
        console.print(_grids(found.best))
        best = found.best[0]
        console.print(_memory(best))
        for line in _moved(best):
            console.print(line)
        for line in timeline(best):
            console.print(line)
    for line in _refusals(found):
        console.print(line)
    for line in _after(answer):
        console.print(line)
    if answer.why is not None:
        _show_why(console, answer.why)


def _refusals(found: Found) -> list[str]:
    """Lists reasons for excluding meshes, each with the first mesh it excludes."""
    first: dict[str, str] = {}
    for mesh, why in found.refused.items():
        first.setdefault(why, mesh)
    return [f"refused: {mesh}: {why}" for why, mesh in first.items()]


def lines_of(answer: Answer, options: Search) -> list[str]:
    """Describes the model, the costs of a step, and the source of the numbers."""
    found, subject = answer.found, answer.subject
    facts, cluster = found.facts, found.cluster
    flops = facts.analysis.flops / facts.samples
    seconds = [facts.analysis.seconds(facts.device, p) / facts.samples for p in (FORWARD, BACKWARD)]
    trained = "" if facts.trained == facts.parameters else f", {facts.trained:,} trained"
    lines = [
        f"{subject.name}: {type(facts.model).__name__}, {facts.parameters:,} parameters{trained}, "
        f"{len(facts.blocks)} blocks, {options.dtype}",
        f"a sample ({subject.sample}): {flops_text(flops)}, forward "
        f"{seconds_text(seconds[0])} and backward {seconds_text(seconds[1])} on one "
        f"{facts.device.name}; keeps {size_text(facts.saved)} for the backward",
        f"{options.batch_size} samples a step on {cluster.size} ranks, {cluster.name}",
        _limit_text(found),
        "not counted: " + ", ".join(not_counted(found)),
    ]
    if facts.cached:
        lines.append(_inference(found, subject.sample))
    lines += [*subject.notes, *facts.analysis.notes, *map(str, facts.analysis.opaque)]
    meshes, left = found.meshes
    lines.append(
        f"{found.looked:,} grids of {meshes - left} of {meshes} meshes in "
        f"{seconds_text(sum(found.seconds))}, at most {size_text(found.limit)} on a rank"
        + _above_device(found)
    )
    if found.best:
        best = found.best[0]
        step = best.seconds.step
        rate = max(facts.device.matmul.values())
        name = DTYPES[options.dtype]
        rate = facts.device.matmul.get(name, rate)
        share = flops * options.batch_size / (step * cluster.size * rate)
        samples = best.samples / step
        lines.append(
            f"best: {best.grid}: {seconds_text(step)} a step, {rate_text(samples)} samples/s"
            + (f", {rate_text(samples * subject.tokens)} tokens/s" if subject.tokens else "")
            + f", {100 * share:.0f} % of the rate of {name}"
        )
    return lines


def _above_device(found: Found) -> str:
    has = found.cluster.device.memory_bytes
    return f": {found.cluster.device.name} has {size_text(has)}" if found.limit > has > 0 else ""


def not_counted(found: Found) -> list[str]:
    if found.facts.trained:
        return list(NOT_COUNTED)
    return [*NOT_COUNTED, GENERATED, *([] if found.facts.cached else [CACHE])]


def _limit_text(found: Found) -> str:
    if found.cluster.measured:
        return f"seconds at measured rates ({found.cluster.date or 'no date'})"
    return f"seconds at data-sheet rates: a floor ({found.cluster.source})"


def _grids(best: Sequence[Scored]) -> Table:
    table = Table()
    behind = any(scored.moved is not None for scored in best)
    for name in ("", "step", "samples/s", "memory", *["behind it"] * behind, "grid"):
        table.add_column(name, justify="left" if name == "grid" else "right", overflow="fold")
    for number, scored in enumerate(best, 1):
        step, moved = scored.seconds.step, scored.moved
        leaves = "" if moved is None else size_text(moved.leaves.total)
        table.add_row(
            str(number),
            seconds_text(step),
            rate_text(scored.samples / step),
            size_text(scored.bytes),
            *[leaves] * behind,
            str(scored.grid),
        )
    return table


def _moved(best: Scored) -> list[str]:
    """Describes a rank's bytes by memory tier, and the traffic of a step between tiers."""
    moved = best.moved
    if moved is None:
        return []
    lines = [
        f"offload: {size_text(moved.stays.total)} of state stay, {size_text(moved.leaves.total)} "
        f"come and go; a step reads {size_text(moved.read)} and writes {size_text(moved.written)}, "
        f"{moved.bottleneck}; least limit {size_at_least(moved.minimum)}, which {moved.decides} "
        "needs"
    ]
    if moved.on_disk.total:
        lines.append(
            f"  {size_text(moved.on_disk.total)} of it are on disk at times; a step reads "
            f"{size_text(moved.disk_read)} from there and writes {size_text(moved.disk_written)}"
        )
    return lines


def _memory(best: Scored) -> str:
    return f"memory of the fullest rank: {size_text(best.bytes)} = {_kinds(best)}"


def _kinds(best: Scored) -> str:
    return ", ".join(
        f"{kind.replace('_', ' ')} {size_text(count)}"
        for kind, count in best.bytes_by_kind.items()
        if count
    )


def timeline(best: Scored) -> list[str]:
    """Draws a step of the best grid: one bar per kind of time, in sequence."""
    lines, begun, step = [], 0.0, best.seconds.step or 1.0
    for kind, seconds in best.seconds_by_kind.items():
        start, end = round(WIDTH * begun / step), round(WIDTH * (begun + seconds) / step)
        begun += seconds
        bar = (" " * start + "\u2588" * (end - start)).ljust(WIDTH)
        named = "messages" if kind == "exposed" else kind
        lines.append(f"{named:>10} |{bar}| {seconds_text(seconds)}, {100 * seconds / step:.1f} %")
    hidden = sum(
        getattr(best.seconds, kind)
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "sends")
    )
    text = seconds_text(max(0.0, hidden - best.seconds.exposed))
    return [*lines, f"{'':>10}  {text} more of communication is hidden behind compute"]


def _after(answer: Answer) -> list[str]:
    found, need = answer.found, answer.minimum_resources
    lines = [
        f"least memory on these ranks: {size_at_least(need.bytes)} ({need.grid})",
        f"smallest number of ranks that fits: {need.ranks or 'more than were searched'}"
        + (
            f", or fewer: {need.unlooked[0]} to {need.unlooked[1]} were not searched"
            if need.unlooked
            else ""
        ),
    ]
    if need.offloaded is not None:
        text = f"{size_at_least(need.offloaded.bytes)} ({need.offloaded})"
        lines.insert(1, f"least memory with offloading: {text}")
    if found.unlooked:
        lines.append(
            f"offload: {found.unlooked:,} more grids with a higher bound were not replayed"
        )
    if answer.changed is not None:
        lines += _changes(found, answer.changed)
    lines += scaling_lines(answer.scaling)
    return lines


def _inference(found: Found, sample: str) -> str:
    facts = found.facts
    model = facts.item * facts.parameters
    sizes = ", ".join(f"{n}: {size_text(model + n * facts.cached)}" for n in SAMPLES)
    return (
        f"KV cache: {size_text(facts.cached)} per sample ({sample}); with the parameters, over all "
        f"ranks that share a model, by batch size: {sizes}"
    )


def scaling_lines(points: Sequence[ScalingPoint]) -> list[str]:
    lines = ["weak scaling, simulated with as many samples for each replica:"] if points else []
    for point in points:
        grid, size = point.grid, f"{point.grid.axes.size:,} ranks"
        chosen = f", chunks of {grid.chunk_mb} MiB" if grid.chunk_mb else ""
        chosen += f", torus {' x '.join(map(str, point.torus))}" if point.torus else ""
        step = seconds_text(point.seconds)
        lines.append(f"{size:>14}: {step} a step, efficiency {point.efficiency:.1%}{chosen}")
    return lines


def _changes(found: Found, changed: Found) -> list[str]:
    text = changed.cluster.source.rpartition("changed: ")[2]
    if not changed.best:
        return [f"with {text}: {changed.why_none()}"]
    after = changed.best[0]
    line = f"with {text}: {seconds_text(after.seconds.step)} a step, {after.grid}"
    if found.best:
        ratio = found.best[0].seconds.step / after.seconds.step
        line += f": {ratio:.2f} x as fast"
    return [line]


def _show_why(console: Console, why: ModuleDecision) -> None:
    again, blocks = why.recomputed
    console.print(
        f"why {why.path}: {why.kind}, {why.parameters:,} parameters, {flops_text(why.flops)} "
        f"and {size_text(why.saved)} kept for a sample; {again} of {blocks} blocks are recomputed"
    )
    table = Table()
    for name in ("tp", "how it is sharded", "compute", "its sums", "whole step"):
        table.add_column(name, justify="left" if name[0] == "w" else "right", overflow="fold")
    for choice in why.choices:
        mark = " *" if choice.tensor == why.chosen else ""
        table.add_row(
            f"{choice.tensor}{mark}",
            choice.how or choice.refused,
            seconds_text(choice.compute_s) if choice.how else "",
            seconds_text(choice.message_s) if choice.how else "",
            seconds_text(choice.step_s) if choice.step_s else (choice.how and choice.refused),
        )
    console.print(table)
    console.print(f"  constants: {why.source}")
