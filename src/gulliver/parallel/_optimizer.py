"""What every boosted optimizer offers, and the plain one for models that are not sharded."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.comm import guard
from gulliver.errors import GulliverError
from gulliver.memory import add_writer
from gulliver.parallel._saving import OptimizerCheckpoint, State
from gulliver.parallel._taken import StepsTaken


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
