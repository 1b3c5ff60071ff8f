"""One state out of a boosted model, its optimizer and what belongs to them, and back.

What is saved knows neither the number of ranks nor how the model was sharded; see
`BoostedOptimizer.model_leaves` for what a rank gives of it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from gulliver.booster._model import narrow_dtypes, unwrapped
from gulliver.booster._old_files import Source
from gulliver.booster._states import (
    check_groups,
    fill_scheduler,
    saved_groups,
    scheduler_numbers,
)
from gulliver.booster._wire_state import WIRE, restore_wire, wire_entry
from gulliver.checkpoint import (
    Filling,
    Loaded,
    Mismatch,
    PerRank,
    Ref,
    StepReader,
    fill_all,
    listed,
    match,
    plan_all,
    refs_in,
    refuse_boosted,
    replace_refs,
    with_refs,
)
from gulliver.comm import gather_objects, group_rank, init_world
from gulliver.errors import GulliverError
from gulliver.memory import Part, whole_shape
from gulliver.parallel import BoostedOptimizer, Counter, ZeroOptimizer
from gulliver.parallel.zero import import_leaves
from gulliver.precision.fp8 import fp8_histories, restore_histories

T = TypeVar("T")

MODEL, OPTIMIZER, SCHEDULER, RANDOM = "model", "optimizer", "lr_scheduler", "random"
FP8 = "fp8_histories"
RESERVED = (MODEL, OPTIMIZER, SCHEDULER, RANDOM, WIRE, FP8)


def boosted_state(
    model: nn.Module,
    optimizer: BoostedOptimizer | None,
    holder: BoostedOptimizer | None,
    lr_scheduler: Any,
    state: Mapping[str, Any] | None,
    frozen: bool = True,
) -> dict[str, Any]:
    """All that is saved of a training run, by entry.

    Args:
        model: boosted or not.
        optimizer: optimizer to save, or None.
        holder: the optimizer that the model was boosted with, whether it is saved or not.
        lr_scheduler: scheduler to save, or None.
        state: what else is saved, by entry.
        frozen: whether parameters that are not trained are saved, too.

    Raises:
        GulliverError: an entry of `state` has a name that is taken, or something cannot be saved.
    """
    found: dict[str, Any] = {}
    plain = unwrapped(model)
    if holder is not None:
        found[MODEL] = _trained(plain, holder.model_leaves(plain), frozen)
    else:
        refuse_boosted(plain, "save")
        found[MODEL] = plain
    if optimizer is not None:
        found[OPTIMIZER] = optimizer_entry(optimizer, optimizer.state_leaves())
        found |= wire_entry(optimizer)
    if lr_scheduler is not None:
        kind = type(lr_scheduler).__name__
        found[SCHEDULER] = {"kind": kind, "state": scheduler_numbers(lr_scheduler)}
    found[RANDOM] = PerRank(random_state())
    if histories := fp8_histories(plain):
        found[FP8] = histories
    for entry, value in (state or {}).items():
        if entry in RESERVED:
            raise GulliverError(f"state[{entry!r}] is taken: the booster saves that itself")
        found[entry] = value
    return found


def _trained(
    model: nn.Module, leaves: dict[str, Tensor | Part], frozen: bool
) -> dict[str, Tensor | Part]:
    """Leaves of a model by name, without its frozen parameters where these are not wanted."""
    if frozen:
        return leaves
    every = model.named_parameters(remove_duplicate=False)
    left = {name for name, parameter in every if not parameter.requires_grad}
    return {name: leaf for name, leaf in leaves.items() if name not in left}


def optimizer_entry(
    optimizer: BoostedOptimizer, leaves: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """What is saved of an optimizer.

    Args:
        optimizer: boosted.
        leaves: state by parameter, as far as this rank has it.
    """
    found: dict[str, Any] = {
        "optimizer": type(optimizer.inner).__name__,
        "groups": saved_groups(optimizer),
        "state": {
            name: {key: _plain(value) for key, value in entries.items()}
            for name, entries in leaves.items()
        },
    }
    others = optimizer.other_state()
    return {**found, "others": others} if others else found


def _plain(value: Any) -> Any:
    """A counter as JSON has it; leaves as they are."""
    if not isinstance(value, Counter):
        return value
    return {"value": value.value, "dtype": value.dtype}


def load_boosted(
    reader: StepReader,
    model: nn.Module | None,
    optimizer: BoostedOptimizer | None,
    holder: BoostedOptimizer | None,
    lr_scheduler: Any,
    strict: bool,
    prefix: str,
    state: Mapping[str, Any] | None = None,
    frozen: bool = True,
) -> Loaded:
    """Loads a step in place, at any number of ranks; every rank calls it.

    Args:
        reader: reader of the step.
        model: model to fill, or None.
        optimizer: optimizer to fill, or None.
        holder: the optimizer that the model was boosted with, whether it is filled or not.
        lr_scheduler: scheduler to fill, or None.
        strict: refuse what does not match, before anything is changed.
        prefix: what the checkpoint's names have before the model's.
        state: what else to load, by entry.
        frozen: whether parameters that are not trained are loaded, too.

    Raises:
        GulliverError: something does not match, or a file is broken, on any rank.
    """
    loaded = Loaded.of(reader)
    entries: dict[str, Any] = {}
    # Groups may be asked of all ranks: not where one of them might have failed before.
    groups = None if optimizer is None else Groups.of(optimizer)
    elsewhere = names_of_all(model, holder)
    wanted: dict[str, Tensor | Part] = {}
    rest: dict[str, Filling] = {}

    def check_entries() -> None:
        for entry, given in ((MODEL, model), (OPTIMIZER, optimizer), (SCHEDULER, lr_scheduler)):
            if given is not None:
                reader.skeleton(entry)
        if optimizer is not None and groups is not None:
            entries.update(check_optimizer_entry(reader, optimizer, groups))
        if lr_scheduler is not None:
            _check_scheduler(reader, lr_scheduler)

    def check() -> None:
        if model is not None and holder is None:
            rest.update(plan_all(reader, {MODEL: unwrapped(model)}, strict, prefix, loaded))
        elif model is not None and holder is not None:
            leaves = _tied(reader, unwrapped(model), holder, prefix)
            leaves = _trained(unwrapped(model), leaves, frozen)
            _check_model(reader, leaves, elsewhere, strict, prefix, loaded)
            odd = loaded.mismatches.get(MODEL, Mismatch())
            wanted.update((n, leaf) for n, leaf in leaves.items() if n not in odd.missing)
            # What is trained in 16 bits is filled by its float32 copies, and rounded from them.
            reader.check_fits(MODEL, wanted, prefix, narrow_dtypes(unwrapped(model)))
            reader.check_tied(MODEL, holder.canonical_names(unwrapped(model)), prefix)
        rest.update(plan_all(reader, state or {}, strict, "", loaded))

    agreed(check_entries)
    if optimizer is not None and groups is not None:
        # Before the model is filled: of 16 bits there is a float32 copy to fill then.
        take_up(reader, optimizer, entries, groups)
    agreed(check)
    if model is not None and holder is not None:
        holder.before_model_load()
        agreed(lambda: reader.read_into(MODEL, wanted, prefix))
        wanted.clear()  # under a memory limit nothing can leave that is still looked at
        holder.after_model_load()
        # Those of other weights say nothing of these.
        restore_histories(unwrapped(model), reader.value(FP8) if FP8 in reader.entries else {})
    if optimizer is not None:
        boosted = optimizer
        agreed(lambda: fill_optimizer(reader, boosted, entries))
        restore_wire(reader, optimizer)
    if lr_scheduler is not None:
        fill_scheduler(lr_scheduler, reader.value(SCHEDULER)["state"])
    agreed(lambda: fill_all(rest, loaded))
    return loaded


def names_of_all(model: nn.Module | None, holder: BoostedOptimizer | None) -> set[str]:
    """Names that a checkpoint may have of this model: what this rank has no part of, others fill.

    Every rank calls it.
    """
    if model is None:
        return set()
    names = [name for name, _ in unwrapped(model).named_parameters(remove_duplicate=False)]
    if holder is None or holder.has_whole_model:
        return set(names)
    names += [name for name, _ in unwrapped(model).named_buffers(remove_duplicate=False)]
    return {name for found in gather_objects(names) for name in found}


def _tied(
    reader: StepReader, model: nn.Module, holder: BoostedOptimizer, prefix: str
) -> dict[str, Tensor | Part]:
    """What is to be filled, by names in the checkpoint, which may have one only of tied ones."""
    leaves, saved = holder.load_leaves(model), reader.tensors(MODEL)
    for name, known in holder.canonical_names(model).items():
        if name in leaves and prefix + name not in saved and prefix + known in saved:
            leaf = leaves.pop(name)
            leaves.setdefault(known, leaf)
    return leaves


def _check_model(
    reader: StepReader,
    leaves: Mapping[str, Tensor | Part],
    elsewhere: set[str],
    strict: bool,
    prefix: str,
    loaded: Loaded,
) -> None:
    odd = match(reader.tensors(MODEL), leaves, prefix, elsewhere)
    odd.refuse(f"{reader.folder}, entry {MODEL!r},", len(leaves), strict)
    if odd:
        loaded.mismatches[MODEL] = odd


@dataclass(frozen=True)
class Groups:
    """Groups of an optimizer.

    Attributes:
        trained: names of the trained parameters of each group, of all ranks.
        frozen: names of those that each was given, too.
    """

    trained: list[list[str]]
    frozen: list[list[str]]

    @classmethod
    def of(cls, optimizer: BoostedOptimizer) -> Self:
        """Asks an optimizer; every rank calls it."""
        return cls(optimizer.all_group_names(), optimizer.frozen_groups())


def take_up(
    reader: Source, optimizer: BoostedOptimizer, content: Mapping[str, Any], groups: Groups
) -> None:
    """Makes room for the saved state of what is frozen here, or says that it is left out.

    Args:
        reader: reader of the step.
        optimizer: optimizer to fill.
        content: entry of it, which was checked.
        groups: groups of the optimizer.
    """
    frozen = {name for names in groups.frozen for name in names}
    saved = [name for name, entries in content["state"].items() if entries and name in frozen]
    lost = optimizer.take_up(saved)
    if lost and init_world().is_main:
        logging.getLogger("gulliver").warning(
            "%s: the optimizer state of %s is left out: only stage 3 unfreezes after boost",
            reader.folder,
            listed("frozen parameters", sorted(lost)),
        )


def check_optimizer_entry(
    reader: Source, optimizer: BoostedOptimizer, groups: Groups
) -> dict[str, Any]:
    """The optimizer's entry, with stand-ins for tensors."""
    content = with_refs(reader.skeleton(OPTIMIZER), reader.tensors(OPTIMIZER))
    if not isinstance(content, dict) or not {"optimizer", "groups", "state"} <= content.keys():
        raise GulliverError(f"{reader.folder} holds no state of a boosted optimizer")
    ours = type(optimizer.inner).__name__
    if content["optimizer"] != ours:
        raise GulliverError(
            f"{reader.folder} is of {content['optimizer']}, the optimizer is {ours}"
        )
    check_groups(groups.trained, groups.frozen, content["groups"], reader.folder)
    _check_shapes(reader, optimizer, content)
    return content


