"""Plugins: short, hand-written ways to make a plan and to run it."""

from __future__ import annotations

import inspect
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler

from gulliver.comm import Torus, World, broadcast, current_world
from gulliver.data import DataLoader
from gulliver.errors import GulliverError, nearest
from gulliver.parallel import (
    BoostedOptimizer,
    BucketTuner,
    BufferSync,
    ZeroOptimizer,
    check_optimizer,
    check_trainable,
    check_unshared,
    is_boosted,
    named_trainables,
    state_tensors,
)
from gulliver.plan import ChunkPlan, MemoryPlan, Plan

MIB = 2**20
STAGES = (0, 1, 2, 3)
TUNED = ("auto", "again")
DEFAULT_CHUNK_MB = 4.0
"""Before tuning, and without other ranks."""
RUNNING = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Normalizations that may keep running statistics."""
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _NamedArguments(type(ABC)):
    """Turns an unknown constructor argument into an error that names the nearest one."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        known = [n for n in inspect.signature(cls.__init__).parameters if n != "self"]
        for name in kwargs:
            if name not in known:
                raise GulliverError(
                    f"{cls.__name__} has no argument {name!r}: {nearest(name, known)}"
                )
        return super().__call__(*args, **kwargs)


class Plugin(ABC, metaclass=_NamedArguments):
    """A way to run a model."""

    verbose: bool = True
    takes: tuple[str, ...] = ()
    """Kinds of devices that parameters may be on besides the rank's own."""

    def check(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, precision: str
    ) -> None:
        """Refuses what this plugin cannot run; nothing is changed yet.

        Raises:
            GulliverError: naming what is wrong.
        """
        if optimizer is not None:
            named_trainables(model, optimizer)

    @abstractmethod
    def configure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        world: World,
        precision: str,
    ) -> tuple[nn.Module, BoostedOptimizer, Plan]:
        """The model and optimizer as they will run, and the plan that says how.

        Without an optimizer the model is not trained.
        """

    def prepare_dataloader(
        self,
        dataset: Dataset,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        **kwargs: Any,
    ) -> DataLoader:
        """A loader that gives this rank its share of a data set; see `gulliver.data.DataLoader`.

        Args:
            dataset: with a length.
            batch_size: samples per rank and step.
            shuffle: in another order each epoch.
            seed: of the order, the same on all ranks, and of what workers draw, another on each.
            drop_last: drop what does not divide, rather than repeat samples.
            kwargs: further arguments of the loader. On a GPU batches arrive there ahead of use,
                unless ``device=None`` is given.

        Raises:
            GulliverError: an argument that the loader does not have; fewer samples than ranks.
        """
        world, (place, size) = current_world(), self.data_place()
        count = len(dataset) if hasattr(dataset, "__len__") else None  # type: ignore[arg-type]
        if count is None or count < size:
            has = "no length" if count is None else f"{count} samples"
            raise GulliverError(f"the data set has {has}: {size} ranks need one sample each")
        for name in ("sampler", "batch_sampler", "rank", "world_size"):
            if name in kwargs:
                raise GulliverError(
                    f"prepare_dataloader sets {name} itself: make a gulliver.data.DataLoader"
                )
        sampler: DistributedSampler = DistributedSampler(
            dataset, size, place, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        kwargs.setdefault("device", world.device if world.device.type != "cpu" else None)
        return DataLoader(
            dataset,
            batch_size,
            sampler=sampler,
            drop_last=drop_last,
            seed=seed,
            rank=place,
            world_size=size,
            **kwargs,
        )

    def data_place(self) -> tuple[int, int]:
        """This rank's number among those that read different samples, and how many there are."""
        world = current_world()
        return world.rank, world.size


class TorchDDPPlugin(Plugin):
    """torch's DistributedDataParallel: everything on every rank.

    Args:
        find_unused_parameters: allow parameters without gradients in a backward.
        bucket_cap_mb: size of a gradient bucket in MiB.
        static_graph: promise that the graph never changes.
        verbose: print the plan when the model is boosted.
    """

    def __init__(
        self,
        find_unused_parameters: bool = False,
        bucket_cap_mb: int = 25,
        static_graph: bool = False,
        verbose: bool = True,
    ) -> None:
        self.find_unused_parameters = find_unused_parameters
        self.bucket_cap_mb, self.static_graph, self.verbose = bucket_cap_mb, static_graph, verbose

    def configure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        world: World,
        precision: str,
    ) -> tuple[nn.Module, BoostedOptimizer, Plan]:
        """Wraps the model; in a world of one, or not to be trained, it stays as it is."""
        plain, idle = unwrapped(model), optimizer is None
        names = {} if optimizer is None else named_trainables(plain, optimizer)
        optimizer = optimizer or no_optimizer()
        memory = _whole_memory(plain, optimizer)
        plan = _plan(self, plain, names, optimizer, world, precision, None, memory, ())
        if idle and world.size > 1:
            with torch.no_grad():
                for tensor in [*plain.parameters(), *plain.buffers()]:
                    _broadcast_any(tensor)
        elif world.size > 1 and plain is model:
            model = _DDP(
                model,
                device_ids=[world.device.index] if world.device.type == "cuda" else None,
                find_unused_parameters=self.find_unused_parameters,
                bucket_cap_mb=self.bucket_cap_mb,
                static_graph=self.static_graph,
                gradient_as_bucket_view=True,
            )
        return model, _DDPOptimizer(optimizer, names, model), plan


