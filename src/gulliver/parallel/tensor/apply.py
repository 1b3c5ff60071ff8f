"""Shards a model in place, with hooks where inputs enter and where the sequence is sharded.

*Sites* are modules whose input goes into several column layers, such as attention and gated MLPs:
with a sharded sequence, `enter_once` gathers the input once for all of them. *Stacks* are lists of
blocks: `guard_stack` shards the sequence before the first block, gathers it after the last, and
publishes its length in between. At a boundary between pipeline stages, the sequence stays sharded.

Hooks keep the model's own classes, which its code may check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

import gulliver.parallel.tensor.quantized  # noqa: F401 - registers int8 twins of cut layers
from gulliver._compat import share_forward_hooks
from gulliver.comm.groups import RankGroup
from gulliver.errors import GulliverError, nearest
from gulliver.families.lookup import family_of, type_of
from gulliver.layout.even import Interval, intervals, split_evenly
from gulliver.memory.parts import Region, region_of, set_region
from gulliver.parallel.tensor.collectives import copy, copy_region, gather, split, summed
from gulliver.parallel.tensor.entry import UNCUT, GatheringTensor, SharedSequence, enter
from gulliver.parallel.tensor.layers import (
    ColumnEmbedding,
    ColumnLinear,
    RowLinear,
    VocabularyEmbedding,
)
from gulliver.parallel.tensor.styles import (
    HIDDEN,
    REPEATED,
    SCALED,
    ShardedModule,
    TensorPlan,
    layer_of,
    rotary_width,
    share_experts,
    share_rotary,
)
from gulliver.precision.fp8.conversion import is_transposed


def enter_once(site: nn.Module, shared: SharedSequence) -> None:
    """Gathers a module's hidden states once for all its column layers."""

    def entered(value: Any) -> Any:
        if shared.inside or not isinstance(value, Tensor) or isinstance(value, GatheringTensor):
            return value
        cut = shared.cut_of(value)
        return value if cut is None else enter(value, shared.rank_group, cut)

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        name = next((n for n in HIDDEN if n in kwargs), None)
        if name:
            kwargs[name] = entered(kwargs[name])
        elif args:
            args = (entered(args[0]), *args[1:])
        shared.inside += 1
        return args, kwargs

    def after(*_: Any) -> None:
        shared.inside -= 1

    site.register_forward_pre_hook(before, with_kwargs=True)
    site.register_forward_hook(after, always_call=True)


def expect_whole(path: str, module: nn.Module, shared: SharedSequence) -> None:
    # Such a module uses gathered columns, so its gradients are not summed over the ranks.

    def before(module: nn.Module, args: Any) -> None:
        lengths = shared.lengths
        if not lengths or not args or not isinstance(args[0], Tensor) or args[0].dim() < 3:
            return
        if args[0].shape[1] == lengths[shared.rank_group.rank]:
            raise GulliverError(
                f"{path} gets a shard of the sequence inside a module that gathers it, so its "
                "gradient would be partial; use sequence_parallelism_mode=None"
            )

    module.register_forward_pre_hook(before)


def guard_stack(path: str, stack: nn.Module, shared: SharedSequence, known: bool) -> None:
    """Shards the sequence before the first block, and gathers it after the last."""
    blocks = list(stack.children())
    for number, block in enumerate(blocks):
        if not any(True for _ in block.parameters()):
            continue
        guard = _Guard(f"{path}.{number}", shared, known)
        guard.first, guard.last = number == 0, number == len(blocks) - 1
        block.register_forward_pre_hook(guard.before, with_kwargs=True)
        block.register_forward_hook(guard.after, always_call=True)


def gather_outputs(module: nn.Module, rank_group: RankGroup) -> None:
    def whole(value: Any) -> Any:
        if isinstance(value, Tensor):
            lengths = vars(value).get("_lengths") or UNCUT
            # Other outputs of the last block also have the sharded length.
            cut = lengths != UNCUT and value.shape[1] == lengths[rank_group.rank] != sum(lengths)
            return gather(value, 1, lengths, rank_group) if cut else value
        if isinstance(value, dict):
            for key, entry in value.items():
                found = whole(entry)
                if found is not entry:
                    value[key] = found
        elif type(value) in (tuple, list):
            entries = [whole(entry) for entry in value]
            if any(new is not old for new, old in zip(entries, value, strict=True)):
                return type(value)(entries)
        return value

    module.register_forward_hook(lambda _, args, output: whole(output))


