"""Plugins: strategies that create a plan.

A plugin makes its choices (`Plugin.choices`), `make_plan` resolves them for a model, and
`apply_plan` runs the result; the last two are shared by all plugins.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, DistributedSampler

from gulliver.booster.apply import apply_plan, check_choices
from gulliver.booster.plugin_options import (
    CommunicationOptions,
    Fp8Options,
    LimitOptions,
    LinkOptions,
    PlacementOptions,
    Stage,
    StepOptions,
    ZeroOptions,
    sort_options,
)
from gulliver.comm.collectives import broadcast_object, choose_axes, raise_on_any_rank
from gulliver.comm.world import World, current_world
from gulliver.data.loader import DataLoader
from gulliver.errors import GulliverError
from gulliver.hardware.cluster import Cluster
from gulliver.hardware.costs import zero_collectives
from gulliver.hardware.probe import current_cluster
from gulliver.options import Options, checked
from gulliver.parallel.optimizer import BoostedOptimizer, named_trainables
from gulliver.plan.checks import check_plan
from gulliver.plan.plan import Plan
from gulliver.plan.tree import DDPPlan, Mesh, Precision, Work
from gulliver.planner.model import unwrapped
from gulliver.planner.predict import predict, with_mixed, with_work
from gulliver.planner.resolve import cut_model, differences, resolve
from gulliver.planner.tiers import MemoryTiers, plan_tiers
from gulliver.planner.wires import WireOptions, decide


class Plugin(ABC):
    """A strategy that creates plans."""

    verbose: bool = True
    wires = WireOptions()
    takes: tuple[str, ...] = ()
    """Device types that parameters may be on, in addition to the rank's own."""

    def _sort(self, kinds: Sequence[type[Options]], given: Mapping[str, Any]) -> list[Any]:
        """Sorts options into an instance of each of `kinds`, and stores the number formats."""
        formats = (Fp8Options, CommunicationOptions)
        *groups, fp8, communication = sort_options(type(self), (*kinds, *formats), given)
        self.fp8, self.wires = fp8.plan(), communication.wires()
        return groups

    @abstractmethod
    def choices(self, ranks: int, precision: str = "none") -> Plan:
        """Returns the plan's choices that do not depend on the model.

        Args:
            ranks: number of ranks of the world.
            precision: dtype of autocast, or none.

        Raises:
            GulliverError: the plugin cannot run on that many ranks.
        """

    def for_model(
        self, plan: Plan, model: nn.Module, optimizer: Optimizer | None, cluster: Cluster | None
    ) -> Plan:
        """Adds the choices that depend on the model."""
        return plan

    def make_plan(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        cluster: Cluster | None = None,
        sample: Any = None,
        precision: str = "none",
        work: Work | None = None,
    ) -> Plan:
        """Plans how a model would run; changes nothing.

        One process can plan for any number of ranks. If the planned ranks are running, each of them
        must call it.

        Args:
            model: full model; it may be on meta.
            optimizer: optimizer of its parameters; None without training.
            cluster: hardware to plan for, one device per rank; None for the local machines, as
                measured by ``gulliver probe`` or described.
            sample: batch of one replica, as keyword or positional arguments or a tensor, to measure
                compute, or to estimate it for a model on meta; without it, predicted seconds cover
                only communication.
            precision: dtype of autocast, or none.
            work: cost of a batch, such as from `estimate_work`, instead of a sample.

        Raises:
            GulliverError: the plugin does not support the model or its optimizer.
        """
        ranks = current_world().size if cluster is None else cluster.size
        model, choices = unwrapped(model), self.choices(ranks, precision)
        choices = self.wires.asked(choices)
        choices = choices if work is None else replace(choices, work=work)
        if sample is not None and choices.limited:
            # Under a limit, the choices depend on the memory and time of a batch.
            check_plan(choices, ranks)
            check_choices(choices, model, optimizer)
            choices = with_work(cut_model(choices, model, optimizer), sample)
        choices = self.for_model(choices, model, optimizer, cluster)
        if sample is not None:
            choices = with_mixed(choices, model, sample)
        check_plan(choices, ranks)
        check_choices(choices, model, optimizer)
        resolved = resolve(choices, model, optimizer, cluster)
        if sample is not None and not choices.limited:
            resolved = resolved.with_plan(with_work(resolved, sample))
        plan = predict(decide(resolved, self.wires, cluster), cluster).plan
        # Ranks measure different times, but need the same plan.
        return broadcast_object(plan) if current_world().size == ranks > 1 else plan

    def check(self, model: nn.Module, optimizer: Optimizer | None, precision: str) -> Plan:
        """Returns the choices for a model; rejects unsupported models before anything is changed.

        Raises:
            GulliverError: the plugin does not support the model.
        """
        ranks = current_world().size
        choices = self.wires.asked(self.choices(ranks, precision))
        check_plan(choices, ranks)
        check_choices(choices, model, optimizer)
        return choices

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        world: World,
        choices: Plan,
    ) -> tuple[nn.Module, BoostedOptimizer, Plan]:
        """Plans and runs the choices of `check`; returns the boosted model, optimizer and plan."""
        plain = unwrapped(model)
        # Ranks with different wire formats would have different plans, and wait for each other.
        self.wires.check_equal_on_ranks()
        choices = self.for_model(choices, plain, optimizer, None)
        # Reads measurements of this machine, which may be missing on a single rank.
        resolved = raise_on_any_rank(lambda: resolve(choices, plain, optimizer))
        resolved = decide(resolved, self.wires)
        if choices.work.samples or choices.limited:
            resolved = predict(resolved)
        plan = resolved.plan
        boosted, wrapped = apply_plan(resolved, model, world, self.verbose)
        if self.verbose and world.is_main:
            told = differences(choices, plan)
            if told is not None:
                print(told, file=sys.stderr)
        return boosted, wrapped, plan

    def prepare_dataloader(
        self,
        dataset: Dataset,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        **kwargs: Any,
    ) -> DataLoader:
        """Creates a loader of this rank's share of a dataset; see `gulliver.data.DataLoader`.

        Args:
            dataset: dataset with a length.
            batch_size: samples per rank and step.
            shuffle: whether to reorder each epoch.
            seed: seed of the order, which is the same on all ranks, and of the workers, which
                differs per rank.
            drop_last: drop the remainder instead of repeating samples.
            kwargs: further arguments of the loader. On a GPU, batches are prefetched to it unless
                ``device=None`` is given.

        Raises:
            GulliverError: the loader has no such argument; there are fewer samples than ranks.
        """
        world, (place, size) = current_world(), self.data_place()
        samples = len(dataset)  # type: ignore[arg-type]
        if samples < size:
            raise GulliverError(
                f"the dataset has only {samples} samples, but {size} ranks need one each"
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
        """Index of this rank among the ranks that read different samples, and their number."""
        world = current_world()
        return world.rank, world.size


class TorchDDPPlugin(Plugin):
    """torch's DistributedDataParallel: full state on every rank.

    Args:
        find_unused_parameters: allow parameters without gradients in a backward.
        bucket_cap_mb: size of a gradient bucket in MiB.
        static_graph: promise that the graph never changes.
        verbose: print the plan when the model is boosted.
        options: fields of `Fp8Options` and `CommunicationOptions`.

    Raises:
        GulliverError: an option is unknown or its value out of range.
    """

    def __init__(
        self,
        find_unused_parameters: bool = False,
        bucket_cap_mb: int = 25,
        static_graph: bool = False,
        verbose: bool = True,
        **options: Any,
    ) -> None:
        self._sort((), options)
        self.find_unused_parameters = find_unused_parameters
        self.bucket_cap_mb, self.static_graph, self.verbose = bucket_cap_mb, static_graph, verbose

    def choices(self, ranks: int, precision: str = "none") -> Plan:
        """Plans full state on every rank."""
        return Plan(
            plugin=type(self).__name__,
            mesh=Mesh(current_world().device.type, {"data": ranks}),
            ddp=DDPPlan(self.find_unused_parameters, self.bucket_cap_mb, self.static_graph),
            precision=Precision(precision, fp8=self.fp8),
        )


class LowLevelZeroPlugin(Plugin):
    """ZeRO: higher stages shard more state over the ranks.

    Args:
        stage: 0 shards nothing, 1 the optimizer state, 2 gradients too, 3 parameters too.
        chunk_mb: chunk size in MiB, ``auto`` or ``again``; see `ZeroOptions`.
        precision: ``bf16`` or ``fp16``; see `ZeroOptions`.
        max_norm: clip gradients to this global norm at every step; 0 disables clipping.
        memory_limit: memory of each rank under stage 3; see `LimitOptions`.
        disk: folder and bytes for state that does not fit; see `LimitOptions`.
        activations: treatment of activations under a limit; see `StepOptions`.
        step_in_backward: step each chunk inside `Booster.backward`; see `StepOptions`.
        weights: checkpoint that fills the model at stage 3, as for `GeminiPlugin`.
        verbose: print the plan when the model is boosted, and the results of tuning.
        options: fields of `ZeroOptions`, `LimitOptions`, `StepOptions`, `LinkOptions`,
            `Fp8Options` and `CommunicationOptions`.

    Raises:
        GulliverError: an option is unknown, its value out of range, or options exclude each other.
    """

    def __init__(
        self,
        stage: int = 1,
        chunk_mb: float | str = "auto",
        precision: str | None = None,
        max_norm: float = 0.0,
        *,
        memory_limit: int | float | str | None = None,
        disk: Path | str | None = None,
        activations: str = "keep",
        step_in_backward: bool = False,
        weights: Path | str | None = None,
        verbose: bool = True,
        **options: Any,
    ) -> None:
        self.stage: int = checked(stage, Stage, f"{type(self).__name__}.stage")
        kinds = (ZeroOptions, LimitOptions, StepOptions, LinkOptions)
        given = {
            "chunk_mb": chunk_mb,
            "precision": precision,
            "max_norm": max_norm,
            "memory_limit": memory_limit,
            "disk": disk,
            "activations": activations,
            "step_in_backward": step_in_backward,
        }
        self.zero, limits, self.steps, self.links = self._sort(kinds, given | options)
        self.precision, self.max_norm = self.zero.precision, self.zero.max_norm
        self.step_in_backward = self.steps.step_in_backward
        self.broadcast_buffers = self.steps.broadcast_buffers
        self.weights, self.verbose = weights, verbose
        if weights is not None and stage != 3:
            raise GulliverError(
                f"weights= needs the parameter shards of stage 3, but stage={stage}; use stage=3, "
                "or load the model before boost"
            )
        self.takes = ("meta",) if stage == 3 else ()
        self.memory = limits.tiers(
            stage,
            "LowLevelZeroPlugin(stage=3)",
            step_in_backward=self.step_in_backward,
            activations=self.steps.activations,
        )
        if self.memory is None and self.steps.activations != "keep":
            raise GulliverError(f"activations={activations!r} needs a memory_limit")
        if self.memory is not None:
            self.zero.refuse_tuning()

    def choices(self, ranks: int, precision: str = "none") -> Plan:
        """Plans sharding over all ranks."""
        links, memory, chunk_mb = self.links, self.memory, self.zero.chunk_mb
        torus = {} if isinstance(links.axes, str) else dict(links.axes or {})
        order = tuple(links.rank_order or ()) if torus else ()
        device = current_world().device.type
        tuned = isinstance(chunk_mb, str) and memory is None
        return Plan(
            plugin=type(self).__name__,
            mesh=Mesh(device, {"data": ranks}, torus, order),
            zero=self.zero.plan(
                self.stage,
                tuning=str(chunk_mb) if tuned else "off",
                overlap=links.overlap,
                broadcast_buffers=self.broadcast_buffers,
                step_in_backward=self.step_in_backward and memory is None,
                report=None if links.folder is None else str(links.folder),
                tiers=None if memory is None else memory.tiers(device),
            ),
            precision=Precision(precision, self.precision or "none", fp8=self.fp8),
            max_norm=self.max_norm,
            weights=None if self.weights is None else str(self.weights),
        )

    def for_model(
        self, plan: Plan, model: nn.Module, optimizer: Optimizer | None, cluster: Cluster | None
    ) -> Plan:
        """Chooses the torus if ``axes="auto"`` and, under a memory limit, the chunks."""
        links = cluster or self.links.cluster
        if self.memory is not None:
            chosen = isinstance(self.zero.chunk_mb, str)
            plan = plan_tiers(plan, model, optimizer, links, chosen)
        if self.links.axes != "auto":
            return plan
        names = {} if optimizer is None else named_trainables(model, optimizer)
        whole, chunk = max(1, sum(p.nbytes for p in names)), self.zero.chunk_bytes
        chunks = [min(chunk, whole - start) for start in range(0, whole, chunk)]
        ranks = plan.mesh.size
        sent = zero_collectives(self.stage, chunks)
        found = choose_axes(links or current_cluster(ranks), sent, ranks)
        order = tuple(self.links.rank_order or found.order or ()) if found.axes else ()
        mesh = replace(plan.mesh, torus=dict(found.axes), rank_order=order)
        return replace(plan, mesh=mesh, reasons={**plan.reasons, "mesh.torus": str(found)})


# The plugin for models larger than memory: a memory limit, and a plan that keeps to it.


class GeminiPlugin(Plugin):
    """ZeRO stage 3 under a memory limit, with offloading to the host or a disk.

    Results equal those of a run without a limit. Parameters, gradients and optimizer state are
    prefetched chunk by chunk; the chunks that stay on the device are planned from the order in
    which a step uses them. A limit that is too small raises before the first step; the error names
    the smallest one that works.

    Args:
        memory_limit: memory of each rank in bytes or as text, ``6GiB`` or ``70%``, excluding the
            interpreter and torch; see `LimitOptions`.
        host_limit: page-locked host memory per GPU; None for none.
        disk: folder and bytes to use there, ``/scratch:100GiB``; None for none. With `host_limit`
            it holds state that exceeds the host's limit.
        precision: ``bf16`` or ``fp16``; see `ZeroOptions`.
        max_norm: clip gradients to this global norm at every step; 0 disables clipping.
        step_in_backward: step each chunk inside `Booster.backward`, so that gradients take no
            memory; see `StepOptions`.
        activations: ``keep``, ``recompute``, ``offload`` or ``auto``; see `StepOptions`.
        weights: folder of a Hugging Face checkpoint, or a safetensors file, that fills the model
            when it is boosted. A model on meta is filled chunk by chunk, so it may be larger than
            memory; without `weights`, its modules' ``reset_parameters`` initialize it.
        verbose: print the plan when the model is boosted.
        options: fields of `ZeroOptions`, `PlacementOptions`, `StepOptions`, `Fp8Options` and
            `CommunicationOptions`.

    Raises:
        GulliverError: an option is unknown or its value out of range.
    """

    takes = ("meta",)

    def __init__(
        self,
        memory_limit: int | float | str,
        host_limit: int | float | str | None = None,
        disk: Path | str | None = None,
        *,
        precision: str | None = None,
        max_norm: float = 0.0,
        step_in_backward: bool = False,
        activations: str = "keep",
        weights: Path | str | None = None,
        verbose: bool = True,
        **options: Any,
    ) -> None:
        given = {
            "memory_limit": memory_limit,
            "host_limit": host_limit,
            "disk": disk,
            "precision": precision,
            "max_norm": max_norm,
            "step_in_backward": step_in_backward,
            "activations": activations,
        }
        kinds = (ZeroOptions, LimitOptions, StepOptions, PlacementOptions)
        self.zero, limits, steps, placement = self._sort(kinds, given | options)
        # Chunk sizes are planned: steps of the tuner could exceed the limit.
        self.zero.refuse_tuning()
        self.memory = MemoryTiers(
            **asdict(limits),
            step_in_backward=steps.step_in_backward,
            activations=steps.activations,
            **asdict(placement),
        )
        self.precision, self.max_norm = self.zero.precision, self.zero.max_norm
        self.step_in_backward = steps.step_in_backward
        self.broadcast_buffers = steps.broadcast_buffers
        self.weights, self.verbose = weights, verbose

    def choices(self, ranks: int, precision: str = "none") -> Plan:
        """Plans sharding over all ranks, under the memory limit."""
        device = current_world().device.type
        return Plan(
            plugin=type(self).__name__,
            mesh=Mesh(device, {"data": ranks}),
            zero=self.zero.plan(
                stage=3,
                broadcast_buffers=self.broadcast_buffers,
                tiers=self.memory.tiers(device),
            ),
            precision=Precision(precision, self.precision or "none", fp8=self.fp8),
            max_norm=self.max_norm,
            weights=None if self.weights is None else str(self.weights),
        )

    def for_model(
        self, plan: Plan, model: nn.Module, optimizer: Optimizer | None, cluster: Cluster | None
    ) -> Plan:
        """Chooses the chunk size, if not given, and the recomputed blocks."""
        return plan_tiers(plan, model, optimizer, cluster, self.zero.chunk_mb == "auto")


# The plugin that runs a given plan.


class PlanPlugin(Plugin):
    """Runs a given plan.

    Args:
        plan: plan that was loaded, edited, or created by a plugin.
        verbose: print the plan when the model is boosted.
    """

    def __init__(self, plan: Plan, verbose: bool = True) -> None:
        self.plan, self.verbose = plan, verbose
        self.takes = ("meta",) if plan.stage == 3 or plan.weights is not None else ()

    def choices(self, ranks: int, precision: str = "none") -> Plan:
        # The plan may have been edited, or made for other machines.
        check_plan(self.plan, ranks)
        device = current_world().device.type
        if self.plan.mesh.device != device:
            raise GulliverError(
                f"{self.plan.describe_field('mesh.device')}, but ranks run on {device}"
            )
        if precision not in ("none", self.plan.precision.autocast):
            raise GulliverError(
                f"{self.plan.describe_field('precision.autocast')}, and "
                f"Booster(mixed_precision={precision!r}): set it only in the plan"
            )
        return self.plan

    def for_model(
        self, plan: Plan, model: nn.Module, optimizer: Optimizer | None, cluster: Cluster | None
    ) -> Plan:
        """Chooses the treatment of activations under a limit, if the plan leaves it open."""
        return plan_tiers(plan, model, optimizer, cluster, chosen=False) if plan.limited else plan

    def data_place(self) -> tuple[int, int]:
        """Index of this rank among the ranks that read different samples, and their number."""
        mesh, rank = self.plan.mesh, current_world().rank
        if self.plan.operators is not None:  # all ranks read one batch, and shard its operators
            return 0, 1
        return rank // (mesh.of("sequence") * mesh.of("tensor")) % mesh.of("data"), mesh.of("data")