class LowLevelZeroPlugin(Plugin):
    """ZeRO of our own: what is sharded over the ranks grows with the stage.

    Args:
        stage: 0 shards nothing, 1 the optimizer's state, 2 the gradients too, 3 the parameters too.
        chunk_mb: size of a chunk in MiB: small ones start early, large ones travel better. ``auto``
            tunes it in the first steps and keeps what it found for this model on this cluster,
            ``again`` tunes although an earlier job did; a number turns tuning off.
        precision: ``bf16`` or ``fp16`` turn the model's floating-point tensors and inputs to it,
            and train them through float32 copies in the shards, ``fp16`` with a loss scale that
            follows overflows; None leaves the model as it is.
        max_norm: clip gradients to this global norm at every step; 0 leaves that to the loop.
        gather_ahead: chunks that stage 3 gathers ahead of the one in use.
        overlap: False waits for every collective at once; the results are the same.
        axes: names and sizes of the mesh that collectives go along step by step, slowest links
            first, such as ``{"node": 2, "local": 4}``; None sends straight from rank to rank.
        rank_order: ranks in the order of their places on the axes, where they are not numbered so.
        assume_elementwise: shard an optimizer that is not known, on the user's word that its update
            of an element looks at that element only. Stage 0 needs no word: it steps whole
            parameters, those of an optimizer that is not known in one call.
        broadcast_buffers: at every step give all ranks rank 0's values of the buffers that training
            changed, such as running statistics, as torch's DDP does.
        folder: where tuning writes ``chunks.json`` and a picture, ``chunks.png``; None for neither.
        verbose: print the plan when the model is boosted, and what tuning found.

    Raises:
        GulliverError: another stage or precision, or a size that is not positive.
    """

    def __init__(
        self,
        stage: int = 1,
        chunk_mb: float | str = "auto",
        precision: str | None = None,
        max_norm: float = 0.0,
        gather_ahead: int = 2,
        overlap: bool = True,
        axes: Mapping[str, int] | None = None,
        rank_order: Sequence[int] | None = None,
        assume_elementwise: bool = False,
        folder: Path | str | None = None,
        verbose: bool = True,
        broadcast_buffers: bool = True,
    ) -> None:
        if isinstance(chunk_mb, str) and chunk_mb not in TUNED:
            raise GulliverError(
                f"chunk_mb={chunk_mb!r} is not known: {nearest(chunk_mb, TUNED)}, or a number"
            )
        size = DEFAULT_CHUNK_MB if isinstance(chunk_mb, str) else chunk_mb
        if stage not in STAGES:
            raise GulliverError(
                f"LowLevelZeroPlugin(stage={stage!r}) is not supported: 0 shards nothing, 1 the "
                "optimizer, 2 the gradients too, 3 the parameters too"
            )
        if not (size > 0 and max_norm >= 0 and gather_ahead >= 0):
            raise GulliverError(
                "chunk_mb must be positive, max_norm and gather_ahead not negative, not "
                f"{chunk_mb}, {max_norm}, {gather_ahead}"
            )
        if precision not in (None, *HALVES):
            raise GulliverError(
                f"LowLevelZeroPlugin(precision={precision!r}) is not supported: "
                f"{nearest(str(precision), HALVES)} (or None)"
            )
        self.stage, self.chunk_mb, self.max_norm = stage, chunk_mb, max_norm
        self.precision, self.gather_ahead, self.overlap = precision, gather_ahead, overlap
        self.axes, self.rank_order, self._size_mb = axes, rank_order, size
        self.folder = None if folder is None else Path(folder)
        self.assume_elementwise, self.verbose = assume_elementwise, verbose
        self.broadcast_buffers = broadcast_buffers

    def check(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, precision: str
    ) -> None:
        """Refuses what cannot be sharded; nothing is changed yet."""
        super().check(model, optimizer, precision)
        if self.precision and precision != "none":
            raise GulliverError(
                f"Booster(mixed_precision={precision!r}) and "
                f"LowLevelZeroPlugin(precision={self.precision!r}) exclude each other: the "
                "first computes in 16 bits and keeps float32 parameters, the second keeps 16"
            )
        others = any(is_boosted(p) for p in model.parameters())
        if others and (self.stage == 3 or self.precision == "fp16"):
            what = (
                "stage 3 has sharded all of" if self.stage == 3 else "fp16 has one loss scale for"
            )
            raise GulliverError(
                f"a parameter is trained by another boosted optimizer, and {what} the model: make "
                "one optimizer with a group for each part"
            )
        if optimizer is None:
            return
        if self.precision:
            _check_unstepped(optimizer)
        check_optimizer(optimizer, self.stage, self.assume_elementwise)
        check_trainable(named_trainables(model, optimizer))
        check_unshared(model, optimizer)

    def configure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        world: World,
        precision: str,
    ) -> tuple[nn.Module, BoostedOptimizer, Plan]:
        """Moves parameters into chunks; the model stays the object that it was."""
        torus = Torus(self.axes, self.rank_order, world.device.type) if self.axes else None
        if self.precision:
            _convert(model, optimizer, HALVES[self.precision])
            precision = f"{self.precision} with float32 copies"
        names = {} if optimizer is None else named_trainables(model, optimizer)
        optimizer = optimizer or no_optimizer()
        rest = {p: name for name, p in model.named_parameters() if p not in names}
        frozen = {p: name for p, name in rest.items() if not is_boosted(p)}
        with torch.no_grad():
            # Trained parameters travel with their chunks; the rest must start equal as well.
            for tensor in [*model.buffers(), *frozen]:
                if world.size > 1:
                    _broadcast_any(tensor)
        sharded = ZeroOptimizer(
            optimizer,
            names,
            self.stage,
            int(self._size_mb * MIB),
            max_norm=self.max_norm or math.inf,
            group=torus,
            assume_elementwise=self.assume_elementwise,
            frozen=frozen,
            ahead=self.gather_ahead,
            overlap=self.overlap,
        )
        if self.broadcast_buffers and sharded.size > 1:
            sharded.buffers = BufferSync(model, torus, RUNNING)
        if isinstance(self.chunk_mb, str) and sharded.size > 1 and names:
            report = _say if self.verbose else None
            again = self.chunk_mb == "again"
            sharded.tune(BucketTuner(sharded.shards, model, self.folder, report, again))
        memory = MemoryPlan(**sharded.memory())
        beside = sum(p.nbytes for p in rest) if self.stage < 3 else 0
        memory = replace(memory, parameters=memory.parameters + beside)
        chunks = chunk_plans(sharded)
        plan = _plan(self, model, names, optimizer, world, precision, self.stage, memory, chunks)
        if torus is not None:
            plan = replace(plan, mesh=dict(torus.axes))
        return model, sharded, plan


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def chunk_plans(optimizer: ZeroOptimizer) -> tuple[ChunkPlan, ...]:
    """The chunks of an optimizer, as a plan tells them."""
    return tuple(
        ChunkPlan(
            tensors=tuple(c.chunk.parameters),
            bytes=c.chunk.nbytes,
            padding_bytes=c.chunk.layout.padding * c.chunk.dtype.itemsize,
            dtype=str(c.chunk.dtype).removeprefix("torch."),
        )
        for c in optimizer.everything
    )


