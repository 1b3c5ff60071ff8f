"""Creates a stage of a model, in place: modules of other stages become placeholders.

`make_stage` assigns the full model's modules to stages, identically on every rank, then replaces
modules of other ranks. Kept modules stay the same objects at the same paths, with their parameters;
placeholders have none. `Stage.tied` lists weights that several stages keep, because they are tied
or needed everywhere; their gradient is the sum over the copies (`Stage.sum_tied`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gulliver.comm.collectives import all_reduce
from gulliver.comm.groups import RankGroup
from gulliver.comm.messages import post
from gulliver.errors import GulliverError
from gulliver.parallel.pipeline.stack import Cut, Stack, around, units_of
from gulliver.parallel.pipeline.stage_forward import (
    Placeholder,
    PlaceholderBlock,
    StageForward,
    own,
    own_memory,
)


@dataclass(frozen=True, eq=False)
class Stage:
    """The part of a model on one rank: one stage, or several of a looped pipeline.

    Attributes:
        model: model with placeholders for other ranks' modules.
        stack: blocks of the full model.
        cut: assignment of the full model's blocks to stages.
        rank_group: rank group of the pipeline.
        numbers: indices of the stages on each rank of the group.
        stage_forward: object that runs the blocks.
        tied: ranks in the group with a copy of each shared parameter, by its first name in the full
            model.
        aliases: maps every name of each parameter of the full model to its first name.
    """

    model: nn.Module
    stack: Stack
    cut: Cut
    rank_group: RankGroup
    numbers: tuple[tuple[int, ...], ...]
    stage_forward: StageForward
    tied: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]

    @property
    def own(self) -> tuple[int, ...]:
        return self.numbers[self.rank_group.rank]

    @property
    def last_stage_rank(self) -> int:
        return next(p for p, held in enumerate(self.numbers) if self.cut.stages - 1 in held)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        found: dict[str, nn.Parameter] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            found.setdefault(self.aliases.get(name, name), parameter)
        return found

    def copies(self) -> dict[str, RankGroup]:
        """Returns the ranks with a copy of each of this rank's tied parameters."""
        place = self.rank_group.rank
        return {
            name: RankGroup(tuple(self.rank_group.ranks[p] for p in places), places.index(place))
            for name, places in self.tied.items()
            if place in places
        }

    def sum_tied(self, gradients: Mapping[str, Tensor]) -> None:
        """Sums the gradients of tied parameters over their copies on other stages, in place.

        Every rank of the pipeline calls it once after the schedule, before gradients are averaged
        over replicas, with all its trained tied parameters.

        Args:
            gradients: gradients by name as in `tied`; zeros if a parameter has none.

        Raises:
            GulliverError: a gradient is missing.
        """
        mine = {name: p for name, p in self.named_parameters().items() if name in self.tied}
        for name in self.tied:
            if name in mine and mine[name].requires_grad and name not in gradients:
                raise GulliverError(f"the gradient of tied parameter {name!r} is missing")
        for name, places in self.tied.items():
            if name in gradients and name in mine:
                _sum(gradients[name], places, self.rank_group)

    def share_tied(self) -> None:
        """Broadcasts tied parameters from the first stage that has them."""
        mine = self.named_parameters()
        with torch.no_grad():
            for name, places in self.tied.items():
                if name not in mine or mine[name].is_meta:
                    continue
                value = mine[name].detach().contiguous()
                _send_first(value, places, self.rank_group)
                mine[name].copy_(value)


def make_stage(
    model: nn.Module,
    stack: Stack,
    cut: Cut,
    rank_group: RankGroup,
    numbers: Sequence[Sequence[int]],
) -> Stage:
    """Turns a full model into one rank's stage, in place.

    Args:
        model: full model, the same on all ranks of the pipeline; its parameters may be on meta.
        stack: blocks of the model.
        cut: assignment of the blocks to stages.
        rank_group: rank group of the pipeline.
        numbers: indices of the stages on each rank.

    Returns:
        The stage.

    Raises:
        GulliverError: the model skips blocks at random, or already uses activation checkpointing.
    """
    check_stages(model, stack)
    stage_forward = StageForward(stack, cut.bounds)
    kept = [_kept(model, stack, cut, held) for held in numbers]
    aliases, tied = _tied(model, stack, kept)
    mine = kept[rank_group.rank]
    _replace(model, stack, stage_forward, mine)
    held = tuple(tuple(n) for n in numbers)
    return Stage(model, stack, cut, rank_group, held, stage_forward, tied, aliases)


def checkpoint_blocks(stage: Stage, paths: Collection[str] | None = None) -> None:
    blocks = enumerate(stage.stack.blocks)
    stage.stage_forward.recomputed = {n for n, path in blocks if paths is None or path in paths}


