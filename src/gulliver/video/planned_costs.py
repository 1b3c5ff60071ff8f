"""Clips of planned steps: read ahead, and left out on all ranks alike where one cannot be read.

Read `StepClips.begin`; `ClipOrder` says which row of a table a planner's sample is.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from gulliver.comm.collectives import barrier, broadcast_object, gather_objects
from gulliver.comm.world import World
from gulliver.data.buckets import BucketConfig
from gulliver.data.clips import BrokenClip, Bucket, Clip
from gulliver.data.table import ClipTable
from gulliver.data_centric.steps import StepPlan
from gulliver.errors import GulliverError
from gulliver.hardware.batch_costs import BlockKind
from gulliver.hardware.probe import current_cluster, planned_memory
from gulliver.hardware.samples import (
    SampleCosts,
    SampleFit,
    SampleModel,
    SampleShape,
    fit_samples,
    load_samples,
    measure_samples,
    save_samples,
)
from gulliver.jobs.log import derive
from gulliver.models.autoencoders import Autoencoder
from gulliver.models.stdit import STDiT3
from gulliver.options import DTYPES, byte_size, size_text
from gulliver.video.config import TrainConfig

READERS = 2
"""Threads of a rank that read clips."""
Read = Clip | BrokenClip


# [Note: clips that break] The gradient of a step is that of the mean over the clips that could be
# read, and every micro-batch is weighed when its backward begins. So each rank reads all clips of
# its part of a step first, and all ranks tell each other what they could not read: the ranks of a
# group then leave the same clips out, and all know how many are left. While a step runs, two
# threads read this rank's clips of the next one. What it does not know: how a step is weighed and
# run (`gulliver.booster`), and when so many are lost that a run ends (`batches.py`).
class ClipOrder:
    """Numbers of a planner's samples: rows of a data set, or of those that an epoch deals out."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self.is_dealt = isinstance(getattr(dataset, "buckets", None), BucketConfig)
        """Whether every epoch deals the rows to other buckets, and leaves some out."""
        self.epoch = lru_cache(maxsize=3)(self._epoch)

    def _epoch(self, epoch: int) -> tuple[list[int], list[Bucket]]:
        """Rows of an epoch in their order, and the bucket of each."""
        if not self.is_dealt:
            buckets = [self._dataset.bucket_of(row) for row in range(len(self._dataset))]
            return list(range(len(buckets))), buckets
        dealt = self._dataset.deal(epoch)
        rows = [row for row, bucket in enumerate(dealt) if bucket is not None]
        draw = np.random.Generator(np.random.Philox(key=[abs(self._seed), epoch]))
        rows = draw.permutation(np.array(rows, dtype=np.int64)).tolist()
        return rows, [dealt[row] for row in rows]

    def buckets(self) -> list[Bucket]:
        """All buckets that a sample of any epoch may have."""
        if not self.is_dealt:
            return list(dict.fromkeys(self.epoch(0)[1]))
        config, interval = self._dataset.buckets, self._dataset.frame_interval
        sizes = {(p.frames, p.height, p.width): None for p in self._probes()}
        return list(dict.fromkeys(b for size in sizes for b in config.possible(*size, interval)))

    def row(self, epoch: int, index: int) -> tuple[int, Bucket]:
        """Row and bucket of a planner's sample."""
        rows, buckets = self.epoch(epoch)
        return rows[index], buckets[index]

    @property
    def digest(self) -> str:
        """Digest of what epochs are dealt from: ranks and resumed runs must have the same."""
        told = [self._seed, *map(repr, self._probes()), *map(repr, self._dataset.buckets.rules)]
        return hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest()

    def _probes(self) -> Iterable[Any]:
        return (row.probe for row in self._dataset.rows)


