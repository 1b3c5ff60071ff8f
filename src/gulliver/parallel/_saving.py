"""What a rank saves and loads of a boosted optimizer and its model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from gulliver.comm import gather_objects
from gulliver.errors import GulliverError
from gulliver.memory import Part, region_of

if TYPE_CHECKING:
    from gulliver.parallel._optimizer import BoostedOptimizer

Leaf = Tensor | Part
State = dict[str, dict[str, Any]]
"""Optimizer state by parameter name and kind: whole tensors, and counters."""

Saved = dict[str, dict[str, Any]]
"""Optimizer state by parameter name and kind, as far as a rank has it: leaves, and counters."""

COUNTERS = frozenset({"step", "eta", "mu", "mu_product"})
"""State that torch's optimizers keep once per parameter, not per element."""


def is_counter(key: str, value: Any, parameter: Tensor) -> bool:
    """Whether an entry of the state belongs to a parameter as a whole, not to its elements."""
    if not isinstance(value, Tensor):
        return value is not None
    return value.ndim == 0 and (parameter.ndim > 0 or key in COUNTERS)


@dataclass(frozen=True)
class Counter:
    """One value of an optimizer's state that belongs to a parameter as a whole."""

    value: float | int | bool
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, value: Any) -> Self:
        """Makes it from a number, or from a tensor with one element."""
        return cls(value.item(), value.dtype) if isinstance(value, Tensor) else cls(value)

    def to_value(self, device: torch.device | None = None) -> Any:
        """Returns it as the optimizer keeps it: a number, or a tensor without dims on `device`."""
        if self.dtype is None:
            return self.value
        return torch.tensor(self.value, dtype=self.dtype, device=device)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a model's state has, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer.detach()
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def refuse_extra_state(model: nn.Module) -> None:
    """Refuses a model with state that is neither parameter nor buffer."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise GulliverError(
                f"module {name!r} has a state of its own (get_extra_state), which cannot be saved "
                "of a boosted model: keep it in buffers"
            )


def _unrounded(loaded: Any, saved: Any) -> Any:
    """What was loaded, in the dtypes in which it was saved."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(saved, Mapping):
        return {key: _unrounded(value, saved.get(key)) for key, value in loaded.items()}
    if type(loaded) in (list, tuple) and isinstance(saved, list | tuple):
        pairs = zip(loaded, saved, strict=True)
        return type(loaded)(_unrounded(value, other) for value, other in pairs)
    return loaded


