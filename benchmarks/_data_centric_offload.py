"""Activations kept, computed again or moved to the host: predicted over the video table.

Beside ours stand the three plain policies: every block computed again, blocks kept as memory lasts
and the others computed again, and every block moved (as ``torch.autograd.graph.save_on_cpu`` does).
Nothing is run: seconds are those of the table and of the model of moves.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from benchmarks._data_centric_costs import video_costs
from benchmarks._harness import Report, at_least
from gulliver.data import DataCentricPlanner, Tokens
from gulliver.data_centric.costs import DISTRIBUTIONS, draw_shapes
from gulliver.data_centric.pictures import shares_of
from gulliver.hardware import HostRoom, TableCosts
from gulliver.hardware.batch_costs import BatchCosts
from gulliver.hardware.offload import TierRates

DEVICES, BUDGET = 8, 8_000_000
MEMORIES, RATES = (50e9, 40e9), {"PCIe 4": 25e9, "PCIe 5": 55e9, "NVLink to the host": 400e9}
HOST_BYTES = 200e9


@dataclass(frozen=True)
class AllMoved(TableCosts):
    """The table with every block's activations in the host's memory."""

    def batches(self, shape: Any, degree: int, pac: bool = True, most: int = 4096) -> BatchCosts:
        """Costs of micro-batches of a shape on a group of so many ranks."""
        costs = super().batches(shape, degree, False, most)
        assert self.host is not None
        each = self.lengths[shape] / degree
        size = np.arange(1, len(costs) + 1)
        moved = each * size * sum(kind.count * kind.kept_bytes for kind in self.kinds)
        coming = each * size * max(kind.kept_bytes for kind in self.kinds)
        fits = int(((moved <= self.host.bytes) & (costs.bytes + coming <= self.memory)).sum())
        forward = costs.recomputing
        out = np.maximum(0, moved / self.host.rates.write_rate - forward)
        back = np.maximum(0, moved / self.host.rates.read_rate - 2 * forward)
        none = np.zeros_like(forward)
        seconds = costs.seconds - forward + out + back
        return replace(costs, seconds=seconds, recomputing=none, moving=out + back).first(fits)


def offload(options: Any) -> Report:
    """Gains of moving activations, by memory and link."""
    columns = ("distribution, memory, link", "recompute all", "keep, recompute", "move all", "ours")
    report = Report(
        "data-centric-offload",
        "Predicted samples/s, in those of keeping and computing again",
        (*columns, "micro-batches that move"),
    )
    least = {"keeping and computing again": 1e9, "moving all": 1e9}
    for distribution in DISTRIBUTIONS:
        for memory in MEMORIES:
            costs = replace(video_costs(), memory=memory)
            shapes = draw_shapes(costs, distribution, options.samples // 10, options.seed)
            plain, kept = (_seconds(costs, shapes, pac)[0] for pac in (False, True))
            for link, rate in RATES.items():
                host = HostRoom(HOST_BYTES, TierRates("host", rate, rate))
                ours, share = _seconds(replace(costs, host=host), shapes)
                given: dict[str, Any] = {f.name: getattr(costs, f.name) for f in fields(costs)}
                given["host"] = host
                every = AllMoved(**given)
                moved = _seconds(every, shapes)[0]
                place = f"{distribution}, {memory / 1e9:.0f} GB, {link}"
                told = [kept / seconds for seconds in (plain, kept, moved, ours)]
                shown = [f"{value:.3f}" for value in told]
                report.rows.append((place, *shown, f"{share:.0%}"))
                report.figures[place] = {"move all": told[2], "ours": told[3], "share": share}
                for name, other in zip(least, (kept, moved), strict=True):
                    least[name] = min(least[name], other / ours)
    report.bars = [at_least(f"ours over {n}, least of the rows", v, 1.0) for n, v in least.items()]
    report.notes = [
        f"{DEVICES} devices, {BUDGET:,} tokens a step, {HOST_BYTES / 1e9:.0f} GB of host memory a "
        "rank; the rates of links are given, not measured, and nothing is run: all is predicted. "
        "No micro-batch takes longer than where all moves; an epoch may, by the gaps of its steps "
        "over their bounds."
    ]
    return report


def _seconds(costs: TableCosts, shapes: list[str], pac: bool = True) -> tuple[float, float]:
    """Seconds of an epoch, and the share of micro-batches that move some activations."""
    planner = DataCentricPlanner(costs, shapes, DEVICES, Tokens(BUDGET), pac=pac)
    told = shares_of(list(planner))
    return told.seconds, told.offloaded
