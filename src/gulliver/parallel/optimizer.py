"""Base classes of boosted optimizers and their checkpoints."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from gulliver.comm.collectives import gather_objects
from gulliver.comm.watchdog import guard, sent_bytes
from gulliver.errors import GulliverError
from gulliver.memory.parts import Part, region_of
from gulliver.memory.pending import add_writer

TIMED_STEPS = 64
COUNTED_STEPS = 3
"""Number of initial steps in which communication is counted."""


class StepsTaken:
    """Statistics of the most recent steps."""

    def __init__(self) -> None:
        self.steps = 0
        # Times at which they ended.
        self.stepped_at: deque[float] = deque(maxlen=TIMED_STEPS)
        # Seconds from the call of each step to its end.
        self.updated_in: deque[float] = deque(maxlen=TIMED_STEPS)
        # Bytes that this process had sent by then.
        self.sent_at: deque[int] = deque(maxlen=TIMED_STEPS)
        # Whether the step after each of them has additional traffic.
        self.extra_after: deque[bool] = deque(maxlen=TIMED_STEPS)
        # Maximum bytes of gradients at the end of the first steps.
        self.most_gradients = 0
        # Callbacks that return whether the next step has additional traffic, to tune chunks or to
        # compare packed gradients.
        self.more: list[Callable[[], bool]] = []

    def note(self, begun: float, gradient_bytes: Callable[[], int]) -> None:
        if len(self.stepped_at) < COUNTED_STEPS:
            # Only now are all gradients reduced.
            self.most_gradients = max(self.most_gradients, gradient_bytes())
        self.steps += 1
        self.stepped_at.append(time.perf_counter())
        self.updated_in.append(self.stepped_at[-1] - begun)
        self.sent_at.append(sent_bytes())
        self.extra_after.append(any(more() for more in self.more))

    def sent(self) -> tuple[list[int], bool]:
        """Returns bytes sent per step, and whether steps with extra traffic are excluded."""
        # Steps with additional traffic are excluded, unless there are no others.
        every = [b - a for a, b in itertools.pairwise(self.sent_at)]
        plain = [sent for sent, more in zip(every, self.extra_after, strict=False) if not more]
        return plain or every, bool(plain)


# The part of a boosted optimizer and its model that a rank saves and loads.


Leaf = Tensor | Part
State = dict[str, dict[str, Any]]
"""Optimizer state by parameter name and kind: full tensors and counters."""

Saved = dict[str, dict[str, Any]]
"""A rank's part of the optimizer state, by parameter name and kind: leaves and counters."""

COUNTERS = frozenset({"step", "eta", "mu", "mu_product"})
"""State keys with one value per parameter instead of one per element."""


def is_counter(key: str, value: Any, parameter: Tensor) -> bool:
    if not isinstance(value, Tensor):
        return value is not None
    return value.ndim == 0 and (parameter.ndim > 0 or key in COUNTERS)


