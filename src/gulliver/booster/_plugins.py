"""Plugins: short, hand-written ways to make a plan.

Each says its choices (`Plugin.choices`); what follows from them for a model is `make_plan`, and
running it is `apply_plan`, for all of them alike.
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, DistributedSampler

from gulliver.booster._apply import apply_plan, check_choices
from gulliver.booster._checkpoint import agreed
from gulliver.booster._fp8 import fp8_plan
from gulliver.booster._model import HALVES, unwrapped
from gulliver.booster._predict import predict, with_mixed, with_work
from gulliver.booster._resolve import cut_model, differences, resolve
from gulliver.booster._tiers import TierOptions, plan_tiers
from gulliver.booster._wires import WireOptions, decide
from gulliver.comm import World, broadcast_object, choose_axes, current_world
from gulliver.data import DataLoader
from gulliver.errors import GulliverError, nearest
from gulliver.hardware import Cluster, current_cluster, zero_collectives
from gulliver.parallel import BoostedOptimizer, named_trainables
from gulliver.plan import DDPPlan, Fp8Plan, Mesh, Plan, Precision, Work, ZeroPlan, check_plan

MIB = 2**20
STAGES = (0, 1, 2, 3)
TUNED = ("auto", "again")
DEFAULT_CHUNK_MB = 4.0
"""Before tuning, and without other ranks."""


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
    """A way to make plans."""

    verbose: bool = True
    wires = WireOptions()
    takes: tuple[str, ...] = ()
    """Kinds of devices that parameters may be on besides the rank's own."""

    @abstractmethod
    def choices(self, ranks: int, precision: str = "none") -> Plan:
        """The choices of a plan, whatever the model is.

        Args:
            ranks: number of ranks of the world.
            precision: dtype of autocast, or none.

        Raises:
            GulliverError: it cannot be run by so many ranks.
        """

    def for_model(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        cluster: Cluster | None,
    ) -> Plan:
        """The choices that are made by looking at a model; a plugin may have some."""
        return plan

    def make_plan(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        cluster: Cluster | None = None,
        sample: Any = None,
        precision: str = "none",
        work: Work | None = None,
    ) -> Plan:
        """Plans how a model would run; nothing is changed.

        One process can plan for any number of ranks. Where the ranks that the plan is of are up,
        each of them calls it.

        Args:
            model: whole model, perhaps on meta.
            optimizer: optimizer of its parameters; None where it is not trained.
            cluster: machines to plan for, one device of it for each rank; None for those at hand,
                as they were measured by ``gulliver probe`` or are described.
            sample: batch of one model, as keyword or positional arguments or a tensor, with which
                compute is measured here, or of a model on meta estimated; without it seconds are
                those of messages alone.
            precision: dtype of autocast, or none.
            work: what a batch costs, such as `estimate_work` says, instead of a sample.

        Raises:
            GulliverError: the model or its optimizer cannot be run so.
        """
        ranks = current_world().size if cluster is None else cluster.size
        model, choices = unwrapped(model), self.choices(ranks, precision)
        choices = self.wires.asked(choices)
        choices = choices if work is None else replace(choices, work=work)
        if sample is not None and choices.limited:
            # What is chosen under a limit depends on what a batch takes.
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
        # Ranks measure different times, and have one plan.
        return broadcast_object(plan) if current_world().size == ranks > 1 else plan

    def check(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, precision: str
    ) -> Plan:
        """The choices for a model; refuses what this plugin cannot run, with nothing changed.

        Raises:
            GulliverError: the plugin cannot run it; what is wrong is named.
        """
        ranks = current_world().size
        choices = self.wires.asked(self.choices(ranks, precision))
        check_plan(choices, ranks)
        check_choices(choices, model, optimizer)
        return choices

    def configure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        world: World,
        choices: Plan,
    ) -> tuple[nn.Module, BoostedOptimizer, Plan]:
        """Plans and runs what `check` returned: the running model and optimizer, and the plan."""
        plain = unwrapped(model)
        self.wires.agree()
        choices = self.for_model(choices, plain, optimizer, None)
        resolved = agreed(lambda: resolve(choices, plain, optimizer))
        resolved = decide(resolved, self.wires)
        if choices.work.samples or choices.limited:
            resolved = predict(resolved)
        plan = resolved.plan
        boosted, wrapped = apply_plan(resolved, model, world, self.verbose)
        if self.verbose and world.is_main:
            for told in (differences(choices, plan), _unknown_label(choices)):
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
        """A loader that gives this rank its share of a data set; see `gulliver.data.DataLoader`.

        Args:
            dataset: data set with a length.
            batch_size: samples per rank and step.
            shuffle: whether each epoch has another order.
            seed: seed of the order, the same on all ranks, and of what workers draw, another on
                each.
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


def _unknown_label(plan: Plan) -> str | None:
    """What to tell of a plan that no plugin here has made: the name chooses nothing."""
    kinds = [Plugin]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # "operators" is what `find_operators` writes, which is no plugin.
    if plan.plugin in ("", "operators", *(kind.__name__ for kind in kinds)):
        return None
    label = plan.describe_field("plugin")
    return f"plan: {label} is no plugin here: it is a label, the other values run"


class TorchDDPPlugin(Plugin):
    """torch's DistributedDataParallel: everything on every rank.

    Args:
        find_unused_parameters: allow parameters without gradients in a backward.
        bucket_cap_mb: size of a gradient bucket in MiB.
        static_graph: promise that the graph never changes.
        verbose: print the plan when the model is boosted.
        use_fp8: linear layers compute in FP8, where that is predicted to pay: True, a scaling
            (``tensorwise``, ``rowwise``, ``delayed``), or a `gulliver.plan.Fp8Plan`.
        fp8_emulation: compute the numerics of FP8 without units for it: slower, for experiments.
        communication_dtype: format of what travels between ranks, as of `LowLevelZeroPlugin`, or of
            some kinds of it: ``reduce``.
        force_communication_dtype: the same as in `LowLevelZeroPlugin`, as are the next two.
        error_feedback: add what packing loses of a gradient to the next one.
        wire_gate: compare gradients with unpacked ones now and then.
    """

    def __init__(
        self,
        find_unused_parameters: bool = False,
        bucket_cap_mb: int = 25,
        static_graph: bool = False,
        verbose: bool = True,
        use_fp8: bool | str | Fp8Plan = False,
        fp8_emulation: bool = False,
        communication_dtype: str | Mapping[str, str] | None = None,
        force_communication_dtype: bool = False,
        error_feedback: bool = False,
        wire_gate: bool = True,
    ) -> None:
        self.fp8 = fp8_plan(use_fp8, fp8_emulation)
        self.wires = WireOptions.of(
            communication_dtype, force_communication_dtype, error_feedback, wire_gate
        )
        self.find_unused_parameters = find_unused_parameters
        self.bucket_cap_mb, self.static_graph, self.verbose = bucket_cap_mb, static_graph, verbose

    def choices(self, ranks: int, precision: str = "none") -> Plan:
        """Everything whole on every rank."""
        return Plan(
            plugin=type(self).__name__,
            mesh=Mesh(current_world().device.type, {"data": ranks}),
            ddp=DDPPlan(self.find_unused_parameters, self.bucket_cap_mb, self.static_graph),
            precision=Precision(precision, fp8=self.fp8),
        )


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
            ``auto`` takes the faster of the two, and the best axes, as `cluster` predicts them.
        rank_order: ranks as they fill the axes, the innermost first, where they are not numbered
            so.
        cluster: links of the ranks for ``axes="auto"``; None is what ``gulliver probe`` measured
            here, or else a description of such machines.
        assume_elementwise: shard an optimizer that is not known, on the user's word that its update
            of an element looks at that element only. Stage 0 needs no word: it steps whole
            parameters, those of an optimizer that is not known in one call.
        assume_per_parameter: shard such an optimizer by whole parameters, on the user's word that
            its update of a parameter looks at that parameter only: its values, gradient and state.
        broadcast_buffers: whether every step gives all ranks rank 0's values of the buffers,
            such as running statistics, as torch's DDP does.
        folder: where tuning writes ``chunks.json`` and a picture, ``chunks.png``; None for neither.
        verbose: print the plan when the model is boosted, and what tuning found.
        memory_limit: memory for state and activations on each rank, under stage 3, as
            `GeminiPlugin` takes it; None for no limit.
        disk: folder and bytes for what does not fit, as of `GeminiPlugin`.
        activations: fate of what forward keeps, under a limit: ``keep``, ``recompute``,
            ``offload`` or ``auto``, as `GeminiPlugin` takes it.
        step_in_backward: step each chunk inside `Booster.backward`, as soon as its gradient is
            complete: less memory for gradients, and at stages 1 and 2 gathers begin earlier. With
            `max_norm` and with ``fp16`` all gradients are waited for. Clipping by the loop comes
            too late for it and is refused, and `zero_grad` has to follow each step.
        weights: checkpoint that stage 3 fills the model from, as of `GeminiPlugin`.
        use_fp8: the same as in `TorchDDPPlugin`.
        fp8_emulation: the same as in `TorchDDPPlugin`.
        communication_dtype: format of what travels between ranks: ``bf16``, ``fp8``, ``int8`` and
            others, for all of it, or by kind, such as ``{"reduce": "fp8"}``; None for none. Where
            the plan predicts that packing costs more than it spares it stays off.
        force_communication_dtype: pack nevertheless.
        error_feedback: add what packing loses of a gradient to the next one; see docs/wire.md.
        wire_gate: compare gradients with unpacked ones now and then; stop if they are far off.

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
        axes: Mapping[str, int] | str | None = None,
        rank_order: Sequence[int] | None = None,
        assume_elementwise: bool = False,
        folder: Path | str | None = None,
        verbose: bool = True,
        broadcast_buffers: bool = True,
        cluster: Cluster | None = None,
        memory_limit: int | float | str | None = None,
        disk: Path | str | None = None,
        assume_per_parameter: bool = False,
        step_in_backward: bool = False,
        activations: str = "keep",
        weights: Path | str | None = None,
        use_fp8: bool | str | Fp8Plan = False,
        fp8_emulation: bool = False,
        communication_dtype: str | Mapping[str, str] | None = None,
        force_communication_dtype: bool = False,
        error_feedback: bool = False,
        wire_gate: bool = True,
    ) -> None:
        self.fp8 = fp8_plan(use_fp8, fp8_emulation)
        self.wires = WireOptions.of(
            communication_dtype, force_communication_dtype, error_feedback, wire_gate
        )
        if isinstance(axes, str) and axes != "auto":
            raise GulliverError(f"axes={axes!r} is not known: 'auto', or the size of each axis")
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
        self.assume_per_parameter = assume_per_parameter
        self.broadcast_buffers, self.cluster = broadcast_buffers, cluster
        self.step_in_backward = step_in_backward
        if weights is not None and stage != 3:
            raise GulliverError(
                f"weights= fills the shards of stage=3, not of stage={stage}: load the model "
                "before it is boosted"
            )
        self.weights = None if weights is None else str(weights)
        self.takes = ("meta",) if stage == 3 else ()
        self.memory = TierOptions.within(
            stage,
            "LowLevelZeroPlugin(stage=3)",
            memory_limit,
            disk,
            step_in_backward=step_in_backward,
            activations=activations,
        )
        if self.memory is None and activations != "keep":
            raise GulliverError(f"activations={activations!r} needs a memory_limit to keep to")
        if self.memory is not None and chunk_mb == "again":
            raise GulliverError(
                "chunk_mb='again' tunes in the first steps: with a memory_limit 'auto' plans the "
                "size, or give a number"
            )

    def choices(self, ranks: int, precision: str = "none") -> Plan:
        """Shards over all ranks."""
        torus = {} if isinstance(self.axes, str) else dict(self.axes or {})
        order = tuple(self.rank_order or ()) if torus else ()
        device = current_world().device.type
        tuned = isinstance(self.chunk_mb, str) and self.memory is None
        return Plan(
            plugin=type(self).__name__,
            mesh=Mesh(device, {"data": ranks}, torus, order),
            zero=ZeroPlan(
                stage=self.stage,
                chunk_bytes=int(self._size_mb * MIB),
                tuning=str(self.chunk_mb) if tuned else "off",
                gather_ahead=self.gather_ahead,
                overlap=self.overlap,
                broadcast_buffers=self.broadcast_buffers,
                assume_elementwise=self.assume_elementwise,
                assume_per_parameter=self.assume_per_parameter,
                step_in_backward=self.step_in_backward and self.memory is None,
                report=None if self.folder is None else str(self.folder),
                tiers=None if self.memory is None else self.memory.tiers(device),
            ),
            precision=Precision(precision, self.precision or "none", fp8=self.fp8),
            max_norm=float(self.max_norm),
            weights=self.weights,
        )

    def for_model(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        cluster: Cluster | None,
    ) -> Plan:
        """A torus, where ``axes="auto"`` predicts that it is faster; chunks under a limit."""
        if self.memory is not None:
            links = cluster or self.cluster
            plan = plan_tiers(plan, model, optimizer, links, isinstance(self.chunk_mb, str))
        if not isinstance(self.axes, str):
            return plan
        names = {} if optimizer is None else named_trainables(model, optimizer)
        whole, chunk = max(1, sum(p.nbytes for p in names)), int(self._size_mb * MIB)
        chunks = [min(chunk, whole - start) for start in range(0, whole, chunk)]
        ranks = plan.mesh.size
        links = cluster or self.cluster or current_cluster(ranks)
        chosen = choose_axes(links, zero_collectives(self.stage, chunks), ranks)
        order = tuple(self.rank_order or chosen.order or ()) if chosen.axes else ()
        mesh = replace(plan.mesh, torus=dict(chosen.axes), rank_order=order)
        return replace(plan, mesh=mesh, reasons={**plan.reasons, "mesh.torus": str(chosen)})
