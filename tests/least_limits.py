"""Small models that train under exactly the least limit that is stated for them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from benchmarks._models import GPT, VOCABULARY
from torch import Tensor, nn

from gulliver.booster import limited as _limited
from gulliver.booster.booster import Booster
from gulliver.booster.plugins import GeminiPlugin

STEPS = 3


@dataclass(frozen=True)
class LeastCase:
    """A model, an optimizer and a way of training.

    Attributes:
        seed: seed of the model, its data, and of what follows.
        kind: ``gpt`` or ``layers``.
        width: width of the model.
        depth: number of blocks.
        optimizer: name of the optimizer's class.
        step_in_backward: whether chunks are stepped in backward.
        max_norm: global norm that is clipped to; 0 for none.
        passes: backwards in a step, all but the last of them accumulated.
        later: whether steps after the first differ from it: other lengths, evaluation between.
        ranks: number of ranks, each with a batch of its own.
        frozen: share of the modules, the first of them, that are not trained.
    """

    seed: int
    kind: str
    width: int
    depth: int
    optimizer: str
    step_in_backward: bool
    max_norm: float
    passes: int
    later: bool
    ranks: int = 1
    frozen: float = 0.0

    def made(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(self.seed)
        if self.kind == "gpt":
            model: nn.Module = GPT(self.width, self.depth, 8)
        else:
            widths = [self.width * (1 + (self.seed + i) % 3) for i in range(self.depth)]
            pairs = itertools.pairwise([self.width, *widths, self.width])
            model = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairs))
        modules = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
        for module in modules[: int(self.frozen * len(modules))]:
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)
        options = {"momentum": 0.9} if self.optimizer == "SGD" else {}
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, getattr(torch.optim, self.optimizer)(trained, lr=1e-3, **options)

    def batch(self, number: int, rank: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + number + 1000 * rank)
        rows = 2 + 3 * (self.later and number > 0)
        if self.kind == "gpt":
            return torch.randint(VOCABULARY, (rows, 8), generator=generator)
        return torch.randn(rows, self.width, generator=generator)


def least_case(seed: int, ranks: int = 1) -> LeastCase:
    draw = random.Random(seed)
    case = LeastCase(
        seed,
        draw.choice(("gpt", "layers")),
        8 * draw.randint(2, 12),
        draw.randint(1, 6),
        draw.choice(("AdamW", "SGD", "RMSprop")),
        draw.random() < 0.5,
        draw.choice((0.0, 0.0, 1e9)),
        draw.choice((1, 1, 2)),
        draw.random() < 0.5,
    )
    frozen = draw.choice((0.0, 0.3, 0.7)) if ranks > 1 else 0.0
    return replace(case, ranks=ranks, frozen=frozen)


class Watched:
    """Notes by how much more than its budget a manager has held."""

    def __init__(self, manager: Any) -> None:
        self.over, self.manager = 0, manager
        for name in ("use", "done", "lend", "give"):
            setattr(manager, name, self._noted(getattr(manager, name)))

    def _noted(self, call: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            found = call(*args, **kwargs)
            self.over = max(self.over, self.manager.held - self.manager.budget)
            return found

        return noted


Backward = Callable[[Tensor, int], None]


def _train(
    case: LeastCase, model: nn.Module, optimizer, backward: Backward, ranks: range
) -> list[Tensor]:
    def loss_of(number: int) -> Tensor:
        outs = [model(case.batch(number, rank)) for rank in ranks]
        return sum((out - 1).square().mean() for out in outs) / len(ranks)  # type: ignore[return-value]

    found = []
    for step in range(STEPS):
        if step and case.later:
            model.eval()
            with torch.no_grad():
                found.append(model(case.batch(99)))  # a rank of several sees the same
            model.train()
        for number in range(case.passes if step or not case.later else 1):
            loss = loss_of(step + number)
            backward(loss, case.passes - 1 - number if step or not case.later else 0)
            found += [loss.detach()] if case.ranks == 1 else []
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(value.clone() for value in model.state_dict().values())]


def plain(case: LeastCase) -> list[Tensor]:
    """Losses and values without a limit."""
    model, optimizer = case.made()
    ranks = range(case.ranks)
    return _train(case, model, optimizer, lambda loss, _: loss.backward(), ranks)


def at_least_limit(case: LeastCase, folder: str, rank: int = 0) -> list[Tensor]:
    """The same at exactly the least limit that the plan of a roomy run states."""

    def plugin(limit: int | str) -> GeminiPlugin:
        return GeminiPlugin(
            limit,
            disk=f"{folder}:1GiB",
            step_in_backward=case.step_in_backward,
            max_norm=case.max_norm,
            verbose=False,
        )

    model, optimizer = case.made()
    plan = plugin("100GiB").make_plan(model, optimizer, sample=case.batch(0))
    assert plan.predicted.moved is not None
    tight = plugin(plan.predicted.moved.minimum)
    plan = tight.make_plan(model, optimizer, sample=case.batch(0))
    assert plan.predicted.moved is not None
    least = plugin(plan.predicted.moved.minimum)
    plan = least.make_plan(model, optimizer, sample=case.batch(0))
    booster = Booster(plan=plan, verbose=False)
    # What else this process holds, and gives back, is no business of the model.
    with patch.object(_limited, "Footprint", side_effect=OSError):
        model, optimizer, *_ = booster.boost(model, optimizer)

    def backward(loss: Tensor, more: int) -> None:
        if more:
            with booster.no_sync(model, optimizer):
                booster.backward(loss, optimizer)
        else:
            booster.backward(loss, optimizer)

    found = _train(case, model, optimizer, backward, range(rank, rank + 1))
    booster.close()
    return found
