"""Chooses wire formats: drops requested ones that are not predicted to be faster.

Packing costs compute and saves communication. `decide` drops formats that are predicted to be
slower, and records why in the plan. The formats in a plan file are used as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from gulliver.comm.collectives import broadcast_object, gather_objects
from gulliver.comm.world import current_world
from gulliver.errors import GulliverError, nearest
from gulliver.hardware.cluster import Cluster, Link
from gulliver.hardware.probe import current_cluster
from gulliver.hardware.step import Message
from gulliver.options import Options
from gulliver.plan.plan import Plan
from gulliver.plan.tree import WIRE_KINDS, Wire
from gulliver.planner.predict import (
    attention_sends,
    axis_links,
    model_messages,
    packed_message,
    rates_of_packing,
    shared_messages,
    wire_kind,
)
from gulliver.planner.ranks import ResolvedPlan, places
from gulliver.planner.resolve import predict_memory
from gulliver.precision.wire.formats import WireFormat, wire_format

SAMPLE_BYTES = 1 << 20  # message size assumed if the sizes of a step are unknown


@dataclass(frozen=True)
class WireOptions(Options):
    """Wire formats that a plugin's options request.

    Attributes:
        formats: format of each named kind.
        every: format of all kinds; None if `formats` names them.
        force: whether formats are kept even if predicted to be slower.
        feedback: whether a gradient's packing error is added to the next gradient (error feedback).
        gate: whether gradients are occasionally compared with unpacked ones.
    """

    formats: Mapping[str, str] = field(default_factory=dict)
    every: str | None = None
    force: bool = False
    feedback: bool = False
    gate: bool = True

    @classmethod
    def of(cls, communication_dtype: Any, force: bool, feedback: bool, gate: bool) -> WireOptions:
        if communication_dtype is None:
            if force or feedback:
                name = "force_communication_dtype" if force else "error_feedback"
                raise GulliverError(f"{name}=True needs a communication_dtype, such as 'fp8'")
            return cls(gate=gate)
        if not isinstance(communication_dtype, Mapping):
            text = str(wire_format(communication_dtype))
            return cls({}, text, force, feedback, gate)
        for kind in communication_dtype:
            if kind not in WIRE_KINDS:
                raise GulliverError(
                    f"communication_dtype has no kind {kind!r}: {nearest(str(kind), WIRE_KINDS)}"
                )
        formats = {kind: str(wire_format(text)) for kind, text in communication_dtype.items()}
        return cls(formats, None, force, feedback, gate)

    def check_equal_on_ranks(self) -> None:
        """Rejects options that differ between ranks (collective)."""
        every = [str(asked) for asked in gather_objects((self.formats, self.every, *self.switches))]
        other = next((rank for rank, asked in enumerate(every) if asked != every[0]), None)
        if other is not None:
            raise GulliverError(
                f"wire formats differ: rank 0 has {every[0]}, rank {other} has {every[other]}; "
                "pass the same communication options on all ranks"
            )

    @property
    def switches(self) -> tuple[bool, bool, bool]:
        return self.force, self.feedback, self.gate

    def asked(self, plan: Plan) -> Plan:
        if not self.formats and self.every is None:
            return plan
        formats = dict(self.formats)
        if self.every is not None:
            formats = dict.fromkeys(_kinds(plan), self.every)
        feedback = self.feedback and wire_format(formats.get("reduce", "identity")).name != (
            "identity"
        )
        if self.feedback and not feedback and self.every is None:
            feedback = True  # refused, by the name of the kind
        return replace(plan, wire=Wire(**formats, error_feedback=feedback, gate=self.gate))


def _kinds(plan: Plan) -> list[str]:
    kinds = ["reduce"] if plan.mesh.replicas > 1 else []
    if kinds and plan.zero is not None and plan.zero.stage > 0:
        kinds.insert(0, "gather")
    return kinds + [k for k in ("tensor", "sequence", "pipeline") if plan.mesh.of(k) > 1]


def decide(
    resolved: ResolvedPlan, options: WireOptions, cluster: Cluster | None = None
) -> ResolvedPlan:
    """Drops formats predicted to cost more time than they save, and records why."""
    plan = resolved.plan
    asked = {k: wire_format(f) for k, f in plan.wire.formats.items() if f != "identity"}
    if not asked or not (options.formats or options.every):
        return resolved  # one that was read from a file runs as it stands there
    links = axis_links(plan, cluster or current_cluster(plan.mesh.size))
    by_kind: dict[str, list[Message]] = {kind: [] for kind in asked}
    for message in _messages(plan, resolved.model, links):
        by_kind.setdefault(wire_kind(message, links), []).append(message)
    formats, reasons = dict(plan.wire.formats), dict(plan.reasons)
    item = 2 if plan.precision.parameters != "none" else 4
    for kind, wire in asked.items():
        axes = links["replicas" if kind in ("gather", "reduce") else kind]
        plain, packed, packing = _compared(by_kind[kind], wire, axes, cluster, item)
        off = packed >= plain and not options.force
        formats[kind] = "identity" if off else formats[kind]
        what = "a step" if by_kind[kind] else "a message of 1 MiB"
        verb = "stays off" if off else "pays" if packed < plain else "is forced"
        reasons[f"wire.{kind}"] = (
            f"{wire} {verb}: {what} {1e3 * plain:.3g} ms unpacked, {1e3 * packed:.3g} ms packed to "
            f"{100 * wire.ratio():.0f} % (packing {1e3 * packing:.3g} ms)"
            + ("; force_communication_dtype=True overrides" if off else "")
        )
    feedback = plan.wire.error_feedback and formats["reduce"] != "identity"
    decided = replace(plan.wire, **formats, error_feedback=feedback), reasons
    if current_world().size == plan.mesh.size > 1:
        decided = broadcast_object(decided)  # ranks measure different times
    return _with_memory(resolved, replace(plan, wire=decided[0], reasons=decided[1]))


def _with_memory(asked: ResolvedPlan, plan: Plan) -> ResolvedPlan:
    found = asked.with_plan(plan)
    if plan.wire.gather == asked.plan.wire.gather or plan.stage == 3:
        return found
    place = next(p for p, rank in places(plan).items() if rank == plan.predicted.fullest)
    before, after = (
        predict_memory(r.plan, r.model, r.sizes(place)).parameters for r in (asked, found)
    )
    predicted, held = plan.predicted, plan.predicted.bytes
    held = replace(held, parameters=held.parameters - before + after)
    return found.with_plan(replace(plan, predicted=replace(predicted, bytes=held)))


def _messages(
    plan: Plan, model: nn.Module, links: dict[str, list[tuple[int, Link]]]
) -> Iterator[Message]:
    yield from shared_messages(plan, links["replicas"])
    if plan.work.samples:
        sends = attention_sends(plan, model)
        yield from model_messages(plan, links, 0.0, max(1, len(plan.work.blocks)), 1.0, sends)


def _compared(
    messages: Sequence[Message],
    wire: WireFormat,
    axes: Sequence[tuple[int, Link]],
    cluster: Cluster | None,
    item: int,
) -> tuple[float, float, float]:
    """Returns seconds of plain messages, of packed ones including packing, and of packing alone."""
    if not messages:
        messages = [Message("reduce_scatter", SAMPLE_BYTES, axes)]
    plain = sum(message.seconds for message in messages)
    rates = rates_of_packing(wire, cluster)
    less = [packed_message(m, wire, rates, item) for m in messages]
    packing = sum(m.count * m.packing_s for m in less)
    return plain, sum(message.seconds for message in less) + packing, packing
