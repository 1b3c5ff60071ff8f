"""The cells of hybrid parallelism: families x grids, and one process to hold them to.

`errors_of(world, cell, dtype)` trains a cell on its ranks and returns its errors; `rows(pool)`
gives the lines of a table of them. The reference is a plain torch loop over the whole batch.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from gulliver.booster import Booster, HybridParallelPlugin
from gulliver.comm import World, barrier, gather_objects
from gulliver.comm.collectives import broadcast_object
from gulliver.planner.capability import families
from tests.hybrid.hybrid_models import DECODERS, LATER, Precise, batch, build, exact_norms
from tests.references import computed_once

STEPS = 10
BARS = {torch.float64: 1e-10, torch.float32: 1e-5}
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Grid:
    """How a model lies over its ranks."""

    name: str
    ranks: int
    plugin: dict[str, Any] = field(default_factory=dict)

    @property
    def model_ranks(self) -> int:
        sizes = [self.plugin.get(f"{axis}_size", 1) for axis in ("tp", "pp", "sp")]
        return sizes[0] * sizes[1] * sizes[2]

    @property
    def data(self) -> int:
        return self.ranks // self.model_ranks


def grid(name: str, ranks: int, **plugin: Any) -> Grid:
    return Grid(name, ranks, plugin)


RING = {"sequence_parallelism_mode": "ring_attn"}
ULYSSES = {"sequence_parallelism_mode": "all_to_all"}
SPLIT = {"sequence_parallelism_mode": "split_gather"}
PIPED = {"sequence_parallelism_mode": "ring"}
ANY = (
    grid("tensor 2", 2, tp_size=2),
    grid("tensor 2, split gather", 2, tp_size=2, **SPLIT),
    grid("tensor 2, ring", 2, tp_size=2, **PIPED),
    grid("pipeline 2", 2, pp_size=2, num_microbatches=2),
    grid("tensor 2 x data 2, ZeRO 1", 4, tp_size=2, zero_stage=1),
    grid("tensor 2 x data 2, ZeRO 3", 4, tp_size=2, zero_stage=3),
    grid("pipeline 2 x data 2, ZeRO 1", 4, pp_size=2, zero_stage=1, num_microbatches=2),
    grid("pipeline 2 x data 2, ZeRO 2", 4, pp_size=2, zero_stage=2, num_microbatches=2),
    grid("pipeline 2 x data 2, ZeRO 3", 4, pp_size=2, zero_stage=3, num_microbatches=2),
    grid("tensor 2 x pipeline 2", 4, tp_size=2, pp_size=2, num_microbatches=2),
    grid(
        "tensor 2 x pipeline 2, split gather",
        4,
        tp_size=2,
        pp_size=2,
        num_microbatches=2,
        **SPLIT,
    ),
)
SHARED = (
    grid("Ulysses 2", 2, sp_size=2, **ULYSSES),
    grid("ring 2", 2, sp_size=2, **RING),
    grid("ring 2 x data 2, ZeRO 2", 4, sp_size=2, zero_stage=2, **RING),
    grid("Ulysses 2 x data 2, ZeRO 3", 4, sp_size=2, zero_stage=3, **ULYSSES),
    grid("tensor 2 x Ulysses 2", 4, tp_size=2, sp_size=2, **ULYSSES),
    grid("tensor 2 x ring 2, ZeRO 1", 4, tp_size=2, sp_size=2, zero_stage=1, **RING),
    grid("pipeline 2 x ring 2", 4, pp_size=2, sp_size=2, num_microbatches=2, **RING),
)
BIG = (
    grid(
        "tensor 2 x pipeline 2 x data 2, ZeRO 1",
        8,
        tp_size=2,
        pp_size=2,
        zero_stage=1,
        num_microbatches=2,
    ),
)
BIG_SHARED = (
    grid(
        "tensor 2 x pipeline 2 x ring 2, ZeRO 1",
        8,
        tp_size=2,
        pp_size=2,
        sp_size=2,
        zero_stage=1,
        num_microbatches=2,
        **RING,
    ),
    grid("tensor 2 x ring 2 x data 2, ZeRO 3", 8, tp_size=2, sp_size=2, zero_stage=3, **RING),
)


CAPABILITIES = families()


def known(family: str) -> str:
    """The name of a family in the table of what may be combined."""
    return "STDiT3" if family == "stdit3" else family


@dataclass(frozen=True)
class Cell:
    """A family on a grid."""

    family: str
    grid: Grid
    clip: float = 0.0
    mask: str = ""

    @property
    def name(self) -> str:
        return f"{self.family}: {self.grid.name}{', ' + self.mask if self.mask else ''}"


SHARED_FAMILIES = ("llama", "gpt2", "vit", "stdit3")
FAMILIES = ("llama", "gpt2", "bloom", "t5", "vit", "stdit3")
CELLS = tuple(
    Cell(family, g)
    for family in FAMILIES
    for g in (*ANY, *(SHARED if family in SHARED_FAMILIES else ()))
    if g.plugin.get("sequence_parallelism_mode") in (None, *CAPABILITIES[known(family)].modes)
)
MASKED_CELLS = tuple(
    Cell(family, g, mask=mask)
    for family, known_of in CAPABILITIES.items()
    if "ring_attn" in known_of.modes and family != "STDiT3"
    for mask in known_of.masks
    for g in (SHARED[0], SHARED[1])
)
"""Every mask that the table of what may be combined lists."""

LATER_CELLS = tuple(
    Cell(family, g)
    for family in ("qwen3", "gemma2", "gemma3", "mixtral")
    for g in (*ANY[:4], *SHARED[:2])
    if g.plugin.get("sequence_parallelism_mode") in (None, *CAPABILITIES[family].modes)
)
"""Families with a file of their own: every mode that they list, on two ranks."""
COPIED_CELLS = tuple(
    Cell(family, g, clip=0.05)
    for family, g in (
        ("llama, 2 KV heads", grid("tensor 4", 4, tp_size=4)),
        ("llama, 2 KV heads", grid("tensor 4, ring", 4, tp_size=4, **PIPED)),
        ("llama, 1 KV head", grid("tensor 2 x data 2, ZeRO 3", 4, tp_size=2, zero_stage=3)),
        ("llama, 1 KV head", grid("tensor 2 x ring 2", 4, tp_size=2, sp_size=2, **RING)),
    )
)
"""More tensor ranks than key-value heads."""

SHARED_WITH_TENSOR = tuple(
    grid(f"tensor 2 x {name}", 2 * ranks, tp_size=2, sp_size=ranks, **sizes)
    for name, ranks, sizes in (
        ("Ulysses 4", 4, ULYSSES),
        ("ring 3", 3, RING),
        ("ring 4", 4, RING),
        ("ring 2 x 2", 4, {**RING, "inner_ring_size": 2}),
        ("Ulysses 2 x ring 2", 4, {**RING, "ulysses_size": 2}),
    )
)
LARGE_CELLS = (
    *(Cell(family, g) for family in FAMILIES for g in BIG),
    *(Cell(family, g) for family in ("llama", "stdit3") for g in BIG_SHARED),
    *(Cell("llama", g) for g in SHARED_WITH_TENSOR),
)


def samples(cell: Cell, place: int, step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The batch of a data rank; its length changes from step to step."""
    length = 12 if step % 2 == 0 else 15
    texts = cell.family not in ("vit", "stdit3", "whisper")
    padded = texts and (cell.mask == "padding" or (step % 3 == 2 and not cell.mask))
    found = batch(
        cell.family, 4, seed=100 * step + place, length=length, dtype=dtype, padded=padded
    )
    if cell.mask == "documents":
        # Positions that begin anew are how transformers is told of packed documents.
        places = torch.cat([torch.arange(5), torch.arange(length - 5)])
        found["position_ids"] = places.expand(4, -1).contiguous()
    return found


