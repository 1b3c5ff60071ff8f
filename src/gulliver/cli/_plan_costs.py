"""Costs that ``gulliver plan data`` plans with: a table of seconds, or what a run has kept."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from gulliver.cli._plan_data_options import PlanData
from gulliver.data import draw_samples, draw_shapes
from gulliver.errors import GulliverError, nearest
from gulliver.hardware import (
    HostRoom,
    SampleCosts,
    SampleShape,
    TableCosts,
    TierRates,
    holds_samples,
    host_rates,
    named_cluster,
    planned_memory,
    read_samples,
)
from gulliver.options import size_text


@dataclass(frozen=True)
class LoadedCosts:
    """Costs of a file, and lines that describe them."""

    costs: Any
    # Where they come from, and what they are planned with.
    lines: list[str]
    # Shapes that the file knows; none where it does not say.
    shapes: tuple[Any, ...]
    # Whether the file says what a kept block holds.
    keeps: bool
    # Link to the host's memory; None where it is not known.
    rates: TierRates | None = None

    def drawn(self, options: PlanData) -> list[Any]:
        """Shapes of samples that nobody has given: drawn from those that the file knows."""
        if isinstance(self.costs, TableCosts):
            return draw_shapes(self.costs, options.distribution, options.count, options.seed)
        if not self.shapes:
            raise GulliverError(
                f"{options.costs} does not say which shapes there are: give --shapes"
            )
        return draw_samples(
            self.costs, self.shapes, options.distribution, options.count, options.seed
        )

    def named(self, text: str) -> Any:
        """The shape of a line of --shapes."""
        if isinstance(self.costs, TableCosts):
            return text
        named = {str(shape): shape for shape in self.shapes}
        if text in named:
            return named[text]
        if re.fullmatch(r"[1-9]\d*", text):
            return SampleShape.document(int(text))
        if re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2}", text):
            frames, rows, columns = map(int, text.split("x"))
            return SampleShape.clip(frames, rows, columns)
        hint = f": {nearest(text, named)}" if named else ""
        raise GulliverError(
            f"--shapes: {text!r} is no shape: write one that the costs know, a number of tokens, "
            f"or latent frames x rows x columns such as 16x30x40{hint}"
        )


def load_costs(options: PlanData) -> LoadedCosts:
    """Reads the costs of a command."""
    found = _samples(options) if holds_samples(options.costs) else _table(options)
    if options.offload is None:
        return found
    if options.stages > 1:
        raise GulliverError(
            f"--offload {options.offload:g} and --stages {options.stages}: activations of stages "
            "do not move to the host: leave one of both out"
        )
    missing = "nothing says how fast bytes move to the host: name a --cluster of GPUs"
    if not found.keeps:
        missing = f"{options.costs} does not say what blocks hold that are kept"
    if found.rates is None or not found.keeps:
        raise GulliverError(f"--offload {options.offload:g}: {missing}")
    host = HostRoom.within(options.offload * 2**30, found.rates)
    hint = (
        f"activations may move to {size_text(host.bytes)} of a rank's host memory, at "
        f"{host.rates.write_rate / 1e9:.3g} GB/s there and {host.rates.read_rate / 1e9:.3g} back"
    )
    return replace(found, costs=replace(found.costs, host=host), lines=[*found.lines, hint])


def _table(options: PlanData) -> LoadedCosts:
    if options.memory is not None:
        raise GulliverError(
            f"--memory {options.memory:g} is for costs that a run has kept: the table "
            f"{options.costs} says itself how many tokens fit"
        )
    costs = TableCosts.load(options.costs)
    if options.cluster != "here" and (costs.host or not costs.kinds):
        why = "how fast bytes move to the host" if costs.host else "what takes how long"
        raise GulliverError(
            f"--cluster {options.cluster} is for costs that a run has kept: the table "
            f"{options.costs} says itself {why}"
        )
    rates = costs.host.rates if costs.host else None
    if rates is None and costs.kinds and options.cluster != "here":
        rates = host_rates(named_cluster(options.cluster, options.ranks).device)
    return LoadedCosts(costs, [], tuple(costs.seconds), bool(costs.kinds), rates)


def _samples(options: PlanData) -> LoadedCosts:
    saved = read_samples(options.costs)
    cluster = named_cluster(options.cluster, options.ranks)
    kind = "cpu" if cluster.device.to_device_rate is None else "cuda"
    # A cluster at hand tells what it leaves to each of its ranks, and a run asks the machine.
    size = None if options.cluster == "here" else cluster.device.memory_bytes
    memory, why = planned_memory(kind, size)
    if options.memory is not None:
        memory, why = options.memory * 2**30, "as --memory says"
    lines = [
        f"costs of {saved.model.name}, {saved.model.dtype}, measured on {saved.machine}: error "
        f"{saved.fit.error:.1%}, {saved.fit.worst:.1%} at most; links of {options.cluster}",
        f"memory of a rank: {size_text(memory)}, {why}",
    ]
    room = saved.fit.host_room(1.0)
    rates = room.rates if room else host_rates(cluster.device)
    costs = SampleCosts(saved.model, saved.fit, memory, cluster, encoded_alike=True)
    return LoadedCosts(costs, lines, saved.shapes, True, rates)
