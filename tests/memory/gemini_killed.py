"""Trains under a memory limit and ends itself by SIGKILL, twice: in a step and in a save.

Started by `tests/memory/test_gemini_killed.py`: ``python -m tests.memory.gemini_killed FOLDER``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.booster.booster import Booster
from gulliver.booster.plugins import GeminiPlugin
from gulliver.memory.manager import Manager

WIDTH, SAVED, STEPS = 256, 2, 4
KINDS = "step", "save"
NAMING = "rename", "replace", "link", "symlink"


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(12)))


def batch_of(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def plugin_of(folder: str, limit: str) -> GeminiPlugin:
    return GeminiPlugin(limit, disk=f"{folder}:64MiB", chunk_mb=0.3, verbose=False)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _end(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _end_in_step(count: int) -> None:
    """Lets the process end when so many objects have been used."""
    use, left = Manager.use, [count]

    def counted(*arguments: Any, **options: Any) -> Tensor:
        left[0] -= 1
        if not left[0]:
            _end()
        return use(*arguments, **options)

    Manager.use = counted  # type: ignore[method-assign]


def _train(folder: Path, kind: str) -> None:
    model, booster = model_of(), Booster(plugin=plugin_of(str(folder), "21MiB"))
    model, optimizer, *_ = booster.boost(model, adamw(model))
    for step in range(STEPS):
        booster.backward(model(batch_of(step)).square().mean(), optimizer)
        if step == SAVED and kind == "step":
            _end_in_step(7)
        optimizer.step()
        optimizer.zero_grad()
        if step == SAVED:
            for name in NAMING:
                setattr(os, name, _end)
        booster.save(folder / kind, step + 1, model, optimizer, use_async=step == SAVED)
        booster.wait()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for kind in KINDS:
        child = os.fork()
        if not child:
            _train(folder, kind)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
