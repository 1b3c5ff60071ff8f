"""Models the time of a training step by slots and batch size, and the efficiency of large batches.

    step(n, B) = sample_seconds ceil(B / n) + step_seconds + exchange_seconds 2 (n - 1) / n

The slowest of n slots has ceil(B / n) samples, and a ring all-reduce sends 2 (n - 1) / n times the
gradients (Patarasuk and Yuan 2009). A sample in a batch of B is worth (noise + base) / (noise + B)
samples in a batch of `base`, with `noise` the gradient noise scale in samples (McCandlish et al.
2018, "An empirical model of large-batch training"); goodput is throughput times this efficiency
(Qiao et al. 2021, "Pollux").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from gulliver.errors import GulliverError


@dataclass(frozen=True)
class Scaling:
    """Components of a job's step time.

    Attributes:
        sample_seconds: seconds per sample on one slot.
        step_seconds: constant seconds per step.
        exchange_seconds: seconds for one slot to send all gradients once.
        error: largest relative error of the fit; 0 for described costs.
    """

    sample_seconds: float
    step_seconds: float = 0.0
    exchange_seconds: float = 0.0
    error: float = 0.0

    def seconds(self, slots: int, batch: int) -> float:
        shared = self.exchange_seconds * 2 * (slots - 1) / slots
        return self.sample_seconds * math.ceil(batch / slots) + self.step_seconds + shared

    def throughput(self, slots: int, batch: int) -> float:
        return batch / self.seconds(slots, batch)

    def across(self, parts: Sequence[int], slower: float) -> Scaling:
        """Scales the costs to slots on several nodes.

        Gradients are reduced within each node, then shares of them between nodes, and then gathered
        (`gulliver.hardware.all_reduce_seconds` over two axes): with k slots on each of m nodes this
        takes exchange_seconds x (2 (k - 1) / k + slower x 2 (m - 1) / (m k)). If k differs, its
        maximum is used within the nodes, and its minimum between them.

        Args:
            parts: slots on each node; zeros are ignored.
            slower: cost of sending a byte between nodes, relative to within a node.
        """
        held = [part for part in parts if part]
        slots, nodes = sum(held), len(held)
        if nodes < 2 or slots < 2:
            return self
        most, least = max(held), min(held)
        turns = 2 * (most - 1) / most + slower * 2 * (nodes - 1) / (nodes * least)
        return replace(
            self, exchange_seconds=self.exchange_seconds * turns * slots / 2 / (slots - 1)
        )


def batch_efficiency(noise: float, base: int, batch: int) -> float:
    """Value of a sample at batch size `batch`, relative to a sample at `base`."""
    return (noise + base) / (noise + batch)


def best_batch(scaling: Scaling, slots: int, noise: float, base: int, least: int, most: int) -> int:
    # Among batches of equal step time the largest is best, so it is k samples on every slot, or
    # `most`. Goodput rises and then falls with k; for real numbers its maximum is where k^2 =
    # overhead x noise / (sample_seconds x slots).
    overhead = scaling.seconds(slots, 0)
    first, last = math.ceil(least / slots), most // slots
    tried = {least, most}
    if first <= last:
        top = float(last)
        if scaling.sample_seconds > 0:
            top = math.sqrt(overhead * noise / (scaling.sample_seconds * slots))
        tried |= {slots * int(min(max(k, first), last)) for k in (top // 1, top // 1 + 1)}

    def goodput(batch: int) -> float:
        return scaling.throughput(slots, batch) * batch_efficiency(noise, base, batch)

    return max(sorted(tried), key=goodput)


def fit_scaling(points: Sequence[tuple[int, int, float]]) -> Scaling:
    """Fits the costs of a step to measured throughput, by least squares of relative errors.

    Costs are non-negative. The fit is exact: it tries setting each subset of the three to zero.

    Args:
        points: slots, batch and samples per second of each measurement.

    Raises:
        GulliverError: there are no points, or a point is invalid.
    """
    for slots, batch, speed in points:
        if not (slots >= 1 and batch >= 1 and 0 < speed < math.inf):
            raise GulliverError(
                f"measured point {(slots, batch, speed)} is invalid; use slots and batch of at "
                "least 1 and samples per second above 0"
            )
    if not points:
        raise GulliverError(
            "there are no measured points; pass at least one [slots, batch, samples per second]"
        )
    rows = np.array(
        [[math.ceil(batch / slots), 1.0, 2 * (slots - 1) / slots] for slots, batch, _ in points]
    )
    rows *= np.array([speed / batch for _, batch, speed in points])[:, None]
    best, least = np.zeros(3), math.inf
    for count in (1, 2, 3):
        for chosen in combinations(range(3), count):
            found = np.linalg.lstsq(rows[:, chosen], np.ones(len(points)), rcond=None)[0]
            # A step with only communication would take no time on one slot.
            if (found < 0).any() or not found[[place < 2 for place in chosen]].any():
                continue
            costs = np.zeros(3)
            costs[list(chosen)] = found
            residual = float(np.square(rows @ costs - 1).sum())
            if residual < least - 1e-12:
                best, least = costs, residual
    return Scaling(*map(float, best), error=float(np.abs(rows @ best - 1).max()))
