"""Boosted models and optimizers as a loop of accelerate calls them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MethodType
from typing import Any, Protocol

from accelerate.optimizer import AcceleratedOptimizer
from safetensors.torch import load_file
from torch import Tensor, nn

from gulliver.booster import Booster
from gulliver.comm import current_world
from gulliver.errors import GulliverError
from gulliver.parallel import BoostedOptimizer


class Accelerating(Protocol):
    """What an optimizer reads of the accelerator that prepared it."""

    @property
    def num_processes(self) -> int: ...
    @property
    def sync_gradients(self) -> bool: ...
    @property
    def holds_back(self) -> bool: ...


class PreparedOptimizer(AcceleratedOptimizer):
    """A boosted optimizer that steps when gradients are complete."""

    def __init__(self, boosted: BoostedOptimizer, accelerator: Accelerating) -> None:
        super().__init__(boosted, device_placement=False)
        self.boosted, self._accelerator = boosted, accelerator

    def step(self, closure: Any = None) -> None:
        accelerator, boosted = self._accelerator, self.boosted
        if accelerator.holds_back and accelerator.sync_gradients and accelerator.num_processes > 1:
            raise GulliverError(
                "a step inside no_sync is one of this rank alone (LocalSGD), and optimizer state "
                "is shared: step outside"
            )
        before = getattr(boosted, "skipped", 0)
        super().step(closure)
        self._is_overflow = getattr(boosted, "skipped", 0) > before

    def full_gradients(self) -> dict[str, Tensor]:
        """Whole averaged gradients by name; every rank calls it."""
        return self.boosted.full_gradients()

    def state_dict(self) -> dict[str, Any]:
        raise GulliverError("the optimizer's state lies with all ranks: accelerator.save_state")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise GulliverError("the optimizer's state lies with all ranks: accelerator.load_state")


def work_together(model: nn.Module) -> None:
    """Makes ranks generate and save together where each needs the others' parameters."""
    # They generate until the last has its text, and save what was gathered by all.
    for module in model.modules():
        if hasattr(type(module), "generate"):
            # A method, so that a copy of the model generates by itself.
            module.generate = MethodType(_generate, module)  # type: ignore[assignment]
    if hasattr(type(model), "save_pretrained"):
        model.save_pretrained = MethodType(_save_pretrained, model)  # type: ignore[assignment]


def work_alone(model: nn.Module) -> None:
    """Undoes `work_together`."""
    ours = (_generate, _save_pretrained)
    for module in model.modules():
        for name in ("generate", "save_pretrained"):
            if getattr(vars(module).get(name), "__func__", None) in ours:
                del vars(module)[name]


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    return type(model).generate(model, *args, **{**kwargs, "synced_gpus": True})


def _save_pretrained(model: Any, *args: Any, **kwargs: Any) -> Any:
    state, save = kwargs.get("state_dict"), type(model).save_pretrained
    if state is None:
        return save(model, *args, **kwargs)
    if state:  # else another rank has it, and writes
        with _states_from(model, state):
            return save(model, *args, **kwargs)
    return None


@contextmanager
def _states_from(model: nn.Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Makes modules answer ``state_dict()`` with what was gathered."""
    # peft asks the modules of ``modules_to_save`` for the names of their entries, on the rank that
    # writes; to read parameters takes all ranks.
    parts = [(name, part) for name, part in model.named_modules() if name]
    for name, part in parts:
        vars(part)["state_dict"] = partial(_state_below, part, f"{name}.", state)
    try:
        yield
    finally:
        for _, part in parts:
            del vars(part)["state_dict"]


def _state_below(
    part: nn.Module, prefix: str, state: Mapping[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    if args or kwargs:  # a call from above, whose state is wanted as a whole
        return type(part).state_dict(part, *args, **kwargs)
    return {name.removeprefix(prefix): v for name, v in state.items() if name.startswith(prefix)}


def mapped_state(booster: Booster, model: nn.Module, folder: Path | None) -> dict[str, Tensor]:
    """Gathers one tensor at a time, so that the whole model is never in memory."""
    main = current_world().is_main
    with TemporaryDirectory(dir=folder if main else None, prefix=".gulliver-") as place:
        path = Path(place) / "model.safetensors"
        booster.save_model(model, path)
        # The pages of a file that is gone stay for those who have mapped it.
        read = load_file(path) if main else {}
    # As a state dict of the model's own: in its order, and tied tensors are one.
    known, state = dict[int, str](), dict[str, Tensor]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in read:
            state[name] = read[known.setdefault(id(parameter), name)]
    return {**state, **{name: value for name, value in read.items() if name not in state}}
