"""A task whose layers sleep as long as they would compute, as on an accelerator beside the CPU.

`slept(task, seconds)` has the same parameters in the same blocks and the same gradients to reduce,
of each rank its own, so all collectives are the same; but the core is free meanwhile. The optimizer
still computes. A layer sleeps in proportion to its parameters, twice as long backward as forward;
embeddings, which only look up, do not. As with real layers, backward needs the parameters, and its
time includes that gradients are written: fresh tensors, which autograd takes as they are. The loss
is a sum over what the layers hold, so that losses
of all contestants agree only if all of them reduce and update alike.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks._models import Task

FORWARD = 1 / 3  # Share of a step that is forward


def slept(task: Task, seconds: float) -> Task:
    """The task with a step of so many seconds slept instead of computed."""
    gradients: dict[str, Tensor] = {}

    def model() -> nn.Module:
        return SleptModel(task, seconds, gradients)

    def loss(net: nn.Module, seed: int) -> Tensor:
        return net(torch.ones((), dtype=torch.float64))

    return Task(f"{task.name}, slept", model, loss, lambda net: list(net.blocks))  # type: ignore[arg-type]


class SleptLayer(nn.Module):
    """The parameters of one module, and the time that it takes."""

    def __init__(self, module: nn.Module, seconds: float, gradients: list[Tensor]) -> None:
        super().__init__()
        for name, parameter in module.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.seconds, self.gradients = seconds, gradients

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self, *self.parameters(recurse=False))  # type: ignore[return-value]


class SleptModel(nn.Module):
    """The layers before the blocks of a task's model, the blocks, and the layers after them."""

    def __init__(self, task: Task, seconds: float, gradients: dict[str, Tensor]) -> None:
        super().__init__()
        original = task.model()
        blocks = task.blocks(original)
        within = {m: number for number, block in enumerate(blocks) for m in block.modules()}
        layers = {n: m for n, m in original.named_modules() if list(m.parameters(recurse=False))}
        work = {n: _work(module) for n, module in layers.items()}
        self.before, self.after = nn.Sequential(), nn.Sequential()
        self.blocks = nn.ModuleList(nn.Sequential() for _ in blocks)
        place = self.before
        for name, module in layers.items():
            place = self.after if place is not self.before or module in within else place
            target = self.blocks[within[module]] if module in within else place
            took = seconds * work[name] / sum(work.values())
            found = [
                gradients.setdefault(f"{name}.{n}", _gradient(p))
                for n, p in module.named_parameters(recurse=False)
            ]
            target.append(SleptLayer(module, took, found))  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.after(x)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: SleptLayer, *parameters: Tensor) -> Tensor:
        time.sleep(FORWARD * layer.seconds)
        ctx.layer = layer
        ctx.save_for_backward(*parameters)
        return x + sum(float(p.reshape(-1)[0]) for p in parameters)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        assert all(p.numel() for p in ctx.saved_tensors)  # waits for those that are elsewhere
        begun = time.perf_counter()
        gradients = [gradient.clone() for gradient in ctx.layer.gradients]
        took = time.perf_counter() - begun
        time.sleep(max(0.0, (1 - FORWARD) * ctx.layer.seconds - took))
        return grad_outputs[0], None, *gradients


def _work(module: nn.Module) -> int:
    if isinstance(module, nn.Embedding):
        return 0
    return sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)


def _gradient(parameter: Tensor) -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(1 + rank)
    return 1e-2 * torch.randn(parameter.shape, generator=generator)
