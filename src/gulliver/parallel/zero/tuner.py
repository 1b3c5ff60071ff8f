"""Finds the size of chunks in a job's first steps: predicted coarsely, then measured finely.

Small chunks waste latency, large ones lose overlap. Read `BucketTuner.stepped`: it is called after
every step, and goes from recording (the order of use), over profiling (how long the parts of a step
take, and what the link costs), to trials of the best predicted size and its neighbours. What it
found is kept for this model on this cluster, and taken from there the next time.

It does not know how chunks are cut, nor who takes the steps. What transfers cost is measured and
computed by `gulliver.hardware`, on the group that the chunks are sharded over.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from pathlib import Path

import torch
from torch import nn

from gulliver.comm.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast_object,
    gather_objects,
    group_size,
    reduce_scatter,
)
from gulliver.hardware.costs import IN_A_ROW, Transfers, probe_transfers
from gulliver.io.files import cache_folder, write_text
from gulliver.memory.prefetch import UseRecorder
from gulliver.memory.streams import seconds_between
from gulliver.parallel.zero.checkpoint import relayout
from gulliver.parallel.zero.state import ShardedState
from gulliver.solve.partition import geometric_sizes
from gulliver.solve.timeline import StepTimes, step_seconds

SMALLEST, LARGEST = 2**18, 2**27
PLATEAU = 1.02
"""Predicted steps so close to the best count as equal."""
TRIAL_STEPS = 4
"""Steps with each size; the first does not count."""
PROFILED_AT_MOST = 10
"""Steps after which tuning ends where none of them was seen as a whole."""


class TuningStage(Enum):
    """What the tuner does with the present step."""

    RECORDING = auto()
    PROFILING = auto()
    TRYING = auto()
    DONE = auto()


@dataclass
class Tuning:
    """The result of tuning."""

    chosen: int
    # Seconds of a step by size, from the model of its timeline.
    predicted: dict[int, float] = field(default_factory=dict)
    # Seconds of a step by the clock, for the sizes that were tried.
    measured: dict[int, float] = field(default_factory=dict)
    # Latency in seconds, and seconds per byte, of a reduce-scatter and an all-gather.
    link: dict[str, tuple[float, float]] = field(default_factory=dict)
    # Seconds until a transfer that has the link to itself is there.
    latency_s: float = 0.0
    order: list[str] = field(default_factory=list)
    # Whether it was taken from an earlier job.
    reused: bool = False

    def summary(self) -> str:
        """The result in a line."""
        size = f"{self.chosen / 2**20:.3g} MiB"
        if self.reused:
            return f"chunks of {size}, as an earlier job found"
        expected, took = self.predicted[self.chosen], self.measured[self.chosen]
        return (
            f"chunks of {size}: step {1e3 * took:.1f} ms measured, {1e3 * expected:.1f} ms "
            f"predicted ({100 * (expected / took - 1):+.0f} %)"
        )

    def to_json(self) -> str:
        """The text of a file."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Tuning:
        """Reads the text of a file."""
        values = json.loads(text)
        for name in ("predicted", "measured"):
            values[name] = {int(size): took for size, took in values[name].items()}
        return cls(**values)