class StepClips:
    """This rank's clips of one planned step after the other."""

    def __init__(self, dataset: Any, order: ClipOrder, seed: int) -> None:
        self._dataset, self._order, self._seed = dataset, order, seed
        self._pool = ThreadPoolExecutor(READERS, "gulliver-clips")
        self._coming: dict[tuple[int, int], Future[Read]] = {}
        self._clips: dict[int, Read] = {}
        # Samples of the present step that some rank could not read.
        self.lost: frozenset[int] = frozenset()

    def begin(self, rank: int, plan: StepPlan, upcoming: StepPlan | None) -> None:
        """Reads a step, agrees with all ranks on what is lost, and begins to read the next one."""
        now = self._asked(plan, rank)
        self._clips = {index: future.result() for (_, index), future in now.items()}
        lost = [n for n, clip in self._clips.items() if isinstance(clip, BrokenClip)]
        if isinstance(self._dataset, ClipTable):  # what is made cannot break
            lost = [index for found in gather_objects(lost) for index in found]
        self.lost = frozenset(lost)
        self._coming = {} if upcoming is None else self._asked(upcoming, rank)

    def _asked(self, plan: StepPlan, rank: int) -> dict[tuple[int, int], Future[Read]]:
        """This rank's clips of a step as they are read; what was read for nothing is dropped."""
        groups = plan.groups_of(rank)
        keys = [
            (plan.epoch, index)
            for group in groups
            for batch in group.micro_batches
            for index in batch.samples
        ]
        found = {k: self._coming.pop(k, None) or self._pool.submit(self._read, *k) for k in keys}
        for future in self._coming.values():
            future.cancel()
        return found

    def _read(self, epoch: int, index: int) -> Read:
        row, bucket = self._order.row(epoch, index)
        if not isinstance(self._dataset, ClipTable):
            return self._dataset[row]
        return self._dataset.read(row, derive(self._seed, 8, epoch, row), bucket)

    def __getitem__(self, index: int) -> Read:
        """Gives a clip of the present step away: it is kept no longer than it is needed."""
        clip = self._clips.pop(index)
        if index in self.lost and isinstance(clip, Clip):
            return BrokenClip(clip.index, "another rank cannot read it")
        return clip

    def weight(self, index: int) -> float:
        """What a sample of the present step counts: 1, or 0 where it is lost."""
        return float(index not in self.lost)

    def close(self) -> None:
        """Ends the reading ahead."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def stack_clips(clips: Sequence[Read]) -> dict[str, Any]:
    """Makes a micro-batch of the clips that could be read."""
    read = [clip for clip in clips if isinstance(clip, Clip)]
    return {
        "videos": torch.stack([clip.video for clip in read]) if read else None,
        "captions": [clip.caption for clip in read],
        "fps": torch.tensor([clip.fps for clip in read]),
        "rows": [clip.index for clip in read],
    }


# Costs of clips for data-centric steps: measured on this run's model when it begins, and kept.
#
# Few blocks of the model run, forward and backward, on the smallest and the largest of the run's
# shapes; `gulliver.hardware.fit_samples` draws the rest from that. All ranks measure at once, for
# they run at once in training; rank 0's medians count. The file says what it was measured on, and
# is measured anew where that has changed.


STATE_BYTES = 20
"""Bytes of a parameter's weight, gradient, two moments and average, if nothing is sharded."""
PAIRED = {"spatial": "spatial_blocks", "temporal": "temporal_blocks"}
"""Lists of the blocks of an STDiT3 by kind, which run in turns and share sequences."""
JOINT = {"joint": "blocks"}
"""The list of an STDiT2, each block of which attends in space and in time."""


def kinds_of(model: Any) -> dict[str, str]:
    """Names of a model's lists of blocks, by kind."""
    return PAIRED if isinstance(model, STDiT3) else JOINT


