"""Tunes the chunk size in a job's first steps, by measuring.

Small chunks add latency, large ones reduce overlap. `BucketTuner.stepped`, which runs between
steps, forms chunks in the order in which the first step used the parameters, then times steps with
a few sizes. The result is cached for this model and cluster.
"""

from __future__ import annotations

import hashlib
import json
import math
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gulliver._compat import compiled_call, is_compiled
from gulliver.comm.collectives import all_reduce, barrier, broadcast_object, gather_objects
from gulliver.io.files import cache_folder, write_text
from gulliver.parallel.zero.checkpoint import relayout
from gulliver.parallel.zero.state import ShardedState

SMALLEST, LARGEST = 2**18, 2**27
COARSE = (0, 2, -2, 4, -4)
"""First sizes to try, as powers of two relative to the initial size."""
TRIAL_STEPS = 4
"""Steps per size; the first one is not timed."""
MOST_SIZES = 7
"""Maximum number of sizes to try: tuning ends within 30 steps."""


class TuningStage(Enum):
    """The tuner's activity in the current step."""

    RECORDING = auto()
    TRYING = auto()
    DONE = auto()


@dataclass
class Tuning:
    """The result of tuning."""

    chosen: int
    # Measured seconds of a step, by chunk size.
    measured: dict[int, float] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    # Whether it was cached by an earlier job.
    reused: bool = False

    def summary(self) -> str:
        size = f"{self.chosen / 2**20:.3g} MiB"
        if self.reused:
            return f"chunks of {size}, as an earlier job found"
        took = 1e3 * self.measured[self.chosen]
        return f"chunks of {size}: step {took:.1f} ms, the best of {len(self.measured)} sizes"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Tuning:
        values = json.loads(text)
        values["measured"] = {int(size): took for size, took in values["measured"].items()}
        return cls(**values)


# [Note: noise] Steps of one size differ by more than those of neighboring sizes, so a search that
# follows the fastest measurement stops at whichever was lucky. A step depends on the size in a
# known way: T(size) = a + b / size + c size, where b is the work per chunk and c the last chunk of
# a pass, which nothing hides. The fit averages the noise of all sizes.
def next_size(measured: dict[int, float], start: int, largest: int) -> int | None:
    """Returns the next size to try: first distant ones, then neighbors of the best one."""
    sizes = [start << n if n > 0 else start >> -n for n in COARSE]
    sizes = [size for size in sizes if SMALLEST <= size <= largest]
    if all(size in measured for size in sizes):
        best = best_size(measured)
        sizes = [2 * best, best // 2]
    for size in sizes:
        if SMALLEST <= size <= largest and size not in measured and len(measured) < MOST_SIZES:
            return size
    return None


def best_size(measured: dict[int, float]) -> int:
    """Returns the size with the smallest mean of measured and fitted seconds."""
    sizes = torch.tensor(list(measured), dtype=torch.float64) / min(measured)
    took = torch.tensor(list(measured.values()), dtype=torch.float64)
    terms = torch.stack((torch.ones_like(sizes), 1 / sizes, sizes), 1)
    fitted, least = took.mean().expand_as(took), math.inf
    for chosen in ([0], [0, 1], [0, 2], [0, 1, 2])[: len(measured)]:
        found = torch.linalg.lstsq(terms[:, chosen], took[:, None]).solution[:, 0]
        line = terms[:, chosen] @ found
        error = float((line - took).square().sum())
        if bool((found >= 0).all()) and error < least:
            fitted, least = line, error
    return list(measured)[int((took + fitted).argmin())]


class BucketTuner:
    """Tunes the chunk size of an optimizer during training."""

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
        self._trying = 0
        self._times: list[float] = []
        self._since = 0.0
        whole = sum(p.nbytes for p in shards.names)
        self._largest = min(LARGEST, max(SMALLEST, 2 * whole))
        self._start = 1 << (max(1, min(shards.chunk_bytes, self._largest)).bit_length() - 1)
        self._start = max(SMALLEST, self._start)
        self._path = cache_folder() / "chunks" / f"{self._key()}.json"
        found = broadcast_object(None if again else _read(self._path))
        if found is not None:
            self.result, self.stage = found, TuningStage.DONE
            self._recorder = None
            relayout(shards, found.order, found.chosen)
            self._report_result()
            return
        self._recorder = UseRecorder(model, self._names)

    @property
    def tuning(self) -> bool:
        return self.stage is not TuningStage.DONE

    def stepped(self) -> None:
        """Times a step and may re-partition chunks; called between steps (collective)."""
        if self._recorder is not None:
            order = broadcast_object(self._recorder.order(self._names.values()))
            self._recorder.close()
            self._recorder = None
            self.result, self.stage = Tuning(0, order=order), TuningStage.TRYING
            self._try_next()
        elif self.stage is TuningStage.TRYING:
            self._tick()

    def _try_next(self) -> bool:
        assert self.result is not None
        size = next_size(self.result.measured, self._start, self._largest)
        if size is None:
            return False
        self._trying = size
        relayout(self.shards, self.result.order, size)
        self._times, self._since = [], 0.0
        return True

    def _tick(self) -> None:
        assert self.result is not None
        now = time.perf_counter()
        if self._since:
            self._times.append(now - self._since)
        self._since = now
        if len(self._times) < TRIAL_STEPS - 1:
            return
        slowest = torch.tensor([min(self._times)], dtype=torch.float64)
        all_reduce(slowest, "max")
        self.result.measured[self._trying] = float(slowest)
        if not self._try_next():
            self._finish()

    def _finish(self) -> None:
        assert self.result is not None
        self.result.chosen = best_size(self.result.measured)
        relayout(self.shards, self.result.order, self.result.chosen)
        self.stage = TuningStage.DONE
        if self.shards.rank == 0:
            try:
                write_text(self._path, self.result.to_json())
            except OSError as error:
                self.report(f"the size of chunks could not be kept in {self._path}: {error}")
        self._report_result()
        barrier()

    def _report_result(self) -> None:
        if self.shards.rank or self.result is None:
            return
        self.report(self.result.summary())
        if self.folder is not None:
            write_text(self.folder / "chunks.json", self.result.to_json())

    def _key(self) -> str:
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


def _read(path: Path) -> Tuning | None:
    try:
        found = Tuning.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    found.reused = True
    return found


class UseRecorder:
    """Records the order in which modules first use their parameters."""

    def __init__(self, model: nn.Module, names: dict[nn.Parameter, str]) -> None:
        self._first: dict[str, int] = {}
        self._hooks = []
        for module in _outside_of_compiled(model):
            region = is_compiled(module) or compiled_call(module) is not None
            owned = [names[p] for p in module.parameters(recurse=region) if p in names]
            if owned:
                hook = self._noting(owned)
                self._hooks.append(module.register_forward_pre_hook(hook, prepend=True))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def order(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda name: self._first.get(name, len(self._first)))

    def _noting(self, owned: list[str]) -> Callable[..., None]:
        def note(*_: Any) -> None:
            if torch.compiler.is_compiling():
                return  # uses in traced code are not visible; these stay in the model's order
            for name in owned:
                self._first.setdefault(name, len(self._first))

        return note


def _outside_of_compiled(module: nn.Module) -> Iterable[nn.Module]:
    """Yields modules outside of compiled regions, and each compiled region as one module."""
    yield module
    if is_compiled(module) or compiled_call(module) is not None:
        return
    for child in module.children():
        yield from _outside_of_compiled(child)
