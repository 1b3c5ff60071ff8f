"""Fine-tunes, and ends itself by SIGKILL again and again: in steps, saves and the result.

Started by `tests/finetune/test_finetune_run.py`, with the folder of a model, a file, a folder and
points.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from gulliver.finetune import FinetuneConfig, finetune
from gulliver.finetune import finetuner as module
from tests.finetune.finetune_runs import small

POINTS = ("step 2", "save 3", "best 4", "step 6", "result")
STEPS = 8


def _end(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arm(point: str) -> None:
    """Lets the process end at a point of the run."""
    where, _, number = point.partition(" ")
    kind = module.Finetuner
    if where == "result":
        module.write_result = _end  # type: ignore[assignment]
        return
    name = {"step": "_step", "save": "save", "best": "evaluate"}[where]
    inner = getattr(kind, name)

    def ending(self: Any, *arguments: Any) -> Any:
        found = inner(self, *arguments)
        if self.step_number == int(number):
            _end()  # the save of this step, if there is one, is under way
        return found

    setattr(kind, name, ending)


def _run(config: FinetuneConfig, point: str) -> int:
    child = os.fork()
    if not child:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        if point:
            _arm(point)
        finetune(config)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(model: Path, data: Path, folder: Path, points: list[str]) -> None:
    torch.set_num_threads(1)
    example = model, data
    options = {"steps": STEPS, "lora_rank": 4, "method": "lora", "lora_dropout": 0.1}
    print(_run(small(example, folder / "whole", **options), ""), flush=True)
    for point in (*points, ""):
        config = small(example, folder / "killed", resume=True, **options)
        print(_run(config, point), flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), points=sys.argv[4:])
