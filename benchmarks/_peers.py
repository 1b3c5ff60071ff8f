"""What trains in `benchmarks.zero`: ours, DDP, torch's ZeRO 1, FSDP2 and DeepSpeed, on one task.

Each contestant is a step on the batch of a seed, made in the process that runs it. DeepSpeed takes
part where it is installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks._models import Task
from gulliver.booster import Booster, LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from gulliver.plan.tree import Work

IN_BACKWARD = "in backward"
"""Ends the name of a ZeRO that steps a chunk as soon as its gradient is complete."""
DEEPSPEED_BUCKET = 5_000_000
"""Elements of its buckets: by default all of a small model is one, and nothing overlaps."""


Step = Callable[[int], tuple[float, tuple[float, float, float]]]
"""A step on the batch of a seed: its loss, and seconds of forward, backward and update."""


@dataclass
class Contestant:
    """A model in training."""

    name: str  # in the table
    step: Step
    # parameters, gradients and optimizer state that this rank holds now
    tensors: Callable[[], Iterable[Any]]
    optimizer: Any = None  # that steps; ours, where it is ours
    model: nn.Module = field(default_factory=nn.Module)  # that is trained, without wrappers
    inner: torch.optim.Optimizer | None = None  # torch's optimizer, which it steps in the end
    finish: Callable[[], None] = lambda: None  # waits for what a step leaves under way
    # calls a function inside of a step where most may be held, besides around layers
    watching: Callable[[Callable[..., None]], Any] = lambda look: contextlib.nullcontext()
    # bytes that this rank will hold at most, where somebody predicts them
    planned: Callable[[], int] | None = None
    steps: int = 0  # done so far
    loss: float = float("nan")  # of the last step
    losses: list[float] = field(default_factory=list)  # of all steps that `advance` did
    # seconds of forward, backward and update of the same steps
    passes: list[tuple[float, float, float]] = field(default_factory=list)

    def advance(self, rank: int, ranks: int) -> None:
        """A step on this rank's next batch."""
        self.loss, passes = self.step(self.steps * ranks + rank)
        self.losses.append(self.loss)
        self.passes.append(passes)
        self.steps += 1

    @property
    def settled(self) -> bool:
        """Whether it has found how it wants to run, and was run so once."""
        tuner = getattr(self.optimizer, "tuner", None)
        return self.steps >= 2 and (tuner is None or tuner.stage.name == "DONE")

    @property
    def chunk_mb(self) -> float | None:
        """Size of the largest chunk, of ours."""
        chunks = getattr(self.optimizer, "all_chunks", None)
        return max(c.chunk.nbytes for c in chunks) / 2**20 if chunks else None

    def bytes(self) -> int:
        """Bytes that this rank holds, every storage once, of sharded ones the local part."""
        seen: dict[int, int] = {}
        with torch.no_grad():
            for tensor in self.tensors():
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                if local is not None and local.ndim:
                    storage = local.untyped_storage()
                    seen[storage.data_ptr()] = storage.nbytes()
        return sum(seen.values())

    def peak_bytes(self, rank: int, ranks: int) -> int:
        """Most that `bytes` is in a step, looked at around layers, reductions and the update."""
        most = self.bytes()

        def look(*_: Any) -> None:
            nonlocal most
            most = max(most, self.bytes())

        def forward(_: nn.Module, args: Any, output: Any) -> None:
            look()
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(look)

        layers = [m for m in self.model.modules() if not list(m.children())]
        hooks: list[Any] = [layer.register_forward_hook(forward) for layer in layers]
        if self.inner is not None:
            hooks.append(self.inner.register_step_pre_hook(look))
        with self.watching(look):
            self.advance(rank, ranks)
            self.finish()
        for hook in hooks:
            hook.remove()
        return most


def build(name: str, task: Task, chunk_mb: float | str) -> Contestant | None:
    """The contestant of a name, or None where it is not installed."""
    kind, _, rest = name.partition(" ")
    if kind == "ZeRO":
        stage, _, when = rest.partition(" ")
        early = when == IN_BACKWARD
        plugin = LowLevelZeroPlugin(int(stage), chunk_mb, step_in_backward=early, verbose=False)
        return boosted(name, task, plugin)
    if name == "DDP ZeRO 1":
        return zero_redundancy(name, task)
    if kind == "DDP":
        return boosted(name, task, TorchDDPPlugin(bucket_cap_mb=int(rest or 25), verbose=False))
    if kind == "FSDP2":
        return fsdp2(name, task, reshard=rest != "keep")
    if kind == "DeepSpeed":
        return deepspeed(name, task, int(rest))
    return plain(task)


def plain(task: Task) -> Contestant:
    """The task with communication left out: every rank for itself."""
    model, optimizer = make(task)
    step = _stepper(task, model, optimizer)
    return Contestant("compute", step, lambda: _all(model, optimizer), optimizer, model, optimizer)


