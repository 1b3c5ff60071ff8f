"""``gulliver plan``: the fastest grids of a model on a cluster, and related reports.

The search is in `gulliver.planner.search`; `plan_models.py` builds the models, and `plan_text.py`
formats the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from rich.table import Table

from gulliver.booster.hybrid_plugin import HybridParallelPlugin
from gulliver.booster.plugins import GeminiPlugin, Plugin
from gulliver.cli.options import CapabilitiesConfig, Memory, Search, Show
from gulliver.cli.plan_models import OPTIMIZERS, Subject, model_of, subject_of, trained_part
from gulliver.cli.plan_text import Answer, not_counted, show_answer, why_module
from gulliver.errors import GulliverError, UsageError, usage_errors
from gulliver.hardware.cluster import Cluster, changed_cluster
from gulliver.hardware.offload import seconds_text
from gulliver.hardware.probe import current_cluster, named_cluster
from gulliver.jobs.display import print_json, report_console, working
from gulliver.options import byte_size, size_at_least, size_text
from gulliver.plan.plan import Plan
from gulliver.planner.measure import estimate_work
from gulliver.planner.search.facts import facts_of
from gulliver.planner.search.grids import (
    Found,
    minimum_resources,
    scorer_of,
    search_grids,
    searched_again,
)
from gulliver.planner.search.score import Scored
from gulliver.planner.search.simulate import weak_scaling
from gulliver.planner.tiers import OffloadTiers


def search_command(options: Search) -> int:
    """Searches and prints the result; the exit code is 1 if nothing fits."""
    with working(f"planning {options.model}") as progress:
        answer = answer_of(options, progress)
    if options.json:
        print_json(plain(answer))
    else:
        show_answer(answer, options)
    if not answer.found.best and not options.json:
        raise GulliverError(answer.found.why_none())
    return 0 if answer.found.best else 1


def answer_of(options: Search, progress: Callable[[str], None] = lambda part: None) -> Answer:
    with usage_errors():
        cluster = named_cluster(options.cluster)
        other = changed_cluster(cluster, options.what_if) if options.what_if else None
    if options.inference and (options.host_memory or options.disk):
        raise UsageError(
            "--host-memory and --disk only apply to training; omit them with --inference"
        )
    subject, found = _searched(options, cluster, progress)
    progress("comparing with other clusters and limits")
    samples = options.batch_size
    changed = None
    if other is not None:
        limit = byte_size("--memory-limit", options.memory_limit) if options.memory_limit else None
        changed = searched_again(found, samples, other, memory=limit)
    why = why_module(found, options.why) if options.why else None
    least = minimum_resources(found, samples)
    scaling = ()
    if options.weak_scaling and found.best:
        progress("simulating weak scaling")
        grid = found.best[0].grid
        if grid.offload or options.inference:
            raise UsageError(
                "--weak-scaling simulates training without offload; omit it with --inference, or "
                "use more ranks or a smaller batch"
            )
        scaling = tuple(weak_scaling(scorer_of(found, samples), grid))
    return Answer(subject, found, least, changed, why, scaling)


def _searched(
    options: Search, cluster: Cluster, progress: Callable[[str], None]
) -> tuple[Subject, Found]:
    progress("reading the model")
    with usage_errors():
        subject = subject_of(options)
        optimizer = trained_part(subject, options)
    limit = None
    if options.memory_limit is not None:
        limit = byte_size("--memory-limit", options.memory_limit)
    facts = None
    if subject.cached:
        on_cpu = cluster.device.to_device_rate is None
        known = subject.model, optimizer, subject.batch, cluster.device, options.dtype, on_cpu
        facts = facts_of(*known)
        heads = getattr(subject.model.config, "num_key_value_heads", None) or 1
        facts = replace(facts, cached=facts.item * subject.cached, cached_heads=heads)
    progress("searching grids")
    found = search_grids(
        subject.model,
        optimizer,
        subject.batch,
        cluster,
        options.batch_size,
        limit,
        options.dtype,
        facts=facts,
        behind=OffloadTiers()
        if options.inference
        else OffloadTiers.of(options.host_memory, options.disk),
    )
    return subject, found


def plain(answer: Answer) -> dict[str, Any]:
    """Converts an answer to plain values, in seconds and bytes."""
    found = answer.found
    analysis = found.facts.analysis
    return {
        "model": answer.subject.name,
        "parameters": found.facts.parameters,
        "trained": found.facts.trained,
        "flops_of_a_sample": analysis.flops // found.facts.samples,
        "kept_by_a_sample": found.facts.saved,
        "cached_of_a_sample": found.facts.cached,
        "cluster": {
            "name": found.cluster.name,
            "ranks": found.cluster.size,
            "measured": found.cluster.measured,
            "source": found.cluster.source,
        },
        "limit": found.limit,
        "best": [_plain(scored) for scored in found.best],
        "why_none": "" if found.best else found.why_none(),
        "refused": found.refused,
        "enough": {
            "bytes": answer.minimum_resources.bytes,
            "grid": str(answer.minimum_resources.grid),
            "ranks": answer.minimum_resources.ranks,
            "ranks_unlooked": answer.minimum_resources.unlooked,
            "offloaded": answer.minimum_resources.offloaded
            and asdict(answer.minimum_resources.offloaded),
        },
        "what_if": answer.changed and [_plain(scored) for scored in answer.changed.best],
        "why": answer.why and asdict(answer.why),
        "weak_scaling": [
            {**asdict(point), "ranks": point.grid.axes.size} for point in answer.scaling
        ],
        "not_counted": not_counted(found),
        "notes": [*answer.subject.notes, *analysis.notes, *map(str, analysis.opaque)],
    }


def _plain(scored: Scored) -> dict[str, Any]:
    return {
        "text": str(scored.grid),
        "grid": asdict(scored.grid),
        "seconds": asdict(scored.seconds),
        "bytes": {**scored.bytes_by_kind, "all": scored.bytes},
        "moved": scored.moved and asdict(scored.moved),
        "samples_per_second": scored.samples / scored.seconds.step,
    }


# ``gulliver plan memory``: where a model's state would be kept, before anything is loaded.
#
# The search, ``gulliver plan MODEL``, is in `plan.py`, and ``gulliver plan data`` in
# `plan_data.py`.


KINDS = ("parameters", "gradients", "optimizer_state", "activations")


def show_command(options: Show) -> int:
    plan = Plan.load(options.file)
    print_json(plan.to_values()) if options.json else print(plan.summary())
    return 0


def memory_command(options: Memory) -> int:
    with working(f"planning {options.model}"):
        plan = _memory_plan(options)
    if options.json:
        print_json(plan.to_values())
    else:
        show(plan, options)
    return 0


def _memory_plan(options: Memory) -> Plan:
    model = model_of(options.model)
    optimizer = OPTIMIZERS[options.optimizer](model.parameters())
    cluster = current_cluster(
        max(options.ranks, options.tp_size * options.sp_size * options.pp_size)
    )
    size = options.batch_size, options.seq_length
    work = estimate_work(
        model, optimizer, cluster.device, *size, options.dtype, options.activations
    )
    return plugin_of(options).make_plan(model, optimizer, cluster, work=work)


def plugin_of(options: Memory) -> Plugin:
    precision = None if options.dtype == "fp32" else options.dtype
    limits = options.memory_limit, options.host_memory, options.disk
    if options.tp_size * options.sp_size * options.pp_size == 1:
        return GeminiPlugin(
            *limits,
            precision=precision,
            step_in_backward=options.step_in_backward,
            activations=options.activations,
            verbose=False,
        )
    if options.step_in_backward:
        raise UsageError(
            "--step-in-backward needs an unsharded model: omit it with --tp-size, --sp-size "
            "or --pp-size"
        )
    if options.activations not in ("keep", "recompute"):
        raise UsageError(
            f"--activations {options.activations} needs an unsharded model: use keep or recompute "
            "with "
            "--tp-size, --sp-size or --pp-size"
        )
    return HybridParallelPlugin(
        options.tp_size,
        options.pp_size,
        options.sp_size,
        "all_to_all" if options.sp_size > 1 else None,
        precision=precision,
        checkpoint_activations=options.activations == "recompute",
        memory_limit=limits[0],
        host_limit=limits[1],
        disk=limits[2],
        verbose=False,
    )


def show(plan: Plan, options: Memory) -> None:
    console = report_console()
    moved, memory, zero = plan.predicted.moved, plan.memory, plan.zero
    assert moved is not None, "the plan has tiers"
    assert zero is not None, "the plan uses ZeRO"
    assert zero.tiers is not None, "the plan has tiers"
    tokens = options.batch_size * options.seq_length
    console.print(
        f"{plan.model.kind}: {plan.model.parameters:,} parameters, {plan.model.optimizer}, "
        f"{options.dtype}, {tokens:,} tokens a step on each of {plan.mesh.size} ranks"
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


def capabilities_command(config: CapabilitiesConfig) -> int:
    from gulliver.parallel.zero.elementwise import OPTIMIZERS as ELEMENTWISE
    from gulliver.parallel.zero.elementwise import optimizer_table
    from gulliver.planner.capability import DTYPES, HEADER, table

    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    tables = (
        (HEADER, table(), f"with any tp_size, pp_size and zero_stage; {dtypes}"),
        (ELEMENTWISE, optimizer_table(), "zero_stage=0 gives all of them whole parameters"),
    )
    if config.json:
        models, optimizers = (
            [dict(zip(header, row, strict=True)) for row in rows] for header, rows, _ in tables
        )
        print_json({"models": models, "optimizers": optimizers, "dtypes": dtypes.split(", ")})
        return 0
    console = report_console()
    for header, rows, caption in tables:
        shown = Table(*header)
        for row in rows:
            shown.add_row(*row)
        console.print(shown)
        console.print(caption)
    console.print(
        "with a memory limit and a disk: whole models of any kind on the data axis "
        "(GeminiPlugin, LowLevelZeroPlugin(stage=3, memory_limit=...)), and all of the above "
        "(HybridParallelPlugin(memory_limit=...)), but for step_in_backward"
    )
    return 0
