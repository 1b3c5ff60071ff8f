"""A data loader that resumes exactly; batches are created by the caller or prefetched by a thread.

Start reading at `Feed`, then `_run`, the body of its thread. An error is passed on as a batch.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import data as torch_data

from gulliver.data.fetch import (
    BatchStream,
    Fetch,
    Orders,
    WorkerStart,
    as_is,
    check_seed,
    length_of,
)
from gulliver.data.sampler import check_content, check_position, order_of
from gulliver.data.transfer import MovedBatch, Mover, copy_stream, device_of
from gulliver.errors import GulliverError

AT_EXIT_S = 5.0  # seconds that an exiting interpreter waits for a thread to end its workers
NEWER = "this iteration ended because the same loader started another one or loaded a position"
_OPEN: weakref.WeakSet[Feed] = weakref.WeakSet()


class Inline:
    """Creates batches in the calling thread, `ahead` batches in advance."""

    def __init__(
        self, batches: Iterator[Any], move: Callable[[Any], MovedBatch], ahead: int
    ) -> None:
        self._entries: Iterator[MovedBatch | BaseException] = _moved(batches, move)
        self._ready: deque[MovedBatch | BaseException] = deque()
        self._ahead, self._closed = ahead, False

    def get(self) -> MovedBatch | BaseException | None:
        """Returns the next batch, or its error; None at the end."""
        if self._closed:
            raise GulliverError(NEWER)
        while len(self._ready) <= self._ahead:
            entry = next(self._entries, None)
            if entry is None:
                break
            self._ready.append(entry)
        return self._ready.popleft() if self._ready else None

    def close(self) -> None:
        self._closed = True
        self._ready.clear()
        self._entries = iter(())

    def join(self) -> None: ...


class Feed:
    """Moves batches from torch's workers in a thread, at most `ahead` batches in advance."""

    # The thread only refers to its channel, so that this object can be collected.

    def __init__(
        self, batches: Iterator[Any], move: Callable[[Any], MovedBatch], ahead: int
    ) -> None:
        self._channel = _Channel(ahead)
        self._thread = threading.Thread(
            target=_run, args=([batches], move, self._channel), name="gulliver-loader", daemon=True
        )
        self._thread.start()
        _OPEN.add(self)

    def get(self) -> MovedBatch | BaseException | None:
        """Waits for the next batch, or its error; None at the end."""
        if self._channel.closed.is_set():
            raise GulliverError(NEWER)
        entry = self._channel.entries.get()
        self._channel.permits.release()
        return entry

    def close(self) -> None:
        """Asks the thread to end after the batch that it is waiting for."""
        self._channel.close()

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)


class _Channel:
    """Queue from the thread to the training loop, with permits in the other direction."""

    def __init__(self, ahead: int) -> None:
        # A permit is acquired before a batch is moved, so that no more than `ahead` of them hold
        # page-locked memory.
        self.permits = threading.Semaphore(ahead)
        self.entries: queue.SimpleQueue[MovedBatch | BaseException | None] = queue.SimpleQueue()
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()
        self.permits.release()
        self.drain()

    def drain(self) -> None:
        while True:
            try:
                self.entries.get_nowait()
            except queue.Empty:
                return


def _run(source: list[Iterator[Any]], move: Callable[[Any], MovedBatch], channel: _Channel) -> None:
    """Body of the thread; `source` is a list, so that popping it drops the last reference."""
    entries = _moved(source.pop(), move)
    while True:
        # Acquired before the batch is created: a batch waiting for its permit would hold memory.
        channel.permits.acquire()
        if channel.closed.is_set():
            break
        entry = next(entries, None)
        if isinstance(entry, BaseException):
            # Keeps the traceback but clears its variables: torch's iterator is among them, and must
            # end here, not in a garbage collection, where it would wait in vain for its workers.
            traceback.clear_frames(entry.__traceback__)
        channel.entries.put(entry)
        if not isinstance(entry, MovedBatch):
            break
        del entry
    # Ends the workers, in this thread, which may have to wait for them.
    del entries
    if channel.closed.is_set():
        channel.drain()


