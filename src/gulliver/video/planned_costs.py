"""Clips of planned steps: prefetching, unreadable clips, and measured costs.

Start with `StepClips.begin`; `ClipOrder` maps a planner's samples to table rows.
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
"""Reader threads per rank."""
Read = Clip | BrokenClip


# [Note: clips that break] The gradient of a step is that of the mean over the readable clips, and
# each micro-batch needs its weight when its backward begins. So each rank first reads all clips of
# its part of a step, and all ranks exchange the unreadable ones: the ranks of a group then drop the
# same clips, and all know the remaining number. During a step, two threads read this rank's clips
# of the next one.
class ClipOrder:
    """Maps a planner's sample indices to dataset rows, or to the rows selected for an epoch."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self.is_dealt = isinstance(getattr(dataset, "buckets", None), BucketConfig)
        """Whether each epoch assigns rows to different buckets and omits some."""
        self.epoch = lru_cache(maxsize=3)(self._epoch)

    def _epoch(self, epoch: int) -> tuple[list[int], list[Bucket]]:
        if not self.is_dealt:
            buckets = [self._dataset.bucket_of(row) for row in range(len(self._dataset))]
            return list(range(len(buckets))), buckets
        dealt = self._dataset.assign(epoch)
        rows = [row for row, bucket in enumerate(dealt) if bucket is not None]
        draw = np.random.Generator(np.random.Philox(key=[abs(self._seed), epoch]))
        rows = draw.permutation(np.array(rows, dtype=np.int64)).tolist()
        return rows, [dealt[row] for row in rows]

    def buckets(self) -> list[Bucket]:
        if not self.is_dealt:
            return list(dict.fromkeys(self.epoch(0)[1]))
        config, interval = self._dataset.buckets, self._dataset.frame_interval
        sizes = {(p.frames, p.height, p.width): None for p in self._probes()}
        return list(dict.fromkeys(b for size in sizes for b in config.possible(*size, interval)))

    def row(self, epoch: int, index: int) -> tuple[int, Bucket]:
        rows, buckets = self.epoch(epoch)
        return rows[index], buckets[index]

    @property
    def digest(self) -> str:
        """Digest of everything that determines the samples; the same on all ranks and on resume."""
        told = [self._seed, *map(repr, self._probes()), *map(repr, self._dataset.buckets.rules)]
        return hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest()

    def _probes(self) -> Iterable[Any]:
        return (row.probe for row in self._dataset.rows)


class StepClips:
    """This rank's clips of successive planned steps."""

    def __init__(self, dataset: Any, order: ClipOrder, seed: int) -> None:
        self._dataset, self._order, self._seed = dataset, order, seed
        self._pool = ThreadPoolExecutor(READERS, "gulliver-clips")
        self._coming: dict[tuple[int, int], Future[Read]] = {}
        self._clips: dict[int, Read] = {}
        # Samples of the current step that some rank could not read.
        self.lost: frozenset[int] = frozenset()

    def begin(self, rank: int, plan: StepPlan, upcoming: StepPlan | None) -> None:
        """Reads a step's clips, exchanges which are unreadable, and prefetches the next step."""
        now = self._asked(plan, rank)
        self._clips = {index: future.result() for (_, index), future in now.items()}
        lost = [n for n, clip in self._clips.items() if isinstance(clip, BrokenClip)]
        if isinstance(self._dataset, ClipTable):  # generated clips cannot be unreadable
            lost = [index for found in gather_objects(lost) for index in found]
        self.lost = frozenset(lost)
        self._coming = {} if upcoming is None else self._asked(upcoming, rank)

    def _asked(self, plan: StepPlan, rank: int) -> dict[tuple[int, int], Future[Read]]:
        """Returns pending reads of this rank's clips of a step; cancels other prefetched reads."""
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
        """Returns a clip of the current step and releases it."""
        clip = self._clips.pop(index)
        if index in self.lost and isinstance(clip, Clip):
            return BrokenClip(clip.index, "another rank cannot read it")
        return clip

    def weight(self, index: int) -> float:
        """Weight of a sample of the current step: 1, or 0 if any rank could not read it."""
        return float(index not in self.lost)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def stack_clips(clips: Sequence[Read]) -> dict[str, Any]:
    read = [clip for clip in clips if isinstance(clip, Clip)]
    return {
        "videos": torch.stack([clip.video for clip in read]) if read else None,
        "captions": [clip.caption for clip in read],
        "fps": torch.tensor([clip.fps for clip in read]),
        "rows": [clip.index for clip in read],
    }


# Costs of clips for data-centric steps: measured with the run's model at the start, and saved.
#
# A few blocks of the model run forward and backward on the smallest and the largest shapes of the
# run; `gulliver.hardware.fit_samples` extrapolates. All ranks measure at once, because they run at
# once in training; rank 0's medians are used. The file records the setup, and is measured again if
# that changes.


