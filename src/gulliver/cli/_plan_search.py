"""``gulliver plan MODEL``: the fastest grids of a model on a cluster, explained.

What is searched is in `gulliver.booster.search`; models by their names are in `_plan_models.py`,
what is printed in `_plan_text.py`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from gulliver.booster.search import (
    Found,
    OffloadTiers,
    Scored,
    enough,
    facts_of,
    prices_of_memory,
    report,
    search_grids,
    searched_again,
)
from gulliver.cli._options import Search
from gulliver.cli._plan_answer import Answer
from gulliver.cli._plan_models import Subject, subject_of, trained_part
from gulliver.cli._plan_text import lines_of, not_counted, show_answer
from gulliver.cli._plan_why import why_module
from gulliver.errors import GulliverError
from gulliver.hardware import Cluster, changed_cluster, named_cluster
from gulliver.io import write_text
from gulliver.options import byte_size

RANK = 16
"""Rank of the adapters of an estimate where none is asked for."""


def search_command(options: Search) -> int:
    """Searches, and prints what was found; the exit code is 1 where nothing fits."""
    answer = answer_of(options)
    if options.html is not None:
        title = f"{answer.subject.name} on {options.cluster}"
        page = report(title, lines_of(answer, options), answer.found, answer.prices)
        write_text(options.html, page)
    if options.json:
        print(json.dumps(plain(answer), indent=1))
    else:
        show_answer(answer, options)
        if options.html is not None:
            print(f"report: {options.html}")
    if not answer.found.best and not options.json:
        raise GulliverError(answer.found.why_none())
    return 0 if answer.found.best else 1


def answer_of(options: Search) -> Answer:
    """Searches for what the options ask."""
    cluster = named_cluster(options.cluster)
    if options.inference and (options.host or options.disk):
        raise GulliverError("--host and --disk are for training: leave them out of --inference")
    other = changed_cluster(cluster, options.what_if) if options.what_if else None
    subject, found = _searched(options, cluster)
    samples = options.batch
    changed = None
    if other is not None:
        limit = byte_size("--memory", options.memory) if options.memory else None
        changed = searched_again(found, samples, other, memory=limit)
    estimates = None
    if options.estimates:
        uses = {
            "training": replace(options, lora=None, inference=False),
            f"LoRA of rank {options.lora or RANK}": replace(
                options, lora=options.lora or RANK, inference=False
            ),
            "inference": replace(options, lora=None, inference=True),
        }
        estimates = {
            use: found if asked == options else _searched(asked, cluster, 1)[1]
            for use, asked in uses.items()
        }
    why = why_module(found, options.why, samples) if options.why else None
    prices = prices_of_memory(found, samples)
    return Answer(subject, found, prices, enough(found, samples), changed, estimates, why)


def _searched(options: Search, cluster: Cluster, best: int = 10) -> tuple[Subject, Found]:
    subject = subject_of(options)
    optimizer = trained_part(subject, options)
    limit = None if options.memory is None else byte_size("--memory", options.memory)
    facts = None
    if subject.cached:
        on_cpu = cluster.device.to_device_rate is None
        known = subject.model, optimizer, subject.batch, cluster.device, options.precision, on_cpu
        facts = facts_of(*known)
        heads = getattr(subject.model.config, "num_key_value_heads", None) or 1
        facts = replace(facts, cached=facts.item * subject.cached, cached_heads=heads)
    found = search_grids(
        subject.model,
        optimizer,
        subject.batch,
        cluster,
        options.batch,
        limit,
        options.precision,
        best,
        facts,
        OffloadTiers() if options.inference else OffloadTiers.of(options.host, options.disk),
    )
    return subject, found


def plain(answer: Answer) -> dict[str, Any]:
    """An answer in plain values, seconds and bytes."""
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
        "prices": [
            {"limit": p.limit, "step": p.scored and p.scored.seconds.step} for p in answer.prices
        ],
        "enough": {
            "bytes": answer.enough.bytes,
            "grid": str(answer.enough.grid),
            "ranks": answer.enough.ranks,
            "ranks_unlooked": answer.enough.unlooked,
            "offloaded": answer.enough.offloaded and asdict(answer.enough.offloaded),
        },
        "what_if": answer.changed and [_plain(scored) for scored in answer.changed.best],
        "estimates": answer.estimates
        and {
            use: _plain(one.best[0]) if one.best else None for use, one in answer.estimates.items()
        },
        "why": answer.why and asdict(answer.why),
        "not_counted": not_counted(found),
        "notes": [*answer.subject.notes, *analysis.notes, *map(str, analysis.opaque)],
    }


def _plain(scored: Scored) -> dict[str, Any]:
    return {
        "text": str(scored.grid),
        "grid": asdict(scored.grid),
        "seconds": asdict(scored.seconds),
        "bytes": {**vars(scored.memory), "working": scored.working, "all": scored.bytes},
        "moved": scored.moved and asdict(scored.moved),
        "samples_per_second": scored.samples / scored.seconds.step,
    }
