"""Creates batches from samples and seeds, in any process.

A `Work` describes a batch: its epoch, number and indices. It passes through torch's loader as an
index (automatic batching is off, so that a worker creates a batch in one call), and seeds the
generators of Python, numpy and torch. Random numbers depend on (seed, rank, epoch, number), not on
the worker or its earlier batches, so a resumed run draws the same numbers as an uninterrupted one.

Devices and threads are handled elsewhere.
"""

from __future__ import annotations

import base64
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from gulliver.data.sampler import Step, set_state
from gulliver.errors import GulliverError

ORDER, BATCH, STREAM = range(3)
"""Purposes of a seed: the order of an epoch, a numbered batch, a batch of a worker's stream."""
_END = object()


class Work(NamedTuple):
    """Description of a batch to create; `indices` as given by the sampler."""

    epoch: int
    number: int
    indices: Any


class Mark(NamedTuple):
    """Position after a batch: the state of its source, and whether the epoch has ended."""

    state: Any
    is_last: bool


def words(seed: int, *places: int) -> np.ndarray:
    """Draws four 32-bit words determined by a seed and its purpose."""
    return np.random.SeedSequence([seed, *places]).generate_state(4)


@contextmanager
def seeded(seed: int, *places: int) -> Iterator[None]:
    """Seeds the global generators of Python, numpy and torch (CPU) inside the block."""
    # In the training process, their states are restored afterwards, so that the model draws the
    # same numbers with and without a loader; in a worker, nothing else uses them.
    at_home = get_worker_info() is None
    before = _states() if at_home else None
    state = words(seed, *places)
    random.seed(state.tobytes())
    np.random.seed(state)
    # Not `torch.manual_seed`, which also accesses the devices' generators.
    torch.default_generator.manual_seed(_number(state))
    try:
        yield
    finally:
        if before is not None:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.default_generator.set_state(before[2])


def _states() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


class Orders:
    """Sampler for torch's loader that yields an epoch's batches in order, as `Work`."""

    def __init__(
        self,
        source: Iterable[Any],
        stateful: Any,
        seed: tuple[int, int],
        own: torch.Generator | None,
        given: torch.Generator | None,
        generators: list[torch.Generator],
    ) -> None:
        self._source, self._stateful, self._seed = source, stateful, seed
        self._own, self._given, self._generators = own, given, generators
        self.begin(0, 0)

    def begin(self, epoch: int, start: int, generators: list[str] | None = None) -> None:
        self._epoch, self._start, self.at_start = epoch, start, generators
        # A new deque, because an ending thread may still draw for the previous iteration. Marks of
        # the batches drawn: the state of `stateful` after each, and whether it is the last.
        self.marks: deque[Mark] = deque()

    def end(self) -> None:
        """Ends the epoch; the next one continues from the generators' final states."""
        # States of `generators` at the start of the current epoch.
        self.at_start = None

    def generator_states(self) -> list[str]:
        """Returns the generator states of the current epoch, or of the next one."""
        if self.at_start is not None:
            return self.at_start
        return [_text(generator.get_state()) for generator in self._generators]

    def __iter__(self) -> Iterator[Work]:
        epoch, start, marks = self._epoch, self._start, self.marks
        self._set_generators(epoch)
        drawn = iter(self._source)
        seed, rank = self._seed
        # torch's samplers draw an epoch's order, or its seed, at the first index.
        with seeded(seed, ORDER, rank, epoch):
            indices = next(drawn, _END)
        number = start if self._stateful is not None else 0
        length = length_of(self._source)
        while indices is not _END:
            if number >= start:
                state = None if self._stateful is None else self._stateful.state_dict()
                marks.append(Mark(state, number + 1 == length))
                yield Work(epoch, number, indices)
            number += 1
            indices = next(drawn, _END)

    def _set_generators(self, epoch: int) -> None:
        if self._own is not None:
            seed, rank = self._seed
            self._own.manual_seed(_number(words(seed, ORDER, rank, epoch)))
        for generator, state in zip(self._generators, self.at_start or (), strict=False):
            set_state(generator, state)
        self.at_start = [_text(generator.get_state()) for generator in self._generators]
        if self._given is not None:
            # As torch does for its workers at this point, so that the order equals torch's.
            torch.empty((), dtype=torch.int64).random_(generator=self._given)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _number(state: np.ndarray) -> int:
    return int(state[:2].view(np.uint64)[0])


