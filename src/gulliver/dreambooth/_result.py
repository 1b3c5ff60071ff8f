"""What a run leaves, made of its last checkpoint: whatever it ran on, tensors are whole there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from gulliver.checkpoint import open_weights, step_folder, write_json, write_single
from gulliver.dreambooth._base import FACTS, Base, Learnt, TokenHandle
from gulliver.dreambooth._config import DreamboothConfig
from gulliver.dreambooth._student import adapters_of
from gulliver.io import named_errors
from gulliver.jobs._run_folder import RunFolder
from gulliver.memory import Part


class SavedTensors(Mapping[str, Tensor]):
    """Tensors of a step, each read when it is asked for."""

    def __init__(self, step: Path) -> None:
        self.weights = open_weights(step)

    def __getitem__(self, name: str) -> Tensor:
        info = self.weights.infos[name]
        made = torch.empty(info.shape, dtype=info.dtype)
        self.weights.read({name: Part(made.view(-1), info.shape)})
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights.infos)

    def __len__(self) -> int:
        return len(self.weights.infos)

    def write(self, path: Path, names: Mapping[str, str]) -> None:
        """Streams tensors to a safetensors file, by their names there and here."""
        write_single(self.weights, names, path)


def write_result(
    base: Base,
    config: DreamboothConfig,
    run: RunFolder,
    tokens: tuple[TokenHandle, ...],
    facts: Mapping[str, str],
) -> Path:
    """Writes the result of a run that is over, whole or not at all; rank 0 calls it."""
    folder, partial = run.folder / "result", run.folder / ".result.partial"
    if folder.is_dir():
        return folder
    tensors = SavedTensors(step_folder(run.checkpoints.root))
    with tensors.weights, named_errors(folder):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        adapters = adapters_of(base)
        base.save(partial, Learnt(config.method, tensors, tokens, adapters, tensors.write))
        write_json(partial / FACTS, {**facts, "token": config.token, "method": config.method})
        os.replace(partial, folder)
    return folder
