"""An optimizer without its model: a step with one entry, in a folder of its own.

It is the format of whole steps (`_checkpoint.py`), so that every rank writes what it has. Beside
the state there are the float32 copies of 16-bit parameters, which a whole step has as the model,
and shapes and dtypes of the parameters, which a whole step need not tell. `_old_files.py`
reads what was written before there were steps of one entry.
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
    Groups,
    agreed,
    check_optimizer_entry,
    fill_optimizer,
    optimizer_entry,
    take_up,
)
from gulliver.booster._old_files import Source
from gulliver.booster._states import on_main
from gulliver.checkpoint import (
    AsyncCheckpointer,
    CheckpointFolder,
)
from gulliver.comm import broadcast_object
from gulliver.errors import GulliverError
from gulliver.io import PARTIAL, finish_folder, hold, remove_all, remove_leftovers
from gulliver.memory import whole_shape
from gulliver.parallel import BoostedOptimizer, ZeroOptimizer
from gulliver.plan import Plan

PLAN = "plan.yaml"
OURS = re.compile(
    r"manifest\.json|state\.json|plan\.yaml|state\.safetensors|"
    r"optimizer(-[0-9]+-of-[0-9]+)?\.safetensors"
)
"""What a folder of an optimizer has in it, of this format or the one before."""


def write_optimizer(optimizer: BoostedOptimizer, folder: Path, plan: Plan | None) -> None:
    """Writes an optimizer as a step in a folder of its own, whole or not at all; all ranks call it.

    Raises:
        GulliverError: the folder holds other files, which it would replace, or cannot be written.
    """
    agreed(lambda: _refuse_others(folder))
    if isinstance(optimizer, ZeroOptimizer):
        optimizer.shards.take_writes()
    content = optimizer_entry(optimizer, _state_of(optimizer))
    content["parameters"] = stepped(optimizer)
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
    """Makes a temporary folder, which goes with the stack; also those of killed processes go."""
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


def read_optimizer(optimizer: BoostedOptimizer, reader: Source) -> None:
    """Takes over what was written, at any number of ranks; every rank calls it.

    Raises:
        GulliverError: on any rank, it does not fit, and nothing has changed then; or bytes are
            not those that were written, which is seen as they are read in place.
    """
    groups = Groups.of(optimizer)
    content: dict[str, Any] = {}

    def check() -> None:
        reader.check_files()
        content.update(check_optimizer_entry(reader, optimizer, groups))
        _check_stepped(optimizer, content, reader.folder)

    agreed(check)
    take_up(reader, optimizer, content, groups)
    if isinstance(optimizer, ZeroOptimizer):
        optimizer.shards.take_writes()
    agreed(lambda: fill_optimizer(reader, optimizer, content))
    if isinstance(optimizer, ZeroOptimizer):
        optimizer.shards.publish_masters()


def _check_stepped(optimizer: BoostedOptimizer, content: Mapping[str, Any], folder: Path) -> None:
    """Refuses state of parameters of other shapes or dtypes, whatever shapes the state has."""
    theirs = content.get("parameters", {})
    for name, ours in stepped(optimizer).items():
        there = theirs.get(name, ours)
        if there != ours:
            raise GulliverError(
                f"{folder} does not fit: the optimizer state of {name!r} does not fit: it is of "
                f"{tuple(there[0])} {there[1]}, the parameter {tuple(ours[0])} {ours[1]}"
            )