STATE_BYTES = 20
"""Bytes per parameter for weight, gradient, two moments and average, if nothing is sharded."""
PAIRED = {"spatial": "spatial_blocks", "temporal": "temporal_blocks"}
"""Block lists of an STDiT3, by kind of block; the kinds alternate."""
JOINT = {"joint": "blocks"}
"""Block list of an STDiT2: each block has spatial and temporal attention."""


def kinds_of(model: Any) -> dict[str, str]:
    return PAIRED if isinstance(model, STDiT3) else JOINT


@dataclass(frozen=True)
class ClipShapes:
    """Shapes of a run's clips for the cost model."""

    of: dict[Bucket, SampleShape]
    buckets: dict[SampleShape, Bucket]

    @property
    def are_kept(self) -> bool:
        return not any(shape.pixels for shape in self.buckets)

    def arriving(self, order: ClipOrder) -> list[SampleShape] | ArrivingShapes:
        """Returns the shapes of all samples, or a stream if rows are reassigned every epoch."""
        if order.is_dealt:
            return ArrivingShapes(self, order)
        return [self.of[bucket] for bucket in order.epoch(0)[1]]

    @classmethod
    def of_buckets(
        cls, buckets: Iterable[Bucket], model: Any, autoencoder: Autoencoder, encode: bool
    ) -> ClipShapes:
        """Computes the tokens of each bucket, and its pixels if clips are encoded in training."""
        found = {}
        patch, text = model.patch_size, len(model.y_embedder.y_embedding)
        for bucket in buckets:
            sides = autoencoder.latent_shape(bucket.frames, bucket.height, bucket.width)[1:]
            frames, rows, columns = (-(-n // p) for n, p in zip(sides, patch, strict=True))
            pixels = bucket.frames * bucket.height * bucket.width if encode else 0
            shape = SampleShape.clip(frames, rows, columns, text, pixels)
            pairs = shape.pairs * len(PAIRED) / len(kinds_of(model))
            # Two buckets may have equal latents, and still cannot share a batch.
            found[bucket] = replace(shape, pairs=pairs, name=str(bucket))
        return cls(found, {shape: bucket for bucket, shape in found.items()})


@dataclass(frozen=True)
class ArrivingShapes:
    """Shapes of the rows selected for an epoch, in order."""

    shapes: ClipShapes
    order: ClipOrder

    def __call__(self, epoch: int) -> list[SampleShape]:
        return [self.shapes.of[bucket] for bucket in self.order.epoch(epoch)[1]]

    @property
    def digest(self) -> str:
        return self.order.digest


def ready_costs(
    config: TrainConfig,
    folder: Path,
    model: Any,
    shapes: ClipShapes,
    losses: Callable[[Bucket, int], Any],
    world: World,
) -> tuple[SampleCosts, list[str]]:
    """Returns the costs of a run's clips: from a file, from the run's folder, or measured now."""
    kept, extra = _saved_bytes(model, shapes, losses)
    known = _sizes(config, model, *broadcast_object((kept, extra)))
    if shapes.are_kept:  # rates fitted without pixels do not apply to pixels
        known = replace(known, name=f"{known.name} on stored latents")
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
        raise GulliverError(f"--planner.costs does not match: {problem}")
    if fit is None:
        fit = broadcast_object(_measured(model, known, shapes, losses, extra, world))
        if world.is_main:
            save_samples(path, known, fit, shapes.buckets)
    told += f"; leave-one-out error {fit.error:.1%}, at most {fit.worst:.1%}"
    memory, why = _memory(config, world)
    cluster = current_cluster(world.size) if world.size > 1 else None
    more = {"encoded_alike": True, "tensor": config.tp_size}
    shares = isinstance(model, STDiT3)
    costs = SampleCosts(known, fit, memory, cluster, None if shares else (1,), **more)
    return costs, [told, f"memory per rank: {size_text(memory)}, {why}"]


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
    """Fits this rank's measurements; all ranks measure simultaneously, as in training."""
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
    """Measures seconds and bytes of one forward and backward of a few recomputed blocks."""
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
    # Recomputed blocks keep their input; one is whole during its backward.
    held = depth * _input_bytes(model) + extra
    return seconds, saved.bytes + int(held * batch * shape.tokens)


def _input_bytes(model: Any) -> int:
    return model.hidden_size * model.x_embedder.proj.weight.element_size()


def _saved_bytes(
    model: Any, shapes: ClipShapes, losses: Callable[[Bucket, int], Any]
) -> tuple[dict[str, float], float]:
    """Returns the bytes per token that a kept block adds, by kind, and the maximum over kinds."""
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
    """Counts the bytes saved for backward inside the context, once per storage."""

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
        return size, "from --planner.memory-limit"
    # Must not depend on the number of ranks, or the samples of a step would.
    return planned_memory(world.device.type)
