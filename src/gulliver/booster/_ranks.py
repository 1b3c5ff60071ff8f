"""What each rank of a plan has of a model: its tensors, its chunks, and the work of a step.

Ranks of one pipeline have other layers, and those of a tensor axis may have parts of other sizes;
what is planned of memory is planned for the rank that needs most of it (`largest_residency`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from gulliver.booster._model import HALVES, no_optimizer
from gulliver.booster._replay import BACKWARD, FORWARD, Passes, StateBytes
from gulliver.booster._residency import Residency, find_residency, least_bytes
from gulliver.memory import moment_size
from gulliver.parallel import is_boosted, needs_whole, state_sizes
from gulliver.parallel.pipeline import Cut, Stack, check_counts, computations, names_held
from gulliver.parallel.tensor import TensorPlan
from gulliver.parallel.zero import ChunkBytes, TensorSize, ordered_layouts, shard_dtype
from gulliver.plan import Plan, Tiers, Work
from gulliver.solve import FORWARD as FIRST
from gulliver.solve import INPUTS, Policy

Stages = tuple[Stack, Cut, tuple[tuple[int, ...], ...]]
"""Blocks of a model, how they are cut, and the numbers of the stages on each rank."""

NUMBERED = re.compile(r"(.*\.\d+)\..*")
"""Path of the innermost module of a list, and what lies in it."""
TIED = 3
"""Chunks that stay gathered for a weight that is used at both ends: its own, and those that a pass
comes past on the way to it."""
KEPT_WHOLE = 0.5
"""Share of activations, at most, that ranks of a tensor or sequence axis have all of: what passes
layers by, norms, masks."""


def rank_state(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    tensor: TensorPlan | None,
    stages: Stages | None,
    place: tuple[int, int],
) -> StateBytes:
    """State of one rank, and the order in which a step uses it.

    Args:
        plan: choices of ZeRO.
        model: whole model, perhaps on meta.
        optimizer: optimizer of its parameters.
        tensor: how tensors are cut.
        stages: how blocks are.
        place: rank on the pipeline axis, and on the tensor axis.

    Raises:
        GulliverError: a number of micro-batches that the pipeline's schedule cannot order.
    """
    sizes = tensor_sizes(plan, model, optimizer, tensor, stages, place)
    found = state_bytes(plan, sizes)
    if plan.mesh.names_model:
        found = replace(found, blocks=plan.recompute)
        found = replace(found, kept=_kept_gathered(found, model))
    if stages is None:
        return found
    return replace(found, passes=_passes(plan, model, found, stages, place[0]))


def _kept_gathered(state: StateBytes, model: nn.Module) -> int:
    """Bytes beside what modules use: chunks that stay gathered, and where gradients add up."""
    if state.parts == 1:
        return 0
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    count = TIED if len(names) > len(list(model.parameters())) else 0
    count += max((last - first for first, last in state.together()), default=0)
    whole = max((chunk.whole for chunk in state.chunks), default=0)
    # A further backward's gradients arrive beside those that they are added to.
    return count * whole + max((chunk.shard for chunk in state.chunks), default=0)


def order_of_use(plan: Plan, model: nn.Module) -> list[str]:
    """Names of a model's parameters as a forward reads them, where chunks are to lie so.

    That is where a cut model's are gathered under a limit. Blocks of transformers have norms that
    are registered behind the layers before or around which they run. What is gathered from several
    ranks comes in one order: a chunk that is used again behind others would have to stay.
    """
    if not (plan.limited and plan.mesh.names_model and plan.mesh.replicas > 1):
        return []
    blocks = dict[str, list[tuple[str, nn.Parameter]]]()
    for name, parameter in model.named_parameters():
        inside = NUMBERED.fullmatch(name)
        blocks.setdefault(inside[1] if inside else name, []).append((name, parameter))
    return [name for path, found in blocks.items() for name in _within(path, found)]


def _within(path: str, found: Sequence[tuple[str, nn.Parameter]]) -> list[str]:
    """Names of a block in order: norms that follow all layers stand before, or around, each."""
    children = dict[str, list[str]]()
    small = dict[str, bool]()
    for name, parameter in found:
        child = name.removeprefix(f"{path}.").partition(".")[0]
        children.setdefault(child, []).append(name)
        small[child] = small.get(child, True) and parameter.ndim < 2
    layers, norms = ([c for c in children if small[c] is kind] for kind in (False, True))
    each, rest = divmod(len(norms), max(len(layers), 1))
    if list(children) != layers + norms or rest or each not in (1, 2):
        return [name for name, _ in found]
    order = list[str]()
    for number, layer in enumerate(layers):
        before, *after = norms[number * each : (number + 1) * each]
        order += [before, layer, *after]
    return [name for child in order for name in children[child]]


def rank_states(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    tensor: TensorPlan | None,
    stages: Stages | None,
) -> list[StateBytes]:
    """States of all ranks that differ; arguments as of `rank_state`."""
    places = itertools.product(range(plan.mesh.of("pipeline")), range(plan.mesh.of("tensor")))
    found = (rank_state(plan, model, optimizer, tensor, stages, place) for place in places)
    return list(dict.fromkeys(found))


def largest_residency(
    states: Sequence[StateBytes], tiers: Tiers, work: Work, policy: Policy = "planned"
) -> Residency:
    """What a step does on the rank that needs most memory at once; the others are tried as well.

    Raises:
        GulliverError: the limit, or what lies behind, is too small for a rank; the least that all
            of them can do with is named.
    """
    ordered = sorted(states, key=lambda state: -least_bytes(state, tiers))
    first, *_ = (find_residency(state, tiers, work, policy) for state in ordered)
    return first


def _passes(plan: Plan, model: nn.Module, state: StateBytes, stages: Stages, place: int) -> Passes:
    """Chunks of each forward and backward of a micro-batch, in the order of a rank's schedule."""
    stack, cut, numbers = stages
    schedule, count = plan.pipeline.schedule, plan.pipeline.micro_batches or 2 * cut.stages
    check_counts(schedule, cut.stages, len(numbers), count)
    used = dict[int, tuple[int, ...]]()
    for stage in numbers[place]:
        names = names_held(model, stack, cut, [(stage,)], 0)
        # Of several ranks all bring every chunk in each pass: they wait for each other.
        used[stage] = tuple(
            number
            for number, chunk in enumerate(state.chunks)
            if state.parts > 1 or any(name in names for name in chunk.names)
        )
    return tuple(
        (FORWARD if kind == FIRST else BACKWARD, used[stage])
        for kind, stage, _ in computations(schedule, place, numbers, count)
        if kind != INPUTS  # its parameters are used again for the gradients of the weights
    )


