"""Optimizers without their models: a step with one entry, in a folder of its own.

Every rank writes what it has, in the format of whole steps. The entry also has the float32 copies
of 16-bit parameters, which a whole step keeps as the model, and shapes and dtypes of parameters.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gulliver.booster._checkpoint import (
    OPTIMIZER,
    OptimizerEntry,
    optimizer_entry,
)
from gulliver.booster._states import on_main
from gulliver.checkpoint import (
    AsyncCheckpointer,
    CheckpointFolder,
    StepReader,
)
from gulliver.comm import broadcast_object, raise_on_any_rank
from gulliver.errors import GulliverError
from gulliver.io import PARTIAL, finish_folder, hold, remove_all, remove_leftovers
from gulliver.memory import whole_shape
from gulliver.parallel import BoostedOptimizer, ZeroOptimizer
from gulliver.plan import Plan

PLAN = "plan.yaml"
# Names of the files in a folder of an optimizer.
OURS = re.compile(
    r"manifest\.json|state\.json|plan\.yaml|optimizer(-[0-9]+-of-[0-9]+)?\.safetensors"
)


def write_optimizer(optimizer: BoostedOptimizer, folder: Path, plan: Plan | None) -> None:
    """Writes an optimizer as a step in a folder of its own, whole or not at all; all ranks call it.

    Raises:
        GulliverError: the folder holds other files, which it would replace, or cannot be written.
    """
    raise_on_any_rank(lambda: _refuse_others(folder))
    if isinstance(optimizer, ZeroOptimizer):
        optimizer.shards.take_writes()
    content = optimizer_entry(optimizer, _state_of(optimizer))
    content["parameters"] = stepped(optimizer)
    # The name has the writer's process, so that leftovers of killed ones can be told from it.
    number = broadcast_object(os.getpid())
    run = folder.with_name(f".{folder.name}.{number}{PARTIAL}")
    with ExitStack() as stack:
        on_main(lambda: _begin(run, stack))
        limit = optimizer.checkpoint.copy_limit
        with AsyncCheckpointer(run, keep=0, mode="ring", memory_limit=limit) as checkpointer:
            checkpointer.save(0, {OPTIMIZER: content})
        on_main(lambda: _name(CheckpointFolder(run).path(0), folder, plan))


def _refuse_others(folder: Path) -> None:
    there = folder.iterdir() if folder.is_dir() else ()
    others = sorted(entry.name for entry in there if not OURS.fullmatch(entry.name))
    if others:
        raise GulliverError(
            f"{folder} holds other files, such as {others[0]}: give the optimizer a folder of its "
            "own"
        )


def _begin(run: Path, stack: ExitStack) -> None:
    """Makes a temporary folder that the stack removes; also removes those of killed processes."""
    remove_leftovers(run.parent)
    run.mkdir(parents=True)
    stack.callback(remove_all, run)
    stack.enter_context(hold(run))


def _name(step: Path, folder: Path, plan: Plan | None) -> None:
    if plan is not None:
        plan.save(step / PLAN)
    finish_folder(step, folder)


def _state_of(optimizer: BoostedOptimizer) -> Any:
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer.checkpoint.export_leaves()
    return optimizer.checkpoint.state_leaves()


def stepped(optimizer: BoostedOptimizer) -> dict[str, Any]:
    """Shapes of the parameters by name, whole, and the dtypes of their state."""
    return {
        name: [list(whole_shape(p)), optimizer.checkpoint.state_dtype(p)]
        for p, name in optimizer.checkpoint.trainable.items()
    }


def read_optimizer(optimizer: BoostedOptimizer, reader: StepReader) -> None:
    """Loads an optimizer at any number of ranks; every rank calls it."""
    entry = OptimizerEntry.of(reader, optimizer)

    def match() -> None:
        reader.check_files()
        entry.match()
        _check_stepped(optimizer, entry.content, reader.folder)

    raise_on_any_rank(match)
    entry.unfreeze()
    if isinstance(optimizer, ZeroOptimizer):
        # Else values that the user wrote to parameters would replace the masters that are loaded.
        optimizer.shards.take_writes()
    raise_on_any_rank(entry.fill)
    if isinstance(optimizer, ZeroOptimizer):
        optimizer.shards.publish_masters()


def _check_stepped(optimizer: BoostedOptimizer, content: Mapping[str, Any], folder: Path) -> None:
    """Refuses state of parameters of other shapes or dtypes."""
    theirs = content.get("parameters", {})
    for name, ours in stepped(optimizer).items():
        there = theirs.get(name, ours)
        if there != ours:
            raise GulliverError(
                f"{folder} does not fit: the optimizer state of {name!r} does not fit: it is of "
                f"{tuple(there[0])} {there[1]}, the parameter {tuple(ours[0])} {ours[1]}"
            )