def boosted(name: str, task: Task, plugin: Plugin, work: Work | None = None) -> Contestant:
    """The task through the Booster; with `work` it is planned with what a batch costs."""
    model, optimizer = make(task)
    booster = Booster(plugin)
    if work is not None:
        plan = plugin.make_plan(model, optimizer, work=work)
        booster = Booster(plan=plan, verbose=False)
    net, wrapped, *_ = booster.boost(model, optimizer)
    sharded = hasattr(wrapped, "all_chunks")

    step = _timed(
        lambda seed: task.loss(net, seed), lambda loss: booster.backward(loss, wrapped), wrapped
    )

    def tensors() -> Iterator[Any]:
        if not sharded:
            yield from _all(model, optimizer)
            return
        for c in wrapped.all_chunks:
            yield from (
                c.chunk.buffer,
                c.chunk.master_shard,
                *c.chunk.gradients.collected,
                c.gradient_shard,
            )
            yield c.incoming
        yield from _states(optimizer)

    def planned() -> int:
        return sum(wrapped.memory().values()) if sharded else booster.plan.memory.total

    @contextlib.contextmanager
    def watching(look: Callable[..., None]) -> Iterator[None]:
        sender = wrapped.shards.reducer.sender
        send = sender.send

        def sent(sharded: Any) -> Any:
            sharded.incoming, handle = send(sharded)
            look()
            return sharded.incoming, handle

        sender.send = sent
        yield
        del sender.send

    if not sharded:
        return Contestant(name, step, tensors, wrapped, model, optimizer, planned=planned)
    finish = wrapped.gatherer.finish_all
    return Contestant(name, step, tensors, wrapped, model, optimizer, finish, watching, planned)


def zero_redundancy(name: str, task: Task) -> Contestant:
    """DDP with torch's `ZeroRedundancyOptimizer`: each rank updates some of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = task.model()
    net = nn.parallel.DistributedDataParallel(model)
    options: dict[str, Any] = {"lr": 1e-4, "fused": True}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    step = _stepper(task, net, optimizer)
    return Contestant(name, step, lambda: _all(model, optimizer.optim), optimizer, model)


def fsdp2(name: str, task: Task, reshard: bool, offload: bool = False) -> Contestant:
    """FSDP2, each block a unit; with `offload` its shards are in host memory between uses."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    # The loss changes nothing in place, which is what FSDP2 warns of.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    torch.manual_seed(0)
    model = task.model()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pinned = CPUOffloadPolicy(pin_memory=device == "cuda")
    how: dict[str, Any] = {
        "mesh": init_device_mesh(device, (dist.get_world_size(),)),
        "reshard_after_forward": reshard,
        "offload_policy": pinned if offload else OffloadPolicy(),
    }
    for block in task.blocks(model):
        fully_shard(block, **how)
    fully_shard(model, **how)
    optimizer = _optimizer(model)
    shards = list(model.parameters())

    def tensors() -> Iterator[Any]:
        yield from shards
        yield from _all(model, optimizer)

    step = _stepper(task, model, optimizer)
    return Contestant(name, step, tensors, optimizer, model, optimizer)


def deepspeed(
    name: str, task: Task, stage: int, offload: dict[str, str] | None = None
) -> Contestant | None:
    """DeepSpeed's ZeRO; `offload` says where its parameters and optimizer state lie."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    torch.manual_seed(0)
    model = task.model()
    inner = _optimizer(model)
    with _quiet():
        # By name, for the peer is optional: type checking has to pass where it is not installed.
        ds = importlib.import_module("deepspeed")
        ds.init_distributed(dist_backend="gloo", verbose=False)
        engine, optimizer, *_ = ds.initialize(
            model=model, optimizer=inner, config=_deepspeed_config(stage, offload)
        )

    step = _timed(lambda seed: task.loss(engine, seed), engine.backward, engine)

    def tensors() -> Iterator[Any]:
        yield from _all(model, inner)
        yield from _within(vars(optimizer), set())

    return Contestant(name, step, tensors, optimizer, model, inner)


def _deepspeed_config(stage: int, offload: dict[str, str] | None) -> dict[str, Any]:
    places = {} if offload is None else {"offload_param": offload, "offload_optimizer": offload}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "reduce_bucket_size": DEEPSPEED_BUCKET,
            "allgather_bucket_size": DEEPSPEED_BUCKET,
            **places,
        },
        "gradient_clipping": 0.0,  # by default it clips at 1, which is not the task
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps DeepSpeed's greetings to itself."""
    import logging

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    # A file, not a string: what checks for compilers wants the number of one.
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def make(task: Task) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with the weights that all contestants begin with, and its optimizer."""
    torch.manual_seed(0)
    model = task.model()
    return model, _optimizer(model)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _stepper(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return _timed(lambda seed: task.loss(model, seed), torch.Tensor.backward, optimizer)


def _timed(forward: Callable[[int], Any], backward: Callable[[Any], Any], optimizer: Any) -> Step:
    def step(seed: int) -> tuple[float, tuple[float, float, float]]:
        begun = time.perf_counter()
        loss = forward(seed)
        computed = time.perf_counter()
        backward(loss)
        differentiated = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        updated = time.perf_counter()
        passes = computed - begun, differentiated - computed, updated - differentiated
        return float(loss.detach()), passes

    return step


def _all(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    for parameter in model.parameters():
        yield parameter
        yield parameter.grad
    yield from _states(optimizer)


def _states(optimizer: Any) -> Iterator[Any]:
    for state in optimizer.state.values():
        yield from (v for v in state.values() if isinstance(v, torch.Tensor))


def _within(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Tensors in containers, in DeepSpeed's objects, and among the attributes of parameters."""
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: Iterable[Any] = ()
    if isinstance(value, torch.Tensor):
        yield value
        parts = list(vars(value).values())
    elif isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, list | tuple | set):
        parts = value
    elif type(value).__module__.startswith("deepspeed.runtime.zero"):
        parts = list(getattr(value, "__dict__", {}).values())
    for part in parts:
        yield from _within(part, seen)
