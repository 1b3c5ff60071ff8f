"""Measures the cost of a batch in one process, without changing the model."""

from __future__ import annotations

import copy
import inspect
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from gulliver.hardware.cluster import Device
from gulliver.hardware.costs import BACKWARD_OF_LINEAR
from gulliver.hardware.probe import current_cluster, kept_seconds
from gulliver.hardware.step import layer_seconds, update_seconds
from gulliver.memory.budget import FreedMemory
from gulliver.memory.symbolic import ActivationPeak, activation_peak, block_activations
from gulliver.parallel.tensor.styles import TensorPlan
from gulliver.parallel.zero.elementwise import state_sizes
from gulliver.plan.tree import BlockWork, Fp8Plan, Work
from gulliver.planner.model import (
    no_optimizer,
    offloadable_blocks,
    recomputable_blocks,
    recompute_blocks,
)
from gulliver.precision.fp8.conversion import convert_to_fp8, revert_fp8
from gulliver.precision.fp8.layers import Recipe

TURNS = 3
UPDATED = 1 << 22
"""Maximum number of elements in the timed optimizer step; larger steps are extrapolated."""
ADDED_UP = ("row", "vocabulary")  # styles of modules whose outputs are summed over tensor ranks


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
    return next((t.shape[0] for t in tensors_of(sample) if t.ndim), 1)


def with_peaks(
    work: Work, model: nn.Module, sample: Any, autocast: torch.dtype | None, activations: str
) -> Work:
    """Adds peak bytes, excluding model state, to the costs of a batch."""
    # Traced with fake tensors; 0 if it cannot be traced or recomputed.
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
    args = () if isinstance(sample, Mapping) else sample if isinstance(sample, tuple) else (sample,)
    kwargs = sample if isinstance(sample, Mapping) else {}
    offering = recomputable_blocks(model)

    def prepare(model: nn.Module) -> None:
        if again:
            recompute_blocks(model, again, offering)

    options = {"autocast": autocast, "prepare": prepare, "offloaded": offloaded}
    return activation_peak(model, args, kwargs, **options)  # type: ignore[arg-type]


def _shared_out(seconds: float, model: nn.Module, paths: Sequence[str]) -> dict[str, float]:
    """Divides forward time among blocks in proportion to their parameters."""
    counts = {p: sum(t.numel() for t in model.get_submodule(p).parameters()) for p in paths}
    whole = max(1, sum(p.numel() for p in model.parameters()))
    return {path: seconds * count / whole for path, count in counts.items()}


def timed(model: nn.Module, sample: Any, autocast: torch.dtype | None) -> tuple[float, float]:
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
    """Restores gradients, buffers and the random state on exit."""
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
    """Records input and output sizes of the modules at which ranks communicate."""
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
    """Paths of modules that take full tensors and compute a shard of their output."""
    if tensor is None:
        return []
    columns = [path for path, placed in tensor.modules.items() if placed.how.kind == "column"]
    return [*tensor.sites, *(path for path in columns if not _inside(path, tensor.sites))]


def shared_paths(tensor: TensorPlan | None) -> list[str]:
    if tensor is None:
        return []
    return [*tensor.sites, *(path for path in tensor.modules if not _inside(path, tensor.sites))]


