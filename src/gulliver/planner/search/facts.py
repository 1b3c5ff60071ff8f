"""Enumerates the grids of a search: every combination of axes and options that a plugin can run.

No heuristic drops a grid: the search skips only grids that, by a lower bound, cannot be better.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gulliver.errors import GulliverError
from gulliver.hardware.cluster import Device
from gulliver.hardware.step import update_seconds
from gulliver.parallel.pipeline.schedules import STYLES, check_counts
from gulliver.parallel.pipeline.stack import cut, stack_of
from gulliver.parallel.pipeline.stage import names_held
from gulliver.parallel.tensor.plan import plan_tensor
from gulliver.parallel.tensor.styles import TensorPlan
from gulliver.parallel.zero.elementwise import state_sizes
from gulliver.plan.analysis.records import BACKWARD, FORWARD, Analysis, Operator
from gulliver.plan.analysis.step import analyse
from gulliver.plan.tree import SHARED_BY_SEQUENCE
from gulliver.planner.measure import ADDED_UP, entries_of, shared_paths
from gulliver.planner.model import HALVES, cast_floats, convert, modules_kept, recomputable_blocks
from gulliver.planner.ranks import cut_numel

STAGES = (0, 1, 2, 3)
CHUNKS_MB = (4, 2, 1, 8, 16, 32)  # chunk sizes to try for ZeRO; the first is the default


@dataclass(frozen=True, order=True)
class Axes:
    """Sizes of the axes of a mesh, and the sequence mode."""

    # Number of replicas that read different samples.
    data: int = 1
    # Number of ranks that share the sequences of a replica.
    sequence: int = 1
    # Number of ranks that share the matrices of a replica.
    tensor: int = 1
    # Number of pipeline ranks.
    pipeline: int = 1
    # Sequence mode, as `HybridParallelPlugin` names it; empty for none.
    mode: str = ""

    @property
    def size(self) -> int:
        return self.data * self.sequence * self.tensor * self.pipeline

    @property
    def cuts_model(self) -> bool:
        return self.size > self.data


@dataclass(frozen=True, order=True)
class Grid:
    """Mesh axes and options of a parallel run."""

    axes: Axes
    # Stage of ZeRO over data and sequence ranks.
    stage: int = 0
    # Micro-batches of a replica's batch, for a pipeline or for gradient accumulation.
    micro_batches: int = 1
    # Pipeline schedule; empty without a pipeline.
    schedule: str = ""
    # Stages on each rank of a pipeline.
    chunks: int = 1
    # Number of blocks that backward recomputes.
    recomputed: int = 0
    # Size of a ZeRO chunk in MiB; 0 chooses the best.
    chunk_mb: int = 0
    # Tier that state is offloaded to, such as ``host``; empty keeps all on the device.
    offload: str = ""

    def __str__(self) -> str:
        names = (("data", "dp"), ("sequence", "sp"), ("tensor", "tp"), ("pipeline", "pp"))
        sizes = [f"{short} {getattr(self.axes, name)}" for name, short in names]
        found = [text for text in sizes if not text.endswith(" 1")] or ["1 rank"]
        found += [self.axes.mode] if self.axes.mode else []
        found += [f"ZeRO {self.stage}"] if self.axes.data * self.axes.sequence > 1 else []
        if self.micro_batches > 1:
            found.append(f"{self.micro_batches} micro-batches")
        found += [self.schedule] if self.schedule else []
        blocks = "1 block" if self.recomputed == 1 else f"{self.recomputed} blocks"
        found += [f"{blocks} recomputed"] if self.recomputed else []
        found += [f"off-load to {self.offload}"] if self.offload else []
        return ", ".join(found)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def axes_of(ranks: int, batch: int, blocks: int, modes: Sequence[str]) -> Iterator[Axes]:
    """Yields every mesh whose axes divide the batch and the blocks."""
    apart = [mode for mode in modes if mode in SHARED_BY_SEQUENCE]
    for pipeline in divisors(ranks):
        if pipeline > max(1, blocks):
            continue
        for tensor in divisors(ranks // pipeline):
            for sequence in divisors(ranks // pipeline // tensor):
                data = ranks // pipeline // tensor // sequence
                if batch % data:
                    continue
                if sequence > 1:
                    for mode in apart:
                        yield Axes(data, sequence, tensor, pipeline, mode)
                    continue
                yield Axes(data, sequence, tensor, pipeline)
                if tensor > 1 and "split_gather" in modes:
                    yield Axes(data, sequence, tensor, pipeline, "split_gather")


FORWARD_ONLY = ("gpipe", "interleaved")  # schedules that differ in a forward-only pipeline


def grids_of(axes: Axes, batch: int, blocks: int, trains: bool = True) -> Iterator[Grid]:
    """Yields every grid on a mesh; none of them recomputes blocks."""
    stages = STAGES if axes.data * axes.sequence > 1 else (0,)
    for micro in divisors(batch // axes.data):
        if axes.pipeline == 1:
            yield from (Grid(axes, stage, micro) for stage in stages)
            continue
        for name, style in STYLES.items():
            cuts = style.chunks * axes.pipeline
            if not trains and name not in FORWARD_ONLY:
                continue
            if cuts > blocks or not _ordered(name, cuts, axes.pipeline, micro):
                continue
            yield from (Grid(axes, stage, micro, name, style.chunks) for stage in stages)


@cache
def _ordered(schedule: str, stages: int, ranks: int, micro_batches: int) -> bool:
    try:
        check_counts(schedule, stages, ranks, micro_batches)
    except GulliverError:
        return False
    return True


# Costs of a model's blocks for one sample, and the fractions that tensor ranks divide.
#
# The numbers are sums over the operators of an analysis, so a model of a hundred blocks is
# evaluated as fast as one of three.


@dataclass(frozen=True)
class ModelPart:
    """Cost of a block, or of the part outside blocks, for one sample on one device."""

    # Forward seconds, without launch overhead.
    forward_s: float = 0.0
    # Backward seconds, without launch overhead.
    backward_s: float = 0.0
    # Bytes saved for backward.
    saved: int = 0
    # Bytes of the output.
    output: int = 0
    # Peak bytes of forward or backward, in addition to saved bytes and those live before.
    working: int = 0
    # Number of parameter elements.
    parameters: int = 0
    # Number of operators in forward and in backward.
    operators: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class TensorShares:
    """Shares of a model that each rank of a tensor axis computes and stores."""

    # Number of ranks.
    size: int
    # Fraction of the forward seconds that is divided over the ranks.
    seconds: float = 0.0
    # Fraction of the blocks' saved bytes that is divided over the ranks.
    saved: float = 0.0
    # Fraction of the parameters that is divided over the ranks.
    parameters: float = 0.0
    # Bytes per sample of each output that is summed over ranks in forward.
    forward: tuple[int, ...] = ()
    # Bytes per sample of each gradient that is summed over ranks in backward.
    backward: tuple[int, ...] = ()
    # Bytes per sample of each output that recomputed blocks sum again.
    again: tuple[int, ...] = ()
    # Fraction of the bytes saved by head and loss that is divided over the ranks.
    outside: float = 0.0
    # Numbers of elements of a rank's parameters, by block in order.
    sizes: tuple[tuple[int, ...], ...] = ()
    # The same before all blocks, after them, and after them without parameters tied to the former.
    ends: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] = ((), (), ())


@dataclass
class Facts:
    """Costs of a model and a batch, from which grids are priced."""

    # Full model, possibly on the meta device.
    model: nn.Module
    # Analysis of a step on the batch.
    analysis: Analysis
    # Number of samples in the batch.
    samples: int
    # Tokens per sample; 0 if there are none.
    tokens: int
    # Device of each rank.
    device: Device
    # Elements of optimizer state per trained element.
    states: int
    # Bytes of a parameter element in forward and backward.
    item: int
    # Whether the optimizer updates float32 master weights.
    copied: bool
    # Number of trained elements.
    trained: int
    # Size of every chunk of ZeRO; 0 leaves it to the grid.
    chunk_bytes: int = 0
    # Bytes per sample of the key-value cache of all blocks, for generation.
    cached: int = 0
    # Number of key-value heads, over which tensor ranks can shard the cache.
    cached_heads: int = 1
    # Optimizer of the parameters; None if none are trained.
    optimizer: torch.optim.Optimizer | None = None
    refused: dict[int, str] = field(default_factory=dict)
    _shared: dict[int, TensorShares | None] = field(default_factory=dict)

    def on(self, device: Device) -> Facts:
        return replace(self, device=device, refused={}, _shared={})

    @cached_property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Paths of the blocks that can be split over a pipeline, or recomputed."""
        try:
            return tuple(stack_of(self.model, None).blocks)
        except GulliverError:
            return tuple(path for path in recomputable_blocks(self.model) if path)

    @cached_property
    def has_stack(self) -> bool:
        """Whether most of the model is a chain of blocks, which a pipeline can split."""
        try:
            blocks = stack_of(self.model, None).blocks
        except GulliverError:
            return False
        inside = sum(part.parameters for part in self.parts)
        return bool(blocks) and inside >= self.parameters / 2

    @cached_property
    def recomputable(self) -> frozenset[str]:
        return frozenset(self.blocks) & frozenset(recomputable_blocks(self.model))

    @cached_property
    def parts(self) -> tuple[ModelPart, ...]:
        """Costs of the blocks in order; identical blocks are analyzed once."""
        known: dict[str, ModelPart] = {}
        found = []
        for path in self.blocks:
            stands = self.analysis.followed(path)
            if stands not in known:
                known[stands] = self._part(path)
            found.append(known[stands])
        return tuple(found)

    @cached_property
    def outside(self) -> ModelPart:
        """Cost of the part outside blocks: embeddings, head and loss."""
        whole, n = self.analysis, self.samples

        def rest(of_all: float, name: str) -> float:
            return max(0.0, of_all - sum(getattr(part, name) for part in self.parts))

        launched = (sum(o.count for o in self._of(p) if not o.view) for p in (FORWARD, BACKWARD))
        forward, backward = launched
        return ModelPart(
            rest(self._each(whole.seconds(self.device, FORWARD), forward), "forward_s"),
            rest(self._each(whole.seconds(self.device, BACKWARD), backward), "backward_s"),
            int(rest(whole.saved.activations / n, "saved")),
            0,
            int(max(0, self._peak_behind() - whole.saved.activations - whole.inputs) / n),
            int(rest(self.parameters, "parameters")),
            tuple(
                max(0, count - sum(part.operators[n] for part in self.parts))
                for n, count in enumerate((forward, backward))
            ),  # type: ignore[arg-type]
        )

    def _each(self, seconds: float, operators: int) -> float:
        """Converts seconds of the analyzed batch to seconds per sample, without launch overhead."""
        return max(0.0, seconds - self.device.launch_s * operators) / self.samples

    @cached_property
    def ends(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of parameters outside blocks on the first and on the last pipeline rank."""
        # Modules that every rank keeps are in both; without a pipeline, the first has all
        # parameters.
        inside = {f"{path}." for path in self.blocks}

        def rest(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(n for n in names if not any(n.startswith(path) for path in inside))

        if not self.has_stack or len(self.blocks) < 2:
            return rest(name for name, _ in self.model.named_parameters()), ()
        stack = stack_of(self.model, None)
        first = len(self.blocks) // 2
        halves = cut(self.model, stack, 2, at=(first, len(self.blocks) - first))
        before, after = (
            rest(names_held(self.model, stack, halves, ((0,), (1,)), place)) for place in (0, 1)
        )
        return before, after

    def _peak_behind(self) -> int:
        operators = self.analysis.operators
        own = _within(self.analysis, self.blocks)
        inside = [number for number, operator in enumerate(operators) if own(operator)]
        last = max((n for n in inside if operators[n].phase == FORWARD), default=-1)
        first = min((n for n in inside if operators[n].phase != FORWARD), default=len(operators))
        return max((o.live for o in operators[last + 1 : first]), default=0)

    def _part(self, path: str) -> ModelPart:
        analysis, n = self.analysis, self.samples
        costs = analysis.module(path)
        elements = sum(p.numel() for p in self.model.get_submodule(path).parameters())
        # The gradient of its output is allocated by the next block.
        working = max(costs.forward_peak - costs.saved, costs.backward_peak + costs.handed)
        if not analysis.saved.activations:
            working += self._before(path)
        forward, backward = costs.forward.operators, costs.backward.operators
        return ModelPart(
            self._each(analysis.seconds(self.device, FORWARD, path), forward),
            self._each(analysis.seconds(self.device, BACKWARD, path), backward),
            costs.saved // n,
            costs.handed // n,
            max(0, working) // n,
            elements,
            (forward, backward),
        )

    def _before(self, path: str) -> int:
        """Bytes that are live when a block starts but are not saved, such as its inputs."""
        own = _within(self.analysis, [path])
        first = next(operator for operator in self.analysis.operators if own(operator))
        return max(0, first.live - first.written - self.analysis.inputs)

    @cached_property
    def forward_s(self) -> float:
        """Forward seconds of one sample on one device, without launch overhead."""
        return self.outside.forward_s + sum(part.forward_s for part in self.parts)

    @cached_property
    def backward_s(self) -> float:
        """Backward seconds of one sample on one device, without launch overhead."""
        return self.outside.backward_s + sum(part.backward_s for part in self.parts)

    @cached_property
    def launches(self) -> tuple[float, float]:
        """Launch overhead of the forward and the backward pass, in seconds."""
        parts = (*self.parts, self.outside)
        forward, backward = (sum(part.operators[n] for part in parts) for n in (0, 1))
        return self.device.launch_s * forward, self.device.launch_s * backward

    @cached_property
    def weights_s(self) -> float:
        return sum(part.parameters for part in self.parts) * self.item / self.device.memory_rate

    @cached_property
    def attention(self) -> tuple[float, float]:
        found = []
        for phase in (FORWARD, BACKWARD):
            own = [o for o in self._of(phase) if "dot_product" in o.name]
            seconds = sum(self._time(operator) for operator in own)
            found.append(self._each(seconds, sum(operator.count for operator in own)))
        return found[0], found[1]

    @cached_property
    def saved(self) -> int:
        return self.outside.saved + sum(part.saved for part in self.parts)

    @cached_property
    def hidden(self) -> int:
        return max((part.output for part in self.parts), default=0)

    @cached_property
    def update_s(self) -> float:
        return update_seconds(self.device, 4 * self.trained, self.states)

    def shared(self, size: int) -> TensorShares | None:
        """How `size` tensor ranks share the model; None if unsupported (see `refused`)."""
        if size not in self._shared:
            try:
                self._shared[size] = self._shares(plan_tensor(self.model, size, None, True, True))
            except GulliverError as error:
                self.refused[size], self._shared[size] = str(error), None
        return self._shared[size]

    def _shares(self, tensor: TensorPlan) -> TensorShares:
        sizes, ends = self._elements(tensor)
        if tensor.size == 1:
            return TensorShares(1, sizes=sizes, ends=ends)
        inside = _within(self.analysis, shared_paths(tensor))
        seconds = [(self._time(o), inside(o)) for o in self._of(FORWARD)]
        forward = [p for p, placed in tensor.modules.items() if placed.how.kind in ADDED_UP]
        again = [p for p in forward if any(p.startswith(f"{block}.") for block in self.blocks)]
        kept, outside = self._divided(tensor)
        return TensorShares(
            tensor.size,
            _share(seconds),
            kept,
            tensor.share_of(self.model),
            tuple(self._bytes(p, "outputs") for p in forward),
            tuple(self._bytes(p, "inputs") for p in entries_of(tensor)),
            tuple(self._bytes(p, "outputs") for p in again),
            outside,
            sizes,
            ends,
        )

    def _elements(self, tensor: TensorPlan) -> tuple[Any, Any]:
        named, known = dict(self.model.named_parameters()), dict[str, tuple[int, ...]]()
        # A tied parameter counts at each of its names.
        every = dict(self.model.named_parameters(remove_duplicate=False))

        def counts(names: Iterable[str]) -> tuple[int, ...]:
            return tuple(cut_numel(name, every[name], tensor, 0) for name in names)

        found = []
        for path in self.blocks:
            stands = self.analysis.followed(path)
            if stands not in known:
                own = self.model.get_submodule(path).named_parameters()
                known[stands] = counts(f"{path}.{name}" for name, _ in own)
            found.append(known[stands])
        before, after = self.ends
        rest = [name for name in after if name not in before and name in named]
        return tuple(found), (counts(before), counts(after), counts(rest))

    def _divided(self, tensor: TensorPlan) -> tuple[float, float]:
        analysis, kept = self.analysis, self.analysis.kept
        own, apart = _within(analysis, self.blocks), _apart(analysis, tensor)
        cut, seen = [0, 0], set[int]()
        for operator in self._of(FORWARD):
            for value in operator.outputs:
                if value.storage in kept and value.storage not in seen:
                    seen.add(value.storage)
                    nbytes = kept[value.storage] * operator.count
                    cut[own(operator)] += nbytes if value.storage in apart else 0
        inside = self.samples * sum(part.saved for part in self.parts)
        outside = self.samples * self.outside.saved
        return min(1.0, cut[1] / max(1, inside)), min(1.0, cut[0] / max(1, outside))

    def _of(self, phase: str) -> Iterable[Operator]:
        return (o for o in self.analysis.operators if o.phase == phase)

    def _time(self, operator: Operator) -> float:
        return operator.count * operator.seconds_on(self.device)

    def _bytes(self, path: str, side: str) -> int:
        try:
            own = [o for o in self.analysis.graph(path, FORWARD) if not o.in_place]
        except GulliverError:
            return 0
        ordered = own if side == "inputs" else own[::-1]
        values = next((v for o in ordered for v in getattr(o, side) if not v.name), None)
        if values is None:
            return 0
        return math.prod(values.shape) * getattr(torch, values.dtype).itemsize // self.samples


def _within(analysis: Analysis, paths: Iterable[str]) -> Callable[[Operator], bool]:
    heads = {analysis.followed(path) for path in paths}

    def inside(operator: Operator) -> bool:
        parts = operator.path.split(".")
        return any(".".join(parts[:end]) in heads for end in range(1, len(parts) + 1))

    return inside


def _apart(analysis: Analysis, tensor: TensorPlan) -> set[int]:
    """Storages of a forward pass that are sharded over tensor ranks."""
    # Outputs of row-parallel modules and of expert modules are replicated again.
    cut = {analysis.followed(path): placed for path, placed in tensor.modules.items()}
    found = dict[int, str]()
    for operator in analysis.operators:
        if operator.phase != FORWARD:
            continue
        placed = cut.get(operator.path)
        if placed is not None and placed.how.kind in (*ADDED_UP, "summed"):
            for value in () if operator.view else operator.outputs:
                found.pop(value.storage, None)
            continue
        within = operator.path if placed is not None and placed.how.kind == "experts" else ""
        parts = [found[v.storage] for v in operator.inputs if v.storage in found]
        taken = any(scope in ("", operator.path) for scope in parts)
        if taken or (placed is not None and any(_is_cut(v.name, placed) for v in operator.inputs)):
            found |= {value.storage: within for value in operator.outputs if not value.name}
    return set(found)


def _is_cut(name: str, placed: Any) -> bool:
    return bool(name) and name.rpartition(".")[2] in placed.dims


def _share(found: Iterable[tuple[float, bool]]) -> float:
    whole = chosen = 0.0
    for amount, inside in found:
        whole += amount
        chosen += amount if inside else 0.0
    return chosen / whole if whole else 0.0


# Analyses a model for the search, in the dtypes in which it will run.


def facts_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batch: Any,
    device: Device,
    precision: str = "bf16",
    on_cpu: bool = False,
) -> Facts:
    check_shapes(model)
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    half = HALVES.get(precision)
    followed = model
    if half is not None:
        # Parameters are analyzed in 16 bits; their float32 copies belong to the optimizer.
        followed = on_meta(model)
        convert(followed, half, modules_kept(followed))
        batch = cast_floats(batch, half)
    try:
        analysis = analyse(followed, batch, kernels="cpu" if on_cpu else "cuda")
    except GulliverError as error:
        if half is None:
            raise
        raise GulliverError(
            f"{error} (parameters and floating-point inputs were converted to {precision}, as for "
            "training; precision fp32 keeps their dtypes)"
        ) from error
    for opaque in analysis.opaque:
        if not opaque.path:  # neither blocks nor bytes of it are known
            raise GulliverError(
                f"{opaque.kind} cannot be planned: it depends on its data ({opaque.where}: "
                f"{opaque.reason}); move this code into its own module, which stays unsharded"
            )
    tensors = [t for t in _tensors(batch) if t.ndim]
    trained, states = _trained(model, optimizer)
    sizes = tensors[0].shape[0] if tensors else 1
    tokens = max((t.shape[1] for t in tensors if t.ndim == 2), default=0)
    item, copied = (4, False) if half is None else (2, True)
    numbers = sizes, tokens, device, states, item, copied, trained
    return Facts(model, analysis, *numbers, optimizer=optimizer)


def check_shapes(model: nn.Module) -> None:
    """Rejects parameters and buffers without shapes (lazy modules)."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise GulliverError(
                f"{name!r} of a {kind} has no shape; run the model once on a batch, or set the "
                "module's sizes"
            )


def on_meta(model: nn.Module) -> nn.Module:
    own = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {}
    for tensor in own:
        empty = tensor.detach().to("meta")
        kind = nn.Parameter(empty, tensor.requires_grad) if _is_parameter(tensor) else empty
        memo[id(tensor)] = kind
    return copy.deepcopy(model, memo)


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _tensors(batch: Any) -> list[torch.Tensor]:
    values = batch.values() if isinstance(batch, dict) else batch
    values = values if isinstance(values, list | tuple) or hasattr(values, "mapping") else (values,)
    return [value for value in values if isinstance(value, torch.Tensor)]


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[int, int]:
    if optimizer is None:
        return 0, 0
    count = most = 0
    for group in optimizer.param_groups:
        for parameter in (p for p in group["params"] if p.requires_grad):
            count += parameter.numel()
            most = max(most, len(state_sizes(optimizer, group, parameter.shape)))
    return count, most
