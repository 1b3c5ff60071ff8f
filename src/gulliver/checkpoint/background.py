"""Writes a model that ranks hold parts of as whole files while the program goes on.

    saver = begin_single(leaves, Path("model.safetensors"), dtypes)
    saver.close()                              # every rank; waits until the file is there

Nobody has the whole, and gathering it would hold training up. So each rank saves its parts as those
of a step (`AsyncCheckpointer`), in a hidden folder next to the target; when they are all on the
disk rank 0 reads them tensor by tensor, writes the files and removes the folder. For that time the
disk holds the model twice. What a killed process leaves is hidden, and removed by the next one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gulliver.checkpoint.interchange import write_untied
from gulliver.checkpoint.saving import AsyncCheckpointer, Save
from gulliver.checkpoint.tree import Leaf
from gulliver.checkpoint.weights import Weights, open_weights
from gulliver.checkpoint.writing import clear_leftovers, write_single
from gulliver.comm.collectives import broadcast_object
from gulliver.errors import GulliverError
from gulliver.io.files import PARTIAL, hold

ENTRY, STEP = "model", 0


class PartsSaver(AsyncCheckpointer):
    """Saves parts, and makes whole files of them; every rank makes one."""

    def __init__(
        self, target: Path, write: Callable[[Weights], object], memory_limit: int | None = None
    ) -> None:
        # The name says which process writes, so that others know when it is left over.
        writer = broadcast_object(os.getpid())
        parts = target.with_name(f".{target.name}.parts.{writer}{PARTIAL}")
        super().__init__(parts, keep=1, memory_limit=memory_limit)
        self._target, self._put = target, write

    def begin(self, leaves: Mapping[str, Leaf]) -> None:
        """Begins to save; all ranks call it, once."""
        if self.rank == 0:
            clear_leftovers(self._target.parent)
        try:
            self.save(STEP, {ENTRY: dict(leaves)})
        except BaseException:
            self._remove()
            raise

    def _finish(self, save: Save) -> None:
        super()._finish(save)
        if self._engine is not None:
            # There is no other save: its pages make room for those of the conversion.
            self._engine.close()
            self._engine = None
        if self.rank != 0:
            return
        try:
            if save.problem is None:
                with (
                    hold(self.folder.root),
                    open_weights(self.folder.path(STEP), ENTRY) as weights,
                ):
                    self._put(weights)
        except Exception as error:
            self._failure = GulliverError(f"{self._target} was not written: {error}")
            self._failure.__cause__ = error
        finally:
            self._remove()

    def _remove(self) -> None:
        """Removes the parts."""
        if self.rank == 0:
            self._lock.release()
            shutil.rmtree(self.folder.root, ignore_errors=True)

    def _warn_of_space(self, nbytes: int) -> None:
        """Says nothing: there is no next step."""


def begin_single(
    leaves: Mapping[str, Leaf],
    path: Path,
    dtypes: Mapping[str, torch.dtype],
    memory_limit: int | None = None,
) -> PartsSaver:
    """Begins to write one safetensors file of what all ranks have; every rank calls it."""

    def write(weights: Weights) -> None:
        write_single(weights, {name: name for name in weights.infos}, path, dtypes)

    saver = PartsSaver(path, write, memory_limit)
    saver.begin(leaves)
    return saver


def begin_huggingface(
    leaves: Mapping[str, Leaf],
    folder: Path,
    dtypes: Mapping[str, torch.dtype],
    aliases: Mapping[str, str],
    dtype: torch.dtype | None = None,
    memory_limit: int | None = None,
    **options: Any,
) -> PartsSaver:
    """Begins to write a Hugging Face folder of what all ranks have; every rank calls it."""
    kind = dtypes if dtype is None else dtype
    saver = PartsSaver(
        folder,
        lambda weights: write_untied(weights, folder, dtype=kind, aliases=aliases, **options),
        memory_limit,
    )
    saver.begin(leaves)
    return saver
