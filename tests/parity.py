"""Parity of the parallel modes with one process: the cells, and the table made of them.

`python -m tests.parity docs/parity.md` writes the tables, and what follows the page's name are the
numbers of those to write anew (0 to 4, as `sections` has them); the others stay as they are. Half
an hour of two cores can so be taken in pieces. `tests/parallel/test_zero.py` asserts each cell.
The reference is a plain torch loop in one process that knows nothing of gulliver.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gulliver.booster import Booster, LowLevelZeroPlugin, TorchDDPPlugin
from gulliver.comm import World
from tests.references import FOLDER, computed_once, folder_of_this_process

BATCH, WIDTH, CLASSES, STEPS = 24, 24, 11, 20
FEW_STEPS = 7
"""What the tests take by default: each kind of step occurs twice."""
PARAMETER_BARS = {torch.float64: 1e-10, torch.float32: 1e-5}
GRADIENT_BARS = {torch.float64: 1e-12, torch.float32: 1e-6}


@dataclass(frozen=True)
class Cell:
    """A way to train: what is special about the model and the loop."""

    name: str
    accumulate: int = 1
    clip: float = 0.0
    tied: bool = False
    unused: bool = False
    alternating: bool = False
    frozen: bool = False
    groups: bool = False
    optimizer: str = "AdamW"
    checkpointed: bool = False
    compiled: bool = False
    torus: bool = False
    half: bool = False
    """16-bit parameters, trained through float32 copies."""


ALL: dict[str, Any] = {
    "accumulate": 3, "clip": 0.05, "tied": True, "unused": True, "alternating": True,
    "frozen": True, "groups": True,
}  # fmt: skip
CELLS = (
    Cell("plain"),
    Cell("accumulation of 3", accumulate=3),
    Cell("clipping by norm", clip=0.05),
    Cell("tied weights", tied=True),
    Cell("unused parameters", unused=True),
    Cell("used on some ranks and steps only", alternating=True),
    Cell("frozen parameters", frozen=True),
    Cell("two parameter groups", groups=True),
    Cell("all of these", **ALL),
    Cell("SGD with momentum, all of these", **ALL, optimizer="SGD"),
    Cell("activation checkpointing", checkpointed=True),
    Cell("activation checkpointing, all of these", **ALL, checkpointed=True),
    Cell("torch.compile of a block", compiled=True),
    Cell("torus of 2 rows", torus=True),
    Cell("torus of 2 rows, all of these", **ALL, torus=True),
    Cell("bf16 with float32 copies", half=True),
    Cell("bf16 with float32 copies, clipping, accumulation", 3, 0.05, half=True),
)
WORLDS = (2, 4)


class Net(nn.Module):
    """A small classifier of token ids with the oddities of a cell."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(3, 5)
        self.last = nn.Linear(WIDTH, CLASSES, bias=False)
        self.checkpointed = cell.checkpointed
        if cell.tied:
            self.last.weight = self.embed.weight
        self.first.requires_grad_(not cell.frozen)
        self.never.requires_grad_(cell.unused)
        if cell.compiled:
            self.first.compile(backend="aot_eager")

    def forward(self, ids: Tensor, special: Tensor) -> Tensor:
        x = self.embed(ids).mean(dim=1)
        x = x + torch.tanh(self._through(self.first, x))
        if bool(special.any()):
            # Only some samples, and so only some ranks, use this layer.
            x = torch.where(special[:, None], x + self.sometimes(x), x)
        return self.last(self._through(self.norm, x))

    def _through(self, part: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(part, x, use_reentrant=False) if self.checkpointed else part(x)


def build(cell: Cell, dtype: torch.dtype) -> tuple[Net, torch.optim.Optimizer]:
    """The model and its optimizer, the same in every process."""
    torch.manual_seed(1)
    model = Net(cell).to(dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    half = len(trained) // 2 if cell.groups else len(trained)
    groups = [
        {"params": part, "lr": lr, "weight_decay": decay}
        for part, lr, decay in ((trained[:half], 3e-3, 0.1), (trained[half:], 1e-3, 0.0))
        if part
    ]
    if cell.optimizer == "SGD":
        return model, torch.optim.SGD(groups, momentum=0.9)
    return model, torch.optim.AdamW(groups)


def batch(step: int, cell: Cell) -> tuple[Tensor, Tensor, Tensor]:
    """The global batch of a step: ids, which samples are special, and targets."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(CLASSES, (BATCH, 6), generator=generator)
    # Special samples stand in the first quarter, and not in every step.
    special = torch.arange(BATCH) < (BATCH // 4 if cell.alternating and step % 3 else 0)
    return ids, special, torch.randint(CLASSES, (BATCH,), generator=generator)


def shares(step: int, cell: Cell, rank: int, size: int) -> Iterator[tuple[Tensor, ...]]:
    """A rank's micro-batches of a step."""
    whole = batch(step, cell)
    local = BATCH // size
    part = local // cell.accumulate
    for start in range(rank * local, (rank + 1) * local, part):
        yield tuple(tensor[start : start + part] for tensor in whole)


@computed_once
def reference(
    cell: Cell, dtype: torch.dtype, steps: int = STEPS
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters after all steps, and gradients before the first, of a plain loop."""
    model, optimizer = build(cell, dtype)
    first: dict[str, Tensor] = {}
    for step in range(steps):
        ids, special, targets = batch(step, cell)
        F.cross_entropy(model(ids, special), targets).backward()
        if step == 0:
            first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if cell.clip:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], cell.clip)
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}, first


@computed_once
def reference_of_halves(
    cell: Cell, size: int, stage: int, steps: int = STEPS
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One process with the arithmetic of `size` ranks: 16-bit gradients, summed in float32.

    From stage 2 on every micro-batch is summed in float32, before that those of a rank in 16 bits.
    """
    model, optimizer = build(cell, torch.bfloat16)
    master = {p: p.detach().float().clone() for p in model.parameters() if p.requires_grad}
    for group in optimizer.param_groups:
        group["params"] = [master[p] for p in group["params"]]
    first: dict[str, Tensor] = {}
    for step in range(steps):
        for rank in range(size):
            parts = list(shares(step, cell, rank, size))
            for number, (ids, special, targets) in enumerate(parts):
                (F.cross_entropy(model(ids, special), targets) / len(parts)).backward()
                if stage >= 2 or number + 1 == len(parts):
                    add_to_master(master, size)
        if step == 0:
            names = {p: n for n, p in model.named_parameters()}
            first = {names[p]: c.grad.clone() for p, c in master.items() if c.grad is not None}
        if cell.clip:
            nn.utils.clip_grad_norm_(list(master.values()), cell.clip)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, copy in master.items():
                p.copy_(copy)
    return {n: p.detach().clone() for n, p in model.named_parameters()}, first


def add_to_master(master: dict[nn.Parameter, Tensor], size: int) -> None:
    """Moves 16-bit gradients to the float32 copies, as one of `size` terms of a mean."""
    for parameter, copy in master.items():
        if parameter.grad is not None:
            grad = parameter.grad.float() / size
            copy.grad = grad if copy.grad is None else copy.grad + grad
            parameter.grad = None


def boosted(
    world: World,
    cell: Cell,
    dtype: torch.dtype,
    stage: int | None,
    overlap: bool = True,
    steps: int = STEPS,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same through the Booster, on every rank; no stage is DDP."""
    model, optimizer = build(cell, dtype)
    if stage is not None:
        precision = "bf16" if cell.half else None
        plugin = LowLevelZeroPlugin(
            stage,
            chunk_mb=0.005,
            precision=precision,
            overlap=overlap,
            axes={"node": 2, "local": world.size // 2} if cell.torus else None,
            verbose=False,
        )
    else:
        plugin = TorchDDPPlugin(find_unused_parameters=True, verbose=False)
    booster = Booster(plugin=plugin)
    plain = model
    model, optimizer, *_ = booster.boost(model, optimizer)
    first: dict[str, Tensor] = {}
    for step in range(steps):
        parts = list(shares(step, cell, world.rank, world.size))
        for number, (ids, special, targets) in enumerate(parts):
            loss = F.cross_entropy(model(ids, special), targets) / len(parts)
            if number + 1 < len(parts):
                with booster.no_sync(model, optimizer):
                    booster.backward(loss, optimizer)
            else:
                booster.backward(loss, optimizer)
        if step == 0:
            first = {n: g.clone() for n, g in optimizer.full_gradients().items()}
        if cell.clip:
            optimizer.clip_grad_by_norm(cell.clip)
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in plain.named_parameters()}, first


def largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a tensor relative to the tensor's largest element."""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    errors = [
        float((found[n] - expected[n]).abs().max() / expected[n].abs().max().clamp(min=1e-30))
        for n in expected
    ]
    return max(errors)


MARK = "<!-- families -->"
MODES = {None: "DDP", 0: "ZeRO 0", 1: "ZeRO 1", 2: "ZeRO 2", 3: "ZeRO 3"}


def expected(
    cell: Cell, size: int, dtype: torch.dtype, stage: int | None, steps: int = STEPS
) -> tuple[dict[str, Tensor], ...]:
    """What one process arrives at, and the gradients before its first step."""
    if cell.half:
        # The sums of gradients differ from stage 2 on.
        return reference_of_halves(cell, size, 2 if (stage or 0) >= 2 else 0, steps)
    return reference(cell, dtype, steps)


def modes(cell: Cell) -> list[int | None]:
    """Ways to run a cell: torch's DDP has no float32 copies and no torus."""
    return [mode for mode in MODES if mode is not None or not (cell.half or cell.torus)]


def dtypes(cell: Cell) -> list[torch.dtype]:
    """What a cell computes in, apart from 16 bits."""
    return [torch.float32] if cell.half else list(PARAMETER_BARS)


HEADER = f"""# Parity

Written by `make parity` from the cells that the tests assert. The largest difference from one
plain torch loop in one process on the same global batches, relative to the largest element of each
tensor: gradients before the first step, and parameters after {STEPS} steps, on the worst rank.
torch's DDP stands beside it, through the same loop.

Bars: gradients 1e-12 in float64 and 1e-6 in float32, parameters 1e-10 and 1e-5. AdamW runs with
torch's own eps of 1e-8, learning rates 3e-3 and 1e-3. A caution that holds for every way to split
a batch: where a gradient is zero but for rounding (a bias in front of a softmax that ignores it),
Adam divides rounding by rounding and moves by the learning rate in a random direction. The model
here has no such parameter; where a model has one, its float32 difference grows with the steps.

| cell | mode | ranks | dtype | gradients | parameters | |
|---|---|---|---|---|---|---|
"""


def row(
    pool: Any, cell: Cell, stage: int | None, size: int, dtype: torch.dtype, expected: Any
) -> str:
    """A line of the table."""
    results = pool.run(boosted, size, cell, dtype, stage)
    parameters, gradients = (
        max(largest_error(result[k], expected[k]) for result in results) for k in (0, 1)
    )
    holds = parameters <= PARAMETER_BARS[dtype] and gradients <= GRADIENT_BARS[dtype]
    name = "bfloat16" if cell.half else str(dtype).removeprefix("torch.")
    errors = f"{gradients:.1e} | {parameters:.1e}"
    verdict = "" if holds else "**over**"
    return f"| {cell.name} | {MODES[stage]} | {size} | {name} | {errors} | {verdict} |"


def data_rows(pool: Any) -> Iterator[str]:
    """Lines of the table of data parallelism."""
    for cell in CELLS:
        for dtype in dtypes(cell):
            for size in WORLDS:
                for stage in modes(cell):
                    yield row(pool, cell, stage, size, dtype, expected(cell, size, dtype, stage))


AROUND = (
    "Every family can be cut over the tensor axis and into the stages of a pipeline, with any "
    "stage of ZeRO; other models by rules that the user gives. What is refused is refused when "
    "the model is boosted, naming what works instead. All of it runs under a memory limit, too "
    "(`memory_limit=`, with ZeRO 3), but for `step_in_backward`, which needs whole models; "
    "`tests/memory/test_gemini_axes.py` holds that to the same grids without a limit."
)


def sections(pool: Any) -> Iterator[tuple[str, Iterable[str]]]:
    """Every table: what stands over it, and its lines, computed when they are asked for."""
    from gulliver.planner.capability import HEADER as COMBINED
    from gulliver.planner.capability import table
    from tests.hybrid import hybrid_cells
    from tests.parallel import sequence_cells, tensor_cells

    yield HEADER, data_rows(pool)
    head = f"| {' | '.join(COMBINED)} |\n{'|---' * len(COMBINED)}|\n"
    yield (
        f"\n## What may be combined\n\nAs `gulliver capabilities` prints it. {AROUND}\n\n{head}",
        [f"| {' | '.join(row)} |" for row in table()],
    )
    bars = "Bars: 1e-10 in float64, 1e-5 in float32."
    yield (
        f"""
## Attention over sequences on several ranks

Output and gradients of q, k and v against one rank; each line is the worst of several lengths,
even and uneven, and of heads with and without grouped keys and values. {bars}

{sequence_cells.HEADER}""",
        sequence_cells.rows(pool),
    )
    yield (
        f"""
## Tensor parallelism

Outputs and every gradient against one rank. {bars}

{tensor_cells.HEADER}""",
        tensor_cells.rows(pool),
    )
    yield (
        f"""
## Whole models on grids of ranks

Losses of {hybrid_cells.STEPS} steps, all gradients before the first, and all weights after the
last, against one process on the same global batches, whose lengths change from step to step. AdamW
runs with an eps of 1e-4, and a tensor with less than a thousandth of the largest gradient of all
is measured by that: gradients that are zero but for rounding say nothing. {bars}

{hybrid_cells.HEADER}""",
        hybrid_cells.rows(pool),
    )


def main(path: Path, wanted: Collection[int] = ()) -> None:
    """Runs every cell and writes the tables, or those that are wanted."""
    from tests.pool import Pool, start_server

    folder_of_this_process(FOLDER)
    start_server()
    pool = Pool()
    # As the workers: in 16 bits the kernels' results depend on the number of threads.
    torch.set_num_threads(1)
    # Another command's section stays: see `tests/models/family_sweep.py`.
    page, mark, families = (path.read_text() if path.exists() else "").partition(MARK)
    kept = re.split(r"(?m)^(?=## )", page)
    tables, lines = [], []
    for number, (header, rows) in enumerate(sections(pool)):
        if number in wanted or not wanted:
            lines += (made := list(rows))
            tables.append((header + "\n".join(made) + "\n").lstrip("\n"))
        else:
            tables.append(kept[number].rstrip("\n") + "\n")
    pool.close()
    path.write_text("\n".join(tables) + (f"\n{mark}{families}" if mark else ""))
    print(f"{path}: {len(lines)} lines, {sum('**over**' in line for line in lines)} over their bar")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(number) for number in sys.argv[2:]])