def refuse_outputs(model: nn.Module, shared: bool) -> None:
    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        config = getattr(module, "config", None)
        for name in ("output_attentions", "output_router_logits")[: 1 + shared]:
            given = kwargs.get(name)
            if getattr(config, name, False) if given is None else given:
                raise GulliverError(
                    f"{name}=True requests outputs that are sharded over the tensor ranks: set it "
                    "to False"
                )

    model.register_forward_pre_hook(before, with_kwargs=True)


class _Guard:
    first = last = False

    def __init__(self, path: str, shared: SharedSequence, known: bool) -> None:
        self.path, self.shared, self.known = path, shared, known

    def before(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Shards hidden states before the first block, or reads how they are sharded."""
        name = next((n for n in HIDDEN if n in kwargs), None)
        hidden = kwargs[name] if name else args[0] if args else None
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            raise GulliverError(
                f"{self.path} does not get hidden states of shape [batch, length, width] as its "
                "first argument: its sequence cannot be sharded; use sequence_parallelism_mode=None"
            )
        if not self.known:
            self._check_others([v for v in (*args, *kwargs.values()) if v is not hidden])
        self.shared.inside = 0
        hidden = self._entered(hidden)
        if name:
            kwargs[name] = hidden
        else:
            args = (hidden, *args[1:])
        return args, kwargs

    def _entered(self, hidden: Tensor) -> Tensor:
        shared = self.shared
        if self.first:
            shared.lengths = shared.piece_lengths(hidden.shape[1], torch.is_grad_enabled())
            if shared.lengths != UNCUT:
                hidden = split(hidden, 1, shared.lengths, shared.rank_group)
                vars(hidden)["_lengths"] = shared.lengths
        else:
            # None if it comes from another stage; the ranks then exchange the lengths.
            shared.lengths = vars(hidden).get("_lengths")
            if shared.lengths is None:
                shared.lengths = shared.gather_lengths(hidden)
        return hidden

    def after(self, block: nn.Module, args: Any, output: Any) -> Any:
        """Gathers hidden states after the last block, or records how they are sharded."""
        shared, lengths = self.shared, self.shared.lengths
        shared.lengths = None
        if output is None or lengths is None:
            return output
        hidden = output[0] if isinstance(output, tuple) else output
        if self.last and lengths != UNCUT:
            hidden = gather(hidden, 1, lengths, shared.rank_group)
        vars(hidden)["_lengths"] = lengths
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def _check_others(self, values: list[Any]) -> None:
        if any(isinstance(v, Tensor) and v.requires_grad for v in values):
            raise GulliverError(
                f"{self.path} gets a differentiable tensor in addition to its hidden states; its "
                "gradient "
                "would be partial on each rank: use sequence_parallelism_mode=None"
            )


# Applies a plan to a model: modules are replaced by ones that hold this rank's shard.
#
#     apply_tensor(model, plan, line)                              # in place
#     apply_tensor(model, plan, line, sequence="split_gather")     # sequence sharded between blocks
#
# The model stays the same object, with the same module paths and parameter names. A sharded
# parameter records its region of the full tensor (`memory.region_of`), which checkpoints and
# optimizers use; tied parameters stay tied. Parameters on meta stay there.


SequenceMode = Literal["split_gather", "ring"]
MODES = ("split_gather", "ring")


def apply_tensor(
    model: nn.Module, plan: TensorPlan, rank_group: RankGroup, sequence: SequenceMode | None = None
) -> None:
    """Shards a model over ranks, in place (collective).

    Args:
        model: model of the plan, the same on all ranks.
        plan: plan from `plan_tensor`.
        rank_group: ranks to shard over, as many as in the plan; with one rank, nothing is changed.
        sequence: sharding mode of the sequence between blocks; None for no sharding.

    Raises:
        GulliverError: the group has another size, the mode is unknown, or the model has no blocks
            that take hidden states of shape ``[batch, length, width]``.
    """
    if rank_group.size != plan.size:
        raise GulliverError(
            f"the plan is for {plan.size} ranks, but the rank group has {rank_group.size}"
        )
    if sequence is not None and sequence not in MODES:
        raise GulliverError(f"unknown mode {sequence!r}: {nearest(sequence, MODES)}")
    if rank_group.size > 1:
        _Applied(model, plan, rank_group, sequence).run()


def check_mode(model: nn.Module, plan: TensorPlan, sequence: str | None) -> None:
    if sequence is None:
        return
    family = family_of(model)
    if not plan.stacks:
        raise GulliverError(
            f"sequence_parallelism_mode={sequence!r} needs a list of blocks (torch.nn.ModuleList), "
            "but this model has none: use None"
        )
    if family.blocks is not None and family.blocks.parts:
        raise GulliverError(
            f"sequence_parallelism_mode={sequence!r} needs modules as blocks, but the blocks of "
            f"{type_of(model)} are lists of modules: use None"
        )
    if plan.whole:
        more = f" and {len(plan.whole) - 3} more" if len(plan.whole) > 3 else ""
        raise GulliverError(
            f"sequence_parallelism_mode={sequence!r} would pass shards of a sequence to "
            f"{', '.join(plan.whole[:3])}{more}, which may mix tokens (experts, mixers, attention "
            "not sharded by heads): use None"
        )
    known = family.sequences
    if known is not None and sequence not in known.modes:
        raise GulliverError(
            f"{family.name} does not support sequence_parallelism_mode={sequence!r}: {known.why}; "
            f"use {known.modes[0]!r}"
        )


class _Applied:
    def __init__(
        self,
        model: nn.Module,
        plan: TensorPlan,
        rank_group: RankGroup,
        sequence: SequenceMode | None,
    ) -> None:
        self.model, self.plan, self.rank_group, self.sequence = model, plan, rank_group, sequence
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.local: dict[int, nn.Parameter] = {}
        # By id; keep the objects alive, so that their ids are not reused.
        self._wholes: list[Any] = []
        self.replaced: dict[int, nn.Module] = {}
        check_mode(model, plan, sequence)

    def run(self) -> None:
        shared: dict[str, SharedSequence] = {}
        if self.sequence is not None:
            ring = self.sequence == "ring"
            shared = {stack: SharedSequence(self.rank_group, ring) for stack in self.plan.stacks}
        for path, placed in self.plan.modules.items():
            module = self.modules[path]
            if placed.how.kind == "summed":
                continue
            if placed.how.kind in ("experts", "parameters", "latent"):
                self._cut_inside(path, module, placed)
                continue
            if id(module) not in self.replaced:
                self.replaced[id(module)] = self._cut(path, module, placed, shared)
            parent, _, name = path.rpartition(".")
            setattr(self.model.get_submodule(parent), name, self.replaced[id(module)])
        self._tie()
        for path, groups in self.plan.attention.items():
            scale_heads(self.modules[path], self.rank_group, groups)
        self._hook(shared)

    def _cut_inside(self, path: str, module: nn.Module, placed: ShardedModule) -> None:
        if id(module) in self.replaced:
            return
        self.replaced[id(module)] = module
        for name, dim in placed.dims.items():
            runs = placed.runs(self.rank_group.size, self.rank_group.rank, name)
            setattr(module, name, self._part(module._parameters[name], dim, runs))
        if placed.how.kind == "experts":
            share_experts(module, self.rank_group)
        if placed.how.kind == "latent":
            width = rotary_width(path, module, self.modules[path.rpartition(".")[0]])
            share_rotary(module, width, self.rank_group)

    def _cut(
        self,
        path: str,
        module: nn.Module,
        placed: ShardedModule,
        shared: Mapping[str, SharedSequence],
    ) -> nn.Module:
        runs = placed.runs(self.rank_group.size, self.rank_group.rank)
        parameters = {
            name: None if p is None else self._part(p, placed.dims.get(name), runs, placed.copies)
            for name, p in module._parameters.items()
        }
        new = self._module(module, placed, runs, parameters, _stack_of(path, shared))
        if isinstance(module, nn.Embedding):
            # Hooks that change embeddings, such as noise, or that make their outputs require
            # gradients.
            share_forward_hooks(module, new)
        return new.train(module.training)

    def _module(
        self,
        module: Any,
        placed: ShardedModule,
        runs: tuple[Interval, ...],
        parameters: dict[str, Any],
        shared: SharedSequence | None,
    ) -> nn.Module:
        how, rank_group, weight = placed.how, self.rank_group, parameters["weight"]
        bias, transposed = parameters.get("bias"), is_transposed(module)
        if how.kind == "column":
            return ColumnLinear(
                weight, bias, rank_group, runs, placed.total, transposed, how.gather, shared
            )
        if how.kind == "row":
            every = (placed.runs(rank_group.size, place) for place in range(rank_group.size))
            borders = tuple(sorted({end for runs in every for run in runs for end in run}))
            given = how.split, placed.total, shared, borders
            return RowLinear(weight, bias, rank_group, transposed, *given)
        padding = module.padding_idx
        if how.kind == "vocabulary":
            return VocabularyEmbedding(weight, rank_group, runs[0], placed.total, padding)
        return ColumnEmbedding(weight, rank_group, runs[0], placed.total, padding, how.gather)

    def _part(
        self, whole: Any, dim: int | None, runs: tuple[Interval, ...], copies: int = 1
    ) -> nn.Parameter:
        if dim is None:
            return whole
        if id(whole) not in self.local:
            self.local[id(whole)] = cut_parameter(whole, dim, runs, copies)
            self._wholes.append(whole)
        return self.local[id(whole)]

    def _tie(self) -> None:
        for module in self.model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and id(parameter) in self.local:
                    setattr(module, name, self.local[id(parameter)])

    def _hook(self, shared: Mapping[str, SharedSequence]) -> None:
        plan, rank_group = self.plan, self.rank_group
        for path in plan.sites:
            sequence = _stack_of(path, shared)
            if sequence is not None:
                enter_once(self.modules[path], sequence)
        for path in filter(self._in_site, plan.replicated):
            sequence = _stack_of(path, shared)
            if sequence is not None:
                expect_whole(path, self.modules[path], sequence)
        for path, names in plan.sliced.items():
            spans = intervals(split_evenly(plan.attention[path], rank_group.size))
            slice_heads(self.modules[path], names, plan.attention[path], spans[rank_group.rank])
        inside = [
            module
            for stack in shared
            for path, module in self.model.get_submodule(stack).named_modules(prefix=stack)
            if isinstance(module, RowLinear) or not self._in_site(path)
        ]
        summed_up = [
            self.modules[path]
            for path, placed in plan.modules.items()
            if placed.how.kind == "summed"
        ]
        for path, sequence in shared.items():
            guard_stack(path, self.model.get_submodule(path), sequence, plan.known)
        for path in {path: None for stack in shared for path in _above(stack)}:
            gather_outputs(self.model.get_submodule(path), rank_group)
        refuse_outputs(self.model, bool(shared))
        copied = [
            module
            for module in self.replaced.values()
            if any((r := region_of(p)) and r.copies > 1 for p in module.parameters(recurse=False))
        ]
        sum_gradients(self.model, inside + summed_up + copied, rank_group)

    def _in_site(self, path: str) -> bool:
        """Whether a module inside a site reads the full sequence itself."""
        # The second factor of a row layer's adapter does not, because it is added to scattered
        # outputs.
        layer, factor = layer_of(path)
        if factor == "lora_B" and isinstance(self.modules.get(f"{layer}.base_layer"), nn.Module):
            placed = self.plan.modules.get(f"{layer}.base_layer")
            if placed is not None and placed.how.kind == "row":
                return False
        return any(path.startswith(f"{site}.") for site in self.plan.sites)


def _above(stack: str) -> list[str]:
    parts = stack.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, -1, -1)]


def _stack_of(path: str, shared: Mapping[str, SharedSequence]) -> SharedSequence | None:
    return next((s for stack, s in shared.items() if path.startswith(f"{stack}.")), None)


def cut_parameter(
    whole: nn.Parameter, dim: int, runs: tuple[Interval, ...], copies: int
) -> nn.Parameter:
    region = Region(tuple(whole.shape), dim, runs, copies)
    with torch.no_grad():
        part = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in runs], dim)
    local = nn.Parameter(part.contiguous(), requires_grad=whole.requires_grad)
    set_region(local, region)
    return local


def scale_heads(attention: nn.Module, rank_group: RankGroup, groups: int) -> None:
    """Divides an attention module's head counts by the group size; its reshapes use them."""
    copied = rank_group.size > groups
    local, of = (
        (1, rank_group.size)
        if copied
        else (split_evenly(groups, rank_group.size)[rank_group.rank], groups)
    )
    for name in (*SCALED, REPEATED) if copied else SCALED:
        count = vars(attention).get(name)
        if isinstance(count, int):
            # Number of repetitions of a key head: one for each of this rank's query heads.
            count *= groups if name == REPEATED else 1
            setattr(attention, name, max(1, count * local // of))


def slice_heads(module: nn.Module, names: tuple[str, ...], groups: int, own: Interval) -> None:
    """Hooks a module to slice its arguments ``[batch * heads, ...]`` by heads."""

    def cut(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        for name in names:
            value = kwargs.get(name)
            if isinstance(value, Tensor):
                heads = value.unflatten(0, (-1, groups))
                kwargs[name] = heads[:, own[0] : own[1]].flatten(0, 1)
        return args, kwargs

    module.register_forward_pre_hook(cut, with_kwargs=True)


def sum_gradients(model: nn.Module, modules: list[nn.Module], rank_group: RankGroup) -> None:
    # If several ranks hold a region, each of them gets the sum of their gradients.
    #
    # [Note: summed at use] A norm between blocks only sees this rank's tokens, and a norm of
    # queries or keys only this rank's heads, so their gradients are partial. They are summed where
    # a module uses its parameter, not where the parameter's gradient is accumulated: another use in
    # the loss, such as a penalty, is computed by every rank on the full parameter, and a sum would
    # count it once per rank. A parameter that is read by other modules instead of its own has a
    # hook; a frozen one, or one from meta, gets the hook when the model runs. Parameters are
    # identified by name, because those of a copied module have no region.
    names: dict[nn.Module, dict[str, Region | None]] = {}
    for module in modules:
        held = {n: None if p is None else region_of(p) for n, p in module._parameters.items()}
        names[module] = {n: r for n, r in held.items() if r is None or r.copies > 1}

    def enter(own: dict[str, Region | None], module: nn.Module, *_: Any) -> None:
        for name, parameter in _trained(module, own) if torch.is_grad_enabled() else ():
            vars(parameter)["_summed_at_use"] = True
            # An instance attribute takes precedence over a parameter. A view is an operation, so it
            # waits for a parameter that is gathered on demand.
            used, region = parameter.view_as(parameter), own[name]
            vars(module)[name] = (
                copy(used, rank_group) if region is None else copy_region(used, rank_group, region)
            )

    def leave(module: nn.Module, *_: Any) -> None:
        for name in module._parameters:
            vars(module).pop(name, None)

    def watch(*_: Any) -> None:
        for module in modules:
            for name, parameter in _trained(module, names[module]):
                if names[module][name] is None and "_summed" not in vars(parameter):
                    parameter.register_hook(partial(_summed_once, parameter, rank_group))
                    vars(parameter)["_summed"] = True

    for module in modules:
        module.register_forward_pre_hook(partial(enter, names[module]))
        module.register_forward_hook(leave, always_call=True)
    watch()
    model.register_forward_pre_hook(watch)


def _trained(module: nn.Module, names: Iterable[str]) -> list[tuple[str, nn.Parameter]]:
    found = ((name, module._parameters[name]) for name in names)
    return [(name, p) for name, p in found if p is not None and p.requires_grad]


def _summed_once(parameter: nn.Parameter, rank_group: RankGroup, grad: Tensor) -> Tensor:
    return grad if "_summed_at_use" in vars(parameter) else summed(grad, rank_group)


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Allocates uninitialized memory for meta parameters, in place."""
    made: dict[int, nn.Parameter] = {}  # Keeps ties and regions; leaves buffers on meta
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                empty = torch.empty_like(parameter, device=device)
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                region = region_of(parameter)
                if region is not None:
                    set_region(made[id(parameter)], region)
            setattr(module, name, made[id(parameter)])