@dataclass(frozen=True)
class Counter:
    """A state value with one number per parameter."""

    value: float | int | bool
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, value: Any) -> Self:
        return cls(value.item(), value.dtype) if isinstance(value, Tensor) else cls(value)

    def to_value(self, device: torch.device | None = None) -> Any:
        if self.dtype is None:
            return self.value
        return torch.tensor(self.value, dtype=self.dtype, device=device)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{prefix}.{name}" if prefix else name: buffer.detach()
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def refuse_extra_state(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise GulliverError(
                f"module {name!r} has extra state (get_extra_state), which boosted models cannot "
                "save: keep it in buffers"
            )


def _unrounded(loaded: Any, saved: Any) -> Any:
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(saved, Mapping):
        return {key: _unrounded(value, saved.get(key)) for key, value in loaded.items()}
    if type(loaded) in (list, tuple) and isinstance(saved, list | tuple):
        pairs = zip(loaded, saved, strict=True)
        return type(loaded)(_unrounded(value, other) for value, other in pairs)
    return loaded


class OptimizerCheckpoint:
    """Saves and loads this rank's part of a boosted optimizer and its model.

    With tensor or pipeline parallelism, each rank saves the tensors that it is responsible for, as
    `Part`s, and loads all of its tensors. Code that shards the model calls `describe_model`.
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
        """Describes this rank's part of the full model; None keeps a setting.

        Args:
            responsible: function that says whether this optimizer's process group writes a tensor,
                by name; of several groups with equal tensors, one writes them. Slices
                (`gulliver.memory.parts.Region`) are always written. Set on all ranks or none.
            written_elsewhere: names of tensors that another group writes, slices included, such as
                copies of tied weights in later stages.
            whole_groups: names in each parameter group of the full model, in its order; by default
                gathered once from all ranks.
            given_groups: names of all parameters in each group, including frozen ones.
        """
        self._responsible = responsible or self._responsible
        if written_elsewhere is not None:
            self._written_elsewhere = written_elsewhere
        self.whole_groups = whole_groups or self.whole_groups
        self.given_groups = given_groups or self.given_groups

    @property
    def copy_limit(self) -> int | None:
        return None

    # The model.

    @property
    def has_whole_model(self) -> bool:
        """Whether the model is complete on every rank, apart from ZeRO sharding."""
        return self._responsible is None

    def writes(self, name: str, tensor: Tensor) -> bool:
        """Whether this rank's group saves a tensor of the model's state."""
        if name in self._written_elsewhere:
            return False
        if region_of(tensor) is not None or self._responsible is None:
            return True
        return self._responsible(name)

    def model_leaves(self, model: nn.Module) -> dict[str, Leaf]:
        """Returns this rank's part of the model's state, by `state_dict` name."""
        refuse_extra_state(model)
        state = model.state_dict()
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise GulliverError(
                    f"{name!r} of the model is a {type(value).__name__}: only tensors can be saved"
                )
        return dict(state)

    def load_leaves(self, model: nn.Module) -> dict[str, Leaf]:
        return self.model_leaves(model)

    # The optimizer's state.

    def adopt_state(self, state: State, others: Mapping[Any, Any], exact: Collection[str]) -> None:
        """Loads validated state into an optimizer that is not sharded."""
        trained = self.optimizer.inner.state_dict()
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        numbers = {p: number for number, p in enumerate(stepped)}
        mine = {numbers[p]: state[n] for p, n in self.optimizer.names.items() if n in state}
        trained["state"] = {**mine, **others}
        # torch's own loader moves every entry to the device that the optimizer expects.
        self.optimizer.inner.load_state_dict(trained)
        for parameter, name in self.optimizer.names.items():
            if name in state and name in exact:
                # It also converts values to the parameter's dtype, which may have fewer bits.
                found = self.optimizer.inner.state[parameter]
                found.update({k: _unrounded(v, state[name].get(k)) for k, v in found.items()})

    def state_dtype(self, parameter: Tensor) -> torch.dtype:
        return parameter.dtype

    @property
    def trainable(self) -> Mapping[nn.Parameter, str]:
        return self.optimizer.names

    @property
    def has_whole_state(self) -> bool:
        """Whether a parameter's state is never split between ranks."""
        return not self.optimizer.spreads_state

    def other_state(self) -> State:
        """Returns state that is not per parameter, by the optimizer's key."""
        # In torch's types every key is a parameter, but torch also saves and loads other keys.
        kept = dict[Any, Any](self.optimizer.inner.state)
        found = {key: value for key, value in kept.items() if not isinstance(key, Tensor)}
        if found and self.optimizer.spreads_state:
            raise GulliverError(
                f"{type(self.optimizer.inner).__name__} keeps {next(iter(found))!r} for all "
                "parameters together, but only per-element state can be saved; use "
                "TorchDDPPlugin, which can save any state"
            )
        return found

    def state_leaves(self) -> Saved:
        return {
            name: {
                key: Counter.of(value) if value is None or is_counter(key, value, p) else value
                for key, value in self.optimizer.inner.state[p].items()
            }
            for p, name in self.optimizer.names.items()
            if p in self.optimizer.inner.state
        }

    def before_model_load(self) -> None:
        """Waits for pending work that uses the parameters."""

    def after_model_load(self) -> None:
        """Updates parameters on all ranks after loading (collective)."""

    # The optimizer's groups.

    def all_group_names(self) -> list[list[str]]:
        """Returns the names in each group over all ranks (collective if the model is sharded)."""
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
        groups = self.all_group_names()
        pairs = zip(self.given_groups or groups, groups, strict=True)
        return [[name for name in given if name not in names] for given, names in pairs]

    def take_up(self, names: Collection[str]) -> set[str]:
        """Allocates state of frozen parameters; returns the names without state."""
        return set(names)

    def canonical_names(self, model: nn.Module) -> dict[str, str]:
        known, names = dict(model.named_parameters(remove_duplicate=False)), self.optimizer.names
        return {n: names[p] for n, p in known.items() if names.get(p, n) != n}

    def group_names(self) -> list[list[str]]:
        groups, names = self.optimizer.param_groups, self.optimizer.names
        return [[names[p] for p in group["params"] if p in names] for group in groups]


# State that optimizers such as Adagrad create before their first step.


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has stepped; state alone is no proof, as Adagrad creates it early."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values() if state)


def move_state_to_replacements(
    optimizer: torch.optim.Optimizer, exchanged: Mapping[nn.Parameter, nn.Parameter | None]
) -> None:
    """Moves state that was created before the first step to replaced parameters."""
    # A constant per parameter, so a shard gets it in its own shape.
    for old, new in exchanged.items():
        state = optimizer.state.pop(old, None)
        if state and new is not None:
            optimizer.state[new] = {
                key: torch.full_like(new.detach(), value.flatten()[0].item())
                if isinstance(value, Tensor) and value.ndim > 0
                else value
                for key, value in state.items()
            }


# The interface of boosted optimizers, and the implementation for models that are not sharded.


class BoostedOptimizer(torch.optim.Optimizer):
    """Wraps the user's optimizer and shares its groups, defaults and state.

    Attributes:
        checkpoint: object that saves and loads this optimizer and its model.
        feedback: object with the error feedback of compressed gradients, if not this optimizer.
        names: names by parameter; a parameter tied across stages has the same name on all of them.
        taken: statistics of the most recent steps.
        spreads_state: whether state is sharded by element; otherwise every rank has all of it.

    Args:
        inner: the user's optimizer.
        names: names of the trained parameters.
    """

    checkpoint: OptimizerCheckpoint
    feedback: Any = None
    spreads_state = False
    pipeline: Any = None
    """The pipeline that runs batches through stages; None without one."""
    gives_back = False
    """Whether gathered full parameters are released after use."""
    unfinished = ""
    """Reason why a step is impossible now; empty if it is possible."""

    def __init__(self, inner: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> None:
        self.inner, self.names = inner, dict(names)
        add_writer(inner)
        stepped = (p for group in inner.param_groups for p in group["params"])
        self._frozen = [p for p in stepped if p not in self.names]
        self._homes: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._tree: list[tuple[nn.Module, dict[str, Any], int]] = []
        self.taken = StepsTaken()
        self.checkpoint = OptimizerCheckpoint(self)

    def __getattr__(self, name: str) -> Any:
        # Hooks and other attributes that torch expects are those of the inner optimizer.
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # torch would set up the copy before it is filled, and thereby wrap `step` of the class.
        raise GulliverError(
            "a boosted optimizer cannot be copied or pickled: save it with "
            "booster.save_optimizer(optimizer, path), or booster.save with its model"
        )

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
        """Rejects new groups, which are fixed when the model is boosted."""
        raise GulliverError(
            "parameters cannot be added after boost; add them to the optimizer before boost"
        )

    def join_copies(self) -> None:
        """Sums gradients of weights that several ranks of a model share."""

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
            raise GulliverError(
                "this is not the state of an optimizer: pass the result of its state_dict()"
            )
        self.inner.load_state_dict(state_dict)

    def watch(self, model: nn.Module) -> None:
        """Records the storages of trained parameters, to detect replaced parameters."""
        self._homes = [
            (module, key, parameter)
            for module in model.modules()
            for key, parameter in module.named_parameters(recurse=False)
            if parameter in self.names
        ]
        self._known = set(model.parameters())
        self._tree = [(m, dict(m._modules), len(m._parameters)) for m in model.modules()]

    def _check_added(self) -> None:
        if all(m._modules == found and len(m._parameters) == n for m, found, n in self._tree):
            return
        for name, parameter in self._tree[0][0].named_parameters():
            boosted = "_boosted" in vars(parameter)
            if parameter.requires_grad and not boosted and parameter not in self._known:
                raise GulliverError(
                    f"parameter {name!r} was added to the model after boost; add it before boost"
                )

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Takes one step of the inner optimizer.

        Raises:
            GulliverError: a closure was passed, or parameters were replaced after boost.
        """
        if closure is not None:
            raise GulliverError("closures are not supported; call backward first, then step()")
        if self.unfinished:
            raise GulliverError(self.unfinished)
        self._check_model()
        begun = time.perf_counter()
        with guard():
            self._step()
        self.taken.note(begun, self.gradient_bytes)

    def gradient_bytes(self) -> int:
        return sum(p.grad.nbytes for p in self.names if p.grad is not None)

    def parameter_bytes(self, model: nn.Module) -> int:
        return sum(p.nbytes for p in model.parameters())

    def _step(self) -> None:
        self.inner.step()

    def _check_model(self) -> None:
        self._check_added()
        for module, key, parameter in self._homes:
            held = module._parameters
            if key not in held or held[key] is not parameter:
                raise GulliverError(
                    f"parameter {self.names[parameter]!r} was replaced after boost, by "
                    "load_state_dict(assign=True) or a parametrization; replace it before boost"
                )
        if any(parameter.requires_grad for parameter in self._frozen):
            raise GulliverError(
                "a parameter that was frozen when boosted now requires gradients; unfreeze it "
                "before boost"
            )

    def backward(self, loss: Tensor) -> None:
        """Runs backward and averages gradients over the ranks."""
        if self.unfinished:
            raise GulliverError(self.unfinished)
        with self.backward_pass() as scale:
            (loss if scale == 1.0 else loss * scale).backward()

    @contextmanager
    def backward_pass(self) -> Iterator[float]:
        """Context for a backward pass that a framework runs.

        Yields:
            The factor for the loss: the loss scale for float16, or 1.
        """
        yield 1.0

    def release(self, model: nn.Module) -> None:
        """Restores ordinary parameters in the model; state can still be saved."""

    def full_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()

    def no_sync(self) -> AbstractContextManager[Any]:
        """Context in which backward only accumulates gradients."""
        return nullcontext()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients so that their global norm is at most `max_norm`.

        Args:
            max_norm: maximum norm; math.inf only measures.
            norm_type: 2, or math.inf for the maximum element.

        Returns:
            The norm before clipping, in float64; it may be nan or inf.
        """
        self.check_norm(max_norm, norm_type)
        gradients = [p.grad for p in self.names if p.grad is not None]
        norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float64) for g in gradients]
        norms = torch.stack(norms or [torch.zeros((), dtype=torch.float64)])
        norm = torch.linalg.vector_norm(norms, norm_type)
        if math.isfinite(max_norm):
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for gradient in gradients:
                gradient.mul_(scale.to(gradient.dtype))
        return norm

    @staticmethod
    def check_norm(max_norm: float, norm_type: float = 2.0) -> None:
        if norm_type not in (2, math.inf):
            raise GulliverError(f"norm_type={norm_type} is not supported: use 2 or math.inf")
        if math.isnan(max_norm) or max_norm <= 0:
            raise GulliverError(
                f"max_norm must be positive, not {max_norm}; use math.inf to measure the norm "
                "without clipping"
            )

    def clip_grad_by_value(self, limit: float) -> None:
        """Clamps every gradient element to [-limit, limit]."""
        nn.utils.clip_grad_value_(list(self.names), limit)

    def full_gradients(self) -> dict[str, Tensor]:
        """Returns the mean gradients by name, unsharded (collective)."""
        return {name: p.grad for p, name in self.names.items() if p.grad is not None}

    def export_state(self, keep: bool = True) -> State:
        """Returns the full state by parameter name (collective); empty unless `keep`."""
        if not keep:
            return {}
        return {
            n: dict(self.inner.state[p]) for p, n in self.names.items() if p in self.inner.state
        }