def rank_work(
    plan: Plan, model: nn.Module, tensor: TensorPlan | None, stages: Stages | None
) -> Work:
    """What a batch costs the rank that computes most of it: an upper bound for what it keeps.

    Args:
        plan: choices; `Plan.work` is what the whole model costs one process.
        model: whole model.
        tensor: how tensors are cut.
        stages: how blocks are.
    """
    work, degree = plan.work, plan.mesh.of("sequence")
    own, cut, kept = 1.0, 1.0, KEPT_WHOLE + (1 - KEPT_WHOLE) / degree
    if stages is not None:
        _, found, numbers = stages
        own = max(sum(found.times[n] for n in held) for held in numbers) / (sum(found.times) or 1)
    if tensor is not None:
        cut = 1 - tensor.share_of(model) * (1 - 1 / tensor.size)
        kept *= KEPT_WHOLE + (1 - KEPT_WHOLE) * cut
    return replace(
        work,
        forward_s=work.forward_s * own * cut / degree,
        backward_s=work.backward_s * own * cut / degree,
        update_s=work.update_s * own * cut,
        peak=int(work.peak * own * kept),
        peak_recomputed=int(work.peak_recomputed * own * kept),
    )


def tensor_sizes(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    tensor: TensorPlan | None,
    stages: Stages | None,
    place: tuple[int, int] = (0, 0),
) -> list[TensorSize]:
    """The parameters that a rank will have, in the model's order, before any sharding.

    Args:
        plan: choices.
        model: whole model, perhaps on meta.
        optimizer: optimizer of its parameters.
        tensor: how tensors are cut.
        stages: how blocks are.
        place: rank on the pipeline axis, and on the tensor axis; the first one by default.
    """
    stepper = optimizer or no_optimizer()
    groups = {p: group for group in stepper.param_groups for p in group["params"]}
    whole = plan.zero is not None and needs_whole(stepper, plan.zero.assume_elementwise)
    if stages is None:
        named = {name: p for name, p in model.named_parameters() if not is_boosted(p)}
    else:
        named = names_held(model, *stages, place[0])
    named = {name: named[name] for name in order_of_use(plan, model) if name in named} or named
    sizes = []
    for name, parameter in named.items():
        trained = parameter in groups and parameter.requires_grad
        dtype = _dtype_in(plan, name, parameter)
        count = _cut_numel(name, parameter, tensor, place[1])
        # An optimizer that looks at shapes is not given slices.
        shape = parameter.shape if count == parameter.numel() else (count,)
        kept = state_sizes(stepper, groups[parameter], shape) if trained else ()
        device = parameter.device
        sizes.append(TensorSize(name, count, dtype, device, trained, kept, whole and trained))
    return sizes