def _stepped(reader: Source, content: Mapping[str, Any]) -> dict[str, Any]:
    """Shapes and dtypes of the parameters of a saved state, where the step tells them."""
    if "parameters" in content:
        return {n: (tuple(shape), dtype) for n, (shape, dtype) in content["parameters"].items()}
    return {name: (t.shape, t.dtype) for name, t in reader.tensors(MODEL).items()}


def _check_shapes(reader: Source, optimizer: BoostedOptimizer, content: Mapping[str, Any]) -> None:
    """Whether the state is of parameters of the same shapes.

    Where every rank has all of it, it may have any shape itself: then the step tells the
    parameters'.
    """
    shapes = {name: whole_shape(p) for p, name in optimizer.trainable.items()}
    known = _stepped(reader, content) if optimizer.has_whole_state else {}
    for name, entries in content["state"].items():
        ours = shapes.get(name)
        if ours is not None and name in known and known[name][0] != ours:
            raise GulliverError(
                f"{reader.folder}: the optimizer state of {name!r} does not fit: the parameter was "
                f"{known[name][0]}, it is {ours}"
            )
        for key, value in entries.items():
            if ours is None or name in known:
                continue
            refs = refs_in(value)
            if refs and (not isinstance(value, Ref) or value.shape != ours):
                raise GulliverError(
                    f"{reader.folder}: the optimizer state of {name!r} does not fit: {key} is "
                    f"{refs[0].shape}, the parameter {ours}"
                )


