"""Samplers whose position can be saved, and resumed on any number of ranks.

The order depends on epoch and seed, not on the number of ranks.
"""

from __future__ import annotations

import base64
import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from gulliver.data.clips import Bucket
from gulliver.errors import GulliverError
from gulliver.options import whole_number

KEYS = {"epoch", "done", "rank", "generators", "inner", "is_over"}  # keys of every loader state


def set_state(generator: torch.Generator, state: str) -> None:
    """Sets a generator's state, given in base64 as in a loader's state."""
    content = bytearray(base64.b64decode(state, validate=True))
    generator.set_state(torch.frombuffer(content, dtype=torch.uint8))


def check_content(state: Any) -> None:
    if not isinstance(state, Mapping) or not set(state) >= KEYS:
        raise GulliverError("this is not the state of a data loader: it has no position")


def check_position(epoch: Any, done: Any, batches: int | None) -> None:
    for name, value in (("epoch", epoch), ("done", done)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise GulliverError(
                f"the saved position has {name}={value!r}, but it must be an integer of at least 0"
            )
    if batches is not None and done > batches:
        raise GulliverError(
            f"the saved position is after batch {done} of an epoch, which has {batches} here: "
            "resume with the original settings"
        )


def order_of(source: Any) -> str:
    """Names the class of a sampler, or the classes of a batch sampler and its inner sampler."""
    inside = getattr(source, "sampler", None)
    return type(source).__qualname__ + (f" of {order_of(inside)}" if inside is not None else "")


# Bucketed sampling: every sample once per epoch, one shape per step, any number of ranks.
#
# The order of an epoch is a list of global batches, each of one bucket; it depends on the seed and
# the epoch, never on the number of ranks. A rank takes its contiguous share of every batch, so all
# ranks process the same shape in the same step and none waits for a longer clip. The state is
# therefore just (epoch, batches done), and a run resumes exactly on any number of ranks.


Groups = dict[Bucket, tuple[np.ndarray, int]]  # samples of each bucket, and the bucket's batch size


@dataclass(frozen=True)
class Step:
    """One rank's share of a global batch.

    `indices` may be empty if a batch has fewer samples than ranks; `offset` is the position of the
    first index in the batch of `total` samples; `number` is the index of the batch in the epoch.
    """

    bucket: Bucket
    indices: list[int]
    offset: int
    total: int
    epoch: int
    number: int


class ResumableSampler(ABC):
    """Yields batches in an order that does not depend on the number of ranks.

    An iteration yields this rank's share of the rest of the current epoch; the next iteration
    starts the next epoch. The state is the position, and can be resumed on any number of ranks.

    Args:
        rank: rank of this process.
        world_size: number of ranks.
        seed: seed of the order.

    Raises:
        GulliverError: `rank` is not less than `world_size`.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, seed: int = 0) -> None:
        if not 0 <= rank < world_size:
            raise GulliverError(f"rank {rank} is out of range for {world_size} ranks")
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.epoch, self.done = 0, 0

    fingerprint: str | cached_property[str]
    """Digest of everything that determines the order: data, batch sizes and seed, but not ranks."""

    @abstractmethod
    def batches(self, epoch: int) -> Sequence[Any]:
        """Draws the global batches of an epoch, in order."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches in an epoch."""

    @abstractmethod
    def _share(self, batch: Any, epoch: int, number: int) -> Any: ...

    def __iter__(self) -> Iterator[Any]:
        epoch, order = self.epoch, self.batches(self.epoch)
        for number in range(self.done, len(order)):
            # Counted before the step is returned, so that a state saved with it includes it.
            self.epoch, self.done = (
                (epoch, number + 1) if number + 1 < len(order) else (epoch + 1, 0)
            )
            yield self._share(order[number], epoch, number)

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.done = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last returned step."""
        return {"epoch": self.epoch, "done": self.done, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state, on any number of ranks.

        Raises:
            GulliverError: the state was saved with different data, batch sizes or seed, or is
                invalid.
        """
        self.check_state(state)
        self.epoch, self.done = state["epoch"], state["done"]

    def check_state(self, state: Any) -> None:
        """Rejects states that `load_state_dict` does not accept."""
        if not isinstance(state, Mapping) or not {"epoch", "done", "fingerprint"} <= set(state):
            raise GulliverError(f"this is not the state of a {self.kind}: it has no position")
        if state["fingerprint"] != self.fingerprint:
            raise GulliverError(
                "the saved data position belongs to other data, batch sizes or another seed: "
                "resume with the original settings"
            )
        check_position(state["epoch"], state["done"], None)
        check_position(state["epoch"], state["done"], self.batches_of(state["epoch"]))

    def batches_of(self, epoch: int) -> int:
        return len(self)

    kind = "sampler"


class BucketSampler(ResumableSampler):
    """Yields batches of equal shape from a dataset of many shapes.

    Args:
        buckets: bucket of every sample, or None for samples that are never used; or a function from
            an epoch to such a list, if epochs reassign the samples.
        batch_size: samples per batch over all ranks: one number, or one per bucket.
        rank: rank of this process.
        world_size: number of ranks.
        seed: seed of the order.

    Raises:
        GulliverError: no sample has a bucket, a bucket has no batch size, or `rank` is not less
            than `world_size`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket | None] | Callable[[int], Sequence[Bucket | None]],
        batch_size: int | Mapping[Bucket, int],
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(rank, world_size, seed)
        self._buckets, self._batch_size = buckets, batch_size
        self._grouped: tuple[int, Groups] = 0, self._group(0)

    def _groups(self, epoch: int) -> Groups:
        """Returns the samples of each bucket in an epoch; caches the last epoch."""
        drawn, groups = self._grouped
        if callable(self._buckets) and drawn != epoch:
            groups = self._group(epoch)
            self._grouped = epoch, groups
        return groups

    def _group(self, epoch: int) -> Groups:
        buckets = self._buckets(epoch) if callable(self._buckets) else self._buckets
        members: dict[Bucket, list[int]] = {}
        for index, bucket in enumerate(buckets):
            if bucket is not None:
                members.setdefault(bucket, []).append(index)
        if not members:
            raise GulliverError("no sample fits any bucket, so there is nothing to train on")
        # Sorted, so that the order of an epoch does not depend on which bucket occurs first.
        return {
            b: (np.array(members[b], dtype=np.int64), _batch_size(self._batch_size, b))
            for b in sorted(members)
        }

    @property
    def samples(self) -> int:
        return sum(len(members) for members, _ in self._groups(self.epoch).values())

    kind = "bucket sampler"

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(str(self.seed).encode(), digest_size=8)
        for bucket, (members, size) in self._groups(0).items():
            digest.update(f"{bucket}:{size}:{len(members)}".encode())
            digest.update(members.tobytes())
        return digest.hexdigest()

    def batches(self, epoch: int) -> list[tuple[Bucket, np.ndarray]]:
        """Draws an epoch's global batches in order, each as a bucket and indices."""
        draw = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        found = []
        for bucket, (members, size) in self._groups(epoch).items():
            shuffled = draw.permutation(members)
            found += [
                (bucket, shuffled[start : start + size]) for start in range(0, len(members), size)
            ]
        return [found[place] for place in draw.permutation(len(found))]

    def __len__(self) -> int:
        """Number of batches in the current epoch."""
        return self.batches_of(self.epoch)

    def batches_of(self, epoch: int) -> int:
        return sum(-(-len(members) // size) for members, size in self._groups(epoch).values())

    def _share(self, batch: tuple[Bucket, np.ndarray], epoch: int, number: int) -> Step:
        bucket, members = batch
        start = len(members) * self.rank // self.world_size
        end = len(members) * (self.rank + 1) // self.world_size
        return Step(bucket, members[start:end].tolist(), start, len(members), epoch, number)

    def describe(self) -> str:
        """Describes the numbers of samples and batches, and their buckets, in one line."""
        groups = self._groups(self.epoch)
        shares = Counter({str(bucket): len(members) for bucket, (members, _) in groups.items()})
        spread = ", ".join(f"{name}: {count}" for name, count in shares.most_common())
        return f"{self.samples} samples in {len(self)} batches ({spread})"


def _batch_size(batch_size: int | Mapping[Bucket, int], bucket: Bucket) -> int:
    if isinstance(batch_size, Mapping):
        batch_size = batch_size[bucket]
    batch_size = whole_number(f"batch size for bucket {bucket}", batch_size)
    if batch_size < 1:
        raise GulliverError(f"batch size {batch_size} for bucket {bucket} must be at least 1")
    return batch_size