def named_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer, frozen: bool = False
) -> list[list[str]]:
    # Computes `whole_groups`, or with `frozen`, which has further names, `given_groups` of
    # `OptimizerCheckpoint.describe_model`; called before the model is sharded.
    names = [(name, p) for name, p in model.named_parameters() if p.requires_grad or frozen]
    stepped = [set(group["params"]) for group in optimizer.param_groups]
    return [[name for name, p in names if p in members] for members in stepped]


def named_trainables(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, str]:
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    known = {p: name for name, p in model.named_parameters()}
    strangers = [p for p in stepped if p not in known]
    if strangers:
        raise GulliverError(
            f"the optimizer updates {len(strangers)} tensors that are not parameters of the model, "
            f"the first of shape {tuple(strangers[0].shape)}: build it from model.parameters()"
        )
    trainable = {p: name for p, name in known.items() if p in stepped and p.requires_grad}
    if not trainable:
        what = "has no parameters" if not known else "has no trainable parameter in the optimizer"
        raise GulliverError(f"the model {what}, so there is nothing to train")
    return trainable


def boosted_only(optimizer: Any) -> BoostedOptimizer:
    if not isinstance(optimizer, BoostedOptimizer):
        raise GulliverError(
            f"{type(optimizer).__name__} is not boosted: pass the optimizer that boost returned"
        )
    return optimizer
