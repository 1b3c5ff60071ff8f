"""Gradient noise scale: the batch size beyond which larger batches gain little.

McCandlish et al. 2018, "An empirical model of large-batch training", appendix A.1. With G the true
gradient and S the trace of a sample's covariance, the gradient of b samples has the expected
squared norm |G|^2 + S / b. A step has N gradients, one per backward and rank, and their mean;
gradient i covers the fraction a_i of the B samples and contributes g_i to the mean:

    sum_i E|g_i|^2 = A |G|^2 + S / B,  A = sum_i a_i^2        E|g|^2 = |G|^2 + S / B

so that both have unbiased estimates:

    |G|^2 = (|g|^2 - sum_i |g_i|^2) / (1 - A)                 S = B (|g|^2 - |G|^2)

Equal fractions give A = 1 / N and the paper's equations. As in the paper, both are averaged over
steps separately; the noise scale is S / |G|^2, in samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gulliver.comm.collectives import all_reduce
from gulliver.comm.world import World
from gulliver.errors import GulliverError
from gulliver.parallel.optimizer import BoostedOptimizer

# Weight of the previous average at each step.
DECAY = 0.95


class NoiseScale(NamedTuple):
    """Estimate of the noise of gradients.

    Attributes:
        scale: noise scale in samples; inf while the gradient is indistinguishable from noise.
        signal: squared norm of the true gradient.
        variance: trace of the covariance of one sample's gradient.
        steps: number of steps that were measured.
    """

    scale: float
    signal: float
    variance: float
    steps: int


def signal_of(whole: float, parts: float, evenness: float) -> float:
    """Estimates the squared norm of the true gradient.

    Args:
        whole: squared norm of the mean gradient.
        parts: sum of the squared norms of each rank's weighted contribution to the mean gradient.
        evenness: sum of the squared weights; 1 / N for N equal weights.
    """
    return (whole - parts) / (1 - evenness)


class NoiseMeter:
    """Measures gradient noise at every step of an optimizer, before gradients are clipped."""

    def __init__(self, optimizer: BoostedOptimizer, world: World) -> None:
        self._optimizer, self._world = optimizer, world
        self._parts: list[Tensor] = []
        self._calls = 0
        self._measured = False
        self._pending: list[tuple[float, float]] = []
        self.signal = self.variance = self.weight = 0.0
        self.steps = 0
        for parameter in optimizer.names:
            if parameter.requires_grad:
                parameter.register_hook(self._listen)
        # Before clipping, which scales the mean gradient but not its parts.
        self._norm = optimizer.clip_grad_by_norm
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            setattr(optimizer, name, self._first(getattr(optimizer, name)))
        step = optimizer.step

        @wraps(step)
        def measured(*arguments: Any, **options: Any) -> Any:
            self._measure()
            result = step(*arguments, **options)
            self._forget()
            return result

        optimizer.step = measured  # type: ignore[method-assign]
        backward = optimizer.backward

        @wraps(backward)
        def counted(loss: Tensor) -> None:
            self._calls += 1
            backward(loss)

        optimizer.backward = counted  # type: ignore[method-assign]

    def _listen(self, gradient: Tensor) -> None:
        self._parts.append(gradient.detach().double().square().sum())

    def _first(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def measured(*arguments: Any, **options: Any) -> Any:
            self._measure()
            return method(*arguments, **options)

        return measured

    def _measure(self) -> None:
        if self._measured or not self._parts:
            return
        self._measured = True
        ranks, count = self._world.size, self._calls * self._world.size
        if count < 2:
            raise GulliverError(
                "gradient_noise needs at least two gradients per step: use several micro-batches "
                "or ranks"
            )
        parts = torch.stack(self._parts).sum()
        if ranks > 1:
            all_reduce(parts)
        whole = float(self._norm(math.inf)) ** 2
        signal = signal_of(whole, float(parts) / ranks**2, 1 / count)
        if math.isfinite(whole):
            self._pending.append((signal, whole - signal))

    def _forget(self) -> None:
        self._parts.clear()
        self._calls, self._measured = 0, False

    def scale(self, batch: int) -> NoiseScale | None:
        """Returns the current estimate; None before the first step."""
        for signal, excess in self._pending:
            self.signal = DECAY * self.signal + (1 - DECAY) * signal
            self.variance = DECAY * self.variance + (1 - DECAY) * excess * batch
            self.weight = DECAY * self.weight + 1 - DECAY
            self.steps += 1
        self._pending.clear()
        if not self.steps:
            return None
        signal, variance = self.signal / self.weight, self.variance / self.weight
        found = variance / signal if signal > 0 else math.inf
        return NoiseScale(max(found, 0.0), signal, variance, self.steps)


def check_noise(plugin: Any, kinds: tuple[type, ...]) -> None:
    """Rejects plugins whose ranks do not have full gradients of their local samples."""
    name = type(plugin).__name__
    if not isinstance(plugin, kinds):
        told = " or ".join(kind.__name__ for kind in kinds)
        raise GulliverError(f"gradient_noise is not supported by {name}: use {told}")
    if getattr(plugin, "step_in_backward", False):
        raise GulliverError("gradient_noise needs full gradients: omit step_in_backward")
    if getattr(plugin, "precision", None) == "fp16":
        raise GulliverError("gradient_noise is not supported with fp16's loss scale: use bf16")
