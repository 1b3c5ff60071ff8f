"""Jobs, clusters, and the placement of jobs on nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Annotated, NamedTuple

import numpy as np

from gulliver.errors import GulliverError
from gulliver.hardware.cluster import Cluster
from gulliver.hardware.scaling import Scaling, batch_efficiency, best_batch
from gulliver.options import AT_LEAST_1, Range, check_options

Parts = tuple[int, ...]  # number of slots on each node


def place(counts: Sequence[int], free: Sequence[int]) -> list[Parts]:
    """Places jobs on nodes, largest first: on the best-fitting node, or on as few as possible."""
    # Best-fit decreasing (Johnson 1973, "Near-optimal bin packing algorithms").
    assert sum(counts) <= sum(free), "the slots fit into the cluster"
    left = list(free)
    placed: dict[int, Parts] = {}
    for job in sorted(range(len(counts)), key=lambda number: -counts[number]):
        parts, count = [0] * len(left), counts[job]
        fits = [node for node, room in enumerate(left) if room >= count]
        if count and fits:
            parts[min(fits, key=lambda node: left[node])] = count
        else:
            for node in sorted(range(len(left)), key=lambda number: -left[number]):
                parts[node] = min(left[node], count - sum(parts))
        left = [room - part for room, part in zip(left, parts, strict=True)]
        placed[job] = tuple(parts)
    return [placed[job] for job in range(len(counts))]


# A slot is one accelerator. Work is counted in samples at the job's own batch size. On n slots a
# job runs at the allowed batch size with the highest goodput. With a fixed batch, other slots only
# change its gradient accumulation.


AT_LEAST_0 = Range(0, math.inf, open_above=True)
POSITIVE_TIME = Range(0, math.inf, open_below=True, open_above=True)


@dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        name: name, unique in a trace.
        arrival: time of submission, in seconds.
        samples: samples to process at `batch`; larger batches need more, depending on `noise`.
        batch: global batch size chosen by its user.
        slots: number of slots requested by its user; policies that do not resize use it.
        scaling: seconds per step as a function of slots and batch.
        noise: gradient noise scale in samples; with 0, larger batches do not help.
        least_batch: smallest allowed batch size; None for `batch`.
        most_batch: largest allowed batch size; None for `batch`.
        epoch: samples per epoch; None for a twentieth of `samples`.
        deadline: time by which it should be done, in seconds; None for no deadline.
        tenant: the user who owns the job, for quotas.
        resize_seconds: seconds lost when its slots change or it resumes after a pause.
        start_seconds: seconds from its first slots to its first step.
        leave_seconds: part of `resize_seconds` until its slots are free for other jobs.
        most_slots: largest number of slots that it can use; None for no limit.
        announced: whether policies know `samples`; otherwise they estimate it.
        curvature: decay rate of its loss as seen by policies, exp(-curvature x progress).
    """

    name: str
    arrival: Annotated[float, AT_LEAST_0]
    samples: Annotated[float, POSITIVE_TIME]
    batch: Annotated[int, AT_LEAST_1]
    slots: Annotated[int, AT_LEAST_1]
    scaling: Scaling
    noise: Annotated[float, AT_LEAST_0] = 0.0
    least_batch: Annotated[int | None, AT_LEAST_1] = None
    most_batch: Annotated[int | None, AT_LEAST_1] = None
    epoch: Annotated[float | None, POSITIVE_TIME] = None
    deadline: float | None = None
    tenant: str = ""
    resize_seconds: Annotated[float, AT_LEAST_0] = 10.0
    most_slots: Annotated[int | None, AT_LEAST_1] = None
    announced: bool = True
    curvature: Annotated[float, POSITIVE_TIME] = 3.0
    start_seconds: Annotated[float, AT_LEAST_0] = 0.0
    leave_seconds: Annotated[float, AT_LEAST_0] = 0.0

    def __post_init__(self) -> None:
        label = f"job {self.name!r}: "
        check_options(self, label)
        costs = self.scaling
        seconds = costs.sample_seconds, costs.step_seconds, costs.exchange_seconds
        if not all(0 <= one < math.inf for one in seconds):
            raise GulliverError(
                f"{label}the costs of a step are {seconds} s, but must be at least 0"
            )
        if costs.sample_seconds + costs.step_seconds <= 0:
            raise GulliverError(f"{label}a step takes no time; use sample_seconds > 0")
        if self.leave_seconds > self.resize_seconds:
            raise GulliverError(
                f"{label}leave_seconds={self.leave_seconds:g} is part of "
                f"resize_seconds={self.resize_seconds:g}; use at most that"
            )
        if not self.smallest <= self.batch <= self.largest:
            raise GulliverError(
                f"{label}batch {self.batch} is outside of {self.smallest} to {self.largest}; use "
                "least_batch <= batch <= most_batch"
            )
        if self.most_slots is not None and self.slots > self.most_slots:
            raise GulliverError(
                f"{label}requests {self.slots} slots but can use at most {self.most_slots}; "
                "lower its slots"
            )

    @property
    def smallest(self) -> int:
        return self.batch if self.least_batch is None else self.least_batch

    @property
    def largest(self) -> int:
        return self.batch if self.most_batch is None else self.most_batch

    @cached_property
    def epoch_samples(self) -> float:
        return self.samples / 20 if self.epoch is None else self.epoch

    def goodput(self, slots: int, batch: int, scaling: Scaling | None = None) -> float:
        """Samples per second, converted to the job's own batch size.

        Args:
            slots: number of slots.
            batch: global batch size.
            scaling: step costs under the placement of the slots; None for one node.
        """
        worth = batch_efficiency(self.noise, self.batch, batch) if batch != self.batch else 1.0
        return (scaling or self.scaling).throughput(slots, batch) * worth

    def modes(self, within: int | JobCluster) -> Modes:
        """Returns operating points by number of slots, on one node or at the best placement.

        Args:
            within: number of slots on a single node, or a cluster.
        """
        if isinstance(within, int):
            return _modes(self, within, within, 1.0)
        return _modes(self, within.slots, within.node_slots or within.slots, within.across)


