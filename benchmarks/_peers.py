"""What trains in `benchmarks.zero`: ours, DDP, FSDP2 and DeepSpeed, on the same task.

Each contestant is a step on the batch of a seed, made in the process that runs it. DeepSpeed takes
part where it is installed.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks._models import Task
from gulliver.booster import Booster, LowLevelZeroPlugin, Plugin, TorchDDPPlugin


@dataclass
class Contestant:
    """A model in training.

    Attributes:
        name: in the table.
        step: one step on the batch of a seed; returns the loss.
        tensors: parameters, gradients and optimizer state that this rank holds now.
        optimizer: that the contestant steps.
        planned: bytes of them that were predicted, where somebody did.
        steps: done so far.
        loss: of the last step.
    """

    name: str
    step: Callable[[int], float]
    tensors: Callable[[], Iterable[Any]]
    optimizer: Any = None
    planned: int | None = None
    steps: int = 0
    loss: float = float("nan")

    def bytes(self) -> int:
        """Bytes that this rank holds, every storage once, of sharded ones the local part."""
        seen: dict[int, int] = {}
        for tensor in self.tensors():
            if tensor is None:
                continue
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            if local.ndim and storage.nbytes() > local.itemsize:
                seen[storage.data_ptr()] = storage.nbytes()
        return sum(seen.values())


def build(name: str, task: Task, chunk_mb: float) -> Contestant | None:
    """The contestant of a name, or None where it cannot take part.

    Args:
        name: ``compute``, ``DDP``, ``FSDP2``, ``FSDP2 keep``, ``DeepSpeed N`` or ``ZeRO N``.
        task: what to train.
        chunk_mb: of ours.
    """
    kind, _, rest = name.partition(" ")
    if kind == "ZeRO":
        return boosted(name, task, LowLevelZeroPlugin(int(rest), chunk_mb=chunk_mb, verbose=False))
    if kind == "DDP":
        return boosted(name, task, TorchDDPPlugin(verbose=False))
    if kind == "FSDP2":
        return fsdp2(name, task, reshard=rest != "keep")
    if kind == "DeepSpeed":
        return deepspeed(name, task, int(rest))
    return plain(task)


def plain(task: Task) -> Contestant:
    """The task with communication left out: every rank for itself."""
    model, optimizer = _made(task)

    def step(seed: int) -> float:
        loss = task.loss(model, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return Contestant("compute", step, lambda: _all(model, optimizer))


def boosted(name: str, task: Task, plugin: Plugin) -> Contestant:
    """The task through the Booster."""
    model, optimizer = _made(task)
    booster = Booster(plugin)
    net, wrapped, *_ = booster.boost(model, optimizer)

    def step(seed: int) -> float:
        loss = task.loss(net, seed)
        booster.backward(loss, wrapped)
        wrapped.step()
        wrapped.zero_grad()
        return float(loss.detach())

    def tensors() -> Iterable[Any]:
        for c in getattr(wrapped, "everything", ()):
            yield from (c.chunk.buffer, c.chunk.home, c.chunk.gradient, c.gradient_shard)
        if not hasattr(wrapped, "everything"):
            yield from net.parameters()
        yield from (v for state in optimizer.state.values() for v in state.values())

    return Contestant(name, step, tensors, wrapped, booster.plan.memory.total)


def fsdp2(name: str, task: Task, reshard: bool) -> Contestant:
    """FSDP2, each block a unit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # The loss changes nothing in place, which is what FSDP2 warns of.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    torch.manual_seed(0)
    model = task.model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in task.blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    optimizer = _optimizer(model)

    def step(seed: int) -> float:
        loss = task.loss(model, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return Contestant(name, step, lambda: _all(model, optimizer))


def deepspeed(name: str, task: Task, stage: int) -> Contestant | None:
    """DeepSpeed's ZeRO."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    warnings.filterwarnings("ignore")
    import logging

    import deepspeed as ds

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = task.model()
    ds.init_distributed(dist_backend="gloo", verbose=False)
    engine, optimizer, *_ = ds.initialize(
        model=model,
        optimizer=_optimizer(model),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, "overlap_comm": True},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        },
    )

    def step(seed: int) -> float:
        loss = task.loss(engine, seed)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return Contestant(name, step, lambda: _all(model, getattr(optimizer, "optimizer", optimizer)))


def _made(task: Task) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = task.model()
    return model, _optimizer(model)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _all(model: nn.Module, optimizer: Any) -> Iterable[Any]:
    for parameter in model.parameters():
        yield parameter.detach()
        yield parameter.grad
    for state in optimizer.state.values():
        yield from (v for v in state.values() if isinstance(v, torch.Tensor))
