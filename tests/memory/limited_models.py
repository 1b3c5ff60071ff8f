"""Trains models one after another in this process's control group, each under a limit of its own.

Started by `tests/memory/test_memory_limit.py` inside the group: ``python -m
tests.memory.limited_models FILE
CASES``, with the file that has the group's limit. Each case prints a line when it begins and one
when it has ended, so that the one under way is known if the kernel ends the process.

The group's limit is what is charged before a model is there (the interpreter, torch, its threads,
and what the allocator keeps of earlier models), the case's memory limit, and `SLACK`.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from benchmarks._models import GPT, VOCABULARY
from torch import Tensor, nn

from gulliver.booster import Booster, GeminiPlugin
from gulliver.errors import GulliverError

SLACK = 24 << 20
"""Bytes of threads, allocator and Python's objects beside what was there before the model."""
MIB = 1 << 20
STEPS = 3
USAGE = "memory.usage_in_bytes", "memory.current"


@dataclass(frozen=True)
class LimitCase:
    """A model, an optimizer and a limit.

    Attributes:
        seed: seed of the model, its data, and of what follows.
        kind: ``gpt`` or ``layers``.
        width: width of the model.
        depth: number of blocks.
        share: limit as a share of the way from the least that would do to all of the states.
        optimizer: name of the optimizer's class.
        step_in_backward: whether chunks are stepped in backward.
        limited: whether the plugin knows of the limit.
    """

    seed: int
    kind: str = "gpt"
    width: int = 256
    depth: int = 6
    share: float = 0.0
    optimizer: str = "AdamW"
    step_in_backward: bool = False
    limited: bool = True

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        if self.kind == "gpt":
            return GPT(self.width, self.depth, 32)
        widths = [self.width * (1 + (self.seed + i) % 3) for i in range(self.depth)]
        widths = [self.width, *widths, self.width]
        pairs = itertools.pairwise(widths)
        return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairs))

    def sample(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        if self.kind == "gpt":
            return torch.randint(VOCABULARY, (2, 32), generator=generator)
        return torch.randn(16, self.width, generator=generator)

    def loss(self, model: nn.Module) -> Tensor:
        x = self.sample()
        out = model(x)
        if self.kind == "gpt":
            return F.cross_entropy(out.flatten(0, 1), x.flatten())
        return (out - 1).square().mean()

    def made(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = self.model()
        options = {"momentum": 0.9} if self.optimizer == "SGD" else {}
        return model, getattr(torch.optim, self.optimizer)(model.parameters(), lr=1e-3, **options)


def random_case(seed: int) -> LimitCase:
    draw = random.Random(seed)
    return LimitCase(
        seed,
        draw.choice(("gpt", "layers")),
        64 * draw.randint(4, 6),
        draw.randint(4, 8),
        draw.choice((0.0, 0.05, 0.2, 0.5, 0.9)),
        draw.choice(("AdamW", "SGD", "RMSprop")),
        draw.random() < 0.5,
    )


class Limit:
    """The limit of the group that this process is in."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def none(self) -> None:
        self.file.write_text("max" if self.file.name == "memory.max" else "-1")

    def above_present(self, nbytes: int) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        now = next(p for name in USAGE if (p := self.file.parent / name).exists())
        self.file.write_text(str(int(now.read_text()) + nbytes + SLACK))


def plain_losses(case: LimitCase) -> list[float]:
    model, optimizer = case.made()
    losses = []
    for _ in range(STEPS):
        loss = case.loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def limited_losses(case: LimitCase, limit: int, folder: str) -> list[float]:
    model, optimizer = case.made()
    plugin = GeminiPlugin(
        limit,
        disk=f"{folder}:4GiB",
        step_in_backward=case.step_in_backward,
        verbose=False,
    )
    booster = Booster(plugin)
    net, wrapped, *_ = booster.boost(model, optimizer)
    losses = []
    for _ in range(STEPS):
        loss = case.loss(net)
        booster.backward(loss, wrapped)
        wrapped.step()
        wrapped.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def least_limit(case: LimitCase, folder: str, given: int = 100 << 30) -> tuple[int, int]:
    """The stated minimum, and the bytes of all states; refused where `given` is less."""
    model, optimizer = case.made()
    plugin = GeminiPlugin(
        given, disk=f"{folder}:4GiB", step_in_backward=case.step_in_backward, verbose=False
    )
    plan = plugin.make_plan(model, optimizer, sample=case.sample())
    moved = plan.predicted.moved
    assert moved is not None
    return moved.minimum, 16 * sum(p.numel() for p in model.parameters())


def run(case: LimitCase, limit: Limit, folder: str) -> dict[str, object]:
    limit.none()
    wanted = plain_losses(case)
    least, states = least_limit(case, folder)
    given = least + int(case.share * max(0, states - least))
    refused = ""
    try:
        least_limit(case, folder, least // 2)
    except GulliverError as error:
        refused = str(error)
    # The whole model is there when it is boosted: no plugin can help that.
    limit.above_present(max(given, states // 4 + 4 * MIB))
    try:
        found = limited_losses(case, given, folder) if case.limited else plain_losses(case)
    except GulliverError as error:
        found = str(error)
    return {"refused": refused, "wanted": wanted, "found": found, "given": given, "states": states}


def main(file: str, folder: str, cases: str) -> None:
    torch.set_num_threads(1)
    limit = Limit(Path(file))
    # What torch, its threads and the plan's measurements make once in a process.
    run(LimitCase(0, width=128, depth=2, share=1.0), limit, folder)
    for given in json.loads(cases):
        case = LimitCase(**given)
        print(json.dumps({"begins": asdict(case)}), flush=True)
        print(json.dumps({"ended": run(case, limit, folder)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