def piped(cell: Cell) -> bool:
    """Whether a cell has stages; they pass no routers' logits on."""
    return cell.grid.plugin.get("pp_size", 1) > 1


def make_model(cell: Cell, dtype: torch.dtype, wired: bool) -> Any:
    """A model that computes in its own dtype: losses and norms of transformers cast to float32.

    Where tensors or sequences are shared, the plugin puts such a loss in itself.
    """
    model = build(cell.family, dtype, layers=4 if cell.grid.plugin.get("pp_size", 1) > 1 else 2)
    if cell.family in LATER:
        if piped(cell) and hasattr(model.config, "output_router_logits"):
            model.config.output_router_logits = False
        return model
    if dtype == torch.float64:
        exact_norms(model)
    if cell.family in DECODERS and not wired:
        model.loss_function = next_token_loss
    return model


def next_token_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """The mean over all tokens that have a next one and a label for it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, as real runs have them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() > 1]
    rest = [p for p in trained if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=LEARNING_RATE, eps=1e-4)


@dataclass
class Run:
    """What a run computed: losses of all steps, gradients of the first, weights at the end."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def reference(cell: Cell, dtype: torch.dtype, steps: int = STEPS) -> Run:
    """One process that knows nothing of gulliver."""
    # What it computes depends on these alone: other grids share it.
    sizes = {"pp_size": cell.grid.plugin.get("pp_size", 1)}
    same = Grid("alone", cell.grid.data * sizes["pp_size"], sizes)
    return _reference(replace(cell, grid=same), dtype, steps)


@computed_once
def _reference(cell: Cell, dtype: torch.dtype, steps: int) -> Run:
    model = make_model(cell, dtype, wired=False)
    optimizer = make_optimizer(model)
    run = Run([], {}, {})
    for step in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        for place in range(cell.grid.data):
            data = samples(cell, place, step, dtype)
            loss = criterion(model(**data), data) / cell.grid.data
            loss.backward()
            total += loss.detach()
        if step == 0:
            run.gradients = {
                n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
            }
        if cell.clip:
            nn.utils.clip_grad_norm_(model.parameters(), cell.clip)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(float(total))
    run.weights = {n: v.detach().clone() for n, v in model.state_dict().items()}
    return run


