"""Windows and queues of samples, and validation of a planner's saved position.

`planner.py` forms steps from the queue.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gulliver.data_centric.steps import Shape
from gulliver.errors import GulliverError

PARTS = ("epoch", "step", "drawn", "queue")


def digest_of(position: Mapping[str, Any]) -> str:
    content = json.dumps([position.get(name) for name in PARTS])
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def check_state(state: Any, model: str, data: str) -> None:
    """Rejects values that are not a planner state for this model and data."""
    keys = {*PARTS, "digest", "data", "model"}
    if not isinstance(state, Mapping) or not keys <= set(state):
        raise GulliverError("this is not the state of a data-centric planner")
    if state["model"] != model:
        raise GulliverError(
            f"the saved position was planned for model {state['model']!r}, but this one is "
            f"{model!r}: resume with the same model"
        )
    if state["data"] != data:
        raise GulliverError(
            "the saved position belongs to other data or another seed: resume with the original "
            "data and seed"
        )
    if state["digest"] != digest_of(state):
        raise GulliverError("the saved position is corrupted: samples would be skipped or repeated")


# Samples before they are in steps: the stream, its windows, and the queue of drawn samples.


class SampleStream:
    """Samples of an epoch in order of arrival."""

    def __init__(
        self,
        shapes: Sequence[Shape] | Callable[[int], Iterable[Shape]],
        seed: int,
        shuffle: bool,
    ) -> None:
        self._shapes, self._seed, self._shuffle = shapes, seed, shuffle
        self.counts: dict[Shape, tuple[int, int]] | None = None
        source = f"stream {seed} {getattr(shapes, 'digest', '')}".rstrip()
        if not callable(shapes):
            if isinstance(shapes, torch.Tensor):
                raise GulliverError("shapes is a tensor; pass a list, such as shapes.tolist()")
            if not len(shapes):
                raise GulliverError("the dataset is empty, so there is nothing to train on")
            # A copy, because later changes to the list would be seen by one rank only.
            self._shapes = shapes = list(shapes)
            self.counts = _counted(shapes)
            number = {shape: place for place, shape in enumerate(self.counts)}
            codes = np.fromiter(map(number.__getitem__, shapes), np.int64, len(shapes))
            content = hashlib.blake2b(repr(list(number)).encode(), digest_size=8)
            content.update(codes.tobytes())
            source = f"{len(shapes)} samples {content.hexdigest()}, seed {seed}, shuffle {shuffle}"
        self.digest = source

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[int, Shape]]:
        if callable(self._shapes):
            return itertools.islice(enumerate(self._shapes(epoch)), start, None)
        count = len(self._shapes)
        order = np.arange(count)
        if self._shuffle:
            draw = np.random.Generator(np.random.Philox(key=[abs(self._seed), epoch]))
            order = draw.permutation(count)
        shapes = self._shapes
        return ((index, shapes[index]) for index in order[start:].tolist())

    def restored(self, epoch: int, drawn: int, queue: Sequence[int]) -> list[tuple[int, Shape]]:
        """Finds the shapes of the samples in a saved queue."""
        seen = dict(itertools.islice(self.epoch(epoch), drawn))
        return [(index, seen[index]) for index in queue]


class SampleWindow:
    """Iterates over an epoch's samples by window."""

    def __init__(self, stream: SampleStream, epoch: int, start: int) -> None:
        self.epoch, self.is_over = epoch, False
        self._samples = stream.epoch(epoch, start)
        self._unknown = stream.counts is None
        self._next: tuple[int, Shape] | None = None
        self._advance()

    def draw(self, count: int) -> tuple[np.ndarray, list[Shape]]:
        found: list[tuple[int, Shape]] = []
        if self._next is not None:
            found = [self._next, *itertools.islice(self._samples, count - 1)]
            self._advance()
        if self._unknown:
            for index, shape in found:
                _check_hashable(index, shape)
        indices = np.fromiter((index for index, _ in found), np.int64, len(found))
        return indices, [shape for _, shape in found]

    def _advance(self) -> None:
        # Reads one sample ahead, to know the end when the last one is drawn.
        self._next = next(self._samples, None)
        self.is_over = self._next is None


