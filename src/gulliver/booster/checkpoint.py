"""Checkpoint files of a model, an optimizer and a scheduler: safetensors and JSON."""

from __future__ import annotations

import collections
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from gulliver.checkpoint.collect import PerRank, refuse_boosted
from gulliver.checkpoint.files import read_json, write_json
from gulliver.checkpoint.loading import (
    Filling,
    Loaded,
    Ref,
    fill_all,
    plan_all,
    refs_in,
    replace_refs,
    with_refs,
)
from gulliver.checkpoint.manifest import Mismatch, listed, match
from gulliver.checkpoint.reader import StepReader
from gulliver.checkpoint.tree import join_state, split_state
from gulliver.comm.collectives import (
    any_rank,
    barrier,
    gather_objects,
    group_rank,
    raise_on_any_rank,
)
from gulliver.comm.world import init_world
from gulliver.errors import GulliverError
from gulliver.memory.parts import Part, whole_shape
from gulliver.parallel.optimizer import BoostedOptimizer, Counter
from gulliver.parallel.zero.optimizer import ZeroOptimizer
from gulliver.planner.model import narrow_dtypes, unwrapped


def on_main(write: Callable[[], object]) -> None:
    """Writes on rank 0 and raises on every rank if that fails (collective)."""
    world = init_world()
    failure: Exception | None = None
    if world.is_main:
        try:
            write()
        except OSError as error:
            failure = GulliverError(f"{error.filename} cannot be written: {error.strerror}")
        except Exception as error:
            failure = error
    # Other ranks wait for this result and thus for the file, so they may read it afterwards.
    failed = any_rank(failure is not None, world.device)
    if failure is not None:
        raise failure
    if failed:
        raise GulliverError("rank 0 failed to write; see its error")
    barrier()


# Attribute of sharded models; copies of these models have it too.
CUT = "gulliver_cut"


def check_whole(model: nn.Module) -> None:
    """Rejects a sharded model that this booster has not boosted."""
    if CUT in vars(model):
        raise GulliverError(
            "this sharded model was not boosted by this booster: pass the boosted model, not a copy"
        )


def whole_model(model: nn.Module) -> dict[str, Tensor]:
    """Returns a model's full state dict (collective; gathers sharded parameters)."""
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise GulliverError(
                f"{name!r} in the model's state dict is a {type(value).__name__}, not a tensor"
            )
    return dict(state)


def saved_groups(optimizer: BoostedOptimizer) -> list[dict[str, Any]]:
    """Returns the parameter groups: names of trained and frozen parameters, and options."""
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
    """Rejects groups whose parameters differ from the saved ones, whether frozen or not."""
    if len(saved) != len(ours):
        raise GulliverError(
            f"{folder} has {len(saved)} parameter groups, but the optimizer has {len(ours)}"
        )
    for number, (group, names, still) in enumerate(zip(saved, ours, frozen, strict=True)):
        found = set(group["names"])
        missing = set(names) - found - set(group.get("frozen", ()))
        odd = Mismatch(sorted(missing), sorted(found - set(names) - set(still)))
        if odd:
            raise GulliverError(f"{folder} has different parameters in group {number}: {odd}")


def write_scheduler(lr_scheduler: Any, path: Path, writes: bool) -> None:
    """Checks a scheduler's state on all ranks, and writes it as JSON if `writes`."""
    tensors, skeleton = split_state(scheduler_numbers(lr_scheduler))
    if tensors:
        raise GulliverError(
            f"{type(lr_scheduler).__name__} has tensors in its state, which JSON cannot store; "
            "save it with booster.save(..., lr_scheduler=...), or make its optimizer's lr a float"
        )
    if writes:
        write_json(path, {"scheduler": type(lr_scheduler).__name__, "state": skeleton})


def read_scheduler(lr_scheduler: Any, path: Path) -> None:
    content, ours = read_json(path), type(lr_scheduler).__name__
    if not isinstance(content, Mapping) or not {"scheduler", "state"} <= content.keys():
        raise GulliverError(f"{path} contains no scheduler state")
    if content["scheduler"] != ours:
        raise GulliverError(
            f"{path} is the state of {content['scheduler']}, but the scheduler is {ours}"
        )
    fill_scheduler(lr_scheduler, join_state({}, content["state"]))