def no_optimizer() -> torch.optim.Optimizer:
    """An optimizer of nothing, for models that are not trained."""
    return torch.optim.SGD([{"params": []}], lr=0.0)


def _check_unstepped(optimizer: torch.optim.Optimizer) -> None:
    if optimizer.state:
        raise GulliverError(
            "the optimizer has stepped before boost: precision converts the model, so boost first"
        )


def _convert(model: nn.Module, optimizer: torch.optim.Optimizer | None, dtype: torch.dtype) -> None:
    """Turns a model and what it is called with to `dtype`.

    Parameters and persistent buffers are turned. As with Hugging Face's ``from_pretrained(dtype=)``
    buffers that are no part of the state dict keep their dtype: tables that modules compute from,
    such as rotary frequencies, which 16 bits would spoil. As with autocast normalizations by
    running statistics stay as they are, because averages of 16 bits stop moving.

    Raises:
        GulliverError: the optimizer has stepped already: its state is of another dtype.
    """
    if optimizer is not None:
        _check_unstepped(optimizer)
    for module in model.modules():
        if isinstance(module, RUNNING) and module.track_running_stats:
            continue
        kept = module._non_persistent_buffers_set
        tensors = [*module._parameters.items(), *module._buffers.items()]
        for name, tensor in tensors:
            if tensor is not None and tensor.is_floating_point() and name not in kept:
                tensor.data = tensor.data.to(dtype)

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if isinstance(value, dict):
            return {key: cast(entry) for key, entry in value.items()}
        if type(value) in (list, tuple):
            return type(value)(cast(entry) for entry in value)
        return value

    model.register_forward_pre_hook(
        lambda _, args, kwargs: (cast(args), cast(kwargs)), prepend=True, with_kwargs=True
    )


