"""Predicts the time of a step from the costs of a batch and its messages."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from gulliver.comm.world import current_world
from gulliver.families.lookup import family_of, is_hugging_face
from gulliver.families.loss import hugging_face_of
from gulliver.hardware.attention import GATHER_LAUNCHES, exchange_launches, hop_launches
from gulliver.hardware.attention import AttentionBytes as Volume
from gulliver.hardware.cluster import Cluster, Device, Link
from gulliver.hardware.costs import packing_seconds, torus_links, zero_collectives
from gulliver.hardware.probe import current_cluster
from gulliver.hardware.step import Message, StepCosts, predict_step
from gulliver.memory.budget import FreedMemory
from gulliver.parallel.pipeline.schedules import predict as predict_pipeline
from gulliver.parallel.sequence.choice import volume
from gulliver.plan.plan import Plan
from gulliver.plan.results import Predicted, Seconds, TierTraffic
from gulliver.plan.tree import AXES, SHARED_BY_TENSOR, Work
from gulliver.planner.capability import attention_shape, sequence_plan
from gulliver.planner.measure import estimate_sample, follow_sample, measure_work, with_peaks
from gulliver.planner.model import PRECISIONS, offloadable_blocks
from gulliver.planner.ranks import ResolvedPlan, largest_residency, rank_states, rank_work
from gulliver.planner.residency import other_bytes, priced
from gulliver.planner.resolve import recomputable
from gulliver.precision.wire.formats import WireFormat, wire_format
from gulliver.precision.wire.packing import PackRates, pack_rates


def in_parts(message: Message, times: int) -> Message:
    """Splits a message by micro-batches, unless it is sent between stages (already split)."""
    if times == 1 or message.behind_s == math.inf:
        return message
    behind = None if message.behind_s is None else message.behind_s / times
    size, count = message.bytes // times, message.count * times
    return replace(message, bytes=size, count=count, behind_s=behind)


def wire_kind(message: Message, links: dict[str, list[tuple[int, Link]]]) -> str:
    """Kind of a message's payload, one of `gulliver.plan.tree.WIRE_KINDS`."""
    if message.kind == "all_to_all":
        return "sequence"
    if message.kind == "sends":
        return "pipeline" if message.axes is links.get("pipeline") else "sequence"
    if message.axes is links["replicas"]:
        return "gather" if message.kind == "all_gather" else "reduce"
    return "tensor"


def rates_of_packing(wire: WireFormat, cluster: Cluster | None) -> PackRates:
    """Packing rates: measured on this machine, or estimated for others."""
    if cluster is None:
        return pack_rates(wire, current_world().device.type)
    each = 8.0 / cluster.device.memory_rate
    return PackRates(each, each, 2 * cluster.device.launch_s)


def packed_message(message: Message, wire: WireFormat, rates: PackRates, item: int) -> Message:
    if wire.name == "identity":
        return message
    elements = message.bytes // item
    packing_s = packing_seconds(
        message.kind, message.axes, elements, rates.pack_s, rates.unpack_s, rates.call_s
    )
    size = int(message.bytes * wire.ratio(item))
    return replace(message, bytes=size, packing_s=packing_s, reads=False)


def packed(
    plan: Plan,
    message: Message,
    links: dict[str, list[tuple[int, Link]]],
    rates: Callable[[WireFormat], PackRates],
) -> Message:
    wire = wire_format(getattr(plan.wire, wire_kind(message, links)))
    item = 2 if plan.precision.parameters != "none" else 4
    return packed_message(message, wire, rates(wire), item)


# Seconds of a plan's step: compute, messages and waits of a rank.
#
# Formulas for seconds are in `gulliver.hardware`; this file determines a plan's messages.


HALVES = {"bf16": "bfloat16", "fp16": "float16"}


