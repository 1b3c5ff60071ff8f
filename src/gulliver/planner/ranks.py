"""Tensors, chunks and work of each rank of a plan.

Pipeline ranks have different layers, and tensor ranks may have shards of different sizes; memory is
planned for the rank that needs the most (`largest_residency`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from gulliver.families.lookup import family_of
from gulliver.memory.buffers import ChunkLayout, moment_size
from gulliver.parallel.pipeline.schedules import check_counts, computations
from gulliver.parallel.pipeline.stack import Cut, Stack
from gulliver.parallel.pipeline.stage import names_held, uses_held
from gulliver.parallel.tensor.styles import TensorPlan
from gulliver.parallel.zero.chunks import TensorSize, ordered_layouts, shard_dtype
from gulliver.parallel.zero.elementwise import is_boosted, makes_beside, needs_whole, state_sizes
from gulliver.parallel.zero.gate import ZeroWires
from gulliver.parallel.zero.memory import ChunkBytes
from gulliver.plan.plan import Plan
from gulliver.plan.tree import Tiers, Work
from gulliver.planner.model import HALVES, no_optimizer
from gulliver.planner.residency import StateResidency, find_residency, least_bytes
from gulliver.planner.state_bytes import BACKWARD, FORWARD, Passes, StateBytes
from gulliver.precision.wire.formats import IDENTITY, wire_format
from gulliver.solve.replacement import Policy
from gulliver.solve.timeline import FORWARD as FIRST
from gulliver.solve.timeline import INPUTS

Stages = tuple[Stack, Cut, tuple[tuple[int, ...], ...]]
"""Blocks of a model, their split into stages, and the stage numbers of each rank."""

NUMBERED = re.compile(r"(.*\.\d+)\..*")
"""Matches names inside a module list; the group is the path of the list's entry."""
KEPT_WHOLE = 0.5
"""Maximum share of activations that is replicated over a tensor or sequence axis (norms)."""


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan with its model's sharding, computed once for prediction and execution."""

    # Choices, and results as far as they are known.
    plan: Plan
    # Whole model, perhaps on meta.
    model: nn.Module
    # Optimizer of its parameters; None if it is not trained.
    optimizer: torch.optim.Optimizer | None = None
    # How tensors are sharded over the tensor axis; None if they are not.
    tensor: TensorPlan | None = None
    # Blocks and their assignment to stages; None without a pipeline.
    stages: Stages | None = None
    _sizes: dict[tuple[int, int], list[TensorSize]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def with_plan(self, plan: Plan) -> ResolvedPlan:
        """The same sharding with a plan that differs only in choices that do not affect it."""
        return replace(self, plan=plan)

    def sizes(self, place: tuple[int, int] = (0, 0)) -> list[TensorSize]:
        """Parameters of the rank at coordinates (pipeline, tensor)."""
        if place not in self._sizes:
            self._sizes[place] = _tensor_sizes(self, place)
        return self._sizes[place]


def rank_state(resolved: ResolvedPlan, place: tuple[int, int]) -> StateBytes:
    """State of one rank, and the order in which a step accesses it."""
    plan = resolved.plan
    found = state_bytes(plan, resolved.sizes(place))
    if plan.mesh.names_model:
        found = replace(found, blocks=plan.recompute)
    if resolved.stages is None:
        return found
    return replace(found, passes=_passes(plan, resolved.model, resolved.stages, place[0]))


def order_of_use(plan: Plan, model: nn.Module) -> list[str]:
    """Parameter names in forward order, if chunks follow that order."""
    # A tied parameter appears under each name. The order matters if several ranks gather chunks in
    # a common order: using a chunk also gathers all chunks that precede it, so with an unsuitable
    # order the first step would hold nearly the full model.
    if plan.limited and not plan.mesh.names_model:
        return []
    if not plan.limited and plan.mesh.replicas == 1:
        return []
    if plan.mesh.replicas == 1:
        return [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return _forward_order(model)


def _forward_order(model: nn.Module) -> list[str]:
    """Parameter names in forward order; a tied parameter appears under each name."""
    # Blocks of transformers register norms after the layers that they run before or around.
    named = list(model.named_parameters(remove_duplicate=False))
    blocks = dict[str, list[tuple[str, nn.Parameter]]]()
    for name, parameter in named:
        inside = NUMBERED.fullmatch(name)
        blocks.setdefault(inside[1] if inside else name, []).append((name, parameter))
    paths, known = list(blocks), family_of(model).blocks
    if known is not None and known.interleaved:
        # Of lists of blocks that take turns, each is one after another in its place.
        lists = [[p for p in paths if p.rpartition(".")[0].endswith(end)] for end in known.lists]
        turns = iter([path for turn in zip(*lists, strict=False) for path in turn])
        taken = {path for found in lists for path in found}
        paths = [next(turns, path) if path in taken else path for path in paths]
    return [name for path in paths for name in _within(path, blocks[path])]


def _within(path: str, found: Sequence[tuple[str, nn.Parameter]]) -> list[str]:
    """Orders a block's parameters, moving norms next to their layers."""
    children = dict[str, list[str]]()
    small = dict[str, bool]()
    for name, parameter in found:
        child = name.removeprefix(f"{path}.").partition(".")[0]
        children.setdefault(child, []).append(name)
        small[child] = small.get(child, True) and parameter.ndim < 2
    layers, norms = ([c for c in children if small[c] is kind] for kind in (False, True))
    each, rest = divmod(len(norms), max(len(layers), 1))
    if not layers or list(children) != layers + norms or rest or each not in (1, 2):
        return [name for name, _ in found]
    order = list[str]()
    for number, layer in enumerate(layers):
        before, *after = norms[number * each : (number + 1) * each]
        order += [before, layer, *after]
    return [name for child in order for name in children[child]]


def rank_states(resolved: ResolvedPlan) -> list[StateBytes]:
    found = (rank_state(resolved, place) for place in places(resolved.plan))
    return list(dict.fromkeys(found))


def places(plan: Plan) -> dict[tuple[int, int], int]:
    mesh = plan.mesh
    stride = mesh.size // mesh.of("pipeline")
    ways = itertools.product(range(mesh.of("pipeline")), range(mesh.of("tensor")))
    return {(stage, part): stage * stride + part for stage, part in ways}


def largest_residency(
    states: Sequence[StateBytes], tiers: Tiers, work: Work, policy: Policy = "planned"
) -> StateResidency:
    """Residency on the rank that needs the most memory; errors name the limit that suffices."""
    ordered = sorted(states, key=lambda state: -least_bytes(state, tiers))
    first, *_ = (find_residency(state, tiers, work, policy) for state in ordered)
    return first


def _passes(plan: Plan, model: nn.Module, stages: Stages, place: int) -> Passes:
    """Parameter names that each forward and backward of a micro-batch uses, in schedule order."""
    stack, cut, numbers = stages
    schedule, count = plan.pipeline.schedule, plan.pipeline.micro_batches or 2 * cut.stages
    check_counts(schedule, cut.stages, len(numbers), count)
    turn = {name: place for place, name in enumerate(order_of_use(plan, model))}
    used = dict[int, tuple[str, ...]]()
    for stage in numbers[place]:
        names = uses_held(model, stack, cut, [(stage,)], 0)
        used[stage] = tuple(names[name] for name in sorted(names, key=lambda name: turn[name]))
    return tuple(
        (FORWARD if kind == FIRST else BACKWARD, used[stage])
        for kind, stage, _ in computations(schedule, place, numbers, count)
        if kind != INPUTS  # its parameters are used again for the gradients of the weights
    )


def rank_work(resolved: ResolvedPlan) -> Work:
    """Cost of a batch on the busiest rank; bytes are an upper bound."""
    plan, tensor, stages = resolved.plan, resolved.tensor, resolved.stages
    work, degree = plan.work, plan.mesh.of("sequence")
    if plan.zero is not None and plan.zero.unequal:
        degree = 1  # a rank may run a whole sample by itself
    # Every micro-batch launches all operations of its own, however many ranks share them.
    times = 1 if stages is None else plan.pipeline.micro_batches or 2 * stages[1].stages
    own, cut, kept = 1.0, 1.0, KEPT_WHOLE + (1 - KEPT_WHOLE) / degree
    if stages is not None:
        _, found, numbers = stages
        own = max(sum(found.times[n] for n in held) for held in numbers) / (sum(found.times) or 1)
    if tensor is not None:
        cut = 1 - tensor.share_of(resolved.model) * (1 - 1 / tensor.size)
        kept *= KEPT_WHOLE + (1 - KEPT_WHOLE) * cut
    return replace(
        work,
        forward_s=own * (work.forward_s * cut / degree + times * work.launch_forward_s),
        backward_s=own * (work.backward_s + _again_s(plan)) * cut / degree
        + own * times * (work.launch_backward_s + _again_share(plan) * work.launch_forward_s),
        update_s=work.update_s * own * cut,
        peak=work.peak_rank or int(work.peak * own * kept),
        peak_recomputed=work.peak_rank or int(work.peak_recomputed * own * kept),
    )


def _again_s(plan: Plan) -> float:
    work, again = plan.work, set(plan.recompute)
    known = [block.forward_s for block in work.blocks if block.path in again]
    return sum(known) if known or not again else (work.share_blocks or 1.0) * work.forward_s


def _again_share(plan: Plan) -> float:
    return (plan.work.share_blocks or 1.0) if plan.recompute else 0.0


def _tensor_sizes(resolved: ResolvedPlan, place: tuple[int, int]) -> list[TensorSize]:
    plan, model, tensor = resolved.plan, resolved.model, resolved.tensor
    stepper = resolved.optimizer or no_optimizer()
    groups = {p: group for group in stepper.param_groups for p in group["params"]}
    whole = plan.zero is not None and needs_whole(stepper, plan.zero.assume_elementwise)
    if resolved.stages is None:
        named = {name: p for name, p in model.named_parameters() if not is_boosted(p)}
    else:
        named = names_held(model, *resolved.stages, place[0])
    named = {name: named[name] for name in order_of_use(plan, model) if name in named} or named
    turns, sizes = _turns(plan, model), list[TensorSize]()
    for name, parameter in named.items():
        given, trained = parameter in groups, parameter in groups and parameter.requires_grad
        dtype = _dtype_in(plan, name, parameter)
        count = cut_numel(name, parameter, tensor, place[1])
        # An optimizer that reads shapes does not get slices.
        shape = parameter.shape if count == parameter.numel() else (count,)
        kept = state_sizes(stepper, groups[parameter], shape) if given else ()
        sleeping = given and not trained and not plan.mesh.names_model
        sizes.append(
            TensorSize(
                name,
                count,
                dtype,
                parameter.device,
                trained,
                kept,
                whole and (trained or sleeping),
                sleeping,
                beside=makes_beside(stepper),
                places=tuple(turns[parameter]),
            )
        )
    return sizes


def _turns(plan: Plan, model: nn.Module) -> dict[nn.Parameter, list[int]]:
    """Positions of each parameter in the order of use; tied parameters have several."""
    known = dict(model.named_parameters(remove_duplicate=False))
    turns: dict[nn.Parameter, list[int]] = {}
    for turn, name in enumerate(order_of_use(plan, model) or _forward_order(model)):
        turns.setdefault(known[name], []).append(turn)
    return turns


def _dtype_in(plan: Plan, name: str, parameter: nn.Parameter) -> torch.dtype:
    half = HALVES.get(plan.precision.parameters)
    kept = name.rpartition(".")[0] in plan.precision.kept
    return parameter.dtype if half is None or kept or not parameter.is_floating_point() else half


def cut_numel(name: str, parameter: nn.Parameter, tensor: TensorPlan | None, rank: int) -> int:
    path, _, own = name.rpartition(".")
    placed = None if tensor is None else tensor.modules.get(path)
    if tensor is None or placed is None or own not in placed.dims:
        return parameter.numel()
    whole = parameter.shape[placed.dims[own]]
    part = sum(end - start for start, end in placed.runs(tensor.size, rank, own))
    return parameter.numel() // whole * part


def state_bytes(plan: Plan, sizes: list[TensorSize]) -> StateBytes:
    zero = plan.zero
    assert zero is not None, "there are chunks"
    order = [name for chunk in zero.chunks for name in chunk.tensors]
    # The plan lists chunks of the first stage; others have other layers.
    order = list(dict.fromkeys([*order, *(t.name for t in sizes)])) if order else []
    layouts = ordered_layouts(sizes, order, zero.chunk_bytes, zero.stage, plan.mesh.replicas)
    parts = plan.mesh.replicas if zero.stage else 1
    # A plan describes the first rank, but the same limit must suffice for every rank.
    ranks = parts if zero.tiers is not None else 1
    states = {t.name: t.states for t in sizes}
    uses = _uses(sizes, [slot.name for layout, _, _ in layouts for slot in layout.slots])
    twice = any(tensor.beside for tensor in sizes)

    def counted(trained: set[str]) -> StateBytes:
        found = [_chunk_bytes(one, dtype, states, trained, ranks) for one, dtype, _ in layouts]
        if zero.stage < 3:
            wires = ZeroWires(gather=wire_format(plan.wire.gather))
            shown = [_shown_bytes(wires, one, dtype) for one, dtype, _ in layouts]
            found = [(replace(c, packed=n), m) for (c, m), n in zip(found, shown, strict=True)]
        chunks, moments = zip(*found, strict=True) if found else ((), ())
        taken = _taken(plan, chunks)
        found = StateBytes(chunks, moments, parts, zero.gather_ahead, uses, twice, taken)
        if zero.tiers is None or not zero.unequal:
            return found
        # The number of micro-batches varies: the second is like every later one.
        return replace(found, unequal=True, passes=((FORWARD, uses), (BACKWARD, uses)) * 2)

    now = counted({t.name for t in sizes if t.trained})
    unfrozen = counted({t.name for t in sizes if t.trained or t.frozen_trainable})
    return replace(now, later=unfrozen.reserved - now.reserved)


def _chunk_bytes(
    layout: ChunkLayout,
    dtype: torch.dtype,
    states: Mapping[str, Sequence[int]],
    trained: set[str],
    ranks: int,
) -> tuple[ChunkBytes, tuple[int, ...]]:
    names = tuple(slot.name for slot in layout.slots)
    is_trained = names[0] in trained
    master = shard_dtype(dtype, is_trained)
    whole, shard = layout.size * dtype.itemsize, layout.part_size * master.itemsize
    cut = layout.parts > 1 and not layout.whole
    held = list[list[int]]()
    for part in range(min(layout.parts, ranks) if is_trained else 0):
        # State tensors of a sliced parameter have the size of the slice.
        kept = [
            (piece.numel,) * len(states[piece.name]) if cut else states[piece.name]
            for piece in layout.pieces(part)
        ]
        kinds = itertools.zip_longest(*kept, fillvalue=0)
        held.append([moment_size(kind) * master.itemsize for kind in kinds])
    most = itertools.zip_longest(*held, fillvalue=0)
    return ChunkBytes(names, whole, shard, is_trained, master != dtype), tuple(map(max, most))


def _shown_bytes(wires: ZeroWires, layout: ChunkLayout, dtype: torch.dtype) -> int:
    """Bytes of the unpacked copy of a shard, which exists if parameters are sent packed."""
    packed = wires.of_parameters(layout.parts, layout.part_size, dtype) is not IDENTITY
    return layout.part_size * dtype.itemsize * packed


def _uses(sizes: list[TensorSize], laid_out: list[str]) -> tuple[str, ...]:
    kinds = {tensor.name: (tensor.trained, tensor.frozen_trainable) for tensor in sizes}
    inside = set(laid_out)
    for kind in set(kinds.values()):
        given = [name for name in laid_out if kinds[name] == kind]
        known = [name for name, one in kinds.items() if one == kind and name in inside]
        if given != known:
            return tuple(laid_out)
    places = [(place, t.name) for t in sizes if t.name in inside for place in t.places]
    return tuple(name for _, name in sorted(places))


def _taken(plan: Plan, chunks: Sequence[ChunkBytes]) -> tuple[tuple[int, ...], ...]:
    """Sizes of offloaded activations, grouped by the last chunk that their block uses."""
    # Only the total and the largest size of a block are known; assume equal sizes.
    tiers = plan.tiers
    if tiers is None or not tiers.takes_activations:
        return ()
    found, number = [list[int]() for _ in chunks], 0
    for block in plan.work.blocks:
        if tiers.activations != "offload" and block.path not in tiers.offloaded:
            continue
        start = f"{block.path}." if block.path else ""
        inside = [n for n, c in enumerate(chunks) if any(m.startswith(start) for m in c.names)]
        number = max(inside, default=number)
        count = -(-block.movable // max(1, block.largest))
        found[number] += [block.movable // count] * count if count else []
    return tuple(map(tuple, found))
