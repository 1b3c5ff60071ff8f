"""Training-free caches that reuse block outputs between sampling steps.

    with cache_blocks(model, "first-block:0.1") as cache:
        latents = flow.sample(model, ...)
    print(cache.counts)                      # calls saved: blocks 65 of 120; 1.2 MiB kept

Two strategies, for all transformers of `gulliver.models`. *Broadcast* (pyramid attention broadcast,
Zhao et al., 2024, arXiv 2408.12588): within a window of noise levels each kind of attention is
computed only at every n-th call. *First block* (the rule of ParaAttention, after TeaCache, Liu et
al., 2024, arXiv 2411.19108): if the residual of the first block has hardly changed since the last
full computation, the residual of all others is reused.

Start with `Broadcast`, `FirstBlock` and `BlockCache`.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError, nearest
from gulliver.models.blocks import JointBlock, STDiTBlock
from gulliver.models.mmdit import DoubleBlock, MMDiT, SingleBlock
from gulliver.models.stdit import STDiT, STDiT2, STDiT3
from gulliver.options import AT_LEAST_1, Options, Range, size_text

FORMS = "'none', 'broadcast[:SPATIAL,TEMPORAL,CROSS[,MLP][@LEAST-MOST]]' or 'first-block[:CHANGE]'"
NOISE = 1000
"""Noise level of pure noise."""
MARK = "_block_cache"
"""Attribute that marks a caching model."""
KINDS = ("spatial", "temporal", "cross", "mlp")
Whole = Callable[[Tensor], Tensor]
"""Sums [rows, 2] over the ranks that share a clip, and gathers all rows."""


@dataclass(frozen=True)
class Broadcast(Options):
    """Reuses outputs of attention and MLPs within a window of noise levels."""

    # Call intervals; with 1 every call computes.
    spatial: Annotated[int, AT_LEAST_1] = 2
    temporal: Annotated[int, AT_LEAST_1] = 4
    cross: Annotated[int, AT_LEAST_1] = 6
    mlp: Annotated[int, AT_LEAST_1] = 1
    # Open interval of noise levels in which outputs are reused.
    window: tuple[float, float] = (450.0, 930.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.window[0] < self.window[1] <= NOISE:
            raise GulliverError(
                f"cache {self} has an invalid window; use two noise levels between 0 and {NOISE}, "
                "the lower one first, such as @450-930"
            )

    @property
    def every(self) -> dict[str, int]:
        return {kind: getattr(self, kind) for kind in KINDS}

    def reuses(self, kind: str, number: int, least: float, most: float) -> bool:
        inside = self.window[0] < least and most < self.window[1]
        return inside and number % self.every[kind] != 0

    def __str__(self) -> str:
        low, high = self.window
        return f"broadcast:{','.join(map(str, self.every.values()))}@{low:g}-{high:g}"


@dataclass(frozen=True)
class FirstBlock(Options):
    """Reuses the later blocks' residual while the first block's residual hardly changes."""

    # Threshold: mean absolute change relative to the mean absolute value; 0: never reuse.
    threshold: Annotated[float, Range(0, 1e9)] = 0.1

    def __str__(self) -> str:
        return f"first-block:{self.threshold:g}"


Strategy = Broadcast | FirstBlock


def read_strategy(text: str) -> Strategy | None:
    """Parses a strategy such as ``broadcast:2,4,6@450-930``; None for ``none``."""
    name, _, rest = text.partition(":")
    try:
        if name == "none" and not rest:
            return None
        if name == "first-block":
            return FirstBlock(float(rest)) if rest else FirstBlock()
        if name == "broadcast":
            return _broadcast(rest)
    except GulliverError:
        raise
    except ValueError:
        raise GulliverError(f"cache {text!r} is invalid; use {FORMS}") from None
    names = ("none", "broadcast", "first-block")
    raise GulliverError(f"unknown cache {text!r}: {nearest(name, names)}; use {FORMS}")


def _broadcast(text: str) -> Broadcast:
    counts, _, window = text.partition("@")
    numbers = [int(part) for part in counts.split(",")] if counts else []
    if len(numbers) not in (0, 3, 4):
        raise ValueError(text)
    given: dict[str, Any] = dict(zip(KINDS, numbers, strict=False))
    if window:
        low, high = (float(level) for level in window.split("-"))
        given["window"] = low, high
    return Broadcast(**given)


@dataclass
class Counts:
    """Numbers of calls, by kind of layer."""

    ran: Counter[str] = field(default_factory=Counter)
    reused: Counter[str] = field(default_factory=Counter)
    # Peak bytes kept between calls on this rank.
    nbytes: int = 0

    @property
    def saved(self) -> float:
        """Fraction of calls whose output was reused."""
        return self.reused.total() / max(1, self.reused.total() + self.ran.total())

    def add(self, others: Counts) -> None:
        self.ran.update(others.ran)
        self.reused.update(others.reused)
        self.nbytes = max(self.nbytes, others.nbytes)

    def __str__(self) -> str:
        parts = [
            f"{kind} {self.reused[kind]} of {self.reused[kind] + self.ran[kind]}"
            for kind in dict.fromkeys([*self.ran, *self.reused])
        ]
        return f"calls saved: {', '.join(parts) or 'none'}; {size_text(self.nbytes)} kept"


@dataclass
class _CallMemory:
    """Tensors kept between calls with the same input shapes."""

    # Index of the current call, starting at 0.
    number: int = -1
    outputs: dict[Any, Tensor] = field(default_factory=dict)
    # Residuals of the first block and of the others in the last full computation.
    added: tuple[Tensor, Any] | None = None

    @property
    def nbytes(self) -> int:
        rest = () if self.added is None else self.added
        return sum(t.nbytes for t in _tensors((*self.outputs.values(), *rest)))


def cache_blocks(
    model: nn.Module, strategy: Strategy | str | None, whole: Whole | None = None
) -> BlockCache:
    """Context manager in which a transformer reuses outputs between calls.

    Args:
        model: STDiT, STDiT2, STDiT3 or MMDiT, possibly sharing clips between ranks.
        strategy: strategy, or its text (`read_strategy`); None leaves the model unchanged.
        whole: function that sums over ranks, if ranks share a clip (`VideoModel.share`); None for
            one rank.

    Raises:
        GulliverError: the strategy is invalid, or does not apply to this model.
    """
    rule = read_strategy(strategy) if isinstance(strategy, str) else strategy
    if rule is not None and not isinstance(model, STDiT | STDiT2 | STDiT3 | MMDiT):
        raise GulliverError(
            f"a {type(model).__name__} does not support caching; STDiT, STDiT2, STDiT3 and MMDiT do"
        )
    if isinstance(rule, FirstBlock) and len(_blocks(model)) < 2:
        raise GulliverError(f"cache {rule} needs a model with at least two blocks")
    return BlockCache(model, rule, whole)


# [Note: what is kept] Broadcast keeps outputs before their gates, so a gate always has the current
# noise level; if attention is split over ranks, the communication is saved, too. Methods are
# replaced on module instances (`BlockCache._replace`), so it does not matter which class the module
# was changed to (`booster/hybrid/stdit.py` changes it) or which hooks it has.
#
# [Note: who decides] Broadcast decides by noise level and call index, which are the same on all
# ranks. The change of the first block is measured, on several ranks only in part, and ranks with
# different decisions would deadlock, so their sums are reduced first (`whole`). The clips and
# guidance branches of a batch are reused together, only if the change of each is below the
# threshold: no clip has a larger error because of its neighbours.
#
# Calls must have decreasing noise levels; a level that does not decrease starts another sampling.
# Each input shape has its own memory.
class BlockCache:
    """The cache of a model while the context is active; see `cache_blocks`."""

    def __init__(self, model: nn.Module, strategy: Strategy | None, whole: Whole | None) -> None:
        self.model, self.strategy, self.whole = model, strategy, whole
        # Numbers of computed and saved calls.
        self.counts = Counts()
        self._undo: list[Callable[[], object]] = []
        self._memories: dict[torch.Size, _CallMemory] = {}
        self._memory = _CallMemory()
        self._levels = (math.inf, math.inf)
        # For the current call: whether the first block has hardly changed, its residual, and the
        # tokens after it.
        self._reusing = False
        self._first: tuple[Tensor, Any] | None = None

    def __enter__(self) -> Self:
        if self.strategy is None:
            return self
        if MARK in vars(self.model):
            raise GulliverError(
                "this model already has a cache; exit the other cache_blocks context first"
            )
        vars(self.model)[MARK] = self
        self._undo.append(lambda: vars(self.model).pop(MARK))
        # Before the hooks of models on several ranks, which must not fail halfway.
        handle = self.model.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)
        self._undo.append(handle.remove)
        if isinstance(self.strategy, Broadcast):
            self._keep_outputs(self.strategy)
        else:
            self._keep_added(_blocks(self.model))
        return self

    def __exit__(self, *_: object) -> None:
        self._forget()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _forget(self) -> None:
        kept = sum(memory.nbytes for memory in self._memories.values())
        self.counts.nbytes = max(self.counts.nbytes, kept)
        self._memories.clear()
        self._memory = _CallMemory()

    def _replace(self, owner: nn.Module, name: str, method: Callable[..., Any]) -> None:
        before = vars(owner).get(name)
        setattr(owner, name, method)

        def undo() -> None:
            delattr(owner, name) if before is None else setattr(owner, name, before)

        self._undo.append(undo)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.training or torch.is_grad_enabled():
            raise GulliverError(
                f"cache {self.strategy} is for sampling; call model.eval() and use "
                "torch.no_grad(), or train without it"
            )
        joint = isinstance(model, MMDiT)
        x = _argument("img" if joint else "x", 0, args, kwargs)
        name, place, scale = ("timesteps", 4, NOISE) if joint else ("timestep", 1, 1)
        levels = _argument(name, place, args, kwargs).detach().double() * scale
        least, most = float(levels.min()), float(levels.max())
        if most >= self._levels[1]:
            self._forget()
        self._levels = least, most
        self._memory = self._memories.setdefault(x.shape, _CallMemory())
        self._memory.number += 1

    def _keep_outputs(self, rule: Broadcast) -> None:
        for owner, name, kind in _outputs(self.model):
            if rule.every[kind] > 1:
                self._replace(owner, name, self._kept(rule, kind, getattr(owner, name)))

    def _kept(
        self, rule: Broadcast, kind: str, method: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        def kept(*args: Any, **kwargs: Any) -> Tensor:
            memory = self._memory
            if kept in memory.outputs and rule.reuses(kind, memory.number, *self._levels):
                self.counts.reused[kind] += 1
                return memory.outputs[kept]
            self.counts.ran[kind] += 1
            out = memory.outputs[kept] = method(*args, **kwargs)
            return out

        return kept

    def _keep_added(self, blocks: list[nn.Module]) -> None:
        first, *others = blocks
        self._replace(first, "forward", self._measured(first, others[-1]))
        for block in others:
            self._replace(block, "forward", self._skipped(block, block is others[-1]))

    def _measured(self, block: nn.Module, last: nn.Module) -> Callable[..., Any]:
        """Wraps the first block, which decides whether the others are computed."""
        method = block.forward

        def measured(*args: Any, **kwargs: Any) -> Any:
            out = method(*args, **kwargs)
            added = _video(out) - _given(block, args)
            before = self._memory.added
            self._reusing = before is not None and self._is_nearly_unchanged(added, before[0])
            self._first = None if self._reusing else (added, _as_given_to(last, out))
            return out

        return measured

    def _skipped(self, block: nn.Module, last: bool) -> Callable[..., Any]:
        """Wraps another block, which is skipped if the first one has hardly changed."""
        method = block.forward

        def skipped(*args: Any, **kwargs: Any) -> Any:
            if not self._reusing:
                self.counts.ran["blocks"] += 1
                out = method(*args, **kwargs)
                if last and self._first is not None:
                    added, start = self._first
                    self._memory.added = added, _each(operator.sub, out, start)
                    self._first = None
                return out
            self.counts.reused["blocks"] += 1
            tokens = args[:2] if isinstance(block, DoubleBlock) else args[0]
            if last and self._memory.added is not None:
                return _each(operator.add, tokens, self._memory.added[1])
            return tokens

        return skipped

    def _is_nearly_unchanged(self, added: Tensor, before: Tensor) -> bool:
        assert isinstance(self.strategy, FirstBlock), "the strategy skips blocks"
        pair = (added - before, before)
        sums = [each.abs().flatten(1).sum(dim=1, dtype=torch.float64) for each in pair]
        found = torch.stack(sums, dim=1)
        change, size = (found if self.whole is None else self.whole(found)).unbind(1)
        # A residual that stays zero has not changed.
        relative = change / size.clamp(min=torch.finfo(torch.float64).tiny)
        return bool((relative < self.strategy.threshold).all())


def psnr(clip: Tensor, reference: Tensor) -> float:
    """Computes the peak signal-to-noise ratio of a clip with values in [-1, 1], in dB."""
    error = float((clip.double() - reference.double()).square().mean())
    return math.inf if error == 0 else 10 * math.log10(4 / error)


def _outputs(model: nn.Module) -> list[tuple[nn.Module, str, str]]:
    found: list[tuple[nn.Module, str, str]] = []
    for block in _blocks(model):
        if isinstance(block, STDiTBlock):
            attention = "temporal" if block.temporal else "spatial"
            found += [(block, "attend", attention), (block, "read", "cross")]
            found.append((block.mlp, "forward", "mlp"))
        elif isinstance(block, JointBlock):
            parts = (block.attn, block.attn_temp, block.cross_attn, block.mlp)
            found += [(p, "forward", kind) for p, kind in zip(parts, KINDS, strict=True)]
        else:
            # MMDiT's attention is joint over space, time and text.
            found.append((block, "attend", "spatial"))
            if isinstance(block, DoubleBlock):
                parts = block.get_submodule("img_mlp"), block.get_submodule("txt_mlp")
                found += [(part, "forward", "mlp") for part in parts]
    return found


def _blocks(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, STDiT3):
        pairs = zip(model.spatial_blocks, model.temporal_blocks, strict=True)
        return [block for pair in pairs for block in pair]
    if isinstance(model, MMDiT):
        return [*model.double_blocks, *model.single_blocks]
    assert isinstance(model, STDiT | STDiT2), "checked"
    return list(model.blocks)


def _argument(name: str, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return kwargs[name] if name in kwargs else args[place]


def _video(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def _given(block: nn.Module, args: tuple[Any, ...]) -> Tensor:
    """Returns a block's input tokens; with sequence parallelism only those of this rank."""
    own = getattr(block, "own", None)
    return args[0] if own is None else own(args[0], args[5])


def _as_given_to(last: nn.Module, out: Any) -> Any:
    """Converts the first block's output to the input form of the last one."""
    if isinstance(out, tuple) and isinstance(last, SingleBlock):
        video, text = out
        return torch.cat([text, video], dim=1)
    return out


def _each(function: Callable[[Tensor, Tensor], Tensor], one: Any, other: Any) -> Any:
    if isinstance(one, tuple):
        return tuple(function(a, b) for a, b in zip(one, other, strict=True))
    return function(one, other)


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [tensor for value in values for tensor in _tensors(value)]
