"""Measures the costs of a batch in one process; the model is left as it was."""

from __future__ import annotations

import inspect
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gulliver.booster._blocks import offloadable_blocks, recomputable_blocks, recompute_blocks
from gulliver.memory import ActivationPeak, activation_peak, block_activations
from gulliver.parallel.tensor import TensorPlan
from gulliver.plan import BlockWork, Fp8Plan, Work
from gulliver.precision.fp8 import Recipe, convert_to_fp8, revert_fp8

TURNS = 3
UPDATED = 1 << 22
"""Most elements of the update that is timed."""
ADDED_UP = ("row", "vocabulary")
"""Kinds of modules whose outputs tensor ranks add up."""


def measure_work(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    sample: Any,
    tensor: TensorPlan | None,
    blocks: tuple[str, ...],
    autocast: torch.dtype | None,
    each: bool = False,
    fp8: Fp8Plan | None = None,
) -> Work:
    """Runs a batch a few times."""
    sizes: dict[str, list[int]] = {"forward": [], "backward": [], "hidden": [], "again": []}
    watched = _sizes_of(model, tensor, blocks, sizes)
    with _put_back(model), watched, _in_fp8(model, fp8), _counted(model) as kept:
        timed(model, sample, autocast)
    with _put_back(model):
        turns = [timed(model, sample, autocast) for _ in range(TURNS)]
    parts = {"blocks": blocks, "cut": shared_paths(tensor)} | {
        f"block {path}": [path] for path in blocks
    }
    whole, inside = math.inf, dict[str, float]()
    for _ in range(TURNS if each else 1):
        with _put_back(model), _seconds_in(model, parts) as found:
            took, _ = timed(model, sample, autocast)
        whole, inside = min((whole, inside), (took, found), key=lambda turn: turn[0])
    tensors = [t for t in tensors_of(sample) if t.ndim]
    return Work(
        samples=samples_of(sample),
        tokens=max((t.shape[0] * t.shape[1] for t in tensors if t.ndim > 1), default=0),
        forward_s=statistics.median(forward for forward, _ in turns),
        backward_s=statistics.median(backward for _, backward in turns),
        update_s=_measured_update(model, optimizer),
        hidden_bytes=max(sizes["hidden"], default=0),
        activations=kept[0],
        reduced_forward=tuple(sizes["forward"]),
        reduced_backward=tuple(sizes["backward"]),
        reduced_again=tuple(sizes["again"]),
        share_blocks=min(1.0, inside["blocks"] / whole),
        share_cut=min(1.0, inside["cut"] / whole),
        blocks=tuple(BlockWork(path, inside[f"block {path}"]) for path in blocks if each),
    )


def samples_of(sample: Any) -> int:
    """Number of samples of a batch."""
    return next((t.shape[0] for t in tensors_of(sample) if t.ndim), 1)


def with_peaks(
    work: Work, model: nn.Module, sample: Any, autocast: torch.dtype | None, activations: str
) -> Work:
    """The work of a batch with the peak bytes of a step that are not state."""
    # Followed with fake tensors; 0 for what cannot be followed or recomputed.
    plain = follow_sample(model, sample, autocast)
    seconds = {block.path: block.forward_s for block in work.blocks}
    work = replace(work, peak=plain.bytes or 0, unfollowed=plain.reason, blocks=())
    if activations == "keep" or plain.bytes is None:
        return work
    again = recomputable_blocks(model)
    if getattr(model, "is_gradient_checkpointing", False):
        work, again = replace(work, peak_recomputed=plain.bytes), ()
    if activations != "offload" and again:
        found = follow_sample(model, sample, autocast, again)
        work = replace(work, peak_recomputed=found.bytes or 0)
    if activations == "recompute":
        return work
    offloadable = set(offloadable_blocks(model))
    ordered = [path for path in plain.kept if path in offloadable]
    # A block's activations go to its own entry, all others to the model's.
    found = follow_sample(model, sample, autocast, offloaded=(*ordered, ""))
    work = replace(work, peak_offloaded=found.bytes or 0)
    if not any(seconds.values()):
        seconds = _shared_out(work.forward_s, model, ordered)
    blocks = []
    for path, one in zip((*ordered, ""), block_activations(plain, ordered), strict=True):
        taken = found.taken.get(path, ())
        sizes = one.saved, one.output, one.working, sum(taken), max(taken, default=0)
        blocks.append(BlockWork(path, seconds.get(path, 0.0), *sizes))
    return replace(work, blocks=tuple(blocks))


def follow_sample(
    model: nn.Module,
    sample: Any,
    autocast: torch.dtype | None,
    again: Sequence[str] = (),
    offloaded: Sequence[str] = (),
) -> ActivationPeak:
    """Follows a step with fake tensors, with the named blocks recomputed or offloaded."""
    args = () if isinstance(sample, Mapping) else sample if isinstance(sample, tuple) else (sample,)
    kwargs = sample if isinstance(sample, Mapping) else {}
    offering = recomputable_blocks(model)

    def prepare(model: nn.Module) -> None:
        if again:
            recompute_blocks(model, again, offering)

    options = {"autocast": autocast, "prepare": prepare, "offloaded": offloaded}
    return activation_peak(model, args, kwargs, **options)  # type: ignore[arg-type]


def _shared_out(seconds: float, model: nn.Module, paths: Sequence[str]) -> dict[str, float]:
    """Seconds of a forward by the parameters of its blocks."""
    counts = {p: sum(t.numel() for t in model.get_submodule(p).parameters()) for p in paths}
    whole = max(1, sum(p.numel() for p in model.parameters()))
    return {path: seconds * count / whole for path, count in counts.items()}


