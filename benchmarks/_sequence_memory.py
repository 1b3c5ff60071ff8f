"""Memory of a rank, counted: while the sequence grows with the ranks, and the longest sequence.

What is counted are the bytes of all tensors alive at once, at every operation of a forward and a
backward; not counted are what kernels use inside and what the backend of messages holds. The model
is a stack of transformer layers. `Layer` is the naive split of Megatron when it is told to have a
part of the heads, and the plain layer otherwise, so that both ways differ in nothing else.

*Weak scaling* runs on 1, 2 and 4 ranks. For *the longest sequence* the same program runs on tensors
without data and a process group that sends nothing: only shapes matter for the count. That both
give the same number is one of the bars.

Contestants: the ring, tensor parallelism with the same kernel, and as in the paper of 2021 the two
rings and tensor parallelism with explicit scores.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gulliver.parallel.sequence._two_ring import _TwoRings
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks._harness import Report, at_least, at_most
from benchmarks._sequence_shared import MIB, Options
from benchmarks.netlab import run
from gulliver import _compat
from gulliver.parallel.sequence import SequencePlan, attention, make_groups

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
KINDS = ("ring", "tensor", "two rings", "tensor, explicit scores")
RANKS = (1, 2, 4)


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that are alive.

    Args:
        known: tensors that do not count.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        # Their storages live as long as this.
        self._known = [tensor.untyped_storage() for tensor in known]
        self._sizes.update({storage._cdata: 0 for storage in self._known})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and takes note of what it made."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._seen(tensor.untyped_storage())
        return out

    def _seen(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


class Enter(torch.autograd.Function):
    """Into the split: forward nothing, backward the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        """The sum."""
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    """Out of the split: forward the sum of all ranks' outputs, backward nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The sum."""
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        """The same."""
        return grad


class Layer(nn.Module):
    """Attention and an MLP, each behind a norm and around a shortcut; whole, or a rank's share."""

    def __init__(self, width: int, heads: int, share: int, mix: Mix) -> None:
        super().__init__()
        self.heads, self.share, self.mix = heads // share, share, mix
        inner = width // share
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * inner), nn.Linear(inner, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * inner), nn.Linear(4 * inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, width]`` to the same."""
        x = x + self._leave(self.out(self._attend(self._enter(self.norm1(x)))))
        return x + self._leave(self.down(F.gelu(self.up(self._enter(self.norm2(x))))))

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.mix(q, k, v).transpose(1, 2).flatten(2)

    def _enter(self, x: Tensor) -> Tensor:
        return Enter.apply(x) if self.share > 1 else x

    def _leave(self, x: Tensor) -> Tensor:
        return Leave.apply(x) if self.share > 1 else x


@dataclass(frozen=True)
class Case:
    """A model over ranks.

    Attributes:
        kind: one of `KINDS`.
        ranks: that share a sequence.
        length: of the whole sequence.
        heads: of attention.
        width: of the model.
        depth: layers.
    """

    kind: str
    ranks: int
    length: int
    heads: int
    width: int = 128
    depth: int = 2

    @property
    def possible(self) -> bool:
        """Whether the heads can be dealt."""
        return not self.kind.startswith("tensor") or self.heads % self.ranks == 0

    @property
    def local(self) -> int:
        """Tokens of a rank's activations between layers."""
        return self.length if self.kind.startswith("tensor") else self.length // self.ranks

    def mix(self) -> Mix:
        """Attention of this rank."""
        if self.kind == "tensor":
            return F.scaled_dot_product_attention
        if self.kind.startswith("tensor"):
            return explicit
        groups = make_groups(SequencePlan(inner=self.ranks))
        if self.kind == "ring":
            return lambda q, k, v: attention(q, k, v, groups, length=self.length)
        return lambda q, k, v: two_rings(q, k, v, groups, self.length)

    def model(self) -> nn.Sequential:
        """This rank's layers."""
        share, mix = self.ranks if self.kind.startswith("tensor") else 1, self.mix()
        layers = (Layer(self.width, self.heads, share, mix) for _ in range(self.depth))
        return nn.Sequential(*layers)