class OptimizerCheckpoint:
    """Saves and loads a boosted optimizer and its model, as far as a rank has them.

    [Note: models that no rank has all of] Where a model is cut by tensors or into stages, each rank
    saves, as `Part`s, what it is responsible for, and loads all that it holds; names are merged
    over the ranks. Who cuts the model says so with `describe_model`.
    """

    def __init__(self, optimizer: BoostedOptimizer) -> None:
        self.optimizer = optimizer
        self.whole_groups: list[list[str]] | None = None
        self.given_groups: list[list[str]] | None = None
        self._responsible: Callable[[str], bool] | None = None
        self._written_elsewhere: Collection[str] = ()

    def describe_model(
        self,
        *,
        responsible: Callable[[str], bool] | None = None,
        written_elsewhere: Collection[str] | None = None,
        whole_groups: list[list[str]] | None = None,
        given_groups: list[list[str]] | None = None,
    ) -> None:
        """Says what of the whole model this rank has; what is None stays as it was.

        Args:
            responsible: says of a name in the model's state whether the ranks that this optimizer
                shards over write it: what several such groups have alike one of them writes. Slices
                (`gulliver.memory.Region`) are written without asking. For every rank, or for none.
            written_elsewhere: names that another group writes although this one has them, slices or
                not: copies of tied weights in later stages.
            whole_groups: names in each parameter group of the whole model, in its order; without
                them all ranks are asked once.
            given_groups: names of all that each group was given, frozen parameters too.
        """
        self._responsible = responsible or self._responsible
        if written_elsewhere is not None:
            self._written_elsewhere = written_elsewhere
        self.whole_groups = whole_groups or self.whole_groups
        self.given_groups = given_groups or self.given_groups

    @property
    def copy_limit(self) -> int | None:
        """Bytes of host memory that saving may take, under a memory limit; None for any number."""
        return None

    # The model.

    @property
    def has_whole_model(self) -> bool:
        """Whether the model is the same on all ranks, apart from what is sharded over them all."""
        return self._responsible is None

    def writes(self, name: str, tensor: Tensor) -> bool:
        """Whether this rank's group saves a tensor of the model's state."""
        if name in self._written_elsewhere:
            return False
        if region_of(tensor) is not None or self._responsible is None:
            return True
        return self._responsible(name)

    def model_leaves(self, model: nn.Module) -> dict[str, Leaf]:
        """The model's state as far as this rank has it, by the names of its `state_dict`."""
        refuse_extra_state(model)
        state = model.state_dict()
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise GulliverError(
                    f"{name!r} of the model is a {type(value).__name__}: only tensors can be saved"
                )
        return dict(state)

    def load_leaves(self, model: nn.Module) -> dict[str, Leaf]:
        """Returns the tensors that this rank loads: all that it holds of the model."""
        return self.model_leaves(model)

    # The optimizer's state.

    def take_state(self, state: State, others: Mapping[Any, Any], exact: Collection[str]) -> None:
        """Takes over state that was checked, where it is not spread over ranks.

        Args:
            state: whole tensors and counters, by parameter name.
            others: state of no parameter.
            exact: names of parameters whose state keeps its dtype; that of the others is turned to
                the dtype of the parameter.
        """
        trained = self.optimizer.inner.state_dict()
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        numbers = {p: number for number, p in enumerate(stepped)}
        mine = {numbers[p]: state[n] for p, n in self.optimizer.names.items() if n in state}
        trained["state"] = {**mine, **others}
        # torch's own loader places every entry where the optimizer wants it.
        self.optimizer.inner.load_state_dict(trained)
        for parameter, name in self.optimizer.names.items():
            if name in state and name in exact:
                # It also turns numbers to the parameter's dtype, which may have fewer bits.
                found = self.optimizer.inner.state[parameter]
                found.update({k: _unrounded(v, state[name].get(k)) for k, v in found.items()})

    def state_dtype(self, parameter: Tensor) -> torch.dtype:
        """Dtype of the state that belongs to a parameter."""
        return parameter.dtype

    @property
    def trainable(self) -> Mapping[nn.Parameter, str]:
        """Parameters that have state, or may have some later, with their names."""
        return self.optimizer.names

    @property
    def has_whole_state(self) -> bool:
        """Whether state of a parameter is whole where it is, of whatever shape that is."""
        return not self.optimizer.spreads_state

    def other_state(self) -> State:
        """State that is of no parameter, by what the optimizer keeps it under.

        Raises:
            GulliverError: there is some, and the state is spread over ranks.
        """
        # torch's types say that every key is a parameter; it saves and loads others, too.
        kept = dict[Any, Any](self.optimizer.inner.state)
        found = {key: value for key, value in kept.items() if not isinstance(key, Tensor)}
        if found and self.optimizer.spreads_state:
            raise GulliverError(
                f"{type(self.optimizer.inner).__name__} keeps {next(iter(found))!r} for all "
                "parameters: only state of each element can be saved here; TorchDDPPlugin saves any"
            )
        return found

    def state_leaves(self) -> Saved:
        """The optimizer's state as far as this rank has it."""
        return {
            name: {
                key: Counter.of(value) if value is None or is_counter(key, value, p) else value
                for key, value in self.optimizer.inner.state[p].items()
            }
            for p, name in self.optimizer.names.items()
            if p in self.optimizer.inner.state
        }

    def before_model_load(self) -> None:
        """Waits for all that is in flight, before the model is filled."""

    def after_model_load(self) -> None:
        """Sends what was filled to all ranks; every rank calls it."""

    # The optimizer's groups.

    def all_group_names(self) -> list[list[str]]:
        """Names of each group over all ranks; every rank calls it where models are cut."""
        if self.whole_groups is None:
            if self.has_whole_model:
                return self.group_names()
            every = gather_objects(self.group_names())
            self.whole_groups = [
                list(dict.fromkeys(name for names in found for name in names))
                for found in zip(*every, strict=True)
            ]
        return self.whole_groups

    def frozen_groups(self) -> list[list[str]]:
        """Names of what each group was given and does not train; ranks as for `all_group_names`."""
        groups = self.all_group_names()
        pairs = zip(self.given_groups or groups, groups, strict=True)
        return [[name for name in given if name not in names] for given, names in pairs]

    def take_up(self, names: Collection[str]) -> set[str]:
        """Makes room for the state of frozen parameters, where they may be unfrozen later.

        Returns:
            Names for which there will be none.
        """
        return set(names)

    def canonical_names(self, model: nn.Module) -> dict[str, str]:
        """Tied names in the model's state, each with the name that optimizer state is kept by."""
        known, names = dict(model.named_parameters(remove_duplicate=False)), self.optimizer.names
        return {n: names[p] for n, p in known.items() if names.get(p, n) != n}

    def group_names(self) -> list[list[str]]:
        """Names of the trained parameters of each group."""
        groups, names = self.optimizer.param_groups, self.optimizer.names
        return [[names[p] for p in group["params"] if p in names] for group in groups]