def _dtype_in(plan: Plan, name: str, parameter: nn.Parameter) -> torch.dtype:
    half = HALVES.get(plan.precision.parameters)
    kept = name.rpartition(".")[0] in plan.precision.kept
    return parameter.dtype if half is None or kept or not parameter.is_floating_point() else half


def _cut_numel(name: str, parameter: nn.Parameter, tensor: TensorPlan | None, rank: int) -> int:
    path, _, own = name.rpartition(".")
    placed = None if tensor is None else tensor.modules.get(path)
    if tensor is None or placed is None or own not in placed.dims:
        return parameter.numel()
    whole = parameter.shape[placed.dims[own]]
    part = sum(end - start for start, end in placed.runs(tensor.size, rank, own))
    return parameter.numel() // whole * part


def state_bytes(plan: Plan, sizes: list[TensorSize]) -> StateBytes:
    """Bytes of the first rank's chunks, and of what the optimizer keeps of each."""
    zero = plan.zero
    assert zero is not None, "there are chunks"
    order = [name for chunk in zero.chunks for name in chunk.tensors]
    # Stages have other layers than the first, whose chunks those of a plan are.
    order = list(dict.fromkeys([*order, *(t.name for t in sizes)])) if order else []
    states = {t.name: t.states for t in sizes if t.trained}
    chunks, moments = list[ChunkBytes](), list[tuple[int, ...]]()
    layouts = ordered_layouts(sizes, order, zero.chunk_bytes, zero.stage, plan.mesh.replicas)
    for layout, dtype, is_trained in layouts:
        home = shard_dtype(dtype, is_trained)
        whole, shard = layout.size * dtype.itemsize, layout.part_size * home.itemsize
        names = tuple(slot.name for slot in layout.slots)
        chunks.append(ChunkBytes(names, whole, shard, is_trained, home != dtype))
        cut = layout.parts > 1 and not layout.whole
        # Of a piece that was cut each tensor has its size.
        kept = [
            (piece.numel,) * len(states[piece.name]) if cut else states[piece.name]
            for piece in (layout.pieces(0) if is_trained else ())
        ]
        kinds = itertools.zip_longest(*kept, fillvalue=0)
        moments.append(tuple(moment_size(kind) * home.itemsize for kind in kinds))
    parts = plan.mesh.replicas if zero.stage else 1
    return StateBytes(tuple(chunks), tuple(moments), parts, zero.gather_ahead)
