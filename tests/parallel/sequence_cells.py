"""The cells of sequence parallelism: modes x masks x heads x lengths, and one rank to hold them to.

`errors_of(world, mode, dtype)` runs every cell of a mode on a rank and returns its errors;
`rows(pool)` gives the lines of a table of them. `tests/parallel/test_sequence.py` asserts each
cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gulliver.comm import World
from gulliver.parallel.sequence import Mask, SequencePlan, attention, make_groups
from gulliver.parallel.sequence import mask as _tiles
from gulliver.parallel.sequence import ring as _core
from gulliver.parallel.sequence.layout import SequenceGroups
from tests.covering import covering

BARS = {torch.float64: 1e-10, torch.float32: 1e-5}
BATCH, HEAD_DIM = 2, 8
HEADS = ((4, 4), (6, 2), (4, 1))
"""Of queries, and of keys and values."""


@dataclass(frozen=True)
class Mode:
    """A way to share a sequence."""

    name: str
    ulysses: int = 1
    outer: int = 1
    inner: int = 1

    @property
    def ranks(self) -> int:
        return self.ulysses * self.outer * self.inner

    def plan(self, layout: Any = "contiguous") -> SequencePlan:
        return SequencePlan(self.ulysses, self.outer, self.inner, layout)


MODES = (
    Mode("one rank"),
    Mode("Ulysses 2", 2),
    Mode("Ulysses 4", 4),
    Mode("ring 2", inner=2),
    Mode("ring 3", inner=3),
    Mode("ring 4", inner=4),
    Mode("ring 2 x 2", outer=2, inner=2),
    Mode("Ulysses 2 x ring 2", 2, 1, 2),
)
LARGE_MODES = (
    Mode("ring 4 x 2", outer=4, inner=2),
    Mode("ring 2 x 4", outer=2, inner=4),
    Mode("Ulysses 2 x ring 2 x 2", 2, 2, 2),
)


@dataclass(frozen=True)
class Cell:
    """A mask on a layout; queries and keys of one length unless it is a cross-attention."""

    name: str
    layout: str = "contiguous"
    lengths: tuple[tuple[int, int], ...] = ((24, 24), (31, 31))


CELLS = (
    Cell("full"),
    Cell("causal"),
    Cell("causal", "zigzag"),
    Cell("window"),
    Cell("window", "zigzag"),
    Cell("two-sided window"),
    Cell("documents"),
    Cell("documents, causal", "zigzag"),
    Cell("padding"),
    Cell("padding, causal", "zigzag"),
    Cell("cross", lengths=((24, 8), (31, 13), (7, 64))),
    Cell("cross, padding", lengths=((31, 13), (5, 41))),
)


def mask_of(name: str, length: int, key_length: int) -> Mask:
    """The mask of a cell; its padding and documents leave some queries nothing to see."""
    documents = torch.arange(length) * 5 // length
    documents[-2:] = -1
    lengths = torch.tensor([key_length, key_length // 3])
    return {
        "full": Mask(),
        "causal": Mask(causal=True),
        "window": Mask(causal=True, window=(6, None)),
        "two-sided window": Mask(window=(5, 3)),
        "documents": Mask(documents=torch.stack([documents, documents.flip(0)])),
        "documents, causal": Mask(causal=True, documents=documents),
        "padding": Mask(key_lengths=lengths, query_lengths=lengths.flip(0)),
        "padding, causal": Mask(causal=True, keys=torch.arange(key_length) >= 4),
        "cross": Mask(),
        "cross, padding": Mask(key_lengths=lengths),
    }[name]


def tensors(
    dtype: torch.dtype, length: int, key_length: int, heads: tuple[int, int], logits: float = 1.0
) -> list[Tensor]:
    """Queries, keys, values and the output's gradient, the same on all ranks."""
    generator = torch.Generator().manual_seed(length + 7 * key_length + heads[1])
    shapes = (heads[0], length), (heads[1], key_length), (heads[1], key_length), (heads[0], length)
    q, k, v, grad = (
        torch.randn((BATCH, h, n, HEAD_DIM), generator=generator, dtype=dtype) for h, n in shapes
    )
    return [q * logits, k, v, grad]


def full_attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Mask) -> list[Tensor]:
    """Output and gradients of q, k and v in float64, by torch's autograd on the formula."""
    q, k, v = (t.double().detach().requires_grad_() for t in (q, k, v))
    wide_k, wide_v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    rules = mask.rules(q.shape[0], q.shape[2], k.shape[2])
    allowed = rules.dense(torch.arange(q.shape[2]), torch.arange(k.shape[2])).unsqueeze(1)
    logits = (q @ wide_k.mT / math.sqrt(q.shape[3])).masked_fill(~allowed, -1e300)
    weights = logits.softmax(-1) * allowed.any(-1, keepdim=True)
    out = weights @ wide_v
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.double())]