def _moved(
    batches: Iterator[Any], move: Callable[[Any], MovedBatch]
) -> Iterator[MovedBatch | BaseException]:
    """Yields moved batches; yields the error of a failed batch and ends."""
    try:
        while True:
            batch, error = _attempt(next, batches)
            if isinstance(error, StopIteration):
                return
            moved = None
            if error is None:
                moved, error = _attempt(move, batch)
            # Not held while the next one is created.
            del batch
            if error is not None:
                yield error
                return
            assert moved is not None
            yield moved
            del moved
    finally:
        # Frames in an error's traceback refer to this one.
        batches, error = iter(()), None


def _attempt(function: Callable[[Any], Any], argument: Any) -> tuple[Any, BaseException | None]:
    try:
        return function(argument), None
    except BaseException as error:
        return None, error


@atexit.register
def _close_all() -> None:
    """Ends all threads; a thread killed at exit would leave its workers behind."""
    for feed in list(_OPEN):
        feed.close()
    for feed in list(_OPEN):
        feed.join(AT_EXIT_S)


# torch's DataLoader with exact resume, its own seeds, pinned memory and prefetched copies.
#
# Workers, sampling and collation are torch's: a second, inner loader of torch's makes whole
# batches, and a thread of ours takes them from it, page-locks them and copies them to the device,
# at most `ahead` of use. Read `DataLoader.__iter__`, then `_Batches`.


_log = logging.getLogger("gulliver")


# [Note: the position] The state counts batches returned to the user, not prefetched ones. Each
# batch carries the mark of its sampler or dataset, taken when it was drawn; returning the batch
# makes its mark the loader's. A resuming loader draws the epoch's indices again and skips those
# that were used, without loading a sample. The seed of a batch depends only on its number (see
# `_fetch`), so the rest of the epoch is bitwise what it would have been.
@dataclass(frozen=True)
class LoaderStatistics:
    """Counters of a loader."""

    # Number of batches returned, over all epochs.
    batches: int
    # Seconds that the caller waited for them.
    waited_s: float

    def __str__(self) -> str:
        return f"{self.batches} batches, {self.waited_s:.3g} s waited"