class Fetch(Dataset):
    """A map-style dataset whose items are batches, indexed by `Work`."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        is_batched: bool,
        seed: tuple[int, int] | None,
    ) -> None:
        self.dataset, self._collate, self._is_batched = dataset, collate, is_batched
        self._seed = seed

    def __getitem__(self, work: Work) -> Any:
        with self._seeded(work):
            try:
                return self._collate(self._samples(work.indices))
            except StopIteration as error:
                # It would end the epoch as if nothing had failed.
                raise RuntimeError(f"the dataset raised StopIteration for {work}") from error

    def _seeded(self, work: Work) -> AbstractContextManager[None]:
        if self._seed is None:
            return nullcontext()
        seed, rank = self._seed
        return seeded(seed, BATCH, rank, work.epoch, work.number)

    def _samples(self, indices: Any) -> Any:
        if not self._is_batched:
            return self.dataset[indices]
        if isinstance(indices, Step):
            if hasattr(self.dataset, "read_step"):
                return self.dataset.read_step(indices)
            indices = indices.indices
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]


class BatchStream(IterableDataset):
    """An iterable dataset whose items are batches."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        batch_size: int | None,
        drop_last: bool,
        seed: tuple[int, int],
        shared: bool,
    ) -> None:
        self.dataset, self._collate = dataset, collate
        self._batch_size, self._drop_last, self._seed = batch_size, drop_last, seed
        # Epoch, and number of the first batch. In shared memory, because persistent workers copy
        # this object once, and read later epochs from here.
        self._place = torch.zeros(2, dtype=torch.int64)
        if shared:
            self._place.share_memory_()
        self._keeps = not shared and hasattr(dataset, "state_dict")
        self.begin(0, 0)

    def begin(self, epoch: int, start: int, generators: list[str] | None = None) -> None:
        assert not generators
        self._place[0], self._place[1] = epoch, start
        # Mark of each batch: the dataset's state after it, if it has one; filled only without
        # workers.
        self.marks: deque[Mark] = deque()

    def end(self) -> None:
        """Does nothing, as a stream has no generators."""

    def generator_states(self) -> list[str]:
        """Returns no states, as a stream determines its own order."""
        return []

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        epoch, number = self._place.tolist()
        worker, (seed, rank) = info.id if info else 0, self._seed
        marks, samples = self.marks, None
        while True:
            with seeded(seed, STREAM, rank, epoch, worker, number):
                samples = iter(self.dataset) if samples is None else samples
                found = self._next(samples)
                if found is _END:
                    return
                batch = self._collate(found)
                if info is None:
                    state = self.dataset.state_dict() if self._keeps else None
                    marks.append(Mark(state, self._is_short(found)))
            yield batch
            number += 1

    def _next(self, samples: Iterator[Any]) -> Any:
        if self._batch_size is None:
            return next(samples, _END)
        found = list(islice(samples, self._batch_size))
        return _END if not found or (self._is_short(found) and self._drop_last) else found

    def _is_short(self, samples: Any) -> bool:
        """Whether the stream ended inside a batch; its state may then be that of a new pass."""
        return self._batch_size is not None and len(samples) < self._batch_size


class WorkerStart:
    """Calls the user's ``worker_init_fn`` in a worker, where it sees the user's own dataset."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        # Datasets and users look for their own dataset in a worker, not for ours.
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        if self._then is not None:
            self._then(worker)


def length_of(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def as_is(batch: Any) -> Any:
    """Returns the batch unchanged, because it is already collated."""
    return batch


def check_seed(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise GulliverError(f"a seed must be an integer of at least 0, not {seed!r}")
    return seed
