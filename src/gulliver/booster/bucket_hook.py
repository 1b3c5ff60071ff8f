"""Wire formats at run time: ZeRO's chunks and DDP's buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gulliver.comm.collectives import all_reduce, group_size
from gulliver.parallel.zero.sending import GradientGate, ZeroWires
from gulliver.plan.plan import Plan
from gulliver.plan.tree import Wire
from gulliver.precision.wire.formats import wire_format


def zero_wires(plan: Plan) -> ZeroWires:
    """Wire formats of ZeRO's chunks."""
    wire = plan.wire
    reduce, gather = wire_format(wire.reduce), wire_format(wire.gather)
    return ZeroWires(reduce, gather, wire.error_feedback, wire.gate)


class BucketHook:
    """Reduces the buckets of torch's DDP in a wire format."""

    def __init__(self, wire: Wire, names: Mapping[Any, str]) -> None:
        self.wire, self.names = wire_format(wire.reduce), names
        self.feeds = wire.error_feedback
        self._lost: dict[int, tuple[dict[str, torch.Tensor], torch.Tensor]] = {}
        self._given: dict[str, torch.Tensor] = {}
        self.gate = GradientGate(self.wire, wire.error_feedback, wire.gate)

    # No annotations: torch compares them with types, and accepts missing ones.
    def reduce(self, state, bucket):
        """Begins the reduction of a bucket; returns its future."""
        tensor, lost = bucket.buffer(), None
        cuda = tensor.is_cuda
        devices = [tensor.device] if cuda else None
        future: Any = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
        if self.feeds:
            lost = self._lost_of(bucket, tensor)
        checking = self.gate.checking
        exact = tensor.clone() if checking else None
        if exact is not None:
            all_reduce(exact, "mean")
        packed = self.wire.of(tensor, tensor.numel() // group_size()).name != "identity"
        waits = cuda or checking or not packed
        handle = all_reduce(
            tensor,
            "mean",
            async_op=True,
            wire=self.wire,
            error=lost,
            finish=None if waits else lambda: future.set_result(tensor),
        )
        if waits:
            handle.wait()
            if exact is not None:
                self._compare(bucket, exact)
            future.set_result(tensor)
        return future

    def _lost_of(self, bucket: dist.GradBucket, tensor: torch.Tensor) -> torch.Tensor:
        members = [self.names.get(p, "") for p in bucket.parameters()]
        views, lost = self._lost.get(bucket.index(), ({}, tensor))
        if list(views) != members:  # DDP cuts buckets anew after a step
            self._given = self.lost()
            self._lost = {}
            lost, views = torch.zeros_like(tensor), {}
            runs = lost.split([g.numel() for g in bucket.gradients()])
            for name, run, gradient in zip(members, runs, bucket.gradients(), strict=True):
                views[name] = run.view(gradient.shape)
        for name in views.keys() & self._given.keys():
            views[name].copy_(self._given.pop(name))
        self._lost[bucket.index()] = views, lost
        return lost

    def lost(self) -> dict[str, torch.Tensor]:
        """Accumulated packing errors of this rank's gradients, by parameter."""
        found = dict(self._given)
        for views, _ in self._lost.values():
            found |= views
        return found

    def take_lost(self, found: Mapping[str, torch.Tensor]) -> None:
        """Restores packing errors by parameter, replacing those here."""
        self._lost, self._given = {}, dict(found) if self.feeds else {}

    def _compare(self, bucket: dist.GradBucket, exact: torch.Tensor) -> None:
        start = 0
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            run = slice(start, start + gradient.numel())
            self.gate.add(self.names.get(parameter, "a parameter"), gradient, exact[run])
            start += gradient.numel()
        if bucket.is_last():
            self.gate.end_step()
