"""``gulliver plan --why MODULE``: what is done with a module, what else could be, at what price."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gulliver.booster.search import Found, Scored, Scorer
from gulliver.errors import GulliverError
from gulliver.hardware import all_reduce_seconds
from gulliver.parallel.tensor import plan_tensor

SIZES = (1, 2, 4, 8, 16)
ADDED_UP = ("row", "vocabulary")
"""Kinds of modules whose outputs tensor ranks add up."""


NONE_FITS = "none fits"
NOT_SHARED = "no such grid"
"""Refusal where heads, samples or ranks do not divide into a grid of the best one's kind."""


@dataclass(frozen=True)
class TensorChoice:
    """A way to lay a module over ranks."""

    tensor: int
    # What they do with it.
    how: str
    # Seconds of it in a rank, forward and backward, for one sample.
    compute_s: float = 0.0
    # Seconds of the sum of its outputs over them, for one sample.
    message_s: float = 0.0
    # Seconds of the step of the whole model with as many tensor ranks; 0 where none fits.
    step_s: float = 0.0
    refused: str = ""


@dataclass(frozen=True)
class Why:
    """Decision about a module."""

    path: str
    kind: str
    parameters: int
    # FLOPs of it, forward and backward, for one sample.
    flops: int
    # Bytes that it keeps of a sample for the backward.
    saved: int
    # Number of tensor ranks of the fastest grid; 0 where none fits.
    chosen: int
    # Whether blocks are computed again in the backward, of how many how many.
    recomputed: tuple[int, int]
    # What could be done with it.
    choices: tuple[TensorChoice, ...]
    # Where the constants come from.
    source: str


def why_module(found: Found, path: str, samples: int) -> Why:
    """Explains what the fastest grid does with a module."""
    facts = found.facts
    costs = facts.analysis.module(path)
    module = facts.model.get_submodule(path)
    best = found.best[0].grid if found.best else None
    sizes = [size for size in SIZES if found.cluster.size % size == 0]
    return Why(
        path,
        type(module).__name__,
        sum(p.numel() for p in module.parameters()),
        costs.flops // facts.samples,
        costs.saved // facts.samples,
        best.axes.tensor if best else 0,
        (best.recomputed if best else 0, len(facts.blocks)),
        tuple(_choice(found, path, size, samples) for size in sizes),
        source_of(found),
    )


def source_of(found: Found) -> str:
    """Names the sources of the constants of a search."""
    how = "measured" if found.cluster.measured else "described, not measured"
    rates = ", ".join(
        f"{dtype} {rate / 1e12:g}" for dtype, rate in found.facts.device.matmul.items()
    )
    device = found.facts.device
    return (
        f"{how}: {device.name}, TFLOP/s {rates}, {device.memory_rate / 1e9:,.0f} GB/s of memory; "
        f"{found.cluster.source}"
    )


def _choice(found: Found, path: str, size: int, samples: int) -> TensorChoice:
    """Says what `size` tensor ranks do with a module, and what it takes."""
    facts = found.facts
    try:
        tensor = plan_tensor(facts.model, size, None, True, True)
    except GulliverError as error:
        return TensorChoice(size, "", refused=str(error))
    placed = tensor.modules.get(path) if size > 1 else None
    inside = [p for p in tensor.modules if p.startswith(f"{path}.")] if size > 1 else []
    how = placed.style if placed else f"{len(inside)} modules in it are cut" if inside else "whole"
    analysis, n = facts.analysis, facts.samples
    seconds = analysis.seconds(facts.device, None, path) / n
    cut = bool(inside or (placed and placed.dims))
    message = 0.0
    if placed is not None and placed.how.kind in ADDED_UP:
        links = found.cluster.crossed(1, size)
        message = all_reduce_seconds(links, analysis.module(path).output // n)
    step, reason = _step(found, size, samples)
    return TensorChoice(
        size,
        how,
        seconds / size if cut else seconds,
        message,
        step.seconds.step if step else 0.0,
        reason,
    )


def _step(found: Found, size: int, samples: int) -> tuple[Scored | None, str]:
    """The fastest of the grids that were found, or of the best one turned to `size` ranks."""
    same = [scored for scored in found.best if scored.grid.axes.tensor == size]
    if same:
        return same[0], ""
    if not found.best:
        return None, NONE_FITS
    return _turned(found, found.best[0], size, samples)


def _turned(found: Found, best: Scored, size: int, samples: int) -> tuple[Scored | None, str]:
    """The best grid with other tensor ranks, of sequence or data ranks, or why there is none."""
    on_cpu = found.cluster.device.to_device_rate is None
    scorer = Scorer(
        found.facts, found.cluster, samples, "cpu" if on_cpu else "cuda", 0.0 if on_cpu else 1.0
    )
    axes = best.grid.axes
    tried, reason = list[Scored](), NOT_SHARED
    for name in ("data", "sequence", "pipeline"):
        whole = getattr(axes, name) * axes.tensor
        if whole % size:
            continue
        changed = replace(axes, tensor=size, **{name: whole // size})
        if changed.sequence == 1 and changed.mode != "split_gather":
            changed = replace(changed, mode="")
        if changed.sequence > 1 and not changed.mode:
            continue
        grid = replace(best.grid, axes=changed, recomputed=0)
        if samples % changed.data or (samples // changed.data) % grid.micro_batches:
            continue
        if changed.pipeline != axes.pipeline or scorer.refuses(changed):
            continue
        reason = NONE_FITS
        scored = scorer.least(grid, found.limit)
        tried += [scored] if scored else []
    if not tried:
        return None, reason
    return min(tried, key=lambda scored: scored.seconds.step), ""
