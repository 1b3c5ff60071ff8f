"""Runs of data-centric steps, and one process that trains on the same samples.

`RandomPlans` stands for a planner: which samples a step has hangs on seed and step only, who runs
them is drawn anew for each number of ranks, so that groups change in every step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from gulliver.booster import Booster, DataCentricLoader, DataCentricPlugin
from gulliver.booster import limited as _limited
from gulliver.comm import World, current_world
from gulliver.data import DataCentricPlanner, Samples, pack_documents
from gulliver.data_centric.steps import MicroBatch, RankGroup, StepPlan
from gulliver.hardware.batch_costs import BlockKind
from tests.data_centric.data_centric_costs import line_costs
from tests.hybrid.hybrid_cells import (
    exact_norms,
    make_optimizer,
    next_token_loss,
    relative,
    saved_weights,
)
from tests.hybrid.hybrid_models import VOCABULARY, build
from tests.random_limits import Watched
from tests.references import computed_once

LENGTHS = (9, 12, 17, 24)
CLIPS = ((2, 4, 4), (4, 4, 6), (5, 6, 4))
"""Frames, rows and columns of latent pixels."""
KINDS = {
    "llama": (BlockKind("layers", 2, 1.0),),
    "qwen2": (BlockKind("layers", 2, 1.0),),
    "documents": (BlockKind("layers", 2, 1.0),),
    "stdit3": (BlockKind("spatial", 2, 1.0), BlockKind("temporal", 2, 1.0)),
}
SAMPLES, PLANNED = 64, 40
"""Samples that random steps draw from; samples of a planned epoch, of eight steps."""


def tokens_of(family: str, index: int) -> int:
    """Tokens of a text: documents are up to four tokens shorter than planned."""
    return shape_of(family, index) - (index % 5 if family == "documents" else 0)


def shape_of(family: str, index: int) -> Any:
    """The shape of a sample, such as a table has it."""
    shapes: Any = CLIPS if family == "stdit3" else LENGTHS
    return shapes[random.Random(f"{family} {index}").randrange(len(shapes))]


class Uneven:
    """A data set of samples of several shapes, the same in every process."""

    def __init__(self, family: str) -> None:
        self.family = family

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        shape = shape_of(self.family, index)
        if self.family != "stdit3":
            size = (tokens_of(self.family, index),)
            ids = torch.randint(3, VOCABULARY, size, generator=generator)
            return {"input_ids": ids, "labels": ids}
        frames, rows, columns = shape
        clip = torch.randn(4, frames, rows, columns, generator=generator, dtype=torch.float64)
        text = torch.randn(1, 5, 16, generator=generator, dtype=torch.float64)
        found = {"x": clip, "y": text, "timestep": 1000 * torch.rand((), generator=generator)}
        sizes = {"fps": 24.0, "height": 8.0 * rows, "width": 8.0 * columns}
        return found | {name: torch.tensor(size) for name, size in sizes.items()}


def loss_of(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    """The mean over the samples, or over their tokens, of one shape."""
    out = model(**data)
    return _criterion(out, data) if isinstance(out, Tensor) else out.loss


def _criterion(out: Tensor, data: dict[str, Tensor]) -> Tensor:
    return ((out - data["timestep"].view(-1, 1, 1, 1, 1) / 1000) ** 2).mean()


@dataclass
class RandomPlans:
    """Steps whose samples hang on seed and step, and whose groups are drawn."""

    family: str
    ranks: int
    steps: int
    seed: int = 0
    degrees: tuple[int, ...] = (1, 2, 3, 4)
    signature: str = "random"
    step: int = 0
    skipped: tuple[int, ...] = ()
    costs: Any = field(init=False)

    def __post_init__(self) -> None:
        self.costs = SimpleNamespace(kinds=KINDS[self.family])

    def position(self) -> int:
        """The next step."""
        return self.step

    def rewind(self, position: int) -> None:
        """Goes back to a step."""
        self.step = position

    def samples(self, step: int) -> list[int]:
        """Indices of the samples of a step."""
        draw = random.Random(f"{self.seed} {step}")
        return draw.sample(range(SAMPLES), draw.randint(3, 6))

    def __iter__(self) -> Iterator[StepPlan]:
        while self.step < self.steps:
            step, self.step = self.step, self.step + 1
            groups, *later = self._phases(step)
            yield StepPlan(step, 0, groups, 0.0, 0.0, (), tuple(later))

    def _phases(self, step: int) -> list[tuple[RankGroup, ...]]:
        """Steps of one, two and three phases in turn, whose groups differ."""
        samples, phases = self.samples(step), step % 3 + 1
        parts = [part for n in range(phases) if (part := samples[n::phases])]
        return [self._groups(step, number, part) for number, part in enumerate(parts)]

    def _groups(self, step: int, phase: int, samples: list[int]) -> tuple[RankGroup, ...]:
        draw = random.Random(f"{self.seed} {step} {self.ranks} {phase}")
        cuts = sorted(draw.sample(range(1, self.ranks), draw.randint(0, self.ranks - 1)))
        rows = [range(a, b) for a, b in zip([0, *cuts], [*cuts, self.ranks], strict=True)]
        work = [list[MicroBatch]() for _ in rows]
        by_shape = dict[Any, list[int]]()
        for index in samples:
            by_shape.setdefault(shape_of(self.family, index), []).append(index)
        for shape, indices in by_shape.items():
            while indices:
                count = draw.randint(1, len(indices))
                again = tuple(draw.randint(0, kind.count) for kind in KINDS[self.family])
                batch = MicroBatch(shape, tuple(indices[:count]), sum(again), again)
                work[draw.randrange(len(rows))].append(batch)
                del indices[:count]
        pairs = zip(rows, work, strict=True)
        return tuple(RankGroup(tuple(row), tuple(batches)) for row, batches in pairs)


def make_model(family: str, wired: bool) -> Any:
    """A small model that computes in float64 throughout."""
    model = build("llama" if family == "documents" else family)
    exact_norms(model)
    if family != "stdit3" and not wired:
        model.loss_function = next_token_loss
    return model


def weights(family: str, by_tokens: bool) -> list[float] | None:
    """What samples count: alike, or by their labels."""
    if not by_tokens:
        return None
    return [float(tokens_of(family, index) - 1) for index in range(SAMPLES)]


@dataclass(frozen=True)
class Case:
    """One run."""

    family: str
    stage: int = 1
    clip: float = 0.0
    by_tokens: bool = False
    mode: str = "all_to_all"
    steps: int = 20
    seed: int = 0
    tensor: int = 1
    stages: int = 1
    disk: str = ""


@computed_once
def alone(
    family: str, clip: float, by_tokens: bool, steps: int, seed: int
) -> tuple[list[dict[str, Tensor]], list[float], dict[str, Tensor]]:
    """Gradients and loss of every step, and the weights at the end, of plain torch."""
    model, data = make_model(family, wired=False), Uneven(family)
    optimizer, plans = make_optimizer(model), RandomPlans(family, 1, steps, seed)
    counts = weights(family, by_tokens) or [1.0] * SAMPLES
    gradients, losses = [], []
    for step in range(steps):
        indices = plans.samples(step)
        whole, shown = sum(counts[index] for index in indices), 0.0
        for index in indices:
            batch = {name: value[None] for name, value in data[index].items()}
            loss = loss_of(model, batch) * counts[index] / whole
            loss.backward()
            shown += float(loss.detach())
        losses.append(shown)
        named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        gradients.append({name: gradient.clone() for name, gradient in named.items()})
        if clip:
            norm = torch.stack([g.square().sum() for g in named.values()]).sum().sqrt()
            for gradient in named.values():
                gradient.mul_((clip / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()
    return gradients, losses, {n: p.detach().clone() for n, p in model.named_parameters()}


def errors(world: World, case: Case) -> dict[str, float]:
    """Largest relative errors of gradients of any step, of losses, and of weights at the end."""
    model = make_model(case.family, wired=world.size > case.stages).to(world.device)
    booster, model, optimizer = boosted(case, model)
    manager = optimizer.shards.manager
    watched = None if manager is None else Watched(manager)
    inside = case.tensor * case.stages
    ranks = world.size // inside
    plans = RandomPlans(case.family, ranks, case.steps, case.seed)
    counted = weights(case.family, case.by_tokens)
    collate = pack_documents if case.family == "documents" else None
    data = Uneven(case.family)
    planner: Any = plans
    loader = DataCentricLoader(planner, data, model, optimizer, collate=collate, weight=counted)
    wanted = alone(case.family, case.clip, case.by_tokens, case.steps, case.seed)
    found = {"gradients": 0.0, "losses": 0.0, "idle": 0.0}
    for step in loader:
        batches = 0
        if case.stages > 1:
            step.run(None if case.family != "stdit3" else _criterion)
            batches = len(step.measured)
        for batch in step if case.stages == 1 else ():
            step.backward(loss_of(model, batch.data))
            batches += 1
        number = step.plan.step
        found["idle"] += batches == 0
        shown, gradients = step.loss(), optimizer.full_gradients()
        error = abs(shown / wanted[1][number] - 1)
        found["losses"] = max(found["losses"], error)
        assert gradients.keys() == wanted[0][number].keys()
        # Against the largest of all gradients: some, such as those of biases of keys, are noise.
        least = 1e-6 * max(float(g.abs().max()) for g in wanted[0][number].values())
        for name, gradient in gradients.items():
            error = relative(gradient, wanted[0][number][name], least)
            found["gradients"] = max(found["gradients"], error)
        if case.clip:
            optimizer.clip_grad_by_norm(case.clip)
        optimizer.step()
        optimizer.zero_grad()
    whole = dict(model.named_parameters()) if inside == 1 else saved_weights(booster, model)
    found["weights"] = max(relative(whole[n].detach(), w) for n, w in wanted[2].items())
    if watched is not None:
        stats = watched.manager.stats()
        found |= {name: stats[name] for name in ("evictions", "minimum", "bytes_out")}
        found |= {"over": watched.over, "budget": watched.manager.budget}
    return found


def boosted(case: Case, model: Any) -> tuple[Booster, Any, Any]:
    """Boosts a model, with a disk under the least limit that a plan of it states."""

    def plugin(**limits: Any) -> DataCentricPlugin:
        size = 0.03 if case.disk else 0.01  # to plan takes a second for each hundred chunks
        given: Any = {"chunk_mb": size, "verbose": False, "tp_size": case.tensor}
        return DataCentricPlugin(case.stage, case.mode, pp_size=case.stages, **given, **limits)

    if not case.disk:
        booster = Booster(plugin=plugin())
        model, optimizer, *_ = booster.boost(model, make_optimizer(model))
        return booster, model, optimizer
    behind = f"{case.disk}:64MiB"
    twin = make_model(case.family, wired=True).to(current_world().device)
    roomy = plugin(memory_limit="1GiB", disk=behind).make_plan(twin, make_optimizer(twin))
    assert roomy.predicted.moved is not None
    booster = Booster(plugin=plugin(memory_limit=roomy.predicted.moved.minimum, disk=behind))
    # What else this process holds, and gives back, is no business of the model.
    with patch.object(_limited, "Footprint", side_effect=OSError):
        model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    return booster, model, optimizer


def planned(ranks: int, **changes: Any) -> DataCentricPlanner:
    """A planner of the llama's samples, whose groups change with the step."""
    costs = line_costs(lambda n: n * n, 2 * max(LENGTHS), 5.0, 0.02, (1, 2, 3, 4))
    shapes = [shape_of("llama", index) for index in range(PLANNED)]
    return DataCentricPlanner(costs, shapes, ranks, Samples(5), window=20, **changes)