def explicit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention whose scores are a tensor."""
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def two_rings(q: Tensor, k: Tensor, v: Tensor, groups: Any, length: int) -> Tensor:
    """The naive twin without asking the others for their lengths, which needs data."""
    sizes = groups.plan.lay(length).place_sizes()
    allowed = torch.ones((1, 1, q.shape[2], length), dtype=torch.bool)
    return _TwoRings.apply(q, k, v, groups, allowed, q.shape[-1] ** -0.5, sizes)


def counted(case: Case, whole: bool = False) -> int:
    """The largest number of bytes alive in a forward and a backward on this rank.

    Args:
        case: to run.
        whole: count weights, their gradients and the input too; otherwise activations alone.
    """
    model = case.model()
    x = torch.randn(1, case.local, case.width, requires_grad=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    kept = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), x]
    # A loss would add its own tensors.
    with Live(kept) as live:
        out = model(x)
        out.backward(torch.ones_like(out))
    return live.peak + (sum(t.nbytes for t in kept) if whole else 0)


def count_peak(case: Case, fake: bool, whole: bool = False) -> int:
    """On this rank of a real world, or as rank 0 of one without data."""
    _make_world(case.ranks, fake)
    with FakeTensorMode() if fake else nullcontext():
        return counted(case, whole)


def _make_world(ranks: int, fake: bool) -> None:
    if fake:
        store = _compat.fake_store()
        dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
    else:
        dist.init_process_group("gloo")


def report_memory(options: Options, report: Report) -> None:
    """The peak while the sequence grows with the ranks."""
    peaks: dict[str, list[int]] = {}
    for kind in KINDS[:3]:
        cases = [Case(kind, n, n * options.local, heads=4) for n in RANKS]
        peaks[kind] = [max(run(count_peak, None, c, False, ranks=c.ranks)) for c in cases]
        shown = " / ".join(f"{value / MIB:.1f}" for value in peaks[kind])
        growth = f"{peaks[kind][2] / peaks[kind][0]:.3f}"
        report.rows.append(("memory", f"{kind}, 1 / 2 / 4 ranks", f"{shown} MiB", "", growth))
    ring = peaks["ring"]
    same = Case("ring", 4, 4 * options.local, heads=4)
    (without,) = run(count_peak, None, same, True, ranks=1)
    report.bars += [
        at_most("memory: ring, 4 ranks / 2 ranks", ring[2] / ring[1], 1.05),
        at_most("memory: ring, 4 ranks / 1 rank", ring[2] / ring[0], 1.15),
        at_most("memory: count without data, off the real one", abs(without / ring[2] - 1), 0.01),
    ]
    report.figures["memory"] = peaks


def longest(kind: str, ranks: int, cap: int, step: int = 256) -> int:
    """The longest sequence under a cap, in tokens; 0 if the heads cannot be dealt."""
    if not Case(kind, ranks, step, heads=2).possible:
        return 0
    _make_world(ranks, fake=True)

    def fits(steps: int) -> bool:
        with FakeTensorMode():
            # As in the paper: two heads, four ranks; tensor parallelism cannot use more than two.
            return counted(Case(kind, ranks, steps * step, heads=2), whole=True) <= cap

    return step * largest(fits)


def largest(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, if all smaller ones do, to one part in 256."""
    high = 1
    while fits(high):
        high *= 2
    low = high // 2
    while high - low > max(1, high // 256):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def report_longest(options: Options, report: Report) -> None:
    """The longest sequences at one cap."""
    cap = options.cap_mib * MIB
    found = {kind: [run(longest, None, kind, n, cap, ranks=1)[0] for n in RANKS] for kind in KINDS}
    for kind, lengths in found.items():
        shown = " / ".join(str(length) if length else "cannot" for length in lengths)
        gain = f"{max(lengths) / lengths[0]:.2f}"
        report.rows.append(("longest", f"{kind}, 1 / 2 / 4 ranks", f"{shown} tokens", "", gain))
    ratio = max(found["ring"]) / max(found["tensor"])
    report.bars.append(at_least("longest: ring on 4 ranks / tensor on 2, its most", ratio, 2.0))
    report.notes.append(
        f"longest: {options.cap_mib} MiB a rank for weights, gradients and activations; "
        "2 layers of width 128 with 2 heads; counted on tensors without data"
    )
    report.figures["longest"] = found