def predict(resolved: ResolvedPlan, cluster: Cluster | None = None) -> ResolvedPlan:
    plan, model, tensor = resolved.plan, resolved.model, resolved.tensor
    blocks = _blocks(resolved)
    rates = partial(rates_of_packing, cluster=cluster)
    cluster = cluster or current_cluster(plan.mesh.size)
    links = axis_links(plan, cluster)
    share = 1.0 if tensor is None else 1 - tensor.share_of(model) * (1 - 1 / tensor.size)
    share /= plan.mesh.of("sequence")
    sent = attention_sends(plan, model)
    share_s = _computed(plan, share)
    costs = _costs(plan, links, share_s, len(blocks), cluster.device, sent, rates)
    reasons = dict(plan.reasons)
    if plan.work.samples:
        reasons["predicted.seconds"] = (
            f"{1e3 * (plan.work.forward_s + plan.work.backward_s):.3g} ms of one process on "
            f"{plan.work.samples} samples, links of {cluster.name}"
        )
    activations = _activations(plan, share, len(blocks))
    seconds, moved = by_kind(costs), plan.predicted.moved
    if moved is not None:
        assert plan.tiers is not None, "the plan has a limit"
        moved, seconds, other = tiered_step(resolved, cluster, seconds)
        activations = other + plan.memory.activations
        folder, disk = plan.tiers.disk, cluster.disk
        if folder is not None and disk is not None and not disk.has(folder):
            reasons["predicted.moved"] = (
                f"rates of the disk of {disk.folder or cluster.name}; "
                f"gulliver probe --folder {folder} measures the one of {folder}"
            )
    memory = replace(plan.predicted.bytes, activations=activations)
    sent, fullest = int(costs.sent), plan.predicted.fullest
    predicted = Predicted(cluster.name, seconds, sent, memory, moved, fullest)
    return resolved.with_plan(replace(plan, predicted=predicted, reasons=reasons))


def with_work(resolved: ResolvedPlan, sample: Any) -> Plan:
    """Adds the cost of a sample to a plan: measured, or estimated for a model on meta."""
    plan, model, optimizer = resolved.plan, resolved.model, resolved.optimizer
    autocast = PRECISIONS.get(plan.precision.autocast)
    tensor, blocks = resolved.tensor, _blocks(resolved)
    tiers = plan.tiers
    chosen = tiers is not None and tiers.activations == "auto"
    blocks = offloadable_blocks(model) if chosen else blocks
    if any(p.is_meta for p in model.parameters()):
        work = estimate_sample(model, optimizer, sample, plan.precision.autocast)
    else:
        with _as_it_runs(plan):
            given = model, optimizer, sample, tensor, blocks, autocast, chosen
            work = measure_work(*given, plan.precision.fp8)
    if tiers is not None:
        work = with_peaks(work, model, sample, autocast, tiers.activations)
    return replace(plan, work=work)


@contextmanager
def _as_it_runs(plan: Plan) -> Iterator[None]:
    """Returns freed memory to the system in this context, as a run under a memory limit does."""
    freed = FreedMemory() if plan.limited else None
    try:
        yield
    finally:
        if freed is not None:
            freed.close()


def with_mixed(plan: Plan, model: nn.Module, sample: Any) -> Plan:
    """Adds the peak bytes of a step with the plan's mix of activation choices."""
    tiers = plan.tiers
    if tiers is None or tiers.activations != "mixed":
        return plan
    autocast = PRECISIONS.get(plan.precision.autocast)
    found = follow_sample(model, sample, autocast, plan.recompute, tiers.offloaded).bytes
    return replace(plan, work=replace(plan.work, peak_mixed=found or plan.work.peak_mixed))


def tiered_step(
    resolved: ResolvedPlan, cluster: Cluster, seconds: Seconds
) -> tuple[TierTraffic, Seconds, int]:
    """Traffic between tiers, step time including waits for it, and peak bytes other than state."""
    plan = resolved.plan
    work, tiers = rank_work(resolved), plan.tiers
    assert tiers is not None, "the plan has a limit"
    found = largest_residency(rank_states(resolved), tiers, work)
    moved, tiered = priced(found, tiers, work, cluster)
    if tiered is None:
        return moved, seconds, other_bytes(tiers, work)
    exposed = seconds.exposed + tiered.exposed
    step = seconds.step + tiered.exposed
    seconds = replace(seconds, transfers=tiered.busy, exposed=exposed, step=step)
    return moved, seconds, other_bytes(tiers, work)


def _blocks(resolved: ResolvedPlan) -> tuple[str, ...]:
    found = recomputable(resolved.plan, resolved.model, resolved.stages)
    return found if resolved.stages is not None else tuple(path for path in found if path)


def axis_links(plan: Plan, cluster: Cluster) -> dict[str, list[tuple[int, Link]]]:
    """Size and link of each mesh axis with several ranks; ``replicas`` combines ZeRO's axes."""
    sizes = [plan.mesh.of(name) for name in AXES]
    several = [name for name, size in zip(AXES, sizes, strict=True) if size > 1]
    # Links need a cluster as large as the mesh.
    whole = cluster if cluster.size == plan.mesh.size else cluster.resized(plan.mesh.size)
    found = {n: [a] for n, a in zip(several, torus_links(whole, sizes), strict=True)}
    replicas = [link for name in ("data", "sequence") for link in found.get(name, [])]
    if len(replicas) > 1:
        count = plan.mesh.replicas
        replicas = [(count, replicas[0][1])]
    if plan.mesh.torus:
        replicas = torus_links(whole, list(plan.mesh.torus.values()))
    return {**found, "replicas": replicas}


