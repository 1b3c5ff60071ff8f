"""Messages of a step in micro-batches and in wire formats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from gulliver.comm import current_world
from gulliver.hardware import Cluster, Link, Message, packing_seconds
from gulliver.plan import Plan
from gulliver.precision.wire import PackRates, WireFormat, pack_rates, wire_format


def in_parts(message: Message, times: int) -> Message:
    """Splits a message by micro-batches; those between stages are split already."""
    if times == 1 or message.behind_s == math.inf:
        return message
    behind = None if message.behind_s is None else message.behind_s / times
    size, count = message.bytes // times, message.count * times
    return replace(message, bytes=size, count=count, behind_s=behind)


def wire_kind(message: Message, links: dict[str, list[tuple[int, Link]]]) -> str:
    """Kind of what a message carries, of `gulliver.plan.WIRE_KINDS`."""
    if message.kind == "all_to_all":
        return "sequence"
    if message.kind == "sends":
        return "pipeline" if message.axes is links.get("pipeline") else "sequence"
    if message.axes is links["replicas"]:
        return "gather" if message.kind == "all_gather" else "reduce"
    return "tensor"


def rates_of_packing(wire: WireFormat, cluster: Cluster | None) -> PackRates:
    """Packing rates: measured here, or estimated for other machines."""
    if cluster is None:
        return pack_rates(wire, current_world().device.type)
    each = 8.0 / cluster.device.memory_rate
    return PackRates(each, each, 2 * cluster.device.launch_s)


def packed_message(message: Message, wire: WireFormat, rates: PackRates, item: int) -> Message:
    """A message in a wire format, with the seconds of packing it."""
    if wire.name == "identity":
        return message
    elements = message.bytes // item
    packing_s = packing_seconds(
        message.kind, message.axes, elements, rates.pack_s, rates.unpack_s, rates.call_s
    )
    return replace(message, bytes=int(message.bytes * wire.ratio(item)), packing_s=packing_s)


def packed(
    plan: Plan,
    message: Message,
    links: dict[str, list[tuple[int, Link]]],
    rates: Callable[[WireFormat], PackRates],
) -> Message:
    """A message in the wire format of the plan."""
    wire = wire_format(getattr(plan.wire, wire_kind(message, links)))
    item = 2 if plan.precision.parameters != "none" else 4
    return packed_message(message, wire, rates(wire), item)
