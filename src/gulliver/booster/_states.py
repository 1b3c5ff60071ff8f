"""The files of a model, an optimizer and a scheduler: safetensors and JSON, checked when read."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gulliver.checkpoint import (
    Mismatch,
    join_state,
    read_json,
    read_weights,
    split_state,
    write_json,
)
from gulliver.comm import any_rank, barrier, init_world
from gulliver.errors import GulliverError
from gulliver.parallel import BoostedOptimizer


def on_main(write: Callable[[], None]) -> None:
    """Writes on rank 0 and raises on every rank if that fails; every rank calls it."""
    world = init_world()
    failure: Exception | None = None
    if world.is_main:
        try:
            write()
        except OSError as error:
            failure = GulliverError(f"{error.filename} cannot be written: {error.strerror}")
        except Exception as error:
            failure = error
    # The others wait for this answer, and so for the file: they may read it afterwards.
    failed = any_rank(failure is not None, world.device)
    if failure is not None:
        raise failure
    if failed:
        raise GulliverError("rank 0 could not write: see its error")
    barrier()


# Attribute of models of which each rank has a share only; copies of them have it, too.
CUT = "gulliver_cut"


def check_whole(model: nn.Module) -> None:
    """Refuses one rank's share of a model that this booster has not boosted."""
    if CUT in vars(model):
        raise GulliverError(
            "each rank has a share of this model, and it is not the one that this booster has "
            "boosted: pass that one (copies do not know what they are shares of)"
        )


def whole_model(model: nn.Module) -> dict[str, Tensor]:
    """A model's state dict; every rank calls it, for sharded parameters come from all of them."""
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise GulliverError(f"{name!r} of the model is a {type(value).__name__}, not a tensor")
    return dict(state)


def read_model(model: nn.Module, path: Path, strict: bool) -> list[str]:
    """Reads a state dict in place; returns the names that were missing or left over."""
    state, odd = read_weights(path, model, strict)
    model.load_state_dict(state, strict=False)
    return odd.missing + odd.unexpected


def saved_groups(optimizer: BoostedOptimizer) -> list[dict[str, Any]]:
    """The groups by the names of their parameters, trained and frozen, with their options."""
    saved = optimizer.checkpoint
    named = zip(saved.all_group_names(), saved.frozen_groups(), strict=True)
    found = list[dict[str, Any]]()
    for (names, frozen), group in zip(named, optimizer.param_groups, strict=True):
        options = {key: value for key, value in group.items() if key != "params"}
        found.append({"names": names, "options": options} | ({"frozen": frozen} if frozen else {}))
    return found


def check_groups(
    ours: list[list[str]], frozen: list[list[str]], saved: list[Any], folder: Path
) -> None:
    """Refuses groups of other parameters; what is frozen here may be trained there, and back."""
    if len(saved) != len(ours):
        raise GulliverError(f"{folder} has {len(saved)} parameter groups, not {len(ours)}")
    for number, (group, names, still) in enumerate(zip(saved, ours, frozen, strict=True)):
        found = set(group["names"])
        missing = set(names) - found - set(group.get("frozen", ()))
        odd = Mismatch(sorted(missing), sorted(found - set(names) - set(still)))
        if odd:
            raise GulliverError(f"{folder} is of other parameters, group {number}: {odd}")


def write_scheduler(lr_scheduler: Any, path: Path, writes: bool) -> None:
    """Writes a scheduler's numbers as JSON, on the rank that writes; all of them check it."""
    tensors, skeleton = split_state(scheduler_numbers(lr_scheduler))
    if tensors:
        raise GulliverError(
            f"{type(lr_scheduler).__name__} keeps tensors, which a file of numbers does not take: "
            "save it with booster.save(..., lr_scheduler=...), or make its optimizer's lr a float"
        )
    if writes:
        write_json(path, {"scheduler": type(lr_scheduler).__name__, "state": skeleton})


def read_scheduler(lr_scheduler: Any, path: Path) -> None:
    """Takes over what `write_scheduler` wrote."""
    content, ours = read_json(path), type(lr_scheduler).__name__
    if not isinstance(content, Mapping) or not {"scheduler", "state"} <= content.keys():
        raise GulliverError(f"{path} holds no scheduler")
    if content["scheduler"] != ours:
        raise GulliverError(f"{path} is of {content['scheduler']}, the scheduler is {ours}")
    fill_scheduler(lr_scheduler, join_state({}, content["state"]))


def fill_scheduler(lr_scheduler: Any, state: Mapping[str, Any]) -> None:
    """Gives a scheduler the numbers that were saved."""
    own = lr_scheduler.state_dict()
    for key, value in state.items():
        # JSON knows plain dicts only; a step schedule counts its milestones.
        counts = isinstance(own.get(key), collections.Counter)
        own[key] = collections.Counter(value) if counts else value
    lr_scheduler.load_state_dict(own)


def scheduler_numbers(lr_scheduler: Any) -> dict[str, Any]:
    """A scheduler's state without its functions, which are the program's."""
    return {k: v for k, v in lr_scheduler.state_dict().items() if not _is_code(v)}


def _is_code(value: Any) -> bool:
    return callable(value) or (
        isinstance(value, list) and any(item is None or callable(item) for item in value)
    )