def fill_scheduler(lr_scheduler: Any, state: Mapping[str, Any]) -> None:
    own = lr_scheduler.state_dict()
    for key, value in state.items():
        # JSON only has plain dicts; a step schedule stores its milestones in a Counter.
        counts = isinstance(own.get(key), collections.Counter)
        own[key] = collections.Counter(value) if counts else value
    lr_scheduler.load_state_dict(own)


def scheduler_numbers(lr_scheduler: Any) -> dict[str, Any]:
    """Returns a scheduler's state without its functions, which are not saved."""
    return {k: v for k, v in lr_scheduler.state_dict().items() if not _is_code(v)}


def _is_code(value: Any) -> bool:
    return callable(value) or (
        isinstance(value, list) and any(item is None or callable(item) for item in value)
    )


# Saves and loads the state of a boosted model, its optimizer and related objects.
#
# Contents depend neither on the number of ranks nor on how the model was sharded; see
# `BoostedOptimizer.model_leaves` for the part that a rank contributes.


MODEL, OPTIMIZER, SCHEDULER, RANDOM = "model", "optimizer", "lr_scheduler", "random"
WIRE = "wire"
RESERVED = (MODEL, OPTIMIZER, SCHEDULER, RANDOM, WIRE)


def boosted_state(
    model: nn.Module,
    optimizer: BoostedOptimizer | None,
    holder: BoostedOptimizer | None,
    lr_scheduler: Any,
    state: Mapping[str, Any] | None,
    frozen: bool = True,
) -> dict[str, Any]:
    """Returns all checkpoint entries of a training run."""
    found: dict[str, Any] = {}
    plain = unwrapped(model)
    if holder is not None:
        found[MODEL] = _trained(plain, holder.checkpoint.model_leaves(plain), frozen)
    else:
        refuse_boosted(plain, "save")
        found[MODEL] = plain
    if optimizer is not None:
        found[OPTIMIZER] = optimizer_entry(optimizer, optimizer.checkpoint.state_leaves())
        found |= wire_entry(optimizer)
    if lr_scheduler is not None:
        kind = type(lr_scheduler).__name__
        found[SCHEDULER] = {"kind": kind, "state": scheduler_numbers(lr_scheduler)}
    found[RANDOM] = PerRank(random_state())
    for entry, value in (state or {}).items():
        if entry in RESERVED:
            raise GulliverError(f"state[{entry!r}] is reserved for the booster; use another name")
        found[entry] = value
    return found


def _trained(
    model: nn.Module, leaves: dict[str, Tensor | Part], frozen: bool
) -> dict[str, Tensor | Part]:
    if frozen:
        return leaves
    every = model.named_parameters(remove_duplicate=False)
    left = {name for name, parameter in every if not parameter.requires_grad}
    return {name: leaf for name, leaf in leaves.items() if name not in left}


def optimizer_entry(
    optimizer: BoostedOptimizer, leaves: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "optimizer": type(optimizer.inner).__name__,
        "groups": saved_groups(optimizer),
        "state": {
            name: {key: _plain(value) for key, value in entries.items()}
            for name, entries in leaves.items()
        },
    }
    if others := optimizer.checkpoint.other_state():
        found["others"] = others
    # With the initial scale, a resumed run would skip steps that the saved run did not skip.
    if isinstance(optimizer, ZeroOptimizer) and optimizer.scaler is not None:
        found["loss_scale"] = optimizer.scaler.state_dict()
    return found


def _plain(value: Any) -> Any:
    """Converts a counter tensor to a plain number for JSON; keeps other leaves."""
    if not isinstance(value, Counter):
        return value
    return {"value": value.value, "dtype": value.dtype}