def fill_optimizer(reader: Source, optimizer: BoostedOptimizer, content: Mapping[str, Any]) -> None:
    """Fills state and options from an entry that was checked."""
    if optimizer.spreads_state:
        _fill_shards(reader, optimizer, content["state"])
    else:
        _give_state(reader, optimizer, content)
    for group, saved in zip(optimizer.param_groups, content["groups"], strict=True):
        group.update(_read(reader, saved["options"]))


def _fill_shards(
    reader: Source,
    optimizer: BoostedOptimizer,
    state: Mapping[str, Mapping[str, Any]],
) -> None:
    """Fills what this rank has of the state of each parameter."""
    assert isinstance(optimizer, ZeroOptimizer), "state is spread over ranks by ZeRO's kind"
    entries = {
        name: {
            key: value if isinstance(value, Ref) else Counter(value["value"], value["dtype"])
            for key, value in found.items()
        }
        for name, found in state.items()
    }
    targets = import_leaves(optimizer, entries)
    wanted = {state[name][key].name: leaf for (name, key), leaf in targets.items()}
    reader.read_into(OPTIMIZER, wanted)


def _give_state(reader: Source, optimizer: BoostedOptimizer, content: Mapping[str, Any]) -> None:
    """Gives an optimizer its whole state, whatever that consists of."""
    found = _read(reader, {"state": content["state"], "others": content.get("others", {})})
    state = {
        name: {
            key: value if isinstance(value, Tensor) else Counter(**value).to_value()
            for key, value in entries.items()
        }
        for name, entries in found["state"].items()
    }
    # Else numbers are turned to the parameter's dtype: ZeRO keeps those of 16 bits in 32.
    known = _stepped(reader, content)
    exact = [n for p, n in optimizer.names.items() if n in known and known[n][1] == p.dtype]
    optimizer.take_state(state, found["others"], exact)


