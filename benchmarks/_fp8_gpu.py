"""The GPU's part of the FP8 benchmark: one command of nine minutes at most, on a GPU with FP8.

Compiled bf16 beside compiled FP8, tensor-wise and row-wise, and beside torchao's where it is
installed: blocks of the shape of Llama-3-8B, layers of several sizes with the gate's prediction,
and 500 steps of a GPT. What the clock leaves
no time for is left out, and said. A contestant that fails is named with its error, and the others
go on.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._fp8_training import Size, final, gpt_losses
from benchmarks._harness import Report, Spread, alternate, at_least, at_most
from gulliver.hardware import fp8_seconds
from gulliver.hardware.operators import fp8_break_even
from gulliver.hardware.probe import named_cluster, probe_device
from gulliver.precision.fp8 import convert_to_fp8
from gulliver.precision.fp8.conversion import has_units

BUDGET_S = 520.0
BLOCK_GAIN, TO_TORCHAO, CURVE = 1.30, 1.0, 0.01
PEERS = {"torchao tensorwise": "tensorwise", "torchao rowwise": "rowwise"}
SIDES = ((4096, 14336), (4096, 4096), (2048, 2048), (1024, 1024))
"""Inputs and outputs of the layers that are timed alone, largest first."""


@dataclass(frozen=True)
class Llama:
    """Sizes of a block of Llama-3-8B, and of its batch."""

    width: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    length: int = 4096
    batch: int = 2
    blocks: int = 2


class LlamaBlock(nn.Module):
    """Grouped-query attention and a gated MLP, without rotary codes, which cost no product."""

    def __init__(self, size: Llama) -> None:
        super().__init__()
        self.size = size
        head = size.width // size.heads
        self.norms = nn.ModuleList(nn.RMSNorm(size.width) for _ in range(2))
        self.q = nn.Linear(size.width, size.width, bias=False)
        self.k = nn.Linear(size.width, size.kv_heads * head, bias=False)
        self.v = nn.Linear(size.width, size.kv_heads * head, bias=False)
        self.o = nn.Linear(size.width, size.width, bias=False)
        self.gate = nn.Linear(size.width, size.inner, bias=False)
        self.up = nn.Linear(size.width, size.inner, bias=False)
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        y = self.norms[0](x)
        q, k, v = (
            layer(y).view(b, t, heads, -1).transpose(1, 2)
            for layer, heads in (
                (self.q, self.size.heads),
                (self.k, self.size.kv_heads),
                (self.v, self.size.kv_heads),
            )
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(seen.transpose(1, 2).reshape(b, t, c))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def report_gpu(rounds: int, report: Report) -> None:
    """Measures on the GPU at hand; without one it says so."""
    if not torch.cuda.is_available() or not has_units(torch.device("cuda")):
        report.notes.append("gpu: there is no CUDA device with FP8 units: not measured.")
        return
    begun = time.monotonic()
    torch.set_float32_matmul_precision("high")
    for part, needs in ((_blocks, 0.0), (_layers, 150.0), (_curve, 150.0)):
        spent = time.monotonic() - begun
        if spent > BUDGET_S - needs:
            report.notes.append(f"{part.__name__[1:]}: left out after {spent:.0f} s.")
            continue
        try:
            part(rounds, report)
        except Exception as error:  # what the others have measured is to be told
            told = str(error).strip().splitlines() or [""]
            name = part.__name__[1:]
            report.notes.append(f"{name} failed: {type(error).__name__}: {told[0][:200]}")
            report.bars.append(at_least(f"{name}: runs", 0.0, 1.0))
        gc.collect()
        torch.cuda.empty_cache()
    report.notes.append(f"gpu: {time.monotonic() - begun:.0f} s in all, compilation included.")


def made(model: nn.Module, arm: str) -> nn.Module:
    """A compiled copy of a model whose linear layers compute as an arm says."""
    model = copy.deepcopy(model)
    if arm in PEERS:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore

        config = Float8LinearConfig.from_recipe_name(PEERS[arm])
        convert_to_float8_training(model, config=config)
    elif arm != "bf16":
        convert_to_fp8(model, arm)
    compiled: Any = torch.compile(model, dynamic=False)
    return compiled


def timed(model: nn.Module, x: Tensor) -> Callable[[], float]:
    """Seconds of a forward and backward, by the device's clock."""
    grad = torch.randn_like(x)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    wide = grad if model(x).shape == x.shape else torch.randn_like(model(x))

    def once(calls: int = 5) -> float:
        start.record()
        for _ in range(calls):
            model.zero_grad(set_to_none=True)
            x.grad = None
            model(x).backward(wide)
        end.record()
        torch.cuda.synchronize()
        return 1e-3 * start.elapsed_time(end) / calls

    return once