def free_share(device: Device, ranks: int) -> float:
    """Share of communication that does not slow down compute."""
    if device.overlap is not None:
        return device.overlap
    busy = ranks * torch.get_num_threads()
    on_cpu = device.to_device_rate is None
    return 0.0 if on_cpu and busy >= (os.cpu_count() or 1) else 1.0


def _computed(plan: Plan, share: float) -> float:
    # [Note: what tensor ranks do not divide] Every tensor rank computes norms, residual additions
    # and rotary embeddings on full hidden states. They have few parameters but take a tenth of a
    # forward or more, so only the seconds of sharded modules are divided.
    tensor, measured = plan.mesh.of("tensor"), plan.work.share_cut
    if tensor == 1 or not measured:
        return share
    return (1 - measured * (1 - 1 / tensor)) / plan.mesh.of("sequence")


def attention_sends(plan: Plan, model: nn.Module) -> Volume:
    """Bytes sent by each rank in one attention call for the whole batch."""
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
    # For images and clips, whose tokens the model creates, each tensor counts like a hidden state.
    part, u = work.hidden_bytes / degree, plan.sequence.ulysses
    exchanged, hops = 4 * part * (1 - 1 / u), degree // u - 1
    return Volume(exchanged, exchanged, 2 * part * hops, 4 * part * hops)


def _costs(
    plan: Plan,
    links: dict[str, list[tuple[int, Link]]],
    share: float,
    blocks: int,
    device: Device,
    attention: Volume,
    rates: Callable[[WireFormat], PackRates],
) -> StepCosts:
    work = plan.work
    again = len(plan.recompute) / blocks if blocks else 0.0
    stages = plan.mesh.of("pipeline")
    times = plan.pipeline.micro_batches if stages > 1 else work.backwards
    forward, backward = passes(work, share, plan.mesh.of("tensor"), times)
    # Embeddings, head and loss are outside of blocks and not recomputed.
    repeated, bubble, own = again * (work.share_blocks or 1.0) * forward, 0.0, 1.0
    if stages > 1:
        bubble, own = _pipelined(plan, links, forward, backward + repeated)
    parts = plan.mesh.replicas if plan.stage else 1
    cut = own / plan.mesh.of("tensor") if plan.mesh.of("tensor") > 1 else own
    messages = list(shared_messages(plan, links["replicas"], times))
    whole = model_messages(plan, links, again, max(blocks, 1) * own, own, attention)
    messages += [in_parts(m, times) for m in whole]
    messages = [packed(plan, message, links, rates) for message in messages]
    return predict_step(
        (own * forward, own * backward),
        own * repeated,
        work.update_s * cut / parts,
        messages,
        bubble,
        free_share(device, plan.mesh.size),
        device.launch_s,
    )


def passes(work: Work, share: float, tensor: int, times: int) -> tuple[float, float]:
    """Forward and backward seconds of a batch in micro-batches, summed over stages."""
    # [Note: what does not shrink] Ranks that share a model, and micro-batches, divide the FLOPs.
    # But each of them launches every operation and reads all its weights.
    least = times * work.weights_s / tensor
    return (
        max(share * work.forward_s, least) + times * work.launch_forward_s,
        max(share * work.backward_s, 2 * least) + times * work.launch_backward_s,
    )


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
        hop_message(links, sent).seconds,
        bool(plan.recompute),
    )
    busiest = max(found.busy)
    return found.seconds - busiest, busiest / (forward + backward)


def hop_message(links: dict[str, list[tuple[int, Link]]], count: int) -> Message:
    return Message("sends", count, links["pipeline"])


def model_messages(
    plan: Plan,
    links: dict[str, list[tuple[int, Link]]],
    again: float,
    blocks: float,
    own: float,
    attention: Volume,
) -> Iterator[Message]:
    """Messages between the ranks of one replica, for the whole batch."""
    if "tensor" in links:
        yield from _tensor_messages(plan, links["tensor"], again, own)
    if "sequence" in links:
        yield from _sequence_messages(plan, links["sequence"], again, blocks, own, attention)
    if "pipeline" in links:
        micro = plan.pipeline.micro_batches
        # The seconds of the schedule include their exposed part.
        size, line = plan.work.hidden_bytes // micro, links["pipeline"]
        yield Message("sends", size, line, micro, True, behind_s=math.inf)


