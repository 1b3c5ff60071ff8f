"""Optimizers that a cached table can have, and what each keeps of a row.

A cached table holds the rows that a step touches, so an optimizer must change the rows of a batch
and no others, each by its own gradient and state: then the state of a row moves with the row, and
a run is that of the whole table. `ROW_OPTIMIZERS` says of each class what it keeps and which
options break that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from gulliver.errors import GulliverError
from gulliver.options import positive_number

Group = Mapping[str, Any]


# [Note: sparse semantics] ``torch.optim.SGD`` without momentum and decay and
# ``torch.optim.Adagrad`` without decay do the same for dense and for sparse gradients.
# ``torch.optim.SparseAdam`` is Adam whose averages of a row change in the steps that have a
# gradient for it, while bias correction counts all steps: this, not dense Adam, is what a cached
# table computes.
class RowWiseAdagrad(Optimizer):
    """Adagrad with one number of state a row: the sum of its gradients' mean squares.

    ``sum += mean(g * g); w -= lr / (1 + (step - 1) * lr_decay) * g / (sqrt(sum) + eps)``, the exact
    row-wise Adagrad of recommender systems (Mudigere et al., arXiv 2104.05158). It takes sparse
    gradients only.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        lr_decay: decay of the learning rate.
        initial_accumulator_value: first value of every sum.
        eps: what is added to the root.

    Raises:
        GulliverError: a learning rate or eps that is not positive.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        positive_number("lr", lr)
        positive_number("eps", eps)
        defaults = {"lr": lr, "lr_decay": lr_decay, "eps": eps}
        super().__init__(
            params, {**defaults, "initial_accumulator_value": initial_accumulator_value}
        )
        for group in self.param_groups:
            for parameter in group["params"]:
                value = group["initial_accumulator_value"]
                state = self.state[parameter]
                state["step"] = torch.tensor(0.0)
                state["sum"] = parameter.new_full((len(parameter), 1), value, requires_grad=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Changes the rows that have a gradient.

        Raises:
            GulliverError: a gradient is not sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: Group) -> None:
        gradient = parameter.grad
        if gradient is None or not gradient.is_sparse:
            raise GulliverError("RowWiseAdagrad takes sparse gradients: make the table sparse=True")
        state, gradient = self.state[parameter], gradient.coalesce()
        rows, values = gradient._indices()[0], gradient._values()
        state["step"] += 1
        rate = group["lr"] / (1 + (state["step"].item() - 1) * group["lr_decay"])
        sums = state["sum"].index_select(0, rows) + values.pow(2).mean(1, keepdim=True)
        state["sum"].index_copy_(0, rows, sums)
        change = values / sums.sqrt().add_(group["eps"])
        parameter.index_add_(0, rows, change, alpha=-rate)


@dataclass(frozen=True)
class RowState:
    """A state that an optimizer has for each row.

    Attributes:
        initial: first value, of all elements.
        whole: whether it is as wide as the row, rather than one number.
    """

    initial: float = 0.0
    whole: bool = True


@dataclass(frozen=True)
class RowOptimizer:
    """What a class of optimizers keeps of a row."""

    # States by name, from the options of a parameter group.
    states: Callable[[Group], dict[str, RowState]]
    # Options that change other rows, or need more than the row, with what is right.
    forbidden: tuple[str, ...] = ()
    # Whether it sums the gradients of a row before it uses them.
    coalesced: bool = True
    # State that it makes in its first step, without that of rows.
    start: Mapping[str, Any] | None = None

    def check(self, kind: str, group: Group) -> None:
        """Refuses options that change rows which are not in the batch."""
        for name in self.forbidden:
            if group.get(name):
                raise GulliverError(
                    f"{kind}({name}={group[name]}) is not row-wise: it changes rows that are not "
                    f"in the batch, which a cached table does not have; leave {name} out"
                )


def _adagrad(group: Group) -> dict[str, RowState]:
    return {"sum": RowState(group["initial_accumulator_value"])}


def _row_wise(group: Group) -> dict[str, RowState]:
    return {"sum": RowState(group["initial_accumulator_value"], whole=False)}


def _sparse_adam(group: Group) -> dict[str, RowState]:
    return {"exp_avg": RowState(), "exp_avg_sq": RowState()}


_DENSE = ("weight_decay", "fused", "differentiable")
ROW_OPTIMIZERS: dict[type[Optimizer], RowOptimizer] = {
    SGD: RowOptimizer(lambda group: {}, ("momentum", "nesterov", *_DENSE), coalesced=False),
    Adagrad: RowOptimizer(_adagrad, _DENSE),
    SparseAdam: RowOptimizer(_sparse_adam, start={"step": 0}),
    RowWiseAdagrad: RowOptimizer(_row_wise),
}
"""Optimizers that a cached table can have."""


def row_optimizer(optimizer: Optimizer, states: Mapping[str, RowState] | None) -> RowOptimizer:
    """Finds what an optimizer keeps of a row."""
    if states is not None:
        return RowOptimizer(lambda group: dict(states))
    found = ROW_OPTIMIZERS.get(type(optimizer))
    if found is None:
        known = ", ".join(kind.__name__ for kind in ROW_OPTIMIZERS)
        raise GulliverError(
            f"{type(optimizer).__name__} is not known to be row-wise: take one of {known}, or say "
            "with row_states= which states it has for each row, if a row's update depends on that "
            "row alone"
        )
    return found
