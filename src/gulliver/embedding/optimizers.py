"""Defines which optimizers work with a cached table, and the state they keep per row.

The cache holds only the rows that a step uses, so the optimizer must update exactly these rows,
each from its own gradient and state. The state of a row moves with the row, and training matches
that of a full table. `ROW_OPTIMIZERS` lists the state of each class, and the options that break
this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from gulliver.embedding.lookup import RowGradient
from gulliver.embedding.records import Column, RecordStore, RowStorage
from gulliver.errors import GulliverError
from gulliver.options import positive_number

Group = Mapping[str, Any]


# [Note: sparse semantics] ``torch.optim.SGD`` without momentum and decay, and
# ``torch.optim.Adagrad`` without decay, compute the same updates for dense and sparse gradients.
# ``torch.optim.SparseAdam`` is Adam that updates the moments of a row only in steps that have a
# gradient for it, while its bias correction counts all steps. A cached table computes this variant,
# not dense Adam.
class RowWiseAdagrad(Optimizer):
    """Row-wise Adagrad: keeps one number per row, the accumulated mean square of its gradients.

    ``sum += mean(g * g); w -= lr / (1 + (step - 1) * lr_decay) * g / (sqrt(sum) + eps)``, the exact
    row-wise Adagrad of recommender systems (Mudigere et al., arXiv 2104.05158). Gradients must be
    sparse.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        lr_decay: decay of the learning rate.
        initial_accumulator_value: initial value of the sums.
        eps: term added to the square root.

    Raises:
        GulliverError: the learning rate or eps is not positive.
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
        """Updates the rows that have a gradient.

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
            raise GulliverError(
                "RowWiseAdagrad needs sparse gradients; create the table with sparse=True"
            )
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
    """Optimizer state that is kept per row.

    Attributes:
        initial: initial value of its elements.
        whole: whether the state has the shape of the row; otherwise it is a single number.
    """

    initial: float = 0.0
    whole: bool = True


@dataclass(frozen=True)
class RowOptimizer:
    """Per-row state of an optimizer class."""

    # States by name, given the options of a parameter group.
    states: Callable[[Group], dict[str, RowState]]
    # Options that affect other rows or need more than the row, with their allowed values.
    forbidden: tuple[str, ...] = ()
    # Whether the optimizer sums the gradients of a row before using them.
    coalesced: bool = True
    # State that it creates in its first step, other than per-row state.
    start: Mapping[str, Any] | None = None

    def check(self, kind: str, group: Group) -> None:
        """Rejects options that update rows outside the batch."""
        for name in self.forbidden:
            if group.get(name):
                raise GulliverError(
                    f"{kind}({name}={group[name]}) updates rows that are not in the batch, which "
                    f"a cached table does not hold; omit {name}"
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
"""Optimizers that work with a cached table."""


def row_optimizer(optimizer: Optimizer, states: Mapping[str, RowState] | None) -> RowOptimizer:
    if states is not None:
        return RowOptimizer(lambda group: dict(states))
    found = ROW_OPTIMIZERS.get(type(optimizer))
    if found is None:
        known = ", ".join(kind.__name__ for kind in ROW_OPTIMIZERS)
        raise GulliverError(
            f"{type(optimizer).__name__} is not known to be row-wise; use one of {known}, or list "
            "its per-row states in row_states= if the update of a row depends on that row alone"
        )
    return found


# An optimizer whose per-row state moves with the row.
#
# `AttachedOptimizer` hooks into the optimizer's step: before it, gradients are put into row order;
# after it, rows may be evicted. In the optimizer's `state_dict` the states of the slots are
# replaced by those of all rows, so that it matches that of an optimizer over the whole table.
# Loading does the reverse.


class AttachedOptimizer:
    """An optimizer with the store of its rows, and hooks that move state between them."""

    def __init__(
        self,
        store: RecordStore,
        gradient: RowGradient,
        optimizer: Optimizer,
        row_states: Mapping[str, RowState] | None,
        storage: RowStorage,
        stable: bool = False,
    ) -> None:
        self._store, self.gradient, self._optimizer = store, gradient, optimizer
        self._stable = stable
        self._kind = row_optimizer(optimizer, row_states)
        self._states = self._kind.states(self._group())
        self._check()
        self._make_columns(storage)
        store.use_states(self._on_device)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_post_hook(self._write_state)
        optimizer.register_load_state_dict_pre_hook(self._read_state)

    def first_rows(self, count: int) -> dict[str, Tensor]:
        return {name: self._filled(state, count) for name, state in self._states.items()}

    def _group(self) -> dict[str, Any]:
        for group in self._optimizer.param_groups:
            if any(parameter is self._store.weight for parameter in group["params"]):
                return group
        raise GulliverError(
            "the optimizer does not contain the table's weight; build it from table.parameters()"
        )

    def _check(self) -> None:
        self._kind.check(type(self._optimizer).__name__, self._group())

    def _make_columns(self, storage: RowStorage) -> None:
        """Allocates the states of all rows on the host, and of the slots on the device."""
        store, weight = self._store, self._store.weight
        for name, state in self._states.items():
            rows = self._filled(state, 0)
            values = storage.zeros((store.rows, *rows.shape[1:]), rows.dtype)
            if state.initial:
                values.fill_(state.initial)
            store.columns[name] = Column(storage, values)
        if not self._states:
            return
        held = self._optimizer.state[weight]
        if not held and self._kind.start is not None:
            held.update(self._kind.start)
        for name, state in self._states.items():
            if name not in held:
                held[name] = self._filled(state, len(weight)).to(weight.device)

    def _filled(self, state: RowState, count: int) -> Tensor:
        weight = self._store.weight
        width = weight.shape[1] if state.whole else 1
        return torch.full((count, width), state.initial, dtype=weight.dtype)

    def _on_device(self) -> dict[str, Tensor]:
        held = self._optimizer.state.get(self._store.weight, {})
        return {name: held[name] for name in self._states}

    # Steps

    @property
    def steps(self) -> float | None:
        """Number of steps counted by the optimizer for these rows; None if it does not count."""
        found = self._optimizer.state.get(self._store.weight, {}).get("step")
        return None if found is None else float(found)

    @steps.setter
    def steps(self, steps: float) -> None:
        held = self._optimizer.state.get(self._store.weight, {})
        found = held.get("step")
        if isinstance(found, Tensor):
            found.fill_(steps)
        elif found is not None:
            held["step"] = type(found)(steps)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        weight = self._store.weight
        if any(given is not None for given in args[1:]) or kwargs.get("closure") is not None:
            raise GulliverError(
                "a cached table does not support closures; call backward before step(), so that "
                "the rows in use are known"
            )
        self._check()
        gradient = weight.grad
        if gradient is None:
            return
        if not gradient.is_sparse:
            raise GulliverError(
                "the table's gradient is dense; only access the rows through forward"
            )
        if gradient is self.gradient.applied:
            raise GulliverError(
                "the table still has the gradient of the last step, whose slots now hold other "
                "rows; call optimizer.zero_grad() before backward"
            )
        if self._kind.coalesced:
            weight.grad = self._by_row(gradient)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.gradient.applied = self._store.weight.grad
        self._store.finish_lookups()

    def _by_row(self, gradient: Tensor) -> Tensor:
        """Sums a gradient as if it were indexed by row (`lookup.py`, [Note: order of sums])."""
        store = self._store
        shape = (store.rows, gradient.shape[1])
        rows = store.rows_in(gradient._indices()[0])[None]
        whole = torch.sparse_coo_tensor(rows, gradient._values(), shape, check_invariants=False)
        whole = _in_order(whole) if self._stable else whole.coalesce()
        # Ordered by row, not by slot: "coalesced" only has to mean distinct here.
        return torch.sparse_coo_tensor(
            store.slots_in_use(whole._indices()[0])[None],
            whole._values(),
            gradient.shape,
            is_coalesced=True,
            check_invariants=False,
        )

    # States of all rows

    def _number(self, groups: Any) -> int:
        """Returns the index of the weight in an optimizer state dict."""
        ours = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        numbers = chain.from_iterable(group["params"] for group in groups)
        return next(n for n, p in zip(numbers, ours, strict=True) if p is self._store.weight)

    def _write_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        number = self._number(state_dict["param_groups"])
        held = state_dict["state"].get(number)
        if held is None:
            return state_dict
        self._store.flush()
        whole = {name: self._store.columns[name].whole() for name in self._states}
        states = {**state_dict["state"], number: {**held, **whole}}
        return {**state_dict, "state": states}

    def _read_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        groups = state_dict["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in optimizer.param_groups]:
            return state_dict  # torch raises its own error
        number = self._number(groups)
        held = state_dict["state"].get(number, {})
        for name, state in self._states.items():
            shape = (self._store.rows, *self._filled(state, 0).shape[1:])
            if held and (name not in held or tuple(held[name].shape) != shape):
                found = tuple(held[name].shape) if name in held else "missing"
                raise GulliverError(
                    f"state {name!r} of the table must have shape {shape}, not {found}"
                )
        self._store.flush()
        for name, state in self._states.items():
            shape = (self._store.rows, *self._filled(state, 0).shape[1:])
            values = held[name].detach().cpu() if held else torch.full(shape, state.initial)
            self._store.columns[name].fill(values)
        self._store.forget()
        kept = self._on_device()
        fresh = {**(held or self._kind.start or {}), **kept}
        if not held and "step" in self._optimizer.state.get(self._store.weight, {}):
            fresh.setdefault("step", torch.tensor(0.0))
        return {**state_dict, "state": {**state_dict["state"], number: fresh}}


def _in_order(gradient: Tensor) -> Tensor:
    if not gradient._nnz():
        return gradient.coalesce()
    rows, order = gradient._indices()[0].sort(stable=True)
    distinct, counts = rows.unique_consecutive(return_counts=True)
    values = torch.segment_reduce(gradient._values()[order], "sum", lengths=counts, axis=0)
    return torch.sparse_coo_tensor(
        distinct[None], values, gradient.shape, is_coalesced=True, check_invariants=False
    )