def _tensor_messages(
    plan: Plan, line: list[tuple[int, Link]], again: float, own: float
) -> Iterator[Message]:
    work, mode = plan.work, plan.sequence.mode
    passes = dict[int, float](Counter((*work.reduced_forward, *work.reduced_backward)))
    for count, number in Counter(work.reduced_again).items():
        passes[count] = passes.get(count, 0) + again * number
    for count, times in passes.items():
        size = count // plan.mesh.of("sequence")
        if mode in SHARED_BY_TENSOR:
            for kind in ("reduce_scatter", "all_gather"):
                yield Message(kind, size, line, times * own, launches=GATHER_LAUNCHES)
        else:
            yield Message("all_reduce", size, line, times * own)
    if mode in SHARED_BY_TENSOR:
        # Gathered inputs are not kept for the gradients of the weights, but gathered again.
        for size, number in Counter(work.reduced_backward).items():
            yield Message("all_gather", size, line, number * own, launches=GATHER_LAUNCHES)


def _sequence_messages(
    plan: Plan,
    line: list[tuple[int, Link]],
    again: float,
    blocks: float,
    own: float,
    attention: Volume,
) -> Iterator[Message]:
    work, sequence = plan.work, plan.sequence
    u, ring = sequence.ulysses, sequence.outer * sequence.inner
    passes: tuple[tuple[Literal["forward", "backward"], float, float, float, float], ...] = (
        (
            "forward",
            attention.forward,
            attention.ulysses_forward,
            1 + again,
            work.attention_forward_s,
        ),
        (
            "backward",
            attention.backward,
            attention.ulysses_backward,
            1.0,
            work.attention_backward_s,
        ),
    )
    for beside, whole, exchanged, times, seconds in passes:
        if u > 1:
            # One exchange of queries, keys and values, one of the result.
            size, count = exchanged / 2 * u / (u - 1), 2 * blocks * times
            launches = exchange_launches(u)
            yield Message("all_to_all", int(size), [(u, line[0][1])], count, launches=launches)
        if ring > 1:
            # In backward keys and values circulate in the ring, and their gradients separately.
            each = 1 if beside == "forward" else 2
            number = (ring - 1) * each
            # The part of an attention that a ring computes during one hop.
            ranks = plan.mesh.of("sequence") * plan.mesh.of("tensor")
            shared = ranks * ring * max(1.0, blocks / max(own, 1e-9))
            behind = seconds / (shared * each) if seconds else None
            yield Message(
                "sends",
                int((whole - exchanged) / number),
                line,
                number * blocks * times,
                True,
                beside,
                behind_s=behind,
                launches=hop_launches(ring) / each,
            )


def shared_messages(plan: Plan, line: list[tuple[int, Link]], times: int = 1) -> Iterator[Message]:
    """Messages between replicas: gradients, and sharded parameters."""
    if not line or plan.model.trainable == 0:
        return
    if plan.ddp is not None:
        whole, bucket = plan.memory.gradients, plan.ddp.bucket_mb * 2**20
        for start in range(0, whole, bucket):
            size = min(bucket, whole - start)
            yield Message("all_reduce", size, line, hidden=True, part=1 / times)
        return
    assert plan.zero is not None, "replicas share by DDP or ZeRO"
    sizes, zero = [c.bytes for c in plan.chunks], plan.zero
    # Steps of unequal work communicate once, as stage 1 does; under a limit without overlap.
    stage = min(zero.stage, 1) if zero.unequal else zero.stage
    hidden = zero.overlap and not (zero.unequal and plan.limited)
    for (kind, size), number in Counter(zero_collectives(stage, sizes)).items():
        for message in zero_messages(stage, kind, size, number, line, times):
            yield replace(message, hidden=hidden)


def zero_messages(
    stage: int, kind: str, size: int, number: float, line: Sequence[tuple[int, Link]], times: int
) -> Iterator[Message]:
    """ZeRO's messages of one size, each with the pass that overlaps it."""
    gathers = kind == "all_gather"
    # Stages without full gradient buffers reduce gradients after every backward.
    once = stage < 2 or (stage == 2 and gathers)
    part, number = (1 / times, number) if once else (1.0, number * times)
    message = Message(kind, size, line, number, True, part=part, reads=True)  # type: ignore[arg-type]
    if not gathers:
        yield message
        return
    later = number // (2 * times) * times if stage == 3 else 0
    yield replace(message, count=number - later, beside="forward")
    if later:
        yield replace(message, count=later)


def _activations(plan: Plan, share: float, blocks: int) -> int:
    again = len(plan.recompute) / blocks if blocks else 0.0
    inputs = plan.work.hidden_bytes * len(plan.recompute)
    kept = share * (plan.work.activations * (1 - again) + inputs)
    if plan.mesh.of("pipeline") > 1:
        kept *= plan.pipeline.shares[0] * plan.mesh.of("pipeline") / plan.pipeline.micro_batches
    return int(kept)