@dataclass
class LoadPlan:
    """Loads a step in place on any number of ranks.

    Everything is matched, and all ranks agree that it matches, before anything is changed.
    """

    reader: StepReader
    model: nn.Module | None
    optimizer: BoostedOptimizer | None
    # The optimizer that the model was boosted with, even if its state is not loaded.
    holder: BoostedOptimizer | None
    lr_scheduler: Any = None
    state: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = True
    # Prefix of the model's names in the checkpoint.
    prefix: str = ""
    # Whether to also load frozen parameters.
    frozen: bool = True

    def load(self) -> Loaded:
        """Matches the step with the objects, and fills them (collective)."""
        reader, optimizer, model = self.reader, self.optimizer, self.model
        self.loaded = Loaded(reader.manifest.step)
        # These are collective, so they run before anything that may fail on one rank only.
        entry = None if optimizer is None else OptimizerEntry.of(reader, optimizer)
        elsewhere = names_of_all(model, self.holder)
        rest = raise_on_any_rank(lambda: self._match(entry, elsewhere))
        if entry is not None:
            # Before the model is filled: unfreezing 16-bit parameters adds float32 copies to fill.
            entry.unfreeze()
        if model is not None and self.holder is not None:
            self._fill_model(unwrapped(model), self.holder)
        raise_on_any_rank(lambda: self._fill_rest(entry, rest))
        if optimizer is not None:
            restore_wire(reader, optimizer)
        return self.loaded

    def _match(self, entry: OptimizerEntry | None, elsewhere: set[str]) -> dict[str, Filling]:
        reader, model, holder = self.reader, self.model, self.holder
        given = {MODEL: model, OPTIMIZER: self.optimizer, SCHEDULER: self.lr_scheduler}
        for name, value in given.items():
            if value is not None:
                reader.skeleton(name)
        if entry is not None:
            entry.match()
        if self.lr_scheduler is not None:
            _check_scheduler(reader, self.lr_scheduler)
        plain, rest = {}, dict[str, Filling]()
        if model is not None and holder is None:
            plain = {MODEL: unwrapped(model)}
        elif model is not None and holder is not None:
            leaves = self._leaves(unwrapped(model), holder)
            odd = match(reader.tensors(MODEL), leaves, self.prefix, elsewhere)
            odd.refuse(f"{reader.folder}, entry {MODEL!r},", len(leaves), self.strict)
            if odd:
                self.loaded.mismatches[MODEL] = odd
            wanted = {name: leaf for name, leaf in leaves.items() if name not in odd.missing}
            # Trained 16-bit parameters are filled from their float32 copies, and rounded.
            reader.check_fits(MODEL, wanted, self.prefix, narrow_dtypes(unwrapped(model)))
            reader.check_tied(
                MODEL, holder.checkpoint.canonical_names(unwrapped(model)), self.prefix
            )
        rest |= plan_all(reader, plain, self.strict, self.prefix, self.loaded)
        rest |= plan_all(reader, self.state, self.strict, "", self.loaded)
        return rest

    def _leaves(self, model: nn.Module, holder: BoostedOptimizer) -> dict[str, Tensor | Part]:
        """Returns the leaves to fill by checkpoint name, which may be any name of a tied weight."""
        leaves, saved = holder.checkpoint.load_leaves(model), self.reader.tensors(MODEL)
        for name, known in holder.checkpoint.canonical_names(model).items():
            if name in leaves and self.prefix + name not in saved and self.prefix + known in saved:
                leaf = leaves.pop(name)
                leaves.setdefault(known, leaf)
        return _trained(model, leaves, self.frozen)

    def _fill_model(self, model: nn.Module, holder: BoostedOptimizer) -> None:
        odd = self.loaded.mismatches.get(MODEL, Mismatch())
        # Listed again, because unfreezing has added float32 copies.
        leaves = self._leaves(model, holder)
        wanted = {name: leaf for name, leaf in leaves.items() if name not in odd.missing}
        holder.checkpoint.before_model_load()
        raise_on_any_rank(lambda: self.reader.read_into(MODEL, wanted, self.prefix))
        # Under a memory limit, views would keep their memory on the device.
        leaves.clear()
        wanted.clear()
        holder.checkpoint.after_model_load()

    def _fill_rest(self, entry: OptimizerEntry | None, rest: Mapping[str, Filling]) -> None:
        if entry is not None:
            entry.fill()
        if self.lr_scheduler is not None:
            fill_scheduler(self.lr_scheduler, self.reader.value(SCHEDULER)["state"])
        fill_all(rest, self.loaded)


def names_of_all(model: nn.Module | None, holder: BoostedOptimizer | None) -> set[str]:
    """Returns all names that a checkpoint may use for this model, on any rank (collective)."""
    if model is None:
        return set()
    names = [name for name, _ in unwrapped(model).named_parameters(remove_duplicate=False)]
    if holder is None or holder.checkpoint.has_whole_model:
        return set(names)
    names += [name for name, _ in unwrapped(model).named_buffers(remove_duplicate=False)]
    return {name for found in gather_objects(names) for name in found}