class _DDP(DistributedDataParallel):
    """DDP that lets the attributes of its module through, so that a loop need not know of it."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class _DDPOptimizer(BoostedOptimizer):
    """The user's optimizer beside a DDP model."""

    def __init__(self, inner: torch.optim.Optimizer, names: Any, model: nn.Module) -> None:
        super().__init__(inner, names)
        self._model = model

    def no_sync(self):  # type: ignore[override]
        return self._model.no_sync() if isinstance(self._model, _DDP) else super().no_sync()


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _broadcast_any(tensor: torch.Tensor) -> None:
    """Sends rank 0's values, whatever their layout in memory and dtype."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.numel():
        broadcast(flat.view(torch.uint8))  # backends do not know every dtype
        tensor.detach().copy_(flat.view(tensor.shape))


def _whole_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> MemoryPlan:
    trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    state = sum(
        state_tensors(optimizer, group) * sum(p.nbytes for p in group["params"] if p.requires_grad)
        for group in optimizer.param_groups
    )
    everything = sum(p.nbytes for p in model.parameters())
    return MemoryPlan(everything, sum(p.nbytes for p in trained), state)


def _plan(
    plugin: Plugin,
    model: nn.Module,
    names: Any,
    optimizer: torch.optim.Optimizer,
    world: World,
    precision: str,
    stage: int | None,
    memory: MemoryPlan,
    chunks: tuple[ChunkPlan, ...],
) -> Plan:
    return Plan(
        plugin=type(plugin).__name__,
        mesh={"data": world.size},
        device=world.device.type,
        stage=stage,
        mixed_precision=precision,
        optimizer=type(optimizer).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=sum(p.numel() for p in names),
        memory=memory,
        chunks=chunks,
    )