class BucketTuner:
    """Tunes the chunks of an optimizer while it trains."""

    def __init__(
        self,
        shards: ShardedState,
        model: nn.Module,
        folder: Path | None = None,
        report: Callable[[str], None] | None = None,
        again: bool = False,
        in_backward: bool = False,
    ) -> None:
        self.shards, self.folder, self.in_backward = shards, folder, in_backward
        self.report = report or (lambda _: None)
        self.stage = TuningStage.RECORDING
        self.result: Tuning | None = None
        self._names = {**shards.names, **shards.frozen_names}
        self._sizes = {name: p.nbytes for p, name in self._names.items()}
        self._tried: list[int] = []
        self._times: list[float] = []
        self._since = 0.0
        self._steps = 0
        self._update_s = 0.0
        self._path = cache_folder() / "chunks" / f"{self._key()}.json"
        found = broadcast_object(None if again else _read(self._path))
        if found is not None:
            self.result, self.stage = found, TuningStage.DONE
            self._recorder = None
            relayout(shards, found.order, found.chosen)
            self._tell()
            return
        self._recorder = UseRecorder(model, self._names)

    def mark(self, name: str) -> None:
        """A moment of the step: ``backward``, ``backward ended``, ``step`` or ``stepped``."""
        if self._recorder is not None and self.stage is not TuningStage.TRYING:
            self._recorder.mark(name)

    @property
    def profiling(self) -> bool:
        """Whether parts of this step are timed: they should not wait for the link then."""
        return self.stage is TuningStage.PROFILING

    @property
    def tuning(self) -> bool:
        """Whether it goes on: it sends messages of its own then, and cuts the chunks again."""
        return self.stage is not TuningStage.DONE

    def updated(self, seconds: float) -> None:
        """Notes what the updates of a profiled step took."""
        self._update_s = seconds

    def gradient(self, name: str) -> None:
        """A gradient has come, perhaps of a backward that went through another optimizer."""
        self.mark("backward")
        if self._recorder is not None and self.stage is not TuningStage.TRYING:
            self._recorder.gradient(name)

    def stepped(self) -> None:
        """Called between steps, when there are no gradients; every rank calls it."""
        if self.stage is TuningStage.DONE or self._recorder is None:
            return
        self._steps += 1
        if self.stage is TuningStage.RECORDING:
            order = broadcast_object(self._recorder.order(self._sizes))
            relayout(self.shards, order, self.shards.chunk_bytes)
            self.result = Tuning(self.shards.chunk_bytes, order=order)
            self._next(TuningStage.PROFILING)
        elif self.stage is TuningStage.PROFILING and self._steps >= 2:
            self._profiled(self._recorder)
        elif self.stage is TuningStage.TRYING:
            self._tick()
        if self._recorder is not None:
            self._recorder.clear()

    def _profiled(self, recorder: UseRecorder) -> None:
        """Goes on to trials where rank 0 saw all of the step: others may train other parts."""
        if broadcast_object(_is_whole(recorder)):
            self._predict()
            self._next(TuningStage.TRYING)
            self._try_next()
        elif self._steps < PROFILED_AT_MOST:
            return
        else:
            self.stage, self._recorder = TuningStage.DONE, None
            if self.shards.rank == 0:
                size = f"{self.shards.chunk_bytes / 2**20:.3g} MiB"
                self.report(f"chunks stay at {size}: no step was a forward, a backward and a step")
        recorder.close()

    def _next(self, stage: TuningStage) -> None:
        self.stage, self._steps = stage, 0

    def _predict(self) -> None:
        assert self.result is not None
        link: Transfers = broadcast_object(self._link())
        self.result.link = {n: (line.alpha_s, 1 / line.bandwidth) for n, line in link.lines.items()}
        self.result.latency_s = link.latency_s
        order = self.result.order
        names = {name: p for p, name in self.shards.names.items()}
        trained = {names[name]: name for name in order if name in names}
        sizes = [self._sizes[name] for name in trained.values()]
        whole = sum(sizes)
        times = broadcast_object(self._step_times(link.processor_s * whole))
        for size in geometric_sizes(SMALLEST, min(LARGEST, max(SMALLEST, 2 * whole))):
            self.result.predicted[size] = step_seconds(
                times,
                sizes,
                self._cut(trained, size),
                lambda count: link.seconds("reduce", count),
                lambda count: link.seconds("gather", count),
                link.latency_s,
                self.shards.stage == 3,
                self.shards.options.ahead,
                in_backward=self.in_backward,
            )
        self._tried = candidates(self.result.predicted)

    def _cut(self, trained: Mapping[nn.Parameter, str], size: int) -> list[list[int]]:
        """Numbers of the parameters in each chunk of a size, in the order of use."""
        numbers = {name: number for number, name in enumerate(trained.values())}
        layouts = self.shards.layouts(trained, size)
        return sorted([numbers[slot.name] for slot in layout.slots] for layout, _ in layouts)

    def _step_times(self, gather_cpu_s: float) -> StepTimes:
        """The parts of the step just recorded; no gathers ran during its forward."""
        recorder, shards = self._recorder, self.shards
        assert recorder is not None
        assert self.result is not None
        marks, trained = recorder.marks, set(shards.names.values())
        order = [name for name in self.result.order if name in trained]
        forward_s = seconds_between(marks["forward"], marks["backward"])
        slower = 1 + gather_cpu_s / forward_s
        ended = marks.get("backward ended", [*recorder.ready.values()][-1])
        backward_s = seconds_between(marks["backward"], ended)
        first, ready = [], []
        for name in order:
            used, came = recorder.first_use.get(name), recorder.ready.get(name)
            since = 0.0 if used is None else seconds_between(marks["forward"], used)
            first.append(min(max(since, first[-1] if first else 0.0), forward_s))
            since = backward_s if came is None else seconds_between(marks["backward"], came)
            ready.append(min(since, backward_s))
        step_s = seconds_between(marks["step"], marks["stepped"])
        chunks = len(shards.chunks)
        whole = sum(c.chunk.nbytes for c in shards.chunks)
        updating = min(self._update_s, step_s) if self._update_s else step_s
        return StepTimes(
            tuple(slower * since for since in first),
            tuple(ready),
            slower * forward_s,
            backward_s,
            updating / whole,
            overhead_s=max(0.0, step_s - updating) / chunks,
        )

    def _link(self) -> Transfers:
        """Measures what both collectives cost, several in a row, on the group of the chunks."""
        group, device = self.shards.group, self.shards.chunks[0].chunk.device
        size = group_size(group)

        def tensors(count: int) -> tuple[torch.Tensor, torch.Tensor]:
            whole = torch.zeros(IN_A_ROW, count // 4 // size * size, device=device)
            return whole, torch.zeros(IN_A_ROW, whole.shape[1] // size, device=device)

        def reduce(count: int) -> Callable[[int], object]:
            whole, part = tensors(count)
            return lambda n: reduce_scatter(part[n], whole[n], "sum", group, async_op=True)

        def gather(count: int) -> Callable[[int], object]:
            whole, part = tensors(count)
            return lambda n: all_gather(whole[n], part[n], group, async_op=True)

        return probe_transfers({"reduce": reduce, "gather": gather}, device)

    def _try_next(self) -> None:
        assert self.result is not None
        size = self._tried[len(self.result.measured)]
        relayout(self.shards, self.result.order, size)
        self._times, self._since = [], 0.0

    def _tick(self) -> None:
        """Takes the time of a step of the present trial."""
        assert self.result is not None
        now = time.perf_counter()
        if self._since:
            self._times.append(now - self._since)
        self._since = now
        if len(self._times) < TRIAL_STEPS - 1:
            return
        slowest = torch.tensor([min(self._times)], dtype=torch.float64)
        all_reduce(slowest, "max")
        self.result.measured[self._tried[len(self.result.measured)]] = float(slowest)
        if len(self.result.measured) < len(self._tried):
            self._try_next()
            return
        self._finish()

    def _finish(self) -> None:
        assert self.result is not None
        self.result.chosen = min(self.result.measured, key=self.result.measured.__getitem__)
        self.stage = TuningStage.DONE
        relayout(self.shards, self.result.order, self.result.chosen)
        self.stage, self._recorder = TuningStage.DONE, None
        if self.shards.rank == 0:
            try:
                write_text(self._path, self.result.to_json())
            except OSError as error:
                self.report(f"the size of chunks could not be kept in {self._path}: {error}")
        self._tell()
        barrier()

    def _tell(self) -> None:
        if self.shards.rank or self.result is None:
            return
        self.report(self.result.summary())
        if self.folder is not None:
            write_text(self.folder / "chunks.json", self.result.to_json())
            if self.result.measured:
                draw(self.result, self.folder / "chunks.png")

    def _key(self) -> str:
        """The name of this model on this cluster."""
        shards = self.shards
        hosts = sorted(set(gather_objects(socket.gethostname())))
        tensors = [(name, tuple(p.shape), str(p.dtype)) for p, name in self._names.items()]
        device = shards.chunks[0].chunk.device
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        what = [tensors, hosts, shards.size, shards.stage, kind, str(shards.group)]
        if not hasattr(shards.group, "axes"):
            what[-1] = "flat"
        if shards.whole:
            what.append("whole parameters")
        if self.in_backward:
            what.append("stepped during backward")
        return hashlib.sha256(repr(what).encode()).hexdigest()[:24]


def draw(tuning: Tuning, path: Path) -> None:
    """A picture of the predicted and the measured step over the size of chunks."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for name, found, style in (
        ("predicted", tuning.predicted, "o-"),
        ("measured", tuning.measured, "s"),
    ):
        sizes = sorted(found)
        axes.plot([s / 2**20 for s in sizes], [1e3 * found[s] for s in sizes], style, label=name)
    axes.axvline(tuning.chosen / 2**20, linestyle=":", color="gray", label="chosen")
    axes.set(xscale="log", xlabel="size of a chunk, MiB", ylabel="step, ms")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _is_whole(recorder: UseRecorder) -> bool:
    """Whether a forward, gradients and a step came in this order since the record was cleared."""
    seen = [name for name in recorder.marks if name != "backward ended"]
    return seen == ["forward", "backward", "step", "stepped"] and bool(recorder.ready)


def _read(path: Path) -> Tuning | None:
    try:
        found = Tuning.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    found.reused = True
    return found


def candidates(predicted: dict[int, float]) -> list[int]:
    """Sizes worth trying: the middle of the predicted plateau, and one on each side of it."""
    known = sorted(predicted)
    best = min(predicted.values())
    plateau = [number for number, size in enumerate(known) if predicted[size] <= PLATEAU * best]
    middle = plateau[len(plateau) // 2]
    step = max(1, len(plateau) // 4)
    tried = {max(0, middle - step), middle, min(len(known) - 1, middle + step)}
    return [known[number] for number in sorted(tried)]