def criterion(out: Any, data: dict[str, Tensor]) -> Tensor:
    """The model's own loss, or for one without the distance to something that a sample says."""
    if not isinstance(out, Tensor):
        return out.loss
    shape = (-1, *[1] * (out.dim() - 1))
    return ((out - data["timestep"].view(shape) / 1000) ** 2).mean()


def hybrid(cell: Cell, dtype: torch.dtype, steps: int = STEPS) -> Run:
    """The same on the ranks of the cell's grid."""
    sizes = cell.grid.plugin
    model = make_model(cell, dtype, wired=sizes.get("tp_size", 1) * sizes.get("sp_size", 1) > 1)
    plugin = HybridParallelPlugin(
        **cell.grid.plugin, max_norm=cell.clip, chunk_mb=0.01, verbose=False
    )
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    run = Run([], {}, {})
    place = optimizer.mesh.data.rank
    for step in range(steps):
        data = samples(cell, place, step, dtype)
        if piped(cell):
            own = criterion if cell.family == "stdit3" else None
            # Of a loss function that was put in nobody knows what it counts.
            told = cell.family in DECODERS and cell.family not in LATER
            weight = "shifted_labels" if told else None
            done = booster.execute_pipeline(iter([data]), model, own, optimizer, weight=weight)
            run.losses.append(float(done["loss"]))
        else:
            loss = criterion(model(**data), data)
            booster.backward(loss, optimizer)
            run.losses.append(loss.item())
        if step == 0:
            run.gradients = optimizer.full_gradients()
        optimizer.step()
        optimizer.zero_grad()
    run.weights = saved_weights(booster, model)
    return run


def saved_weights(booster: Booster, model: nn.Module) -> dict[str, Tensor]:
    """The whole model, as every rank reads it from the file that all write together."""
    folder = broadcast_object(tempfile.mkdtemp())
    path = Path(folder) / "model.safetensors"
    booster.save_model(model, path)
    barrier()
    weights = load_file(path)
    barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return weights


def errors_of(world: World, cell: Cell, dtype: torch.dtype, steps: int = STEPS) -> dict[str, float]:
    """The largest relative errors of loss, gradients and weights, over all tensors."""
    with Precise() if cell.family in LATER else nullcontext():
        wanted, found = reference(cell, dtype, steps), hybrid(cell, dtype, steps)
    losses = gather_objects((found.losses,))
    mean = torch.tensor([own for (own,) in losses], dtype=torch.float64).mean(0)
    return {
        "loss": relative(mean, torch.tensor(wanted.losses, dtype=torch.float64)),
        "gradients": largest(found.gradients, wanted.gradients),
        "weights": largest(found.weights, wanted.weights),
    }


NOTHING = 1e-3
"""Of the largest value of all tensors: a tensor of less, such as the gradient of a bias that a
softmax ignores, is measured by that."""


def largest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest error of tensors by name, relative to the largest element of each."""
    if found.keys() != wanted.keys():
        raise AssertionError(f"names differ: {sorted(found.keys() ^ wanted.keys())}")
    least = NOTHING * max(float(w.abs().max()) for w in wanted.values() if w.numel())
    return max(relative(found[name], wanted[name], least) for name in wanted)


def relative(found: Tensor, wanted: Tensor, least: float = 1e-30) -> float:
    """The largest difference over the largest value."""
    if found.shape != wanted.shape:
        raise AssertionError(f"shapes differ: {tuple(found.shape)}, {tuple(wanted.shape)}")
    if not found.numel():
        return 0.0
    found, scale = found.to(wanted.device), wanted.double().abs().max().clamp(min=least)
    return float((found.double() - wanted.double()).abs().max() / scale)


HEADER = "| model | grid | ranks | dtype | loss | gradients | weights | |\n" + "|---" * 8 + "|\n"
"""Of a table of `rows`: losses of all steps, gradients before the first, weights after the last."""


def rows(
    pool: Any,
    cells: tuple[Cell, ...] = (*CELLS, *LATER_CELLS, *COPIED_CELLS, *MASKED_CELLS, *LARGE_CELLS),
) -> Iterator[str]:
    """Lines of a table: family and grid, dtype, and the errors."""
    for cell in cells:
        for dtype, bar in BARS.items():
            found = pool.run(errors_of, cell.grid.ranks, cell, dtype, deadline_s=300)
            worst = {key: max(errors[key] for errors in found) for key in found[0]}
            verdict = "" if max(worst.values()) <= bar else "**over**"
            numbers = " | ".join(f"{worst[key]:.1e}" for key in ("loss", "gradients", "weights"))
            name = str(dtype).removeprefix("torch.")
            where = f"{cell.grid.name}{', ' + cell.mask if cell.mask else ''} | {cell.grid.ranks}"
            yield f"| {cell.family} | {where} | {name} | {numbers} | {verdict} |"
