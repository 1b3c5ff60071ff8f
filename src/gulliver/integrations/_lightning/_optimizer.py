"""What Lightning sees of a boosted optimizer: groups of whole parameters, steps with a closure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

from gulliver.errors import GulliverError
from gulliver.parallel import BoostedOptimizer


# [Note: whose parameters the groups have] The groups of a boosted optimizer hold the pieces that
# this rank steps. Lightning and its callbacks look there for the parameters of the model: to switch
# ``requires_grad`` off for other optimizers' parameters, for instance. So groups are shown with the
# module's own parameters; every other entry is read from, and written to, the group that is
# stepped, which learning-rate schedulers steer as well.
class SteppedOptimizer(torch.optim.Optimizer):
    """An optimizer that steps what a boosted one has sharded."""

    def __init__(self, boosted: BoostedOptimizer, members: list[list[nn.Parameter]]) -> None:
        # Deliberately without super().__init__: groups and state are the boosted optimizer's.
        self.boosted, self.members = boosted, members
        groups = zip(boosted.param_groups, members, strict=True)
        self._groups = [_Group(group, whole) for group, whole in groups]
        # Callbacks name what they log after the class, and look for the optimizer of a schedule,
        # which is the user's.
        self.__class__ = type(type(boosted.inner).__name__, (SteppedOptimizer,), {})  # type: ignore

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.boosted.inner

    def __hash__(self) -> int:
        return hash(self.boosted.inner)

    def __getattr__(self, name: str) -> Any:
        if name in ("boosted", "members", "_groups"):
            raise AttributeError(name)
        return getattr(self.boosted, name)

    @property
    def param_groups(self) -> list[Any]:  # type: ignore[override]
        """Groups with the parameters of the module."""
        return self._groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the pieces that this rank steps."""
        return self.boosted.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's."""
        return self.boosted.defaults

    def __repr__(self) -> str:
        return f"SteppedOptimizer({self.boosted!r})"

    def step(self, closure: Callable[[], Any] | None = None, **others: Any) -> Any:  # type: ignore[override]
        """Runs the closure, once, then takes a step."""
        if others:
            raise GulliverError(
                f"step takes a closure, not {', '.join(others)}: set options in param_groups"
            )
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.boosted.step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients."""
        self.boosted.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: groups are fixed when the fit begins."""
        raise GulliverError(
            "parameters cannot be added during a fit: give them all in configure_optimizers, "
            "frozen ones too"
        )

    def state_dict(self) -> dict[str, Any]:
        """Refused: each rank has a part of it; checkpoints have all."""
        raise GulliverError(
            "the optimizer's state lies with several ranks: trainer.save_checkpoint(path) saves it"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused: each rank has a part of it; checkpoints have all."""
        raise GulliverError(
            "the optimizer's state lies with several ranks: trainer.fit(ckpt_path=path) loads it"
        )

    def whole_state(self, keep: bool) -> dict[str, Any]:
        """The state as torch's optimizers have it; every rank calls it, those that `keep` get it.

        Args:
            keep: whether this rank wants the result; others get an empty one.
        """
        state = self.boosted.export_state(keep)
        if not keep:
            return {}
        return torch_state(
            state,
            [dict(group, params=None) for group in self.boosted.param_groups],
            [[self.boosted.names.get(p) for p in members] for members in self.members],
        )


def torch_state(
    state: dict[str, dict[str, Any]],
    groups: list[dict[str, Any]],
    names: list[list[str | None]],
) -> dict[str, Any]:
    """State by name as torch numbers it."""
    numbered, found, number = list[dict[str, Any]](), dict[int, Any](), 0
    for group, members in zip(groups, names, strict=True):
        numbered.append({**group, "params": list(range(number, number + len(members)))})
        for name in members:
            if name in state:
                found[number] = state[name]
            number += 1
    return {"state": found, "param_groups": numbered}


class _Group(MutableMapping[str, Any]):
    """A group of a boosted optimizer, with the parameters of the module."""

    def __init__(self, group: dict[str, Any], members: list[nn.Parameter]) -> None:
        self._group, self._members = group, members

    def __getitem__(self, key: str) -> Any:
        return self._members if key == "params" else self._group[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            raise GulliverError("parameters of a group are fixed when the fit begins")
        self._group[key] = value

    def __delitem__(self, key: str) -> None:
        del self._group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)

    def __repr__(self) -> str:
        return repr(dict(self))