def shared_attention(
    groups: SequenceGroups, given: list[Tensor], mask: Mask, **options: Any
) -> list[Tensor]:
    """This rank's output and gradients, of tensors that all ranks have."""
    of_q, of_k = (groups.plan.lay(t.shape[2]).positions(groups.rank) for t in given[:2])
    q, k, v = (
        t[:, :, own].clone().requires_grad_()
        for t, own in zip(given[:3], (of_q, of_k, of_k), strict=True)
    )
    out = attention(q, k, v, groups, mask=mask, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), given[3][:, :, of_q])]


def largest_errors(
    groups: SequenceGroups, found: list[Tensor], expected: list[Tensor]
) -> list[float]:
    """Of output and gradients, relative to the largest element of the whole."""
    errors = []
    for tensor, whole in zip(found, expected, strict=True):
        part = whole[:, :, groups.plan.lay(whole.shape[2]).positions(groups.rank)]
        if not bool(tensor.isfinite().all()):
            errors.append(math.inf)
        elif not tensor.numel():
            errors.append(0.0)
        else:
            # Of a single key the gradients of logits are zero: they have no size to go by.
            scale = whole.abs().max().clamp(min=1e-3)
            errors.append(float((tensor.double() - part).abs().max() / scale))
    return errors


@contextmanager
def small_pieces() -> Iterator[None]:
    """Masks are cut, and blocks travel as pieces, at the lengths of tests too."""
    before = _tiles.LEAF, _core.LEAST_PIECE
    _tiles.LEAF, _core.LEAST_PIECE = 4, 2
    try:
        yield
    finally:
        _tiles.LEAF, _core.LEAST_PIECE = before


Case = tuple[Cell, int, int, tuple[int, int]]
"""A cell, lengths of queries and of keys, and heads."""


def errors_of(
    world: World,
    mode: Mode,
    dtype: torch.dtype,
    logits: float = 1.0,
    kernel: str | None = None,
    cases: list[Case] | None = None,
) -> dict[str, list[float]]:
    """The errors of output, dq, dk and dv of every cell (or of these cases) on this rank."""
    found: dict[str, list[float]] = {}
    with small_pieces():
        for layout in ("contiguous", "zigzag"):
            groups = make_groups(mode.plan(layout))
            for cell, length, key_length, heads in _cases(layout):
                if cases is not None and (cell, length, key_length, heads) not in cases:
                    continue
                mask = mask_of(cell.name, length, key_length)
                given = tensors(dtype, length, key_length, heads, logits)
                part = shared_attention(groups, given, mask, kernel=kernel)
                errors = largest_errors(groups, part, full_attention(*given, mask))
                name = f"{cell.name} | {layout}, {length} x {key_length}, heads {heads}"
                found[name] = errors
    return found


def covered(
    modes: Sequence[Mode], dtypes: Sequence[torch.dtype] = tuple(BARS), strength: int = 2
) -> list[tuple[Mode, torch.dtype, list[Case]]]:
    """Calls of `errors_of` in which every two of mode, cell, dtype, and lengths and heads meet."""
    of_cell = {cell: [c for c in _cases(cell.layout) if c[0] == cell] for cell in CELLS}
    most = range(max(map(len, of_cell.values())))
    calls: dict[tuple[int, int], list[Case]] = {}
    for mode, cell, dtype, shape in covering(modes, CELLS, dtypes, most, strength=strength):
        shapes = of_cell[CELLS[cell]]
        calls.setdefault((mode, dtype), []).append(shapes[shape % len(shapes)])
    return [(modes[mode], dtypes[dtype], cases) for (mode, dtype), cases in calls.items()]


def _cases(layout: str) -> Iterator[Case]:
    for cell in CELLS:
        if cell.layout == layout:
            for number, (length, key_length) in enumerate(cell.lengths):
                for heads in HEADS if number else HEADS[:1]:
                    yield cell, length, key_length, heads


HEADER = (
    "| mode | ranks | mask | cases | output, 64 | gradients, 64 | output, 32 | gradients, 32 | |\n"
    + "|---" * 9
    + "|\n"
)
"""Of a table of `rows`: errors in float64 and in float32."""


def rows(pool: Any, modes: tuple[Mode, ...] = MODES + LARGE_MODES) -> Iterator[str]:
    """A line for each mode and mask: the largest error of all its cases on the worst rank."""
    for mode in modes:
        found = {dtype: pool.run(errors_of, mode.ranks, mode, dtype) for dtype in BARS}
        for mask in dict.fromkeys(cell.name for cell in CELLS):
            names = [n for n in found[torch.float64][0] if n.split(" | ")[0] == mask]
            shown, holds = [], True
            for dtype, results in found.items():
                errors = [result[name] for result in results for name in names]
                worst = max(e[0] for e in errors), max(max(e[1:]) for e in errors)
                holds &= max(worst) <= BARS[dtype]
                shown += [f"{error:.1e}" for error in worst]
            verdict = "" if holds else "**over**"
            head = f"| {mode.name} | {mode.ranks} | {mask} | {len(names)} | "
            yield f"{head}{' | '.join(shown)} | {verdict} |"
