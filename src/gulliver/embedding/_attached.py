"""An optimizer whose state of a row moves with the row.

`Attached` listens to the optimizer's step: before it, gradients are put into the order of rows;
after it, rows may leave. In the optimizer's `state_dict` the states of the slots are replaced by
those of all rows, so that it is what an optimizer of the whole table would write, and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gulliver.embedding._columns import Column, RowStorage
from gulliver.embedding._lookup import RowGradient
from gulliver.embedding._optimizers import RowState, row_optimizer
from gulliver.embedding._records import RecordStore
from gulliver.errors import GulliverError


class Attached:
    """An optimizer, the store that its rows are in, and the hooks between them."""

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
        """Returns the states of new rows."""
        return {name: self._filled(state, count) for name, state in self._states.items()}

    def _group(self) -> dict[str, Any]:
        for group in self._optimizer.param_groups:
            if any(parameter is self._store.weight for parameter in group["params"]):
                return group
        raise GulliverError(
            "the optimizer does not have the table's weight: give it its parameters"
        )

    def _check(self) -> None:
        self._kind.check(type(self._optimizer).__name__, self._group())

    def _make_columns(self, storage: RowStorage) -> None:
        """Lays out the states of all rows, and on the device those of the slots."""
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
        """Steps that the optimizer counts for these rows; None where it counts none."""
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
                "a cached table takes no closure: call backward before step(), so that its rows "
                "are known"
            )
        self._check()
        gradient = weight.grad
        if gradient is None:
            return
        if not gradient.is_sparse:
            raise GulliverError(
                "the table's gradient is dense: use its rows through forward alone, so that only "
                "rows of the batch have a gradient"
            )
        if gradient is self.gradient.applied:
            raise GulliverError(
                "the table's gradient is still that of the last step, whose slots have other rows "
                "by now: call optimizer.zero_grad() before backward"
            )
        if self._kind.coalesced:
            weight.grad = self._by_row(gradient)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.gradient.applied = self._store.weight.grad
        self._store.settle()

    def _by_row(self, gradient: Tensor) -> Tensor:
        """Sums a gradient as if its indices were rows (`_lookup.py`, [Note: order of sums])."""
        store = self._store
        shape = (store.rows, gradient.shape[1])
        rows = store.rows_in(gradient._indices()[0])[None]
        whole = torch.sparse_coo_tensor(rows, gradient._values(), shape, check_invariants=False)
        whole = _in_order(whole) if self._stable else whole.coalesce()
        # In the order of rows, not of slots: distinct is all that "coalesced" has to mean here.
        return torch.sparse_coo_tensor(
            store.slots_in_use(whole._indices()[0])[None],
            whole._values(),
            gradient.shape,
            is_coalesced=True,
            check_invariants=False,
        )

    # States of all rows

    def _number(self, groups: Any) -> int:
        """Finds the number that the weight has in a state dict."""
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
            return state_dict  # torch says what is wrong
        number = self._number(groups)
        held = state_dict["state"].get(number, {})
        for name, state in self._states.items():
            shape = (self._store.rows, *self._filled(state, 0).shape[1:])
            if held and (name not in held or tuple(held[name].shape) != shape):
                found = tuple(held[name].shape) if name in held else "missing"
                raise GulliverError(f"state {name!r} of the table must be {shape}: it is {found}")
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
    """Sums the values of each row in the order in which they are given."""
    if not gradient._nnz():
        return gradient.coalesce()
    rows, order = gradient._indices()[0].sort(stable=True)
    distinct, counts = rows.unique_consecutive(return_counts=True)
    values = torch.segment_reduce(gradient._values()[order], "sum", lengths=counts, axis=0)
    return torch.sparse_coo_tensor(
        distinct[None], values, gradient.shape, is_coalesced=True, check_invariants=False
    )