@dataclass
class OptimizerEntry:
    """A step's optimizer entry, and the optimizer to load it into."""

    reader: StepReader
    optimizer: BoostedOptimizer
    # Names of the parameters of each group over all ranks: trained ones, and frozen ones.
    trained: list[list[str]]
    frozen: list[list[str]]
    # Nested values with placeholders for tensors; set by `match`.
    content: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, reader: StepReader, optimizer: BoostedOptimizer) -> Self:
        """Creates the entry, with the parameter groups of all ranks (collective)."""
        return cls(
            reader,
            optimizer,
            optimizer.checkpoint.all_group_names(),
            optimizer.checkpoint.frozen_groups(),
        )

    def match(self) -> None:
        reader, ours = self.reader, type(self.optimizer.inner).__name__
        content = with_refs(reader.skeleton(OPTIMIZER), reader.tensors(OPTIMIZER))
        if not isinstance(content, dict) or not {"optimizer", "groups", "state"} <= content.keys():
            raise GulliverError(f"{reader.folder} contains no state of a boosted optimizer")
        if content["optimizer"] != ours:
            raise GulliverError(
                f"{reader.folder} is the state of {content['optimizer']}, but the optimizer is "
                f"{ours}"
            )
        check_groups(self.trained, self.frozen, content["groups"], reader.folder)
        _check_shapes(reader, self.optimizer, content)
        self.content = content

    def unfreeze(self) -> None:
        """Allocates the saved optimizer state of parameters that are frozen in this run."""
        frozen = {name for names in self.frozen for name in names}
        state = self.content["state"]
        lost = self.optimizer.checkpoint.take_up([n for n, e in state.items() if e and n in frozen])
        if lost and init_world().is_main:
            logging.getLogger("gulliver").warning(
                "%s: skipped the optimizer state of %s, because only stage 3 unfreezes after boost",
                self.reader.folder,
                listed("frozen parameters", sorted(lost)),
            )

    def fill(self) -> None:
        reader, optimizer, content = self.reader, self.optimizer, self.content
        if optimizer.spreads_state:
            _fill_shards(reader, optimizer, content["state"])
        else:
            _load_optimizer_state(reader, optimizer, content)
        for group, saved in zip(optimizer.param_groups, content["groups"], strict=True):
            group.update(_read(reader, saved["options"]))
        if isinstance(optimizer, ZeroOptimizer) and optimizer.scaler and "loss_scale" in content:
            optimizer.scaler.load_state_dict(content["loss_scale"])


def _stepped(reader: StepReader, content: Mapping[str, Any]) -> dict[str, Any]:
    """Shapes and dtypes of a saved state's parameters, if the step records them."""
    if "parameters" in content:
        return {n: (tuple(shape), dtype) for n, (shape, dtype) in content["parameters"].items()}
    return {name: (t.shape, t.dtype) for name, t in reader.tensors(MODEL).items()}


def _check_shapes(
    reader: StepReader, optimizer: BoostedOptimizer, content: Mapping[str, Any]
) -> None:
    # If every rank has the full state, its shapes need not be those of the parameters; then the
    # step has the parameters' shapes.
    shapes = {name: whole_shape(p) for p, name in optimizer.checkpoint.trainable.items()}
    known = _stepped(reader, content) if optimizer.checkpoint.has_whole_state else {}
    for name, entries in content["state"].items():
        ours = shapes.get(name)
        if ours is not None and name in known and known[name][0] != ours:
            raise GulliverError(
                f"{reader.folder}: the optimizer state of {name!r} does not match: the parameter "
                f"had shape {known[name][0]} when saved, but has shape {ours} now"
            )
        for key, value in entries.items():
            if ours is None or name in known:
                continue
            refs = refs_in(value)
            if refs and (not isinstance(value, Ref) or value.shape != ours):
                raise GulliverError(
                    f"{reader.folder}: the optimizer state of {name!r} does not match: {key} "
                    f"has shape {refs[0].shape}, but the parameter has shape {ours}"
                )


