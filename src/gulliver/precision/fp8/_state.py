"""State of one FP8 layer: scaling recipe, histories of magnitudes, what overflowed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from gulliver.errors import GulliverError, nearest
from gulliver.precision.fp8._cast import FORWARD, GRADIENT, Scaled, encode, magnitude, scale_of

Scaling = Literal["tensorwise", "rowwise", "delayed"]
SCALINGS: tuple[str, ...] = get_args(Scaling)
Role = Literal["input", "weight", "gradient"]
COPIES = {"tensorwise": 1, "rowwise": 0, "delayed": 1}
"""FP8 copies of the weights that backward reads again; row-wise it needs other scales."""
HISTORY = 16
"""Steps that delayed scaling looks back."""
Agree = Callable[[Tensor], Any]
"""Replaces magnitudes by the largest of all ranks, in place."""
DIMS: dict[Role, tuple[str, str]] = {
    "input": ("tokens", "inputs"),
    "weight": ("outputs", "inputs"),
    "gradient": ("tokens", "outputs"),
}


# [Note: weights are cast in every forward] No FP8 copy of a weight outlives the graph that it was
# made for. Nothing tells reliably that a weight has not changed since: fused optimizers, ``p.data``
# and native kernels write without raising its version, and addresses are used again.
#
# [Note: delayed scaling] The scale of inputs and of gradients comes from the largest magnitudes of
# the last steps, so that a cast need not wait for a reduction over its own tensor. All
# micro-batches of a step have one scale, and a recomputed block the same as its first forward: the
# history moves only when the weight has been stepped, which its version says, or, for fused
# optimizers, the hook that `_watch_steps` registers. A step that neither shows leaves the history
# where it is. Before there is any, a tensor's own magnitude counts. What is larger than all that
# was seen saturates, and is counted. Checkpoints have the histories, so that a resumed run
# continues as it would have. Source: Transformer Engine's ``DelayedScaling``.
#
# [Note: dims that ranks share] Where a dim is sharded over ranks, a magnitude over that dim is the
# largest of all ranks, so that each quantises its shard as one process would. `SharedDims` says
# how, for the dims of a layer: a sum over ranks of products of such shards has the terms of one
# process.
@dataclass(frozen=True)
class Recipe:
    """Recipe by which linear layers compute in FP8."""

    # ``tensorwise``: a scale for each tensor; ``rowwise``: one for each row or column that a
    # product sums over; ``delayed``: one for each tensor, from the steps before.
    scaling: str = "tensorwise"
    emulate: bool = False  # Compute the same numerics without FP8 units: slower than without FP8
    history: int = HISTORY  # Number of steps that delayed scaling looks back

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise GulliverError(
                f"FP8 scaling {self.scaling!r} is not known: {nearest(str(self.scaling), SCALINGS)}"
            )

    def __str__(self) -> str:
        return f"{self.scaling}{', emulated' if self.emulate else ''}"


@dataclass(frozen=True)
class SharedDims:
    """Reductions over the ranks that share a dim of a layer; None where each has all of it."""

    tokens: Agree | None = None
    inputs: Agree | None = None
    outputs: Agree | None = None

    def over(self, role: Role, dim: int | None) -> list[Agree]:
        """Returns the reductions of a magnitude over one dim of a tensor, or over both."""
        names = DIMS[role] if dim is None else DIMS[role][dim : dim + 1]
        found = (getattr(self, name) for name in names)
        return [agree for agree in found if agree is not None]

    @property
    def any(self) -> bool:
        """Whether ranks share a dim."""
        return any((self.tokens, self.inputs, self.outputs))


NOT_SHARED = SharedDims()


@dataclass
class MagnitudeHistory:
    """Largest magnitudes of the last steps, and of the one that runs."""

    length: int
    past: list[Tensor] = field(default_factory=list)
    now: Tensor | None = None

    def step(self) -> None:
        """Begins a step."""
        if self.now is not None:
            self.past, self.now = [*self.past, self.now][-self.length :], None

    def note(self, largest: Tensor) -> None:
        """Records a magnitude, unless it is not finite."""
        seen = torch.where(largest.isfinite(), largest, 0.0)
        self.now = seen if self.now is None else torch.maximum(self.now, seen)

    def leaves(self) -> dict[str, Tensor]:
        """Returns the state to save; empty before the first cast."""
        past = {"past": torch.stack(self.past)} if self.past else {}
        return past if self.now is None else {**past, "now": self.now}

    def restore(self, leaves: Mapping[str, Tensor], device: torch.device) -> None:
        """Takes up what `leaves` returned."""
        past, now = leaves.get("past"), leaves.get("now")
        self.past = [] if past is None else [*past.to(device)][-self.length :]
        self.now = None if now is None else now.to(device)

    def limit(self, largest: Tensor) -> Tensor | None:
        """Returns the magnitude to scale for; None while nothing is known."""
        if not self.past:
            return None
        known = torch.stack(self.past).amax()
        return torch.where(known > 0, known, largest)


class LayerState:
    """State that an FP8 layer keeps from call to call."""

    def __init__(
        self, recipe: Recipe, keep_weights: bool = True, shared: SharedDims = NOT_SHARED
    ) -> None:
        self.recipe, self.keep_weights, self.shared = recipe, keep_weights, shared
        self._step: tuple[weakref.ref[Tensor], int] | None = None
        self._events: dict[str, Tensor] = {}
        self._histories = {
            role: MagnitudeHistory(recipe.history) for role in ("input", "gradient") if self.delayed
        }
        if self.delayed:
            _watch_steps()
            _DELAYED.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerState:
        # Process groups cannot be copied, and a copy of the model has weights of its own.
        return LayerState(self.recipe, self.keep_weights, self.shared)

    def __reduce__(self) -> Any:
        return LayerState, (self.recipe, self.keep_weights)

    @property
    def delayed(self) -> bool:
        """Whether scales come from the steps before."""
        return self.recipe.scaling == "delayed"

    @property
    def rowwise(self) -> bool:
        """Whether rows and columns have scales of their own."""
        return self.recipe.scaling == "rowwise"

    @property
    def eager_only(self) -> bool:
        """Whether casts do what compilers cannot trace: keep histories, or send."""
        return self.delayed or self.shared.any

    def leaves(self) -> dict[str, dict[str, Tensor]]:
        """Returns the histories of delayed scaling, by what they are of."""
        found = {role: history.leaves() for role, history in self._histories.items()}
        return {role: leaves for role, leaves in found.items() if leaves}

    def restore(self, leaves: Mapping[str, Mapping[str, Tensor]], device: torch.device) -> None:
        """Takes up histories that `leaves` returned; those that are not there start empty."""
        # The next forward begins a step, as that after an optimizer's step does.
        self._step = None
        for role, history in self._histories.items():
            history.restore(leaves.get(role, {}), device)

    def begin(self, weight: Tensor) -> None:
        """Notes a forward; one with another or a stepped weight begins a step."""
        if not self.delayed or weight.is_inference():
            return
        before = self._step
        if before is None or before[0]() is not weight or before[1] != weight._version:
            self._step = weakref.ref(weight), weight._version
            for history in self._histories.values():
                history.step()

    def stepped(self, weights: set[int]) -> None:
        """Ends the step if the layer's weight is one of those with these ids."""
        if self._step is not None and id(self._step[0]()) in weights:
            self._step = None

    def cast(self, role: Role, x: Tensor, dim: int | None) -> Scaled:
        """Returns a matrix in FP8, with scales that all ranks agree on."""
        dtype, largest = GRADIENT if role == "gradient" else FORWARD, magnitude(x, dim)
        for agree in self.shared.over(role, dim):
            agree(largest)
        self._count(f"{role}s not finite", ~largest.isfinite())
        history = self._histories.get(role)
        if history is None:
            return encode(x, largest, dtype)
        limit = history.limit(largest)
        if torch.is_grad_enabled() or role == "gradient":
            history.note(largest)
        if limit is not None:
            beyond = largest * scale_of(limit, dtype) > torch.finfo(dtype).max
            self._count(f"{role}s beyond their scale", beyond & largest.isfinite())
        return encode(x, largest, dtype, limit)

    def _count(self, what: str, happened: Tensor) -> None:
        # On the device, without a look at the number: a look would wait for the device.
        seen = happened.any().long()
        before = self._events.get(what)
        self._events[what] = seen if before is None else before + seen

    def events(self) -> dict[str, int]:
        """Returns how many casts had elements that FP8 cannot take, by what they were."""
        return {what: int(count) for what, count in self._events.items() if int(count)}


_DELAYED = weakref.WeakSet[LayerState]()


@cache
def _watch_steps() -> None:
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    weights = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for state in tuple(_DELAYED):
        state.stepped(weights)


def plain_cast(role: Role, x: Tensor, dim: int | None) -> Scaled:
    """Returns a matrix in FP8 without recording anything, for compiled graphs."""
    return encode(x, magnitude(x, dim), GRADIENT if role == "gradient" else FORWARD)