def check_stages(model: nn.Module, stack: Stack) -> None:
    for path, module in model.named_modules():
        if getattr(module, "layerdrop", 0.0) and model.training:
            raise GulliverError(
                f"{path!r} skips blocks at random (layerdrop {module.layerdrop}), which pipelines "
                "do not support: set the configuration's layerdrop to 0"
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise GulliverError(
                f"{path!r} already recomputes its activations: call "
                "model.gradient_checkpointing_disable() and pass checkpoint_activations=True "
                "(without a plugin, call checkpoint_blocks(stage))"
            )


def _kept(model: nn.Module, stack: Stack, cut: Cut, numbers: Sequence[int]) -> frozenset[str]:
    blocks = {b for n in numbers for b in range(cut.bounds[n], cut.bounds[n + 1])}
    kept = {stack.blocks[b] for b in blocks}
    kept |= {u.path for u in units_of(model, stack) if u.home is None or u.home in blocks}
    for first, row in _rows(stack):
        if stack.first_only is not None and blocks & set(row) and first not in blocks:
            kept.add(f"{stack.blocks[first]}.{stack.first_only}")
    return frozenset(kept)


def names_held(
    model: nn.Module, stack: Stack, cut: Cut, numbers: Sequence[Sequence[int]], place: int
) -> dict[str, nn.Parameter]:
    known = dict(model.named_parameters())
    found = uses_held(model, stack, cut, numbers, place).values()
    return {name: known[name] for name in found}


def uses_held(
    model: nn.Module, stack: Stack, cut: Cut, numbers: Sequence[Sequence[int]], place: int
) -> dict[str, str]:
    """Maps every name of each parameter on a rank to the parameter's first name."""
    paths, roots = _kept(model, stack, cut, numbers[place]), set(around(model, stack))
    first: dict[nn.Parameter, str] = {}
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        own_name = first.setdefault(parameter, name)
        if name.rpartition(".")[0] in roots or _holds(paths, name):
            found[name] = own_name
    return found


def _rows(stack: Stack) -> list[tuple[int, range]]:
    borders = [0, stack.border, len(stack.blocks)] if stack.border else [0, len(stack.blocks)]
    return [(a, range(a, b)) for a, b in itertools.pairwise(borders)]


def _tied(
    model: nn.Module, stack: Stack, kept: Sequence[frozenset[str]]
) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    first: dict[nn.Parameter, str] = {}
    aliases: dict[str, str] = {}
    places: dict[str, set[int]] = {}
    roots = set(around(model, stack))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        own_name = aliases[name] = first.setdefault(parameter, name)
        for place, paths in enumerate(kept):
            if name.rpartition(".")[0] in roots or _holds(paths, name):
                places.setdefault(own_name, set()).add(place)
    return aliases, {n: tuple(sorted(p)) for n, p in places.items() if len(p) > 1}


def _holds(paths: frozenset[str], name: str) -> bool:
    path = name.rpartition(".")[0]
    while path:
        if path in paths:
            return True
        path = path.rpartition(".")[0]
    return False


def _replace(
    model: nn.Module, stack: Stack, stage_forward: StageForward, kept: frozenset[str]
) -> None:
    paths = dict(model.named_modules())
    for number, path in enumerate(stack.blocks):
        if path in kept:
            own(stage_forward, number, paths[path])
        else:
            placeholder = PlaceholderBlock(stage_forward, number, paths[path])
            first_only = f"{path}.{stack.first_only}"
            if first_only in kept:
                _graft(placeholder, stack.first_only or "", paths[first_only])
            model.set_submodule(path, placeholder)
    for unit in units_of(model, stack):
        if unit.path not in kept:
            model.set_submodule(unit.path, Placeholder(stage_forward, unit.path, paths[unit.path]))
    if stack.memory is not None:
        own_memory(stage_forward, paths[stack.memory])
    if stack.first_only is not None:
        for first, row in _rows(stack):
            _share_position_bias(
                model, stack, first, [b for b in row if stack.blocks[b] in kept and b != first]
            )


def _graft(placeholder: nn.Module, path: str, module: nn.Module) -> None:
    # Not by register_module, because a placeholder seems to have the modules that it replaces.
    inner = placeholder
    *names, last = path.split(".")
    for name in names:
        inner = inner._modules.setdefault(name, nn.Module()) or inner
    inner._modules[last] = module


class _Lent:
    def __init__(self, model: nn.Module, path: str) -> None:
        self._model, self._path = model, path

    def __call__(self, *args: object) -> Tensor:
        return self._model.get_submodule(self._path)(*args)

    def __getattr__(self, name: str) -> object:
        return getattr(self._model.get_submodule(self._path), name)


def _share_position_bias(model: nn.Module, stack: Stack, first: int, blocks: Sequence[int]) -> None:
    """Gives all blocks access to the first block's position bias module."""
    # Blocks compute it only if they receive none, like the first block of a stage.
    inner, _, name = (stack.first_only or "").rpartition(".")
    lent = _Lent(model, f"{stack.blocks[first]}.{stack.first_only}")
    for block in blocks:
        module = model.get_submodule(f"{stack.blocks[block]}.{inner}")
        vars(module)[name] = lent
        vars(module)[f"has_{name}"] = True


def _sum(value: Tensor, places: Sequence[int], rank_group: RankGroup) -> None:
    # Point to point, because a process group for each set of stages that share a weight would have
    # to be created by all ranks.
    if len(places) == rank_group.size:
        all_reduce(value, "sum", rank_group.process_group)
        return
    own = value.contiguous()
    others = [place for place in places if place != rank_group.rank]
    found = {place: torch.empty_like(own) for place in others}
    found[rank_group.rank] = own.clone()
    incoming = [(rank_group.ranks[p], found[p]) for p in others]
    post(
        incoming,
        [(rank_group.ranks[p], found[rank_group.rank]) for p in others],
        rank_group.process_group,
        0,
    ).wait()
    total = found[places[0]]
    for place in places[1:]:
        total = total + found[place]
    value.copy_(total)


def _send_first(value: Tensor, places: Sequence[int], rank_group: RankGroup) -> None:
    if rank_group.rank == places[0]:
        post(
            [], [(rank_group.ranks[p], value) for p in places[1:]], rank_group.process_group, 0
        ).wait()
    else:
        post([(rank_group.ranks[places[0]], value)], [], rank_group.process_group, 0).wait()