@dataclass(frozen=True)
class ClipShapes:
    """Shapes of a run's clips as costs know them."""

    of: dict[Bucket, SampleShape]
    buckets: dict[SampleShape, Bucket]

    @property
    def are_kept(self) -> bool:
        """Whether the clips are latents already, so that nothing is encoded."""
        return not any(shape.pixels for shape in self.buckets)

    def arriving(self, order: ClipOrder) -> list[SampleShape] | ArrivingShapes:
        """Shapes of a planner's samples: a table's, or a stream that every epoch deals anew."""
        if order.is_dealt:
            return ArrivingShapes(self, order)
        return [self.of[bucket] for bucket in order.epoch(0)[1]]

    @classmethod
    def of_buckets(
        cls, buckets: Iterable[Bucket], model: Any, autoencoder: Autoencoder, encode: bool
    ) -> ClipShapes:
        """Shapes of buckets: tokens of a model's patches, and pixels where they are encoded."""
        found = {}
        patch, text = model.patch_size, len(model.y_embedder.y_embedding)
        for bucket in buckets:
            sides = autoencoder.latent_shape(bucket.frames, bucket.height, bucket.width)[1:]
            frames, rows, columns = (-(-n // p) for n, p in zip(sides, patch, strict=True))
            pixels = bucket.frames * bucket.height * bucket.width if encode else 0
            shape = SampleShape.clip(frames, rows, columns, text, pixels)
            pairs = shape.pairs * len(PAIRED) / len(kinds_of(model))
            # Two buckets may have like latents, and cannot share a batch all the same.
            found[bucket] = replace(shape, pairs=pairs, name=str(bucket))
        return cls(found, {shape: bucket for bucket, shape in found.items()})


@dataclass(frozen=True)
class ArrivingShapes:
    """Shapes of the rows that an epoch deals out, in their order."""

    shapes: ClipShapes
    order: ClipOrder

    def __call__(self, epoch: int) -> list[SampleShape]:
        return [self.shapes.of[bucket] for bucket in self.order.epoch(epoch)[1]]

    @property
    def digest(self) -> str:
        """Digest that ranks and resumed runs must share."""
        return self.order.digest


def ready_costs(
    config: TrainConfig,
    folder: Path,
    model: Any,
    shapes: ClipShapes,
    losses: Callable[[Bucket, int], Any],
    world: World,
) -> tuple[SampleCosts, list[str]]:
    """Costs of a run's clips: those of the file that is named, those kept, or measured now."""
    kept, extra = _saved_bytes(model, shapes, losses)
    known = _sizes(config, model, *broadcast_object((kept, extra)))
    if shapes.are_kept:  # rates that were fitted without pixels are of no use with them
        known = replace(known, name=f"{known.name} on kept latents")
    path = config.planner.costs or folder / "costs.json"
    fit, told, problem = None, "", None
    if world.is_main:
        try:
            fit, told = load_samples(path, known), f"costs of samples from {path}"
        except GulliverError as error:
            problem = str(error)
        told = told or f"costs of samples measured now: {problem if path.exists() else 'the first'}"
    fit, told, problem = broadcast_object((fit, told, problem))
    if fit is None and config.planner.costs is not None:
        raise GulliverError(f"--planner.costs: {problem}")
    if fit is None:
        fit = broadcast_object(_measured(model, known, shapes, losses, extra, world))
        if world.is_main:
            save_samples(path, known, fit, shapes.buckets)
    told += f": error of points left out {fit.error:.1%}, {fit.worst:.1%} at most"
    memory, why = _memory(config, world)
    cluster = current_cluster(world.size) if world.size > 1 else None
    more = {"encoded_alike": True, "tensor": config.tp_size}
    shares = isinstance(model, STDiT3)
    costs = SampleCosts(known, fit, memory, cluster, None if shares else (1,), **more)
    return costs, [told, f"memory of a rank: {size_text(memory)}, {why}"]


def _sizes(config: TrainConfig, model: Any, kept: dict[str, float], extra: float) -> SampleModel:
    lists = kinds_of(model)
    weights = sum(
        p.numel()
        for name in lists.values()
        for p in getattr(model, name).parameters()
        if p.ndim >= 2
    )
    name = f"{type(model).__name__} {config.model.size if config.model.weights is None else 'own'}"
    kinds = tuple(BlockKind(kind, model.depth, kept[kind], 0.5) for kind in lists)
    dtype = DTYPES[config.dtype]
    each = weights // (len(lists) * model.depth)
    return SampleModel(name, each, model.hidden_size, kinds, dtype)


def _measured(
    model: Any,
    known: SampleModel,
    shapes: ClipShapes,
    losses: Callable[[Bucket, int], Any],
    extra: float,
    world: World,
) -> SampleFit:
    """Fits points of this rank; every rank measures, so that all are as busy as in training."""
    ordered = sorted(shapes.buckets, key=lambda shape: shape.tokens)
    run = partial(_point, model, shapes, losses, extra, world)
    states = float(STATE_BYTES * sum(p.numel() for p in model.parameters()))
    depths = [n * len(kinds_of(model)) for n in (1, 2)]
    points = measure_samples(run, dict.fromkeys((ordered[0], ordered[-1])), depths=depths)
    model.zero_grad(set_to_none=True)
    return fit_samples(known, points, states)


def _point(
    model: Any,
    shapes: ClipShapes,
    losses: Callable[[Bucket, int], Any],
    extra: float,
    world: World,
    shape: SampleShape,
    batch: int,
    depth: int,
) -> tuple[float, int]:
    """Seconds and bytes of one forward and backward of a few blocks, all computed again."""
    barrier()
    kinds = tuple(kinds_of(model))
    with _shallow(model, depth // len(kinds)), _recomputed(model, kinds):
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        with _Saved() as saved:
            loss = losses(shapes.buckets[shape], batch).mean()
        loss.backward()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    # Blocks that are computed again keep what goes in; one is whole while its backward runs.
    held = depth * _input_bytes(model) + extra
    return seconds, saved.bytes + int(held * batch * shape.tokens)


def _input_bytes(model: Any) -> int:
    """Bytes of a token that goes into a block."""
    return model.hidden_size * model.x_embedder.proj.weight.element_size()


def _saved_bytes(
    model: Any, shapes: ClipShapes, losses: Callable[[Bucket, int], Any]
) -> tuple[dict[str, float], float]:
    """Bytes of a token that a kept block holds more, by kind, and the most of them."""
    shape = min(shapes.buckets, key=lambda shape: shape.tokens)

    def saved(kinds: tuple[str, ...]) -> int:
        with _shallow(model, 1), _recomputed(model, kinds), _Saved() as found:
            losses(shapes.buckets[shape], 1)
        return found.bytes

    kinds = tuple(kinds_of(model))
    least = saved(kinds)
    more = {kind: saved(tuple(k for k in kinds if k != kind)) - least for kind in kinds}
    found = {k: max(1.0, size / shape.tokens - _input_bytes(model)) for k, size in more.items()}
    return found, max(found.values())


class _Saved:
    """Counts the bytes that forwards inside save for backward, once for each storage."""

    def __init__(self) -> None:
        self.bytes, self._seen = 0, set[int]()
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        base = tensor if tensor._base is None else tensor._base
        if not isinstance(base, nn.Parameter) and storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor

    def __enter__(self) -> _Saved:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


@contextmanager
def _shallow(model: Any, depth: int) -> Iterator[None]:
    """Lets only the first blocks of each kind run."""
    whole = {name: getattr(model, name) for name in kinds_of(model).values()}
    for name, blocks in whole.items():
        setattr(model, name, blocks[:depth])
    try:
        yield
    finally:
        for name, blocks in whole.items():
            setattr(model, name, blocks)


@contextmanager
def _recomputed(model: Any, kinds: tuple[str, ...]) -> Iterator[None]:
    """Lets backward compute blocks of some kinds again."""
    changed = [b for kind in kinds for b in getattr(model, kinds_of(model)[kind])]
    for block in changed:
        vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in changed:
            del vars(block)["forward"]


def _memory(config: TrainConfig, world: World) -> tuple[float, str]:
    if (limit := config.planner.memory_limit) is not None:
        size = byte_size("--planner.memory-limit", limit)
        return size, "as --planner.memory-limit says"
    # Nothing here may depend on the number of ranks: which samples a step has would, too.
    return planned_memory(world.device.type)
