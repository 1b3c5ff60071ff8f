"""Hooks on modules of the model: where an input is entered once, and where the sequence is cut.

*Sites* are modules whose input goes into several columns, such as attention and gated MLPs: where
the sequence is sharded, `take_in_once` lets all of them share one entry. *Stacks* are lists of
blocks: `guard_stack` cuts the sequence at the entry of the first block and joins it at the exit of
the last, and says inside how long it is. A block of another pipeline stage does neither; what its
neighbours get is then a piece already.

Hooks, not subclasses: the model keeps its own classes, which its code may ask for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gulliver.comm import RankGroup
from gulliver.errors import GulliverError
from gulliver.parallel.tensor._collectives import gather, split
from gulliver.parallel.tensor._entry import Arriving, enter
from gulliver.parallel.tensor._shared import UNCUT, SharedSequence
from gulliver.parallel.tensor._table import HIDDEN


def take_in_once(site: nn.Module, shared: SharedSequence) -> None:
    """Enters a module's hidden states once for all its columns; it sees the shape of the whole."""

    def entered(value: Any) -> Any:
        if shared.inside or not isinstance(value, Tensor) or isinstance(value, Arriving):
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
    """Refuses a piece as the input of a module that is taken to work on the whole sequence."""
    # Such a module stands past gathered columns, so its gradients are not summed over the ranks.

    def before(module: nn.Module, args: Any) -> None:
        lengths = shared.lengths
        if not lengths or not args or not isinstance(args[0], Tensor) or args[0].dim() < 3:
            return
        if args[0].shape[1] == lengths[shared.rank_group.rank]:
            raise GulliverError(
                f"{path} gets a piece of the sequence inside of a module that gathers it: "
                "its gradient would be partial; use sequence_parallelism_mode=None"
            )

    module.register_forward_pre_hook(before)


def guard_stack(path: str, stack: nn.Module, shared: SharedSequence, known: bool) -> None:
    """Cuts the sequence at the first block, and joins it at the last."""
    blocks = list(stack.children())
    for number, block in enumerate(blocks):
        if not any(True for _ in block.parameters()):
            continue
        guard = _Guard(f"{path}.{number}", shared, known)
        guard.first, guard.last = number == 0, number == len(blocks) - 1
        block.register_forward_pre_hook(guard.before, with_kwargs=True)
        block.register_forward_hook(guard.after, always_call=True)


def gather_outputs(module: nn.Module, rank_group: RankGroup) -> None:
    """Gathers the hidden states in a module's outputs, such as ``output_hidden_states``."""

    def whole(value: Any) -> Any:
        if isinstance(value, Tensor):
            lengths = vars(value).get("_lengths") or UNCUT
            # What the last block joined has the lengths as well.
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
    """Refuses outputs of which each rank has only a shard."""

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        config = getattr(module, "config", None)
        for name in ("output_attentions", "output_router_logits")[: 1 + shared]:
            given = kwargs.get(name)
            if getattr(config, name, False) if given is None else given:
                raise GulliverError(
                    f"{name}=True asks for what each tensor rank has a part of, and no rank has "
                    "whole: leave it out"
                )

    model.register_forward_pre_hook(before, with_kwargs=True)


class _Guard:
    """The hooks at the entry and the exit of one block."""

    first = last = False

    def __init__(self, path: str, shared: SharedSequence, known: bool) -> None:
        self.path, self.shared, self.known = path, shared, known

    def before(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Cuts the hidden states at the first block, or finds out how they were cut."""
        name = next((n for n in HIDDEN if n in kwargs), None)
        hidden = kwargs[name] if name else args[0] if args else None
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            raise GulliverError(
                f"{self.path} does not get hidden states of shape [batch, length, width] as its "
                "first argument: its sequence cannot be cut; use sequence_parallelism_mode=None"
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
            shared.lengths = shared.deal(hidden.shape[1], torch.is_grad_enabled())
            if shared.lengths != UNCUT:
                hidden = split(hidden, 1, shared.lengths, shared.rank_group)
                vars(hidden)["_lengths"] = shared.lengths
        else:
            # None where it comes from another stage: the ranks then ask each other.
            shared.lengths = vars(hidden).get("_lengths")
            if shared.lengths is None:
                shared.lengths = shared.ask(hidden)
        return hidden

    def after(self, block: nn.Module, args: Any, output: Any) -> Any:
        """Joins the hidden states at the last block, or notes on them how they are cut."""
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
                f"{self.path} gets a differentiable tensor besides its hidden states; each rank "
                "would have the gradient of its part: use sequence_parallelism_mode=None"
            )