def trained(
    world: World, folder: str, steps: int, seed: int = 0, stages: int = 1, disk: str = ""
) -> tuple[list[tuple[list[int], float]], dict[str, Tensor], int]:
    """Goes on from what a folder has, saves after so many steps.

    Returns:
        Samples and loss of each step, the weights, and the most ranks of a group.
    """
    model = make_model("llama", wired=world.size > stages)
    case = Case("llama", 3 if disk else 2, stages=stages, disk=disk)
    booster, model, optimizer = boosted(case, model)
    planner = planned(world.size // stages, seed=seed, stages=stages)
    loader = DataCentricLoader(planner, Uneven("llama"), model, optimizer)
    if folder and any(Path(folder).iterdir()):
        booster.load(folder, model, optimizer, state={"loader": loader})
    curve, widest = [], 0
    while len(curve) < steps:
        for step in loader:
            step.run()
            optimizer.step()
            optimizer.zero_grad()
            samples = sorted(index for _, batch in step.plan for index in batch.samples)
            curve.append((samples, step.loss()))
            widest = max(widest, *(g.degree for g in step.plan.all_groups if g.micro_batches))
            if len(curve) == steps:
                break
    if folder:
        state = {"loader": loader}
        booster.save(folder, planner_step(loader), model, optimizer, state=state, use_async=False)
    whole = dict(model.named_parameters()) if stages == 1 else saved_weights(booster, model)
    return curve, {n: p.detach().clone() for n, p in whole.items()}, widest


def planner_step(loader: DataCentricLoader) -> int:
    """Number of steps that were given out."""
    return loader.state_dict()["step"]
