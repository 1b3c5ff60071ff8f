"""What the last steps of an optimizer took: seconds, and bytes that were sent."""

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
from gulliver.comm.watchdog import sent_bytes
from gulliver.comm.world import guard
from gulliver.errors import GulliverError
from gulliver.memory.parts import Part, region_of
from gulliver.memory.pending import add_writer

TIMED_STEPS = 64
COUNTED_STEPS = 3
"""First steps, in which bytes are counted."""


class StepsTaken:
    """Record of the last steps."""

    def __init__(self) -> None:
        self.steps = 0
        # Moments at which they ended.
        self.stepped_at: deque[float] = deque(maxlen=TIMED_STEPS)
        # Seconds of them between their call and their end.
        self.updated_in: deque[float] = deque(maxlen=TIMED_STEPS)
        # Bytes that this process had sent at these moments.
        self.sent_at: deque[int] = deque(maxlen=TIMED_STEPS)
        # Whether the step after each of them sends more than training needs.
        self.extra_after: deque[bool] = deque(maxlen=TIMED_STEPS)
        # Bytes of gradients when the first steps ended, at most.
        self.most_gradients = 0
        # Say whether the step that comes sends more than training needs: to tune chunks, or to
        # compare packed gradients.
        self.more: list[Callable[[], bool]] = []

    def note(self, begun: float, gradient_bytes: Callable[[], int]) -> None:
        """Takes a step that has just ended."""
        if len(self.stepped_at) < COUNTED_STEPS:
            # Only now are all of them where they were reduced to.
            self.most_gradients = max(self.most_gradients, gradient_bytes())
        self.steps += 1
        self.stepped_at.append(time.perf_counter())
        self.updated_in.append(self.stepped_at[-1] - begun)
        self.sent_at.append(sent_bytes())
        self.extra_after.append(any(more() for more in self.more))

    def sent(self) -> tuple[list[int], bool]:
        """Returns the bytes between steps, and whether they are those of training alone."""
        # Steps that sent more are left out, unless there are no others.
        every = [b - a for a, b in itertools.pairwise(self.sent_at)]
        plain = [sent for sent, more in zip(every, self.extra_after, strict=False) if not more]
        return plain or every, bool(plain)


# What a rank saves and loads of a boosted optimizer and its model.


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
                (`gulliver.memory.parts.Region`) are written without asking. For every rank, or for
                none.
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


# State that optimizers such as Adagrad make before their first step.


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has state of steps; some, such as Adagrad, make theirs before."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values() if state)


def take_new_state(
    optimizer: torch.optim.Optimizer, exchanged: Mapping[nn.Parameter, nn.Parameter | None]
) -> None:
    """Gives new parameters the state, from before the first step, of those that they replace."""
    # It is one value for each parameter, so a share has it in its own shape.
    for old, new in exchanged.items():
        state = optimizer.state.pop(old, None)
        if state and new is not None:
            optimizer.state[new] = {
                key: torch.full_like(new.detach(), value.flatten()[0].item())
                if isinstance(value, Tensor) and value.ndim > 0
                else value
                for key, value in state.items()
            }


# What every boosted optimizer offers, and the plain one for models that are not sharded.


