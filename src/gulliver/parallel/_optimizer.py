"""What every boosted optimizer offers, and the plain one for models that are not sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError

State = dict[str, dict[str, Tensor]]
"""Optimizer state by parameter name and kind, whole tensors."""


class BoostedOptimizer(torch.optim.Optimizer):
    """An optimizer around the user's, whose groups, defaults and schedulers it shares.

    Args:
        inner: the user's optimizer.
        names: the name of every parameter that it steps.
    """

    def __init__(self, inner: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> None:
        # Deliberately without super().__init__: groups and state are the inner optimizer's.
        self.inner, self.names = inner, dict(names)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: groups are fixed when the model is boosted."""
        raise GulliverError(
            "parameters cannot be added after boost: add them to the optimizer before"
        )

    def state_dict(self) -> dict[str, Any]:
        """Refused: what one rank holds is not the whole."""
        raise GulliverError("save a boosted optimizer with booster.save_optimizer(optimizer, path)")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused: what one rank holds is not the whole."""
        raise GulliverError("load a boosted optimizer with booster.load_optimizer(optimizer, path)")

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of the inner optimizer."""
        if closure is not None:
            raise GulliverError("closures are not supported: call backward first, then step()")
        self._step()

    def _step(self) -> None:
        self.inner.step()

    def backward(self, loss: Tensor) -> None:
        """Backward of the loss, gradients averaged over the ranks."""
        loss.backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients inside are accumulated and travel with the next backward outside."""
        yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients."""
        self.inner.zero_grad(set_to_none)

    def clip_grad_by_norm(self, max_norm: float) -> Tensor:
        """Scales the gradients so that their global norm is at most `max_norm`.

        Returns:
            The norm before, as of `torch.nn.utils.clip_grad_norm_`; nan or inf show as they are.
        """
        return nn.utils.clip_grad_norm_(list(self.names), max_norm)

    def clip_grad_by_value(self, limit: float) -> None:
        """Cuts every gradient element to [-limit, limit]."""
        nn.utils.clip_grad_value_(list(self.names), limit)

    def full_gradients(self) -> dict[str, Tensor]:
        """Whole averaged gradients by name, of the parameters that have one; for inspection."""
        return {name: p.grad for p, name in self.names.items() if p.grad is not None}

    def export_state(self) -> State:
        """The whole optimizer state by parameter name; every rank calls it, all get it."""
        return {
            self.names[p]: {k: v for k, v in state.items() if isinstance(v, Tensor)}
            for p, state in self.inner.state.items()
        }

    def import_state(self, state: State) -> None:
        """Takes over what `export_state` gave, at any world size."""
        self.inner.state.clear()
        for parameter, name in self.names.items():
            if name in state:
                self.inner.state[parameter] = {
                    key: _placed(value, parameter) for key, value in state[name].items()
                }

    def group_names(self) -> list[list[str]]:
        """Names of the parameters of each group."""
        return [[self.names[p] for p in group["params"]] for group in self.inner.param_groups]


def _placed(value: Tensor, parameter: Tensor) -> Tensor:
    """Element-wise state goes to the parameter's device; step counters stay where they are."""
    return value.clone() if value.ndim == 0 else value.to(parameter.device).clone()


def named_trainables(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, str]:
    """The trainable parameters of an optimizer in the model's order, with their names.

    Raises:
        GulliverError: there is none; the optimizer steps one that the model does not have.
    """
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    known = {p: name for name, p in model.named_parameters()}
    strangers = [p for p in stepped if p not in known]
    if strangers:
        raise GulliverError(
            f"the optimizer steps {len(strangers)} tensors that are no parameters of the model, the "
            f"first of shape {tuple(strangers[0].shape)}: build it from model.parameters()"
        )
    trainable = {p: name for p, name in known.items() if p in stepped and p.requires_grad}
    if not trainable:
        what = "has no parameters" if not known else "has no trainable parameter in the optimizer"
        raise GulliverError(f"the model {what}: nothing to train")
    return trainable