def timed(model: nn.Module, sample: Any, autocast: torch.dtype | None) -> tuple[float, float]:
    """Seconds of a forward and a backward."""
    device = next(model.parameters()).device
    context = torch.autocast(device.type, autocast) if autocast is not None else nullcontext()
    begun = _now(device)
    with context:
        if isinstance(sample, Mapping):
            out = model(**sample)
        else:
            out = model(*sample) if isinstance(sample, tuple) else model(sample)
    between = _now(device)
    found = getattr(out, "loss", None)
    floats = [t for t in tensors_of(out) if t.is_floating_point() and t.requires_grad]
    loss = found if isinstance(found, Tensor) else sum(t.float().square().mean() for t in floats)
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    return between - begun, _now(device) - between


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Leaves gradients, buffers and the random state as they were."""
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.clone()) for b in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def _sizes_of(
    model: nn.Module,
    tensor: TensorPlan | None,
    blocks: tuple[str, ...],
    sizes: dict[str, list[int]],
) -> Iterator[None]:
    """Records input and output sizes of modules at which ranks communicate."""
    watched: list[tuple[str, Callable[..., None]]] = []

    def out_of(*kinds: str) -> Callable[..., None]:
        def note(_: Any, args: Any, out: Any) -> None:
            for kind in kinds:
                sizes[kind].append(_nbytes(out))

        return note

    def into(_: Any, args: Any, kwargs: Any, out: Any) -> None:
        sizes["backward"].append(_nbytes((args, kwargs)))

    for path, placed in (tensor.modules if tensor is not None else {}).items():
        if placed.how.kind in ADDED_UP:
            # Recomputed modules reduce their outputs again.
            again = ("again",) if _inside(path, blocks) else ()
            watched.append((path, out_of("forward", *again)))
    watched += [(path, out_of("hidden")) for path in blocks[:1]]
    handles = [model.get_submodule(p).register_forward_hook(h) for p, h in watched]
    for path in entries_of(tensor):
        module = model.get_submodule(path)
        handles.append(module.register_forward_hook(into, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _inside(path: str, others: Iterable[str]) -> bool:
    return any(path.startswith(f"{other}.") for other in others)


def entries_of(tensor: TensorPlan | None) -> list[str]:
    """Paths of modules that take whole tensors and compute a part of the output."""
    if tensor is None:
        return []
    columns = [path for path, placed in tensor.modules.items() if placed.how.kind == "column"]
    return [*tensor.sites, *(path for path in columns if not _inside(path, tensor.sites))]


def shared_paths(tensor: TensorPlan | None) -> list[str]:
    """Paths of modules that each tensor rank runs a part of, with all that is in them."""
    if tensor is None:
        return []
    return [*tensor.sites, *(path for path in tensor.modules if not _inside(path, tensor.sites))]


@contextmanager
def _seconds_in(model: nn.Module, paths: Mapping[str, Sequence[str]]) -> Iterator[dict[str, float]]:
    """Seconds of a forward spent in disjoint lists of modules, by name."""
    found, begun, handles = dict.fromkeys(paths, 0.0), dict[tuple[str, str], float](), []
    device = next(model.parameters()).device

    def watch(name: str, path: str) -> None:
        def begin(*_: Any) -> None:
            begun[name, path] = _now(device)

        def end(*_: Any) -> None:
            found[name] += _now(device) - begun[name, path]

        module = model.get_submodule(path)
        handles.append(module.register_forward_pre_hook(begin))
        handles.append(module.register_forward_hook(end))

    for name, members in paths.items():
        for path in members:
            watch(name, path)
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _in_fp8(model: nn.Module, fp8: Fp8Plan | None) -> Iterator[None]:
    """Converts layers to (emulated) FP8, so that they save what they will save in a run."""
    if fp8 is None or not fp8.layers:
        yield
        return
    # Kept FP8 copies of weights are counted as parameters.
    recipe = Recipe(fp8.scaling, emulate=True)
    convert_to_fp8(model, recipe, layers=fp8.layers, keep_weights=False)
    try:
        yield
    finally:
        revert_fp8(model)


@contextmanager
def _counted(model: nn.Module) -> Iterator[list[int]]:
    """Bytes that forward saves for backward, each storage once, without parameters."""
    found, seen = [0], {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(value: Tensor) -> Tensor:
        key = value.untyped_storage().data_ptr()
        if not isinstance(value, nn.Parameter) and key not in seen:
            seen.add(key)
            found[0] += value.nbytes
        return value

    with saved_tensors_hooks(pack, lambda value: value):
        yield found


def _measured_update(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> float:
    """Seconds of an optimizer step, extrapolated from a step of some parameters."""
    if optimizer is None:
        return 0.0
    trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    copies, count = list[nn.Parameter](), 0
    for parameter in sorted(trained, key=Tensor.numel):
        if copies and count + parameter.numel() > UPDATED:
            break
        copies.append(nn.Parameter(parameter.detach().clone()))
        copies[-1].grad = torch.zeros_like(copies[-1])
        count += parameter.numel()
    try:
        # `defaults` may have more keys than the constructor takes, as with AdamW.
        taken = inspect.signature(type(optimizer)).parameters
        known = {key: value for key, value in optimizer.defaults.items() if key in taken}
        twin = type(optimizer)(copies, **known)
    except (TypeError, ValueError):
        return 0.0
    took = []
    for _ in range(TURNS + 1):
        begun = _now(copies[0].device)
        twin.step()
        took.append(_now(copies[0].device) - begun)
    return statistics.median(took[1:]) * sum(p.numel() for p in trained) / count


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of nested values."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_of(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_of(inner)


def _nbytes(value: Any) -> int:
    """Bytes of the largest floating-point tensor of nested values."""
    return max((t.nbytes for t in tensors_of(value) if t.is_floating_point()), default=0)