class BoostedOptimizer(torch.optim.Optimizer):
    """An optimizer around the user's, whose groups, defaults and schedulers it shares.

    Attributes:
        checkpoint: saves and loads it.
        feedback: what feeds back what packing loses of gradients, where this optimizer does not.
        names: a tied parameter that lies in another stage, too, has the same name in both: the one
            that it has in the whole model.
        taken: what the last steps took.
        spreads_state: whether the state lies with several ranks, element by element; else every
            rank has all of it, of whatever kinds and shapes.

    Args:
        inner: the user's optimizer.
        names: the name of every parameter that it trains.
    """

    checkpoint: OptimizerCheckpoint
    feedback: Any = None
    spreads_state = False
    pipeline: Any = None
    """What runs batches through the stages of a model; None where it is not cut into stages."""
    gives_back = False
    """Whether whole parameters that were gathered are given back after use."""
    unfinished = ""
    """Why it cannot step now; empty where it can."""

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
        # Hooks and whatever else torch expects of an optimizer are the inner one's.
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: a copy would share the model's gradients; `copy` and `pickle` ask here."""
        # torch would set the copy up before it is filled, and in that wrap `step` of the class.
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
        """Refused: groups are fixed when the model is boosted."""
        raise GulliverError(
            "parameters cannot be added after boost: add them to the optimizer before"
        )

    def join_copies(self) -> None:
        """Adds up gradients of weights that several ranks of one model hold: none do here."""

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inner optimizer's."""
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
            raise GulliverError(
                "this is not the state of an optimizer: give what its state_dict() returned"
            )
        self.inner.load_state_dict(state_dict)

    def watch(self, model: nn.Module) -> None:
        """Remembers where in the model the trained parameters are, to notice changes."""
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
                raise GulliverError(f"parameter {name!r} was put in after boost: do that before")

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Takes one step of the inner optimizer.

        Raises:
            GulliverError: a closure was passed; the model's parameters are others than at boost.
        """
        if closure is not None:
            raise GulliverError("closures are not supported: call backward first, then step()")
        if self.unfinished:
            raise GulliverError(self.unfinished)
        self._check_model()
        begun = time.perf_counter()
        with guard():
            self._step()
        self.taken.note(begun, self.gradient_bytes)

    def gradient_bytes(self) -> int:
        """Bytes of gradients that this rank holds now."""
        return sum(p.grad.nbytes for p in self.names if p.grad is not None)

    def parameter_bytes(self, model: nn.Module) -> int:
        """Bytes of parameters that this rank holds now."""
        return sum(p.nbytes for p in model.parameters())

    def _step(self) -> None:
        self.inner.step()

    def _check_model(self) -> None:
        self._check_added()
        for module, key, parameter in self._homes:
            held = module._parameters
            if key not in held or held[key] is not parameter:
                raise GulliverError(
                    f"parameter {self.names[parameter]!r} is no longer the model's: it was "
                    "replaced after boost, by load_state_dict(assign=True) or a parametrization: "
                    "do that before"
                )
        if any(parameter.requires_grad for parameter in self._frozen):
            raise GulliverError(
                "a parameter that was frozen at boost requires gradients now: unfreeze before boost"
            )

    def backward(self, loss: Tensor) -> None:
        """Backward of the loss, gradients averaged over the ranks."""
        if self.unfinished:
            raise GulliverError(self.unfinished)
        with self.backward_pass() as scale:
            (loss if scale == 1.0 else loss * scale).backward()

    @contextmanager
    def backward_pass(self) -> Iterator[float]:
        """Wraps a backward that somebody else calls, such as a framework.

        Yields:
            The factor that its loss has to be multiplied with: the loss scale of float16, or 1.
        """
        yield 1.0

    def release(self, model: nn.Module) -> None:
        """Gives the model parameters of its own again; state stays and can be saved."""

    def full_parameters(self) -> AbstractContextManager[None]:
        """Block in which parameters are whole, where they are not always."""
        return nullcontext()

    def no_sync(self) -> AbstractContextManager[Any]:
        """Gradients inside are accumulated and travel with the next backward outside."""
        return nullcontext()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients."""
        self.inner.zero_grad(set_to_none)

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients so that their global norm is at most `max_norm`.

        Args:
            max_norm: largest norm; infinite to measure only.
            norm_type: 2, or infinite for the largest element.

        Returns:
            The norm before, float64, so that whatever holds the gradients scales them by the same
            number: an optimizer of chunks adds up in another order. nan or inf show as they are.
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
        """Refuses limits that would clip nothing, or everything, unnoticed, and other norms."""
        if norm_type not in (2, math.inf):
            raise GulliverError(f"norm_type={norm_type} is not supported: use 2 or math.inf")
        if math.isnan(max_norm) or max_norm <= 0:
            raise GulliverError(
                f"max_norm must be positive, not {max_norm}: math.inf only measures"
            )

    def clip_grad_by_value(self, limit: float) -> None:
        """Cuts every gradient element to [-limit, limit]."""
        nn.utils.clip_grad_value_(list(self.names), limit)

    def full_gradients(self) -> dict[str, Tensor]:
        """Whole averaged gradients by name, where there is one; every rank calls it."""
        return {name: p.grad for p, name in self.names.items() if p.grad is not None}

    def export_state(self, keep: bool = True) -> State:
        """The whole state by parameter name; every rank calls it, those that `keep` get it."""
        if not keep:
            return {}
        return {
            n: dict(self.inner.state[p]) for p, n in self.names.items() if p in self.inner.state
        }


def named_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer, frozen: bool = False
) -> list[list[str]]:
    """Names of the trainable parameters of each group, in the model's order."""
    # For `BoostedOptimizer.whole_groups`, and with `frozen`, which names others as well, for
    # `BoostedOptimizer.given_groups`; before the model is cut.
    names = [(name, p) for name, p in model.named_parameters() if p.requires_grad or frozen]
    stepped = [set(group["params"]) for group in optimizer.param_groups]
    return [[name for name, p in names if p in members] for members in stepped]


def named_trainables(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, str]:
    """The trainable parameters of an optimizer in the model's order, with their names."""
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    known = {p: name for name, p in model.named_parameters()}
    strangers = [p for p in stepped if p not in known]
    if strangers:
        raise GulliverError(
            f"the optimizer steps {len(strangers)} tensors that are no parameters of the model, "
            f"the first of shape {tuple(strangers[0].shape)}: build it from model.parameters()"
        )
    trainable = {p: name for p, name in known.items() if p in stepped and p.requires_grad}
    if not trainable:
        what = "has no parameters" if not known else "has no trainable parameter in the optimizer"
        raise GulliverError(f"the model {what}: nothing to train")
    return trainable


def boosted_only(optimizer: Any) -> BoostedOptimizer:
    """Returns an optimizer that boost returned; refuses others."""
    if not isinstance(optimizer, BoostedOptimizer):
        raise GulliverError(
            f"{type(optimizer).__name__} is not boosted: pass the optimizer that boost returned"
        )
    return optimizer