def _fill_shards(
    reader: StepReader,
    optimizer: BoostedOptimizer,
    state: Mapping[str, Mapping[str, Any]],
) -> None:
    assert isinstance(optimizer, ZeroOptimizer), "only ZeRO shards state"
    entries = {
        name: {
            key: value if isinstance(value, Ref) else Counter(value["value"], value["dtype"])
            for key, value in found.items()
        }
        for name, found in state.items()
    }
    targets = optimizer.checkpoint.import_leaves(entries)
    wanted = {state[name][key].name: leaf for (name, key), leaf in targets.items()}
    reader.read_into(OPTIMIZER, wanted)


def _load_optimizer_state(
    reader: StepReader, optimizer: BoostedOptimizer, content: Mapping[str, Any]
) -> None:
    found = _read(reader, {"state": content["state"], "others": content.get("others", {})})
    state = {
        name: {
            key: value if isinstance(value, Tensor) else Counter(**value).to_value()
            for key, value in entries.items()
        }
        for name, entries in found["state"].items()
    }
    # Other values are converted to the parameter's dtype: ZeRO has float32 state for 16-bit ones.
    known = _stepped(reader, content)
    exact = [n for p, n in optimizer.names.items() if n in known and known[n][1] == p.dtype]
    optimizer.checkpoint.adopt_state(state, found["others"], exact)


def _read(reader: StepReader, value: Any) -> Any:
    made = reader.whole(OPTIMIZER, [ref.name for ref in refs_in(value)])
    return replace_refs(value, made)


def _check_scheduler(reader: StepReader, lr_scheduler: Any) -> None:
    kind, ours = reader.value(SCHEDULER)["kind"], type(lr_scheduler).__name__
    if kind != ours:
        raise GulliverError(f"{reader.folder} has the state of {kind}, but the scheduler is {ours}")


def random_state() -> dict[str, Any]:
    """Returns the state of this process's generators: torch's, Python's and numpy's."""
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
    """Restores this rank's generator states; False if the checkpoint has none."""
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


# Error feedback of packed messages, one entry per rank.
#
# A rank feeds back the packing errors of its own gradients, and its parameters differ from its
# shards by the packing errors of their updates. Neither applies to another number of ranks: then
# errors are dropped, and all ranks begin with the saved parameters.


def _feedback(optimizer: BoostedOptimizer) -> Any:
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer.shards.reducer.sender
    return optimizer.feedback


def wire_entry(optimizer: BoostedOptimizer) -> dict[str, PerRank]:
    """Returns the checkpoint entry of packing errors and gathered values; empty without packing."""
    feedback = _feedback(optimizer)
    lost = feedback.lost() if feedback is not None and feedback.feeds else None
    shown = optimizer.checkpoint.shown_parts() if isinstance(optimizer, ZeroOptimizer) else {}
    if lost is None and not shown:
        return {}
    # Copied, because the next backward overwrites them.
    return {WIRE: PerRank({"lost": _copied(lost or {}), "shown": _copied(shown)})}


def _copied(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def restore_wire(reader: StepReader, optimizer: BoostedOptimizer) -> None:
    """Restores packing errors, or warns that they are dropped (collective)."""
    world, feedback = init_world(), _feedback(optimizer)
    if feedback is not None:
        feedback.take_lost({})
    if not reader.is_per_rank(WIRE):
        return
    saved = reader.manifest.world_size
    found: dict[str, Any] = {}
    if saved == world.size:
        found = reader.value(WIRE, world.rank)
    fits = bool(found) and _fits(optimizer, found)
    if not all(gather_objects(fits)):
        if world.is_main:
            where = (
                f"this run of {world.size}" if saved != world.size else "chunk boundaries differ"
            )
            logging.getLogger("gulliver").warning(
                "%s: packing errors are dropped: they were saved by %d ranks, %s",
                reader.folder,
                saved,
                where,
            )
        return
    if feedback is not None:
        feedback.take_lost(found["lost"])
    if isinstance(optimizer, ZeroOptimizer):
        optimizer.checkpoint.take_shown_parts(found["shown"])


def _fits(optimizer: BoostedOptimizer, found: dict[str, Any]) -> bool:
    shapes = {name: p.shape for p, name in optimizer.names.items()}
    if any(shapes.get(name) != tensor.shape for name, tensor in found["lost"].items()):
        return False
    if not isinstance(optimizer, ZeroOptimizer):
        return True
    ours = {name: tensor.shape for name, tensor in optimizer.checkpoint.shown_parts().items()}
    return ours == {name: tensor.shape for name, tensor in found["shown"].items()}
