"""Seconds of a step of a plan: what a rank computes, sends and waits for.

Every second is a formula of `gulliver.hardware`; here stands which messages a plan makes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gulliver.booster._autocast import PRECISIONS
from gulliver.booster._blocks import offloadable_blocks
from gulliver.booster._estimate import estimate_sample
from gulliver.booster._measure import follow_sample, measure_work, with_peaks
from gulliver.booster._ranks import largest_residency, rank_states, rank_work
from gulliver.booster._residency import other_bytes, priced
from gulliver.booster._resolve import plan_stages, plan_tensors, recomputable
from gulliver.booster.hybrid import attention_shape, sequence_plan
from gulliver.families import family_of, hugging_face_of, is_hugging_face
from gulliver.hardware import (
    Cluster,
    Link,
    Message,
    StepCosts,
    current_cluster,
    point_to_point_seconds,
    predict_step,
    torus_links,
    zero_collectives,
)
from gulliver.memory import FreedMemory
from gulliver.parallel.pipeline import predict as predict_pipeline
from gulliver.parallel.sequence import Volume, volume
from gulliver.plan import AXES, SHARED_BY_TENSOR, Moved, Plan, Predicted, Seconds
from gulliver.precision.wire import wire_format

HALVES = {"bf16": "bfloat16", "fp16": "float16"}


def predict(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    cluster: Cluster | None = None,
) -> Plan:
    """A resolved plan with the predicted seconds of a step.

    Args:
        plan: resolved for the model; without `work` its seconds are those of messages alone.
        model: whole model.
        optimizer: optimizer of its parameters.
        cluster: machines; None for those at hand.
    """
    tensor = plan_tensors(plan, model)
    blocks = _blocks(plan, model)
    cluster = cluster or current_cluster(plan.mesh.size)
    links = axis_links(plan, cluster)
    share = 1.0 if tensor is None else 1 - tensor.share_of(model) * (1 - 1 / tensor.size)
    share /= plan.mesh.of("sequence")
    sent = attention_sends(plan, model)
    costs = _costs(plan, links, _computed(plan, share), len(blocks), _free(plan), sent)
    reasons = dict(plan.reasons)
    if plan.work.samples:
        reasons["predicted.seconds"] = (
            f"{1e3 * (plan.work.forward_s + plan.work.backward_s):.3g} ms of one process on "
            f"{plan.work.samples} samples, links of {cluster.name}"
        )
    activations = _activations(plan, share, len(blocks))
    seconds, moved = by_kind(costs), plan.predicted.moved
    if moved is not None:
        assert plan.zero is not None, "tiers are of ZeRO"
        assert plan.zero.tiers is not None, "there are tiers"
        moved, seconds, other = _tiered(plan, model, optimizer, cluster, seconds)
        activations = other + plan.memory.activations
        folder, disk = plan.zero.tiers.disk, cluster.disk
        if folder is not None and disk is not None and not disk.has(folder):
            reasons["predicted.moved"] = (
                f"rates of the disk of {disk.folder or cluster.name}; "
                f"gulliver probe --folder {folder} measures the one of {folder}"
            )
    memory = replace(plan.predicted.bytes, activations=activations)
    predicted = Predicted(cluster.name, seconds, int(costs.sent), memory, moved)
    return replace(plan, predicted=predicted, reasons=reasons)


def with_work(
    plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer | None, sample: Any
) -> Plan:
    """A plan with what a sample costs: measured here, or estimated for a model on meta."""
    autocast = PRECISIONS.get(plan.precision.autocast)
    tensor, blocks = plan_tensors(plan, model), _blocks(plan, model)
    chosen = (
        plan.zero is not None
        and plan.zero.tiers is not None
        and plan.zero.tiers.activations == "auto"
    )
    blocks = offloadable_blocks(model) if chosen else blocks
    if any(p.is_meta for p in model.parameters()):
        work = estimate_sample(model, optimizer, sample, plan.precision.autocast)
    else:
        with _as_it_runs(plan):
            work = measure_work(model, optimizer, sample, tensor, blocks, autocast, chosen)
    if plan.zero is not None and plan.zero.tiers is not None:
        work = with_peaks(work, model, sample, autocast, plan.zero.tiers.activations)
    return replace(plan, work=work)


@contextmanager
def _as_it_runs(plan: Plan) -> Iterator[None]:
    """Measures under a limit as a step runs there, where freed memory goes back to the system."""
    freed = FreedMemory() if plan.zero is not None and plan.zero.tiers is not None else None
    try:
        yield
    finally:
        if freed is not None:
            freed.close()


def with_mixed(plan: Plan, model: nn.Module, sample: Any) -> Plan:
    """A plan with the most bytes of a step that does with each block what was chosen for it."""
    tiers = None if plan.zero is None else plan.zero.tiers
    if tiers is None or tiers.activations != "mixed":
        return plan
    autocast = PRECISIONS.get(plan.precision.autocast)
    found = follow_sample(model, sample, autocast, plan.recompute, tiers.offloaded).bytes
    return replace(plan, work=replace(plan.work, peak_mixed=found or plan.work.peak_mixed))


def _tiered(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    cluster: Cluster,
    seconds: Seconds,
) -> tuple[Moved, Seconds, int]:
    """Returns moves between memories, seconds of a step that waits for them, and other bytes."""
    assert plan.zero is not None, "tiers are of ZeRO"
    assert plan.zero.tiers is not None, "there are tiers"
    tensor, stages = plan_tensors(plan, model), plan_stages(plan, model)
    work, tiers = rank_work(plan, model, tensor, stages), plan.zero.tiers
    found = largest_residency(rank_states(plan, model, optimizer, tensor, stages), tiers, work)
    moved, tiered = priced(found, tiers, work, cluster)
    if tiered is None:
        return moved, seconds, other_bytes(tiers, work)
    exposed = seconds.exposed + tiered.exposed
    step = seconds.step + tiered.exposed
    seconds = replace(seconds, transfers=tiered.busy, exposed=exposed, step=step)
    return moved, seconds, other_bytes(tiers, work)


def _blocks(plan: Plan, model: nn.Module) -> tuple[str, ...]:
    stages = plan_stages(plan, model)
    if stages is not None:
        return stages[0].blocks
    return tuple(path for path in recomputable(plan, model) if path)


def axis_links(plan: Plan, cluster: Cluster) -> dict[str, list[tuple[int, Link]]]:
    """Size and link of each axis that has several ranks; ``replicas`` are those of ZeRO."""
    sizes = [plan.mesh.of(name) for name in AXES]
    several = [name for name, size in zip(AXES, sizes, strict=True) if size > 1]
    # Links need a cluster as large as the mesh; another one is taken for a part of it.
    whole = cluster if cluster.size == plan.mesh.size else cluster.resized(plan.mesh.size)
    found = {n: [a] for n, a in zip(several, torus_links(whole, sizes), strict=True)}
    replicas = [link for name in ("data", "sequence") for link in found.get(name, [])]
    if len(replicas) > 1:
        count = plan.mesh.replicas
        replicas = [(count, replicas[0][1])]
    if plan.mesh.torus:
        replicas = torus_links(whole, list(plan.mesh.torus.values()))
    return {**found, "replicas": replicas}


def _free(plan: Plan) -> float:
    """Share of messages that travel without a core that computes."""
    busy = plan.mesh.size * torch.get_num_threads()
    return 0.0 if plan.mesh.device == "cpu" and busy >= (os.cpu_count() or 1) else 1.0


def _computed(plan: Plan, share: float) -> float:
    """Share of one process's seconds that a rank computes, all stages together.

    [Note: what tensor ranks do not divide] Norms, sums with what passes a block by, and rotary
    embeddings see whole hidden states on every tensor rank. They have few parameters and take a
    tenth of a forward's seconds or more, so seconds are divided by where they were spent.
    """
    tensor, measured = plan.mesh.of("tensor"), plan.work.share_cut
    if tensor == 1 or not measured:
        return share
    return (1 - measured * (1 - 1 / tensor)) / plan.mesh.of("sequence")


def attention_sends(plan: Plan, model: nn.Module) -> Volume:
    """Bytes that a rank sends in one attention of the whole batch."""
    work, degree = plan.work, plan.mesh.of("sequence")
    if degree == 1 or not work.samples:
        return Volume()
    inner, known = hugging_face_of(model), family_of(model).sequences
    if is_hugging_face(inner) and known is not None and known.entry is None:
        sizes = plan.mesh.of("tensor"), True, work.tokens // work.samples, work.samples
        shape = attention_shape(inner, *sizes)
        half = plan.precision.parameters
        half = plan.precision.autocast if half == "none" else half
        return volume(sequence_plan(plan), replace(shape, dtype=HALVES.get(half, shape.dtype)))
    # Of pictures and clips, whose tokens the model makes: each tensor like a hidden state.
    part, u = work.hidden_bytes / degree, plan.sequence.ulysses
    exchanged, hops = 4 * part * (1 - 1 / u), degree // u - 1
    return Volume(exchanged, exchanged, 2 * part * hops, 4 * part * hops)


def _costs(
    plan: Plan,
    links: dict[str, list[tuple[int, Link]]],
    share: float,
    blocks: int,
    free: float,
    attention: Volume,
) -> StepCosts:
    work = plan.work
    again = len(plan.recompute) / blocks if blocks else 0.0
    forward, backward = share * work.forward_s, share * work.backward_s
    # Embeddings, head and loss are not in blocks: nobody computes them again.
    repeated, bubble, own = again * (work.share_blocks or 1.0) * forward, 0.0, 1.0
    if plan.mesh.of("pipeline") > 1:
        bubble, own = _pipelined(plan, links, forward, backward + repeated)
    parts = plan.mesh.replicas if plan.stage else 1
    cut = own / plan.mesh.of("tensor") if plan.mesh.of("tensor") > 1 else own
    messages = list(shared_messages(plan, links["replicas"]))
    messages += model_messages(plan, links, again, max(blocks, 1) * own, own, attention)
    messages = [_packed(plan, message, links) for message in messages]
    return predict_step(
        own * (forward + backward),
        own * repeated,
        work.update_s * cut / parts,
        messages,
        bubble,
        free,
    )


def wire_kind(message: Message, links: dict[str, list[tuple[int, Link]]]) -> str:
    """Kind of what a message carries, of `gulliver.plan.WIRE_KINDS`."""
    if message.kind == "all_to_all":
        return "sequence"
    if message.kind == "sends":
        return "pipeline" if message.axes is links.get("pipeline") else "sequence"
    if message.axes is links["replicas"]:
        return "gather" if message.kind == "all_gather" else "reduce"
    return "tensor"


def _packed(plan: Plan, message: Message, links: dict[str, list[tuple[int, Link]]]) -> Message:
    """A message in the format of the plan."""
    wire = wire_format(getattr(plan.wire, wire_kind(message, links)))
    half = plan.precision.parameters != "none"
    return replace(message, bytes=int(message.bytes * wire.ratio(2 if half else 4)))


def by_kind(costs: StepCosts) -> Seconds:
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "sends")
    spent = {kind: costs.messages.get(kind, 0.0) for kind in kinds}
    return Seconds(
        compute=costs.compute,
        recompute=costs.recompute,
        **spent,
        exposed=costs.exposed,
        bubble=costs.bubble,
        update=costs.update,
        step=costs.step,
    )


def _pipelined(
    plan: Plan, links: dict[str, list[tuple[int, Link]]], forward: float, backward: float
) -> tuple[float, float]:
    """Seconds that the first rank waits, and its share of the work."""
    line, ranks = plan.pipeline, plan.mesh.of("pipeline")
    if not forward:
        return 0.0, sum(line.shares[::ranks])
    each = [share / line.micro_batches for share in line.shares]
    sent = plan.work.hidden_bytes // line.micro_batches
    found = predict_pipeline(
        line.schedule,
        ranks,
        line.micro_batches,
        [forward * part for part in each],
        [backward * part for part in each],
        point_to_point_seconds(links["pipeline"][0][1], sent),
    )
    return found.seconds - found.busy[0], found.busy[0] / (forward + backward)


def model_messages(
    plan: Plan,
    links: dict[str, list[tuple[int, Link]]],
    again: float,
    blocks: float,
    own: float,
    attention: Volume,
) -> Iterator[Message]:
    """Messages between ranks that share a model, of the whole batch.

    Args:
        plan: plan with its work.
        links: size and link of each axis, of `axis_links`.
        again: share of the blocks that are computed again.
        blocks: number of blocks that this rank runs.
        own: share of the work that this rank has.
        attention: bytes that a rank sends in one attention.
    """
    work, sequence, degree = plan.work, plan.sequence, plan.mesh.of("sequence")
    if "tensor" in links:
        passes = dict[int, float](Counter((*work.reduced_forward, *work.reduced_backward)))
        for count, number in Counter(work.reduced_again).items():
            passes[count] = passes.get(count, 0) + again * number
        for count, times in passes.items():
            size = count // degree
            if sequence.mode in SHARED_BY_TENSOR:
                yield Message("reduce_scatter", size, links["tensor"], times * own)
                yield Message("all_gather", size, links["tensor"], times * own)
            else:
                yield Message("all_reduce", size, links["tensor"], times * own)
        if sequence.mode in SHARED_BY_TENSOR:
            # Gathered inputs are not kept for the gradients of the weights, but gathered again.
            for size, number in Counter(work.reduced_backward).items():
                yield Message("all_gather", size, links["tensor"], number * own)
    if "sequence" in links:
        u, ring = sequence.ulysses, sequence.outer * sequence.inner
        passes = (attention.forward, attention.ulysses_forward, 1 + again)
        passes = passes, (attention.backward, attention.ulysses_backward, 1.0)
        for whole, exchanged, times in passes:
            if u > 1:
                # One exchange of queries, keys and values, one of the result.
                line, size = [(u, links["sequence"][0][1])], exchanged / 2 * u / (u - 1)
                yield Message("all_to_all", int(size), line, 2 * blocks * times)
            if ring > 1:
                hop = int((whole - exchanged) / (ring - 1))
                yield Message("sends", hop, links["sequence"], (ring - 1) * blocks * times, True)
    if "pipeline" in links:
        micro = plan.pipeline.micro_batches
        yield Message("sends", work.hidden_bytes // micro, links["pipeline"], micro, hidden=True)


def shared_messages(plan: Plan, line: list[tuple[int, Link]]) -> Iterator[Message]:
    """Messages of the replicas: gradients, and parameters where they are sharded."""
    if not line or plan.model.trainable == 0:
        return
    if plan.ddp is not None:
        whole, bucket = plan.memory.gradients, plan.ddp.bucket_mb * 2**20
        for start in range(0, whole, bucket):
            yield Message("all_reduce", min(bucket, whole - start), line, hidden=True)
        return
    assert plan.zero is not None, "replicas share by DDP or ZeRO"
    sizes = [c.bytes for c in plan.chunks]
    for (kind, count), times in Counter(zero_collectives(plan.zero.stage, sizes)).items():
        yield Message(kind, count, line, times, plan.zero.overlap)  # type: ignore[arg-type]


def _activations(plan: Plan, share: float, blocks: int) -> int:
    """Bytes that a rank keeps for backward; of a pipeline those of the micro-batches under way."""
    again = len(plan.recompute) / blocks if blocks else 0.0
    inputs = plan.work.hidden_bytes * len(plan.recompute)
    kept = share * (plan.work.activations * (1 - again) + inputs)
    if plan.mesh.of("pipeline") > 1:
        kept *= plan.pipeline.shares[0] * plan.mesh.of("pipeline") / plan.pipeline.micro_batches
    return int(kept)
