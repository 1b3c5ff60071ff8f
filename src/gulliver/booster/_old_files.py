"""Optimizers as older versions saved them: a file of tensors, and one of what they belong to.

They are read like a step with one entry; nothing writes them any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gulliver.checkpoint import (
    StepReader,
    is_step_or_run,
    join_state,
    load_huggingface,
    open_weights,
    read_json,
    read_metadata,
)
from gulliver.errors import GulliverError
from gulliver.memory import Part

TENSORS, SKELETON = "state.safetensors", "state.json"


def is_old(folder: Path) -> bool:
    """Whether a folder has the two files that were written before there were steps in them."""
    if not (folder / SKELETON).exists() and not (folder / TENSORS).exists():
        return False
    return not is_step_or_run(folder)


class OldFiles:
    """Two files, of tensors and of where they belong, as a `StepReader` of one entry.

    Raises:
        GulliverError: they are missing, broken, or not of one save.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._file = folder, folder / TENSORS
        content = read_json(folder / SKELETON)
        if not isinstance(content, Mapping) or not {"optimizer", "mark", "state"} <= content.keys():
            raise GulliverError(f"{folder / SKELETON} holds no optimizer state")
        if read_metadata(self._file).get("mark") != content["mark"]:
            raise GulliverError(
                f"{TENSORS} and {SKELETON} in {folder} are not of one save: take another checkpoint"
            )
        self._skeleton = {"dict": [["optimizer", content["optimizer"]], *content["state"]["dict"]]}
        with open_weights(self._file) as weights:
            self._infos = weights.infos
        self._singles = self.whole("", [n for n, info in self._infos.items() if not info.shape])

    def skeleton(self, entry: str) -> Any:
        """Returns nested values that say where tensors belong; single values are counters there."""
        parts = dict(self._skeleton["dict"])
        stepped = join_state({}, parts.get("parameters", {"dict": []}))
        single = {name for name, (shape, _) in stepped.items() if not shape}
        state = [
            [name, {"dict": [[k, self._counted(k, v, name in single)] for k, v in found["dict"]]}]
            for name, found in parts["state"]["dict"]
        ]
        return {"dict": [*({**parts, "state": {"dict": state}}).items()]}

    def _counted(self, key: str, value: Any, is_single: bool) -> Any:
        if not isinstance(value, dict):
            return {"dict": [["value", value], ["dtype", None]]}
        found = self._singles.get(value.get("tensor", ""))
        if found is None or (is_single and key != "step"):
            return value
        dtype = {"dtype": str(found.dtype).removeprefix("torch.")}
        return {"dict": [["value", found.item()], ["dtype", dtype]]}

    def check_files(self) -> None:
        """Does nothing: the files were checked as they were opened."""

    def tensors(self, entry: str) -> Mapping[str, Any]:
        """Shapes and dtypes by name."""
        return self._infos if entry == "optimizer" else {}

    def read_into(self, entry: str, leaves: Mapping[str, Tensor | Part]) -> None:
        """Fills tensors and parts."""
        if leaves:
            load_huggingface(leaves, self._file, strict=False)

    def whole(self, entry: str, names: list[str]) -> dict[str, Tensor]:
        """New tensors by name."""
        made = {
            name: torch.empty(self._infos[name].shape, dtype=self._infos[name].dtype)
            for name in names
        }
        self.read_into(entry, made)
        return made


Source = StepReader | OldFiles
"""What an optimizer's entry is read from."""