@contextmanager
def _seconds_in(model: nn.Module, paths: Mapping[str, Sequence[str]]) -> Iterator[dict[str, float]]:
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
    """Counts the bytes saved for backward, excluding parameters; each storage counts once."""
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
    """Seconds of an optimizer step, extrapolated from a step on some of the parameters."""
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
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_of(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_of(inner)


def _nbytes(value: Any) -> int:
    return max((t.nbytes for t in tensors_of(value) if t.is_floating_point()), default=0)


# Times the blocks of a model on meta one by one, with random weights.
#
# The formula counts matrix products. In 16 bits, where products are fast, everything else in a
# block (norms, activations, rotations, casts, small kernels) takes as long. So one block of each
# kind is timed with random weights and inputs of the right shapes.


ROOM = 4  # a block is timed if it and its gradients need at most 1 / ROOM of the memory
DEVIATION = 0.02  # standard deviation of the random weights of timed blocks
Seconds = tuple[float, float]  # seconds of a forward pass and of its backward pass


class _Seen(Exception):
    """Raised to end the forward pass once all blocks have been seen."""


class _Call(nn.Module):
    def __init__(self, block: nn.Module, keywords: Mapping[str, Any]) -> None:
        super().__init__()
        self.block, self.keywords = block, keywords

    def forward(self, *args: Any) -> Any:
        return self.block(*args, **self.keywords)


def time_blocks(
    model: nn.Module, sample: Mapping[str, Any], room: int, limited: bool
) -> dict[str, Seconds]:
    paths = offloadable_blocks(model)
    kinds = dict[Any, list[str]]()
    for path in paths:
        kinds.setdefault(_kind(model.get_submodule(path)), []).append(path)
    largest = max((_block_bytes(model.get_submodule(path)) for path in paths), default=0)
    if not paths or 2 * largest > room // ROOM:
        return {}
    # The last of a kind, because the first one may get an input without a gradient.
    calls = _calls(model, sample, [found[-1] for found in kinds.values()])
    seconds = dict[str, Seconds]()
    for kind, found in kinds.items():
        if found[-1] not in calls:
            return {}
        args, keywords = calls[found[-1]]
        facts = {"block": str(kind), "call": str(_shapes((args, keywords))), "limited": limited}

        def measure(path: str = found[-1], args: Any = args, keywords: Any = keywords) -> Seconds:
            return _measured(model.get_submodule(path), args, keywords, limited)

        seconds |= dict.fromkeys(found, kept_seconds(facts, measure))
    return seconds


def _kind(block: nn.Module) -> tuple[Any, ...]:
    parameters = block.named_parameters()
    sizes = ((name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in parameters)
    return repr(block), *sizes


def _block_bytes(block: nn.Module) -> int:
    return sum(p.nbytes for p in block.parameters())


def _calls(
    model: nn.Module, sample: Mapping[str, Any], paths: Sequence[str]
) -> dict[str, tuple[Any, Any]]:
    found = dict[str, tuple[Any, Any]]()

    def watch(path: str) -> Callable[..., None]:
        def seen(_: nn.Module, args: Any, keywords: Any) -> None:
            found[path] = args, keywords
            if len(found) == len(paths):
                raise _Seen

        return seen

    def prepare(model: nn.Module) -> None:
        for path in paths:
            block = model.get_submodule(path)
            block.register_forward_pre_hook(watch(path), with_kwargs=True)

    activation_peak(model, (), sample, prepare=prepare)
    return found


def _shapes(call: Any) -> Any:
    def shape(tensor: Tensor) -> Any:
        return tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad

    return [shape(t) for t in pytree.tree_leaves(call) if isinstance(t, Tensor)]


def _measured(block: nn.Module, args: Any, keywords: Any, limited: bool) -> Seconds:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    freed = FreedMemory() if limited else None
    try:
        with torch.random.fork_rng():
            real = copy.deepcopy(block).to_empty(device=device)
            for tensor in (*real.parameters(), *real.buffers()):
                _fill(tensor)
            args, keywords = pytree.tree_map_only(
                Tensor, lambda tensor: _real(tensor, device), (args, keywords)
            )
            call = _Call(real, keywords)
            turns = [timed(call, args, None) for _ in range(TURNS + 1)][1:]
    finally:
        if freed is not None:
            freed.close()
    return median(forward for forward, _ in turns), median(backward for _, backward in turns)


def _fill(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.normal_(0, DEVIATION) if tensor.is_floating_point() else tensor.zero_()


def _real(fake: Tensor, device: torch.device) -> Tensor:
    """Creates a real tensor like a fake one; boolean masks are all True."""
    made = torch.ones(fake.shape, dtype=fake.dtype, device=device)
    return (_fill(made) if fake.is_floating_point() else made).requires_grad_(fake.requires_grad)


# Estimates the costs of a batch in one process from a model's sizes.
#
# Counts matrix products and the attention of transformers. If the ranks' device is available here,
# a block of each kind is timed, and only operations outside of blocks are counted.


NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TABLES = ("embed", "wte", "wpe", "position")
"""Words in the names of lookup tables, whose parameters are not used in matmuls."""


def estimate_work(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: Device,
    batch: int,
    length: int,
    precision: str = "fp32",
    activations: str = "keep",
    room: int | None = None,
    limited: bool = False,
) -> Work:
    work = _computed(model, optimizer, device, batch, length, precision)
    if getattr(model, "config", None) is None:
        return work
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    computing = copy.deepcopy(model).to(getattr(torch, NAMES[precision]))
    sample = {"input_ids": ids, "labels": ids}
    if room is not None:
        work = _timed(work, model, time_blocks(computing, sample, room, limited))
    return with_peaks(work, computing, sample, None, activations)


def _timed(work: Work, model: nn.Module, seconds: Mapping[str, tuple[float, float]]) -> Work:
    """Adds measured block times to the work; time outside blocks is scaled by parameter count."""
    if not seconds:
        return work
    inside = sum(_multiplied(model.get_submodule(path)) for path in seconds)
    outside = max(0, _multiplied(model) - inside) / max(1, inside)
    forward, backward = (sum(found) for found in zip(*seconds.values(), strict=True))
    rest = outside * forward
    return replace(
        work,
        forward_s=forward + rest,
        backward_s=backward + rest * work.backward_s / work.forward_s,
        share_blocks=forward / (forward + rest),
        blocks=tuple(BlockWork(path, found[0]) for path, found in seconds.items()),
    )


def estimate_sample(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, sample: Any, precision: str
) -> Work:
    batch = samples_of(sample)
    # Rows multiplied by matrices: token ids, or vectors.
    rows = (t.numel() // (t.shape[-1] if t.is_floating_point() else 1) for t in tensors_of(sample))
    length = max(1, max(rows, default=1) // max(1, batch))
    device = current_cluster(1).device
    return _computed(
        model, optimizer, device, batch, length, precision if precision in NAMES else "fp32"
    )


def _computed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    device: Device,
    batch: int,
    length: int,
    precision: str,
) -> Work:
    tokens = batch * length
    config = getattr(model, "config", None)
    layers = getattr(config, "num_hidden_layers", 0)
    width = getattr(config, "hidden_size", 0)
    # Attention scores and their product with values count as 2 x length x width more weights.
    weights = _multiplied(model) + layers * 2 * length * width
    forward = layer_seconds(device, weights, tokens, NAMES[precision])
    states, trained, stepper = 0, 0, optimizer or no_optimizer()
    whole = sum(p.numel() for p in model.parameters())
    for group in stepper.param_groups:
        for parameter in (p for p in group["params"] if p.requires_grad):
            trained += parameter.numel()
            states = max(states, len(state_sizes(stepper, group, parameter.shape)))
    item = 4 if precision == "fp32" else 2
    return Work(
        samples=batch,
        tokens=tokens,
        forward_s=forward,
        # Frozen weights need no gradients.
        backward_s=(1 + (BACKWARD_OF_LINEAR - 1) * (trained or whole) / max(1, whole)) * forward,
        update_s=update_seconds(device, 4 * trained, states),
        hidden_bytes=item * tokens * width,
    )


def _multiplied(model: nn.Module) -> int:
    """Counts the elements of the weights that multiply hidden states."""
    tables = {
        p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(False)
    }
    heads = {p for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters(False)}
    count = 0
    for name, parameter in model.named_parameters():
        table = parameter in tables or (not heads and any(word in name for word in TABLES))
        if parameter.ndim > 1 and (parameter in heads or not table):
            count += parameter.numel()
    return count