class DataLoader(torch_data.DataLoader):
    """A data loader that resumes exactly, and copies batches to a device ahead of use.

    It takes the arguments of torch's DataLoader, uses its workers, samplers and collation, and
    returns the same batches. The differences are:

    - Random numbers in datasets and collation (Python, numpy and torch) depend on (seed, rank,
      epoch, batch number), not on the workers or earlier batches. Without `generator`, so does the
      order. The generators of the training loop are not used.
    - `state_dict` has the position of the next batch, from which a loader that loads it continues.
    - With a CUDA device, batches are page-locked and prefetched on a copy stream.

    An error is raised at its batch, and the state then has that batch's position. Leaving a loop
    early ends the thread and the workers. Each iteration is an epoch; starting one ends an
    unfinished one.

    Args:
        dataset: map-style or iterable dataset.
        batch_size: number of samples per batch.
        shuffle: whether to shuffle every epoch.
        device: device to copy batches to; None to leave them on the host.
        ahead: number of batches to prefetch, 1 or more.
        seed: seed of all random numbers, equal on all ranks.
        rank: rank of this process; None to get it from torch.distributed.
        world_size: number of ranks; None to get it from torch.distributed.
        threaded: whether a thread prefetches batches if there are no workers. Generators are not
            seeded then, so dataset and collation must not use the process's generators.
        options: further arguments of torch's DataLoader, such as `num_workers`, `sampler`,
            `batch_sampler` (including a `BucketSampler`) and
            `collate_fn`.

    Raises:
        GulliverError: an argument is unknown or rejected by torch.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        *,
        device: torch.device | str | None = None,
        ahead: int = 2,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        threaded: bool = False,
        **options: Any,
    ) -> None:
        if ahead < 1:
            raise GulliverError(f"ahead={ahead} is too small: use at least 1")
        grouped = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if grouped else 0
        if world_size is None:
            world_size = dist.get_world_size() if grouped else 1
        self.world_size = world_size
        if not 0 <= self.rank < self.world_size:
            raise GulliverError(f"rank {self.rank} is out of range for {self.world_size} ranks")
        self.seed, self.ahead, self.device = check_seed(seed), ahead, device_of(device)
        # Our own generator is seeded again for each epoch, see `Orders`.
        self._own = None if options.get("generator") is not None else torch.Generator()
        options["generator"] = options.get("generator") or self._own
        try:
            super().__init__(dataset, batch_size, shuffle, **options)
        except (ValueError, TypeError) as error:
            raise GulliverError(f"data loader: {error}") from error
        self._is_iterable = isinstance(dataset, torch_data.IterableDataset)
        self._threaded = threaded and not self.num_workers
        if self._threaded and self._is_iterable:
            raise GulliverError("threaded=True needs a map-style dataset, not an iterable one")
        self._stateful = self._find_stateful()
        self._inner, self._work = self._make_inner()
        stream = copy_stream(self.device, ahead)
        locks = stream is not None or (self.pin_memory and torch.cuda.is_available())
        self._mover = Mover(stream, locks)
        self._feed: Feed | Inline = Inline(iter(()), self._mover.move, 0)
        # The position, see the note above; generators are set only between loading and beginning.
        self._epoch = self._done = 0
        self._mark: Any = None
        self._resumes = self._is_over = False
        self._generators: list[str] | None = None
        self._sampler_epoch: int | None = getattr(self._epoch_sampler, "epoch", None)
        self._batches, self._waited_s = 0, 0.0

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._epoch

    def statistics(self) -> LoaderStatistics:
        """Returns counters of the loader, which print as one line."""
        return LoaderStatistics(self._batches, self._waited_s)

    def set_epoch(self, epoch: int) -> None:
        """Moves to the start of an epoch, or to the loaded position if it is in that epoch."""
        if self._resumes and epoch == self._epoch:
            return
        self._feed.close()
        self._epoch, self._done, self._mark, self._generators = epoch, 0, None, None
        self._resumes = self._is_over = False
        self._work.end()
        if self._stateful is not None and hasattr(self._stateful, "set_epoch"):
            self._feed.join()
            self._stateful.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Starts an epoch, or continues the epoch of a loaded state."""
        self._feed.close()
        # The previous thread may still draw from the sampler, or wait for persistent workers.
        self._feed.join()
        passed_over = self._begin()
        # Created in the caller's thread, in which workers are forked and torch's samplers draw.
        # After its last batch, a stateful source may already describe the next epoch's start.
        batches = iter(()) if self._is_over else self._made()
        if passed_over:
            _log.info("resuming: %d batches of the stream are loaded and passed over", passed_over)
            batches = _after(batches, passed_over, self._work)
        if self.num_workers or self._threaded:
            self._feed = Feed(batches, self._mover.move, self.ahead)
        else:
            # Without workers, samples are created in the caller, with seeds that must not affect
            # what the model draws. One batch ahead is enough to overlap its copy.
            on_host = self.device is None or self.device.type == "cpu"
            self._feed = Inline(batches, self._mover.move, 0 if on_host else 1)
        return _Batches(self, self._feed)

    def _made(self) -> Iterator[Any]:
        if not self._threaded:
            return iter(self._inner)
        works = iter(self._work)
        # The first index is drawn here: samplers draw their order then, from global generators.
        first = list(islice(works, 1))
        return map(self._inner.dataset.__getitem__, chain(first, works))

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last returned batch, as JSON values.

        It includes the state of a stateful sampler or dataset.

        Raises:
            GulliverError: batches may be out of order.
        """
        if not self.in_order:
            raise GulliverError("batches out of order have no position to save; use in_order=True")
        mark = self._mark
        if mark is None and self._stateful is not None:
            mark = self._stateful.state_dict()
        generators = self._generators
        if generators is None:
            generators = self._work.generator_states()
        return {
            "epoch": self._epoch,
            "done": self._done,
            **self._identity(),
            "rank": self.rank,
            "generators": generators,
            "inner": mark,
            "is_over": self._is_over,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue from a state.

        Raises:
            GulliverError: the state was saved with different data, batch size, seed or number of
                ranks; or on another rank, if a `generator` determines the order.
        """
        check_content(state)
        batches = None if self._is_iterable else length_of(self._index_source)
        check_position(state["epoch"], state["done"], batches)
        for name, here in self._identity().items():
            if state.get(name) != here:
                raise GulliverError(
                    f"the saved position belongs to {name.replace('_', ' ')} {state.get(name)}, "
                    f"but this loader has {here}: resume with the original settings"
                )
        if self._stateful is None and state["inner"] is not None:
            raise GulliverError(
                "the saved position includes the state of a sampler, but this sampler has none"
            )
        check = getattr(self._stateful, "check_state", None)
        if check is not None:
            check(state["inner"])
        saved, here = len(state["generators"]), len(self._work.generator_states())
        if saved != here:
            raise GulliverError(
                f"the saved position has the states of {saved} sampler generators, but this loader "
                f"has {here} generators: resume with the original settings"
            )
        if saved and state["rank"] != self.rank:
            raise GulliverError(
                f"the saved position has the generator of rank {state['rank']}, but this is rank "
                f"{self.rank}: load each rank's own state, or use `seed` instead of `generator`"
            )
        # The thread draws from the sampler that is about to be reset.
        self._feed.close()
        self._epoch, self._done, self._mark = state["epoch"], state["done"], state["inner"]
        self._resumes, self._generators = True, list(state["generators"])
        self._is_over = state["is_over"]

    @property
    def _index_source(self) -> Any:
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    @property
    def _epoch_sampler(self) -> Any:
        """The sampler whose epoch must be set, unless it has its own state."""
        for sampler in (self.batch_sampler, self.sampler):
            if hasattr(sampler, "set_epoch") and sampler is not self._stateful:
                return sampler
        return None

    def _find_stateful(self) -> Any:
        """Returns the object with the position: dataset (without workers), sampler or None."""
        if self._is_iterable:
            candidates = [] if self.num_workers else [self.dataset]
        else:
            candidates = [self.batch_sampler, self.sampler]
        for candidate in candidates:
            if hasattr(candidate, "state_dict") and hasattr(candidate, "load_state_dict"):
                return candidate
        return None

    def _user_generators(self) -> list[torch.Generator]:
        """Returns the distinct user generators that determine the order."""
        if self._stateful is not None:
            return []
        inside = getattr(self.batch_sampler, "sampler", None)
        found: list[torch.Generator] = []
        for owner in (self, self.batch_sampler, inside, self.sampler):
            generator = getattr(owner, "generator", None)
            is_known = any(generator is other for other in (*found, self._own))
            if isinstance(generator, torch.Generator) and not is_known:
                found.append(generator)
        return found

    def _identity(self) -> dict[str, Any]:
        identity: dict[str, Any] = {"seed": self.seed}
        if self._stateful is None:
            identity["dataset_length"] = length_of(self.dataset)
            identity["world_size"] = self.world_size
        if self._stateful is None or self._is_iterable:
            identity["batch_size"] = self.batch_size
        if not self._is_iterable and self._stateful is None:
            identity["number_of_batches"] = length_of(self._index_source)
            identity["order"] = order_of(self._index_source)
        elif self._stateful is None:
            identity["num_workers"] = self.num_workers
        return identity

    def _make_inner(self) -> tuple[torch_data.DataLoader, Orders | BatchStream]:
        """Creates torch's loader of batches, and the object that determines their order."""
        seed = (self.seed, self.rank)
        collate: Any = self.collate_fn
        given: dict[str, Any] = {}
        if self._is_iterable:
            dataset: Any = BatchStream(
                self.dataset, collate, self.batch_size, self.drop_last, seed, self.num_workers > 0
            )
            work: Orders | BatchStream = dataset
        else:
            is_batched = self.batch_sampler is not None
            seeds = None if self._threaded else seed
            dataset = Fetch(self.dataset, collate, is_batched, seeds)
            work = given["sampler"] = Orders(
                self._index_source,
                self._stateful,
                seed,
                self._own,
                None if self._own is not None or self._stateful is not None else self.generator,
                self._user_generators(),
            )
        if self.num_workers:
            given["worker_init_fn"] = WorkerStart(self.worker_init_fn)
            given["multiprocessing_context"] = self.multiprocessing_context
        inner = torch_data.DataLoader(
            dataset,
            batch_size=None,
            collate_fn=as_is,
            num_workers=self.num_workers,
            timeout=self.timeout,
            # A separate generator, so that the loader draws from no other one.
            generator=torch.Generator(),
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
            in_order=self.in_order,
            **given,
        )
        return inner, work

    def _begin(self) -> int:
        goes_on = self._resumes or (self._done and self._stateful is not None)
        if self._done and not goes_on:
            self._epoch, self._done = self._epoch + 1, 0
        sampler = self._epoch_sampler
        if sampler is not None:
            given = getattr(sampler, "epoch", None)
            if given != self._sampler_epoch and given is not None and not goes_on:
                # The user set the sampler's epoch directly, as with torch's loader.
                self._epoch = given
            sampler.set_epoch(self._epoch)
            self._sampler_epoch = getattr(sampler, "epoch", None)
        dataset: Any = self.dataset
        if self._is_iterable and hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self._epoch)
        if self._stateful is not None:
            if goes_on and self._mark is not None:
                self._stateful.load_state_dict(self._mark)
            self._mark = self._stateful.state_dict()
        by_loading = self._is_iterable and self._stateful is None
        # A stream without a state cannot skip: its batches are loaded again and dropped (`_after`).
        self._work.begin(self._epoch, 0 if by_loading else self._done, self._generators)
        self._resumes, self._generators = False, None
        return self._done if by_loading else 0

    def _count_batch(self, moved: MovedBatch, waited_s: float) -> Any:
        self._done += 1
        self._batches += 1
        self._waited_s += waited_s
        marks = self._work.marks
        if self._stateful is not None:
            self._mark, self._is_over = marks.popleft()
        elif marks:
            marks.popleft()
        return self._mover.receive(moved)

    def _finish_epoch(self) -> None:
        self._epoch, self._done, self._mark, self._is_over = self._epoch + 1, 0, None, False
        self._work.end()


class _Batches:
    """Iterator of a training loop over a loader; its deletion ends the thread."""

    def __init__(self, loader: DataLoader, feed: Feed | Inline) -> None:
        self._loader, self._feed = loader, feed
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        started = time.perf_counter()
        entry = self._feed.get()
        if isinstance(entry, MovedBatch):
            return self._loader._count_batch(entry, time.perf_counter() - started)
        self._ended = True
        self._feed.close()
        if entry is None:
            self._loader._finish_epoch()
            raise StopIteration
        try:
            raise entry
        finally:
            # Its traceback refers to this frame, which would keep the caller's batches alive until
            # the next garbage collection.
            del entry

    def __del__(self) -> None:
        self._feed.close()


def _after(batches: Iterator[Any], count: int, work: Orders | BatchStream) -> Iterator[Any]:
    passed = 0
    for _ in islice(batches, count):
        passed += 1
        if work.marks:
            work.marks.popleft()
    if passed < count:
        raise GulliverError(
            f"the saved position is after batch {count}, but the stream ended after {passed}: "
            "resume with the original data"
        )
    yield from batches