def contest(
    make: Callable[[], nn.Module], x: Tensor, arms: tuple[str, ...], rounds: int, report: Report
) -> dict[str, Spread]:
    """Times of all arms that run; what fails is noted."""
    # Between contests alone: what is reset is compiled again. Torch gives up after eight models.
    torch.compiler.reset()
    runs, plain = {}, make()
    for arm in arms:
        try:
            runs[arm] = timed(made(plain, arm), x)
            runs[arm]()
        except Exception as error:
            runs.pop(arm, None)
            told = str(error).strip().splitlines() or [""]
            report.notes.append(f"{arm} failed: {type(error).__name__}: {told[0][:200]}")
    return alternate(runs, rounds)


def _blocks(rounds: int, report: Report) -> None:
    size = Llama()
    torch.manual_seed(0)

    def make() -> nn.Module:
        with torch.device("cuda"):
            return nn.Sequential(*(LlamaBlock(size) for _ in range(size.blocks))).bfloat16()

    shape = size.batch, size.length, size.width
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    times = contest(make, x, ("bf16", "tensorwise", "rowwise", *PEERS), rounds, report)
    if "bf16" not in times:
        return
    base = times["bf16"].median
    for arm, spread in times.items():
        gain = base / spread.median
        ms = f"{1e3 * spread.median:.2f}"
        name = f"{size.blocks} Llama-3-8B blocks, {size.batch * size.length} tokens"
        report.rows.append((name, arm, ms, f"{gain:.2f} x", ""))
        report.figures[f"blocks {arm}"] = {"seconds": spread.median, "gain": gain}
    ours = [times[arm] for arm in ("tensorwise", "rowwise") if arm in times]
    if not ours:
        return
    best = min(spread.median for spread in ours)
    report.bars.append(at_least("blocks: FP8 to bf16", base / best, BLOCK_GAIN))
    for arm, scaling in PEERS.items():
        if arm in times and scaling in times:
            ratio = times[arm].median / times[scaling].median
            report.bars.append(at_least(f"blocks: {scaling} to {arm}", ratio, TO_TORCHAO))


def _layers(rounds: int, report: Report) -> None:
    device, tokens = probe_device(torch.device("cuda")), 8192
    try:
        described = named_cluster("h200" if "H200" in device.name else "h100").device
    except ValueError:
        described = device
    for inputs, outputs in SIDES:
        x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)

        def make(inputs: int = inputs, outputs: int = outputs) -> nn.Module:
            with torch.device("cuda"):
                return nn.Sequential(nn.Linear(inputs, outputs, bias=False)).bfloat16()

        times = contest(make, x, ("bf16", "tensorwise", "rowwise"), rounds, report)
        for scaling in ("tensorwise", "rowwise"):
            if not {"bf16", scaling} <= times.keys():
                continue
            gain = times["bf16"].median / times[scaling].median
            told = [
                fp8_seconds(rates, tokens, inputs, outputs, scaling).gain
                for rates in (device, described)
            ]
            predicted = f"{told[0]:.2f} x measured rates, {told[1]:.2f} x described"
            ms = f"{1e3 * times[scaling].median:.3f}"
            report.rows.append((f"{inputs} x {outputs}", scaling, ms, f"{gain:.2f} x", predicted))
            key = f"layer {inputs}x{outputs} {scaling}"
            report.figures[key] = {"gain": gain, "predicted": told[0], "described": told[1]}
            right = (gain > 1) == (told[0] > 1) or abs(gain - 1) < 0.05
            report.bars.append(at_least(f"{key}: gate decides right", float(right), 1.0))
    for scaling in ("tensorwise", "rowwise"):
        report.figures[f"break-even {scaling}"] = fp8_break_even(device, tokens, scaling)


def _curve(rounds: int, report: Report) -> None:
    size = Size(width=512, blocks=6, heads=8, length=256, batch=32)
    losses = {}
    for arm in ("fp32", "tensorwise"):
        torch.compiler.reset()
        losses[arm] = gpt_losses(arm, 0, 500, size, "cuda", emulate=False)
    report.figures["curve"] = losses
    ratio = final(losses["tensorwise"]) / final(losses["fp32"]) - 1
    report.rows.append(
        ("GPT, 500 steps, bf16 autocast", "tensorwise", "", f"{100 * ratio:+.2f} % of loss", "")
    )
    report.bars.append(at_most("500 steps: distance of the final loss", abs(ratio), CURVE))