class Modes(NamedTuple):
    """Operating points of a job by number of slots."""

    # Batch size on 0, 1, 2 ... slots; 0 for none.
    batches: tuple[int, ...]
    # Samples per second, [slots + 1]; 0 beyond the slots that it can use.
    goodputs: np.ndarray
    # Number of slots beyond which the job is no faster.
    useful: int


def best_parts(scaling: Scaling, slots: int, node_slots: int, nodes: int, slower: float) -> Parts:
    """Splits slots evenly over the number of nodes with the fastest gradient exchange."""
    fewest = -(-slots // node_slots)
    even = [
        tuple((slots + place) // count for place in range(count))
        for count in range(fewest, min(nodes, slots) + 1)
    ]
    return min(even, key=lambda parts: scaling.across(parts, slower).exchange_seconds)


@lru_cache(maxsize=4096)
def _modes(job: Job, slots: int, node_slots: int, slower: float) -> Modes:
    most = min(slots, job.most_slots or slots)
    batches, goodputs = [0] * (slots + 1), np.zeros(slots + 1)
    for count in range(1, most + 1):
        batch, scaling = job.batch, job.scaling
        if node_slots < slots:
            parts = best_parts(scaling, count, node_slots, slots // node_slots, slower)
            scaling = scaling.across(parts, slower)
        if job.smallest < job.largest:
            limits = (job.smallest, job.largest)
            batch = best_batch(scaling, count, job.noise, job.batch, *limits)
        batches[count], goodputs[count] = batch, job.goodput(count, batch, scaling)
    goodputs.flags.writeable = False
    return Modes(tuple(batches), goodputs, int(goodputs.argmax()))


@dataclass(frozen=True)
class JobCluster:
    """The slots of a cluster.

    Attributes:
        slots: number of slots.
        quotas: guaranteed slots by tenant. A tenant may borrow idle slots of others until they need
            them; then its jobs shrink or pause.
        node_slots: slots per node; None for a single node.
        across: cost of sending a byte between nodes, relative to sending it within a node.
    """

    slots: Annotated[int, AT_LEAST_1]
    quotas: Mapping[str, int] = field(default_factory=dict)
    node_slots: Annotated[int | None, AT_LEAST_1] = None
    across: Annotated[float, Range(1, math.inf, open_above=True)] = 1.0

    def __post_init__(self) -> None:
        check_options(self, "cluster: ")
        if self.node_slots is not None and self.slots % self.node_slots:
            raise GulliverError(
                f"node_slots={self.node_slots} does not divide the {self.slots} slots; use a "
                "node_slots that divides slots"
            )
        if sum(self.quotas.values()) > self.slots:
            raise GulliverError(
                f"quotas add up to {sum(self.quotas.values())} slots but the cluster has "
                f"{self.slots}; lower them"
            )

    @classmethod
    def of(cls, hardware: Cluster, quotas: Mapping[str, int] | None = None) -> JobCluster:
        """Converts a cluster of `gulliver.hardware`; its innermost axis becomes a node.

        Between nodes, the slowest outer link is used.

        Args:
            hardware: cluster, measured or described.
            quotas: guaranteed slots by tenant.
        """
        links = [(size, link) for size, link in hardware.links() if size > 1]
        if len(links) < 2:
            return cls(hardware.size, quotas or {})
        size, inner = links[-1]
        slowest = min(link.bandwidth for _, link in links[:-1])
        return cls(hardware.size, quotas or {}, size, max(1.0, inner.bandwidth / slowest))

    @property
    def nodes(self) -> int:
        return self.slots // (self.node_slots or self.slots)

    def parts(self, slots: Sequence[int]) -> Parts:
        size, found = self.node_slots or self.slots, [0] * self.nodes
        for slot in slots:
            found[slot // size] += 1
        return tuple(found)

    def loss(self, job: Job, batch: int, parts: Parts) -> float:
        """Fraction of its goodput that a job loses compared with the best placement."""
        count = sum(parts)
        if count < 2 or self.nodes < 2:
            return 0.0
        here = job.scaling.across(parts, self.across)
        best = best_parts(job.scaling, count, self.slots // self.nodes, self.nodes, self.across)
        there = job.scaling.across(best, self.across)
        return 1 - job.goodput(count, batch, here) / job.goodput(count, batch, there)

    def limits(self, wanted: Mapping[str, int], borrow: bool = True) -> dict[str, int]:
        """Returns the maximum slots per tenant, given the guaranteed slots that others need.

        Args:
            wanted: slots that each tenant could use now.
            borrow: whether tenants may exceed their quotas; only for policies that can take slots
                back.
        """
        if not self.quotas:
            return dict.fromkeys(wanted, self.slots)
        kept = {tenant: min(wanted.get(tenant, 0), quota) for tenant, quota in self.quotas.items()}
        if not borrow:
            return {tenant: self.quotas.get(tenant, 0) for tenant in wanted}
        return {
            tenant: self.slots - sum(n for other, n in kept.items() if other != tenant)
            for tenant in wanted
        }


def check_trace(jobs: tuple[Job, ...], cluster: JobCluster) -> None:
    if not jobs:
        raise GulliverError("the trace has no jobs; add at least one")
    seen: set[str] = set()
    for job in jobs:
        if job.name in seen:
            raise GulliverError(f"two jobs are named {job.name!r}; names must be unique")
        seen.add(job.name)
        check_job(job.name, job.tenant, job.slots, cluster.slots, cluster.quotas)


def check_job(name: str, tenant: str, slots: int, most: int, quotas: Mapping[str, int]) -> None:
    """Rejects a job that requests more slots than there are, or whose tenant has no quota."""
    if slots > most:
        raise GulliverError(
            f"job {name!r} requests {slots} slots but the cluster has {most}; "
            "lower its slots or use a larger cluster"
        )
    if quotas and tenant not in quotas:
        known = ", ".join(map(repr, quotas))
        raise GulliverError(
            f"job {name!r} belongs to tenant {tenant!r}, which has no quota; add one "
            f"(tenants with a quota: {known})"
        )