class Queue:
    """Samples that have been drawn but are not yet in a step, in order."""

    def __init__(self, drawn: int = 0) -> None:
        # Number of samples drawn so far in the epoch.
        self.drawn = drawn
        self.indices: list[int] = []
        # Shape of each sample.
        self.shapes: list[Shape] = []
        self._ends = np.zeros(0)
        self._start = 0.0

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def weight(self) -> float:
        return float(self._ends[-1] - self._start) if len(self._ends) else 0.0

    def copy(self) -> Queue:
        other = Queue(self.drawn)
        other.indices, other.shapes = self.indices[:], self.shapes[:]
        other._ends, other._start = self._ends, self._start  # never modified in place
        return other

    def extend(self, indices: np.ndarray, shapes: list[Shape], weights: np.ndarray) -> None:
        last = self._ends[-1] if len(self._ends) else self._start
        self._ends = np.concatenate((self._ends, last + np.cumsum(weights)))
        self.indices += indices.tolist()
        self.shapes += shapes

    def up_to(self, weight: float, nearest: bool) -> int:
        """Counts samples at the front whose total weight is at most `weight`; at least one."""
        # Small tolerance, because weights are summed from the beginning of the queue.
        slack = 1e-9 * max(1.0, abs(self._start))
        end = self._start + weight + slack
        count = bisect_right(self._ends, end)
        if nearest and 0 < count < len(self._ends):
            count += bool(self._ends[count] - end < end - self._ends[count - 1])
        return max(1, count)

    def take(self, count: int) -> tuple[list[int], list[Shape]]:
        taken = self.indices[:count], self.shapes[:count]
        if not count:
            return taken
        self._start = float(self._ends[count - 1])
        self._ends = self._ends[count:]
        del self.indices[:count], self.shapes[:count]
        return taken

    def put_back(
        self, samples: Sequence[tuple[int, Shape]], weights: Callable[[Shape], float]
    ) -> None:
        own = np.cumsum([weights(shape) for _, shape in samples])
        self._ends = np.concatenate((own, own[-1] + self._ends - self._start))
        self._start = 0.0
        self.indices[:0] = [index for index, _ in samples]
        self.shapes[:0] = [shape for _, shape in samples]


def _counted(shapes: list[Shape]) -> dict[Shape, tuple[int, int]]:
    """First sample and number of samples of each shape, in order of arrival."""
    try:
        counts = Counter(shapes)
    except TypeError:
        for index, shape in enumerate(shapes):
            _check_hashable(index, shape)
        raise
    # Of several equal shapes, the last entry wins, which is the first to arrive.
    firsts = dict(zip(reversed(shapes), reversed(range(len(shapes))), strict=True))
    return {shape: (firsts[shape], count) for shape, count in counts.items()}


def _check_hashable(index: int, shape: Any) -> None:
    try:
        hash(shape)
    except TypeError:
        raise GulliverError(
            f"the shape of sample {index} is {shape!r}, a {type(shape).__name__}; use a hashable "
            "value, such as a tuple"
        ) from None


FEW_LOTS, MOST_LONGER = 20.0, 4.0
"""Number of batches per step below which batches are enlarged, and maximum enlargement."""


def longer_lots(
    counts: Mapping[Shape, int],
    sizes: Mapping[Shape, int],
    most: Mapping[Shape, float],
    steps: float,
) -> dict[Shape, int]:
    """Enlarges efficient batches if a step would have few of them."""
    # Among few batches, a small one finds no similar ones: it uses ranks that a large one needs,
    # or lets them wait. Larger batches in fewer steps are better.
    each = sum(count / sizes[shape] for shape, count in counts.items()) / steps
    factor = min(MOST_LONGER, FEW_LOTS / each)
    return {s: max(sizes[s], min(int(factor * sizes[s]), int(most[s]))) for s in counts}


def order_by_shape(
    shapes: Sequence[Shape], sizes: Mapping[Shape, int], draw: np.random.Generator
) -> np.ndarray:
    """Orders a window so that batches of each shape are evenly spaced."""
    members: dict[Shape, list[int]] = {}
    for place, shape in enumerate(shapes):
        members.setdefault(shape, []).append(place)
    at = np.empty(len(shapes))
    for places in members.values():
        count = len(places)
        parts = max(1, round(count / sizes[shapes[places[0]]]))
        at[places] = (np.arange(count) * parts // count + draw.random()) / parts
    return np.argsort(at, kind="stable")