def _read(reader: Source, value: Any) -> Any:
    """Nested values, with tensors in place of what stands for them."""
    made = reader.whole(OPTIMIZER, [ref.name for ref in refs_in(value)])
    return replace_refs(value, made)


def _check_scheduler(reader: StepReader, lr_scheduler: Any) -> None:
    kind, ours = reader.value(SCHEDULER)["kind"], type(lr_scheduler).__name__
    if kind != ours:
        raise GulliverError(f"{reader.folder} is of {kind}, the scheduler is {ours}")


def agreed(action: Callable[[], T]) -> T:
    """Runs something on every rank and returns its result; none goes on where one could not.

    Raises:
        Exception: what went wrong here.
        GulliverError: what went wrong on another rank.
    """
    failure: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    reasons = gather_objects(None if failure is None else str(failure) or type(failure).__name__)
    if failure is not None:
        raise failure
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise GulliverError(f"rank {rank} failed: {reason}")
    return result  # type: ignore[return-value]


def random_state() -> dict[str, Any]:
    """The generators of this process: torch's, Python's and numpy's."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {
            "version": version,
            "numbers": torch.tensor(numbers, dtype=torch.int64),
            "gauss": gauss,
        },
        "numpy": {
            "kind": kind,
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
    }
    if init_world().device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(init_world().device)
    return found


def restore_random(reader: StepReader) -> bool:
    """Takes up the generators of this rank; False where it has none in the checkpoint."""
    rank = group_rank()
    if not reader.is_per_rank(RANDOM) or rank >= reader.manifest.world_size:
        return False
    state = reader.value(RANDOM, rank)
    torch.set_rng_state(state["torch"])
    python, numbers = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    np.random.set_state(
        (
            numbers["kind"],
            numbers["keys"].numpy().astype(np.uint32),
            numbers["position"],
            numbers["has_gauss"],
            numbers["cached"],
        )
    )
    if "cuda" in state and init_world().device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], init_world().device)
    return True
