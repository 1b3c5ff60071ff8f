"""Draws dropout masks by position, so that a sharded model drops the same elements as one process.

The part of an activation that this rank holds follows from its shape and preceding modules:

- dim 0 is the batch dim: a micro-batch has some of its samples;
- with a separate sequence axis, dim 1 is sharded in the plan's layout;
- between a column layer and a row layer, features are sharded: the last dim, or the heads of
  attention weights ``[batch, heads, queries, keys]``;
- elsewhere in blocks whose sequence is sharded over the tensor ranks, dim 1 is sharded as in
  `SharedSequence`; everything else is replicated.

Unexpected shapes are rejected, because a mask for the wrong part would go unnoticed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gulliver._compat import compiled_call, is_compiled
from gulliver.booster.hybrid.mesh import HybridMesh
from gulliver.comm.collectives import broadcast
from gulliver.errors import GulliverError
from gulliver.families.loss import hugging_face_of
from gulliver.layout.even import split_evenly
from gulliver.parallel.dropout import Along, attention_with_dropout, drop, hash_text, mix
from gulliver.parallel.tensor.entry import SharedSequence
from gulliver.parallel.tensor.layers import ColumnLinear, RowLinear
from gulliver.parallel.tensor.styles import DRAWN_ALIKE, DROPOUTS, TensorPlan, dropouts_of
from gulliver.plan.plan import Plan


@dataclass
class Forward:
    """State of one forward of the model."""

    # Seed drawn for the batch, equal on all ranks of the model.
    seed: int
    # Index of the first sample in the batch.
    start: int = 0
    # Number of samples; 0 for the whole batch.
    samples: int = 0
    # Tokens of the shared sequence, once known; 0 for none.
    length: int = 0


class ActivationParts:
    """Tracks which part of each activation this rank holds while a model runs."""

    def __init__(self, model: nn.Module, mesh: HybridMesh, plan: TensorPlan | None) -> None:
        self.mesh, self.apart = mesh, None
        self.attention = plan.attention if plan is not None else {}
        self.adapter = vars(hugging_face_of(model)).get("gulliver_adapter")
        self.shared: dict[str, SharedSequence] = {}
        if plan is None:
            return
        for path in plan.stacks:
            stack = model.get_submodule(path)
            shared = (m.shared for m in stack.modules() if isinstance(m, ColumnLinear | RowLinear))
            found = next((s for s in shared if s is not None), None)
            if found is not None:
                assert isinstance(found, SharedSequence)
                self.shared[path] = found
            # A recomputation may end between column and row layers: the next block resets.
            for block in stack.children():
                block.register_forward_pre_hook(self._join)
        model.register_forward_pre_hook(self._join, prepend=True)
        for module in model.modules():
            if isinstance(module, ColumnLinear):
                module.register_forward_hook(self._part)
            elif isinstance(module, RowLinear):
                module.register_forward_hook(self._join)

    def __deepcopy__(self, memo: Any) -> ActivationParts:
        return self

    def _part(self, module: Any, *_: Any) -> None:
        # The column layer whose output is still sharded; None if features are complete.
        self.apart = None if module.gather_output else module

    def _join(self, *_: Any) -> None:
        self.apart = None

    def of(self, path: str, x: Tensor, forward: Forward) -> list[Along]:
        """Returns this rank's part of an activation along each dim."""
        dims = [Along.whole(size) for size in x.shape]
        if forward.samples and x.dim() and not (x.shape[0] == 1 < forward.samples):
            if x.shape[0] % forward.samples:
                raise _unknown_part(path, x, f"{forward.samples} samples along dim 0")
            rows = x.shape[0] // forward.samples
            dims[0] = Along.whole(x.shape[0], forward.start * rows)
        if self.adapter is not None and self.adapter.shared:
            self._over_sequence(path, x, forward, dims)
        if self.apart is not None:
            self._features(path, x, dims)
        else:
            self._over_tensor(path, x, dims)
        return dims

    def _over_sequence(self, path: str, x: Tensor, forward: Forward, dims: list[Along]) -> None:
        opened, groups = self.adapter.opened, self.adapter.groups  # type: ignore[union-attr]
        if opened is not None and opened.call.length:
            forward.length = opened.call.length
        # If the model creates the tokens, they are unsharded until their length is known.
        if forward.length and x.dim() > 2:
            layout = groups.plan.lay(forward.length)
            dims[1] = _cut(path, x, layout.positions(groups.rank), forward.length)

    def _over_tensor(self, path: str, x: Tensor, dims: list[Along]) -> None:
        shared = next((s for stack, s in self.shared.items() if path.startswith(f"{stack}.")), None)
        if shared is None:
            return
        lengths = shared.gather_lengths(x) if shared.lengths is None else shared.lengths
        if lengths:
            place = shared.rank_group.rank
            start = sum(lengths[:place])
            own = torch.arange(start, start + lengths[place])
            if x.dim() < 3:
                raise _unknown_part(path, x, "[batch, length, width]")
            dims[1] = _cut(path, x, own, sum(lengths))

    def _features(self, path: str, x: Tensor, dims: list[Along]) -> None:
        rank_group, runs = self.mesh.tensor, getattr(self.apart, "runs", ())
        groups = next((n for p, n in self.attention.items() if f"{path}.".startswith(f"{p}.")), 0)
        if groups:
            # If key-value heads are replicated, each rank has as many query heads as the others.
            dealt = split_evenly(max(groups, rank_group.size), rank_group.size)
            if x.dim() != 4 or x.shape[1] % dealt[rank_group.rank]:
                raise _unknown_part(path, x, "[batch, heads, queries, keys]")
            heads = x.shape[1] // dealt[rank_group.rank]
            start = sum(dealt[: rank_group.rank]) * heads
            whole = max(groups, rank_group.size) * heads
            dims[1] = Along(torch.arange(start, start + x.shape[1]), whole)
            return
        sizes = [stop - start for start, stop in runs]
        if x.shape[-1] == sum(sizes):
            found = torch.cat([torch.arange(*run) for run in runs])
            dims[-1] = Along(found, self.apart.total)  # type: ignore[union-attr]
        elif len(runs) > 1 and x.shape[-1] == sizes[0]:
            # A gate and the features it multiplies, from one layer, have become one product.
            dims[-1] = Along(torch.arange(*runs[0]), self.apart.total // len(runs))  # type: ignore[union-attr]
        else:
            raise _unknown_part(path, x, f"this rank's {sum(sizes)} features of the layer")


def _cut(path: str, x: Tensor, own: Tensor, length: int) -> Along:
    """Returns the part of dim 1 (the sequence) that this rank holds."""
    if x.shape[1] == len(own):
        return Along(own, length)
    if x.shape[1] == length:
        return Along.whole(length)
    raise _unknown_part(path, x, f"{len(own)} or all {length} tokens along dim 1")


def _unknown_part(path: str, x: Tensor, wanted: str) -> GulliverError:
    return GulliverError(
        f"{path} applies dropout to a tensor of shape {tuple(x.shape)}, whose position in the full "
        f"tensor is unknown (expected {wanted}): set its probability to 0, or use dropout='alike'"
    )


# Dropout of a model that several ranks share, with the same masks as in one process.
#
# Which elements are kept depends on the seed of the step, the site and the element's position in
# the full activation (`gulliver.parallel.dropout.drop`):
#
# 1. *The site.* A module that drops (`_Site`) intercepts torch's dropout calls while it runs. Its
#    path and the number of its earlier runs in this forward identify the site, as in one process.
# 2. *The forward.* All ranks of a model use one seed per batch. Blocks may be recomputed in
#    backward while other forwards are in flight: see the note at `PositionDropout`.
# 3. *The part* of the activation that this rank has: `ActivationParts`.


DROPS = (F.dropout, torch.dropout, torch.dropout_)
# Functions that draw masks, but not by position.
OTHERS = (
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.multi_head_attention_forward,
    torch.rand,
    torch.rand_like,
    torch.bernoulli,
    Tensor.bernoulli_,
)

# Substrings of attribute names: such modules skip whole blocks or samples, or add noise.
SKIPS = ("layerdrop", "drop_path", "drop_prob", "path_drop", "jitter")

# Attention implementations of transformers whose dropout can be intercepted.
ATTENTIONS = (None, "eager", "sdpa", "gulliver_sequence")

# Maximum number of forwards that may be recomputed, far more than are in flight.
REMEMBERED = 4096

INSTEAD = "set dropout to 0 in the model's configuration, or use dropout='alike'"


def drops_by_position(plan: Plan, model: nn.Module) -> bool:
    """Whether dropout draws the same masks as in a single process."""
    # If the model will be split into stages, dropout on any of them counts; so call this before.
    by_position = plan.dropout == "exact" or (plan.dropout == "auto" and plan.mesh.cuts_model)
    return by_position and bool(dropouts_of(model))


def check_positions(
    model: nn.Module, plan: TensorPlan | None, recomputed: Collection[str] = ()
) -> None:
    for path, module in model.named_modules():
        for name in _drops(path, module):
            why = _unknown(model, path, module, name, plan)
            # Other modules have this switch too, but are recomputed as part of these.
            layer = any(c.__name__ == "GradientCheckpointingLayer" for c in type(module).__mro__)
            if path in recomputed and layer:
                why = "drops in a block whose forward alone is recomputed (checkpoint_activations)"
            if why:
                raise GulliverError(f"{path}.{name} {why}; {INSTEAD}")


def _drops(path: str, module: nn.Module) -> list[str]:
    if any(part in DRAWN_ALIKE for part in path.split(".")):
        return []
    if isinstance(module, DROPOUTS):
        return ["p"] if module.p > 0 else []
    rates = {n: v for n, v in vars(module).items() if "drop" in n or "jitter" in n}
    return [name for name, value in rates.items() if isinstance(value, float) and value > 0]


def _unknown(
    model: nn.Module, path: str, module: nn.Module, name: str, plan: TensorPlan | None
) -> str | None:
    """Returns why a module's dropout cannot be drawn by position; None if it can."""
    if isinstance(module, DROPOUTS) and not isinstance(module, nn.Dropout):
        return f"({type(module).__name__}) drops full features, which are not drawn by position"
    if isinstance(module, nn.MultiheadAttention):
        return "drops inside torch's own attention module, where it cannot be drawn by position"
    if any(skip in name.lower() for skip in SKIPS) or "droppath" in type(module).__name__.lower():
        return "skips blocks or samples, or adds noise, which is not drawn by position"
    kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if kind not in ATTENTIONS:
        return f"drops under attn_implementation={kind!r}, which hides it: use 'sdpa' or 'eager'"
    if any(compiled_call(m) is not None or is_compiled(m) for m in model.modules()):
        return "drops in a compiled model, where it cannot be drawn by position"
    if plan is not None and ".lora_" in path:
        return "drops the input of a sharded layer's adapter, which is not drawn by position"
    experts = [p for p, m in plan.modules.items() if m.how.kind == "experts"] if plan else []
    if any(f"{path}.".startswith(f"{inside}.") for inside in experts):
        return "drops inside sharded experts, which is not drawn by position"
    return None


@dataclass
class _Frame:
    """One running call of a dropout site."""

    # Dropout site whose module runs.
    site: _Site
    # Number of earlier runs of the site within its caller.
    number: int
    # Number of runs of each site that it called.
    inner: Counter[str] = field(default_factory=Counter)
    # Number of masks drawn so far.
    draws: int = 0


class PositionDropout:
    """Draws a model's dropout masks; created on all its ranks."""

    # [Note: the forward that is recomputed]
    #
    # A recomputation in backward must find the seed and samples of its forward, although a pipeline
    # has run other forwards since. Checkpointing (`torch.utils.checkpoint`, however it was added)
    # only restores the state of torch's generator. So during a forward, the generator is seeded
    # with a number that identifies the forward (`_forwards`), and its state is restored afterwards.
    # A site that runs outside of a forward is being recomputed. A recomputation does not know how
    # often sites ran before it: a site that runs several times in a forward is rejected, unless the
    # site that calls it is recomputed with it.

    def __init__(self, model: nn.Module, mesh: HybridMesh, plan: TensorPlan | None) -> None:
        self.mesh, self.model = mesh, model
        self.parts = ActivationParts(model, mesh, plan)
        self.frames: list[_Frame] = []
        self._outer: Counter[str] = Counter()
        self._forwards: dict[int, Forward] = {}
        self._next = Forward(0)
        self._state: Tensor | None = None
        for path in _sites_of(model):
            _Site(path, self).watch(model.get_submodule(path))
        # Outside all other hooks: the model itself may be a site.
        model.register_forward_pre_hook(self._enter, prepend=True)
        model.register_forward_hook(self._leave, always_call=True)

    def __deepcopy__(self, memo: Any) -> PositionDropout:
        return self

    def begin(self, batch: Any = None) -> None:
        """Draws a batch's seed: equal on the ranks of one model, different between replicas."""
        if not self.model.training:
            return
        rank_group, device = self.mesh.model, next(self.model.parameters()).device
        drawn = torch.randint(2**62, (1,)).to(device)
        if rank_group.size > 1:
            # A process group numbers its ranks in ascending order, unlike a rank group.
            broadcast(
                drawn, sorted(rank_group.ranks).index(rank_group.ranks[0]), rank_group.process_group
            )
        # Replicas read other samples, and drop other elements even if users seed them equally.
        self._next = Forward(mix(int(drawn), self.mesh.data.rank))

    def before(self, start: int, samples: int) -> None:
        """Sets which samples of the batch the next forward processes."""
        self._next = Forward(self._next.seed, start, samples)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if module is not self.model or not module.training:
            return
        if self.mesh.pipeline.size == 1:
            self.begin()
        name = mix(self._next.seed, self._next.start)
        self._forwards.pop(name, None)
        self._forwards[name] = self._next
        if len(self._forwards) > REMEMBERED:
            del self._forwards[next(iter(self._forwards))]
        self._outer = Counter()
        self._state = torch.get_rng_state()
        torch.default_generator.manual_seed(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self.model and self._state is not None:
            torch.set_rng_state(self._state)
            self._state = None

    def enter(self, site: _Site) -> None:
        counted = self.frames[-1].inner if self.frames else self._outer
        if not self.frames and self._state is None:
            if site.repeated:
                raise GulliverError(
                    f"{site.path} has dropout, runs several times per forward, and is recomputed "
                    "separately from its caller, so its calls cannot be distinguished; recompute "
                    "whole blocks, or use dropout='alike'"
                )
            counted = Counter()
        frame = _Frame(site, counted[site.path])
        counted[site.path] += 1
        site.repeated = site.repeated or frame.number > 0
        self.frames.append(frame)

    def leave(self, site: _Site) -> None:
        """Pops a site's frame when its module ends, even after an exception."""
        while self.frames and self.frames.pop().site is not site:
            pass

    def draw(self, x: Tensor, p: float, inplace: bool = False) -> Tensor:
        """Applies this rank's part of the innermost site's dropout mask."""
        frame, forward = self.frames[-1], self._forwards.get(torch.initial_seed())
        if forward is None:
            raise GulliverError(
                f"{frame.site.path} uses dropout outside of the model's forward; call the model, "
                "and recompute with preserve_rng_state=True"
            )
        repeats = [(f.site.word, f.number) for f in self.frames if f.number]
        words = [word for pair in repeats for word in pair]
        key = mix(forward.seed, frame.site.word, frame.draws, *words)
        frame.draws += 1
        # Waits for an input that is still being gathered.
        x = torch.positive(x)
        return drop(x, p, key, self.parts.of(frame.site.path, x, forward), inplace)


class _Site(TorchFunctionMode):
    """Intercepts torch functions while one dropout module runs."""

    def __init__(self, path: str, drops: PositionDropout) -> None:
        super().__init__()
        self.path, self.drops, self.word, self.repeated = path, drops, hash_text(path), False
        self.module: nn.Module | None = None

    def __deepcopy__(self, memo: Any) -> _Site:
        # Copies of the module are not watched, and draw as torch does.
        return self

    def watch(self, module: nn.Module) -> None:
        self.module = module
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, args: Any) -> None:
        if module is self.module and module.training:
            self.drops.enter(self)
            self.__enter__()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self.module and any(frame.site is self for frame in self.drops.frames):
            self.drops.leave(self)
            self.__exit__(None, None, None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Draws masks by position for functions that drop at random."""
        kwargs = kwargs or {}
        if func in DROPS:
            return self._drop(*args, func=func, **kwargs)
        if func is F.scaled_dot_product_attention and _given(kwargs, args, "dropout_p", 4, 0.0):
            return attention_with_dropout(*args, **kwargs, drop=self.drops.draw)
        # A module in evaluation mode is no site, so this call draws.
        asked = kwargs.get("training", True) and kwargs.get("p", kwargs.get("dropout_p", 1.0))
        single = func is torch.rand and args == ([],)  # for a layerdrop, which is 0 here
        if func in OTHERS and asked and not single:
            raise GulliverError(
                f"{self.path} calls {func.__name__}, whose dropout masks cannot be drawn by "
                f"position; {INSTEAD}"
            )
        return func(*args, **kwargs)

    def _drop(
        self,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        *,
        func: Any,
        train: bool = True,
    ) -> Tensor:
        if not (training and train and p > 0):
            return input
        return self.drops.draw(input, p, inplace or func is torch.dropout_)


def _given(kwargs: dict[str, Any], args: tuple[Any, ...], name: str, at: int, default: Any) -> Any:
    return kwargs.get(name, args[at] if len(args) > at else default)


def _sites_of(model: nn.Module) -> list[str]:
    """Paths of modules with dropout, and of modules that may call it functionally."""
    paths: dict[str, None] = {}
    for path, module in model.named_modules():
        if not _drops(path, module):
            continue
        paths[path] = None
        while isinstance(module, (*DROPOUTS, nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            path, _, last = path.rpartition(".")
            module = model.get_submodule(path)
            if not last:
                break
        paths[path] = None
    return list(paths)
