"""``gulliver plan memory``: where a model's state would lie, before anything is loaded.

The search, ``gulliver plan MODEL``, is in `_plan_search.py`, and ``gulliver plan data`` in
`_plan_data.py`.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gulliver.booster import GeminiPlugin, HybridParallelPlugin, Plugin, estimate_work
from gulliver.cli._options import Memory, PlanConfig, PlanData, Search, Show
from gulliver.cli._plan_data import plan_data
from gulliver.cli._plan_models import OPTIMIZERS, model_of
from gulliver.cli._plan_search import search_command
from gulliver.errors import GulliverError
from gulliver.hardware import current_cluster, seconds_text
from gulliver.options import size_at_least, size_text
from gulliver.plan import MemoryPlan, Plan

KINDS = ("parameters", "gradients", "optimizer_state", "activations")
COLORS = ("cyan", "yellow", "green", "magenta")
WIDTH = 60
"""Characters of a bar."""


def plan_command(config: PlanConfig, arguments: list[str]) -> int:
    """Prints the plan of a model under a memory limit, or that of a file."""
    options = config.action
    if isinstance(options, Show):
        print(Plan.load(options.file).summary())
        return 0
    if isinstance(options, Search):
        return search_command(options)
    if isinstance(options, PlanData):
        return plan_data(options)
    model = model_of(options.model)
    optimizer = OPTIMIZERS[options.optimizer](model.parameters())
    cluster = current_cluster(max(options.ranks, options.tp * options.sp * options.pp))
    size = options.batch, options.length
    work = estimate_work(
        model, optimizer, cluster.device, *size, options.precision, options.activations
    )
    plan = plugin_of(options).make_plan(model, optimizer, cluster, work=work)
    show(plan, options)
    return 0


def plugin_of(options: Memory) -> Plugin:
    """The plugin that runs what the options say."""
    precision = None if options.precision == "fp32" else options.precision
    limits = options.memory, options.host, options.disk
    if options.tp * options.sp * options.pp == 1:
        return GeminiPlugin(
            *limits,
            precision=precision,
            step_in_backward=options.step_in_backward,
            activations=options.activations,
            verbose=False,
        )
    if options.step_in_backward:
        raise GulliverError(
            "--step-in-backward is of whole models: leave it out with --tp, --sp or --pp"
        )
    if options.activations not in ("keep", "recompute"):
        raise GulliverError(
            f"--activations {options.activations} is of whole models: with --tp, --sp or --pp take "
            "keep, or recompute"
        )
    return HybridParallelPlugin(
        options.tp,
        options.pp,
        options.sp,
        "all_to_all" if options.sp > 1 else None,
        precision=precision,
        checkpoint_activations=options.activations == "recompute",
        memory_limit=limits[0],
        host_limit=limits[1],
        disk=limits[2],
        verbose=False,
    )


def show(plan: Plan, options: Memory) -> None:
    """Prints what lies where, as a table and, on a terminal, as bars; then time and limit."""
    console = Console(markup=False, emoji=False, highlight=False)
    moved, memory, zero = plan.predicted.moved, plan.memory, plan.zero
    assert moved is not None, "the plan has tiers"
    assert zero is not None, "the plan is of ZeRO"
    assert zero.tiers is not None, "the plan has tiers"
    tokens = options.batch * options.length
    console.print(
        f"{plan.model.kind}: {plan.model.parameters:,} parameters, {plan.model.optimizer}, "
        f"{options.precision}, {tokens:,} tokens a step on each of {plan.mesh.size} ranks"
    )
    if plan.mesh.cuts_model:
        axes = ", ".join(f"{name} {size}" for name, size in plan.mesh.axes.items())
        console.print(f"{axes}: what follows is of the rank that needs most at once")
    three = bool(zero.tiers.host and zero.tiers.disk)
    behind = "the host" if zero.tiers.host else zero.tiers.disk or "no other memory"
    table = Table()
    columns = ["", "stays in memory", "comes and goes", f"lies in {behind}"]
    for name in [*columns, f"and at times in {zero.tiers.disk}"] if three else columns:
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    for kind in KINDS:
        most, stays = getattr(memory, kind), getattr(moved.stays, kind)
        sizes = [stays, max(0, most - stays), getattr(moved.leaves, kind)]
        sizes += [getattr(moved.on_disk, kind)] if three else []
        table.add_row(kind.replace("_", " "), *map(size_text, sizes))
    console.print(table)
    if console.is_terminal:
        console.print(_bar("memory", memory, zero.tiers.limit))
        if zero.tiers.host or zero.tiers.disk:
            whole = zero.tiers.disk_bytes + zero.tiers.host
            console.print(_bar("behind", moved.leaves, whole))
    seconds = plan.predicted.seconds
    console.print(f"least limit: {size_at_least(moved.minimum)}, which {moved.decides} needs")
    console.print(
        f"a step: {seconds_text(seconds.step)} predicted on {plan.predicted.cluster} "
        f"({moved.bottleneck}); reads {size_text(moved.read)}, writes {size_text(moved.written)}"
    )
    if three:
        console.print(
            f"of the disk a step reads {size_text(moved.disk_read)}, and writes there "
            f"{size_text(moved.disk_written)}"
        )
    for line in (moved.price, *plan.reasons.values()):
        if line:
            console.print(line)


def _bar(name: str, parts: MemoryPlan, whole: int) -> Text:
    """A line of blocks, a colour for each kind, as long as its share of `whole`."""
    text, used = Text(f"{name:<8}"), 0
    for kind, color in zip(KINDS, COLORS, strict=True):
        count = round(WIDTH * getattr(parts, kind) / max(1, whole))
        text.append("\u2588" * count, color)
        used += count
    text.append("\u2591" * max(0, WIDTH - used))
    return text.append(f" {size_text(whole)}")
