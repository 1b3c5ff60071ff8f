"""Measurements of `benchmarks.gpu`. In a dry run the figures mean nothing, but the lines ran."""

from __future__ import annotations

import copy
import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks._fp8_gpu import Llama, LlamaBlock
from benchmarks._gpu_run import GpuRun, PartSkipped, blocks
from benchmarks._gpu_smoke import gpt, llama
from benchmarks._harness import alternate
from gulliver.booster import Booster, GeminiPlugin, LowLevelZeroPlugin, Plugin

SHARES = (0.84, 0.95)  # Memory limits, as shares of what a step needs without one


def fp8(run: GpuRun) -> None:
    """Speed-up of compiled FP8 over compiled bf16: two blocks of Llama-3-8B, then square layers."""
    from gulliver.precision.fp8 import convert_to_fp8
    from gulliver.precision.fp8.conversion import has_units

    if not run.dry and not has_units(run.device):
        raise PartSkipped("the device has no FP8 units")
    size = Llama(64, 128, 4, 2, 32, 2, 1) if run.dry else Llama()

    def block() -> nn.Module:
        return nn.Sequential(*(LlamaBlock(size) for _ in range(size.blocks)))

    models: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        "llama blocks": (block, (size.batch, size.length, size.width))
    }
    for side in (64,) if run.dry else (4096, 2048):
        linear = partial(nn.Linear, side, side, bias=False)
        models[f"linear {side}"] = (linear, (run.sized(8192, 128), side))
    for name, (make, shape) in models.items():
        torch.compiler.reset()
        torch.manual_seed(0)
        plain = make().to(run.device, torch.bfloat16)
        x = torch.randn(shape, device=run.device, dtype=torch.bfloat16, requires_grad=True)
        runs = {}
        for arm in ("bf16", "tensorwise", "rowwise"):
            model: Any = copy.deepcopy(plain)
            if arm != "bf16":
                convert_to_fp8(model, arm, emulate=run.dry)
            model = torch.compile(model, dynamic=False, backend="eager" if run.dry else "inductor")

            def once(model: Any = model, x: Any = x) -> float:
                def passes() -> None:
                    for _ in range(run.sized(5, 1)):
                        model(x).sum().backward()

                return run.seconds(passes) / run.sized(5, 1)

            once()
            runs[arm] = once
        times = alternate(runs, run.sized(7, 1))
        for arm, spread in times.items():
            run.figure(f"{name} {arm}: seconds", spread.median)
            run.figure(f"{name} {arm}: gain", times["bf16"].median / spread.median)


def step(run: GpuRun) -> None:
    """Seconds of a step of ZeRO 1 to 3 on one device, next to plain and FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(run.device.type, (1,))
    runs: dict[str, Callable[[], float]] = {}
    for name in ("plain", "FSDP2", "ZeRO 1", "ZeRO 2", "ZeRO 3"):
        model: Any
        model, ids = gpt(run)
        if name == "FSDP2":
            for layer in model.blocks:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        zero = name.startswith("ZeRO")
        plugin = LowLevelZeroPlugin(stage=int(name[-1]), verbose=False) if zero else None
        runs[name] = training_step(run, model, ids, plugin)
        for _ in range(run.sized(5, 2)):
            runs[name]()
    times = alternate(runs, run.sized(9, 2))
    for name, spread in times.items():
        run.figure(f"{name}: seconds", spread.median)
        run.figure(f"{name}: to plain", spread.median / times["plain"].median)


def training_step(
    run: GpuRun, model: Any, ids: torch.Tensor, plugin: Plugin | None
) -> Callable[[], float]:
    """Returns what trains a step in bf16 autocast and returns its seconds."""
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-4)
    booster = None if plugin is None else Booster(plugin=plugin)
    if booster is not None:
        model, optimizer, *_ = booster.boost(model, optimizer)

    def train() -> None:
        with torch.autocast(run.device.type, torch.bfloat16):
            loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward() if booster is None else booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return lambda: run.seconds(train)


def offload(run: GpuRun) -> None:
    """A step at 84 and 95 % of the memory that it needs without a limit."""
    steps = run.sized(8, 2)

    def trained(plugin: Plugin) -> tuple[float, int]:
        model: Any = blocks(12, run.sized(4096, 512), run.device)
        optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-4)
        batch = torch.ones(run.sized(4096, 8), run.sized(4096, 512), device=run.device)
        booster = Booster(plugin=plugin)
        model, optimizer, *_ = booster.boost(model, optimizer)

        def train() -> None:
            booster.backward(model(batch).square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()

        times: list[float] = []
        for _ in range(4):  # sizes and the budget are measured in the first steps
            train()
        peak = run.peak_bytes(lambda: times.extend(run.seconds(train) for _ in range(steps)))
        return statistics.median(times), peak

    resident_s, resident = trained(LowLevelZeroPlugin(stage=3, verbose=False))
    resident = resident or 60 << 20  # a dry run's process has no peak of its own
    run.figure("resident: seconds", resident_s)
    run.figure("resident: bytes", resident)
    for share in SHARES:
        run.empty_cache()
        away: dict[str, Any] = {"host_limit": "16GiB"}
        if run.dry:
            away = {"disk": f"{run.folder}:1GiB"}
        seconds, peak = trained(GeminiPlugin(int(share * resident), verbose=False, **away))
        run.figure(f"{share:.0%}: seconds", seconds)
        run.figure(f"{share:.0%}: to resident", seconds / resident_s)
        run.figure(f"{share:.0%}: bytes", peak)


def stall(run: GpuRun) -> None:
    """Seconds that a save adds to the steps around it, compared with `torch.save`."""
    from gulliver.checkpoint import AsyncCheckpointer

    model = blocks(run.sized(24, 3), run.sized(2048, 64), run.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    batch = torch.ones(run.sized(16384, 8), run.sized(2048, 64), device=run.device)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}

    def train() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    around = run.sized(20, 3)

    def seconds(save: Callable[[], object]) -> float:
        begun = time.perf_counter()
        save()
        for _ in range(around):
            run.seconds(train)
        return time.perf_counter() - begun

    seconds(lambda: None)
    size = sum(t.nbytes for p in optimizer.state.values() for t in p.values())
    run.figure("bytes", size + sum(p.nbytes for p in model.parameters()))
    plain = statistics.median(seconds(lambda: None) for _ in range(3))
    run.figure("step: seconds", plain / around)
    for mode in ("shadow", "ring"):
        with AsyncCheckpointer(run.folder / mode, mode=mode, keep=1) as checkpointer:
            found = []
            for number in range(3):
                found.append(seconds(lambda n=number, c=checkpointer: c.save(n, state)) - plain)
                checkpointer.wait()
        # The first save takes the memory that later ones use again.
        run.figure(f"{mode}: first stall, seconds", found[0])
        run.figure(f"{mode}: stall, seconds", min(found[1:]))
    whole = {name: part.state_dict() for name, part in state.items()}
    once = seconds(lambda: torch.save(whole, run.folder / "whole.pt")) - plain
    run.figure("torch.save: stall, seconds", once)


class Clips(torch.utils.data.Dataset[torch.Tensor]):
    """Clips of random numbers, made as they are read."""

    def __init__(self, count: int, side: int) -> None:
        self.count, self.side = count, side

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3, 16, self.side, self.side), float(index))


def loader(run: GpuRun) -> None:
    """Seconds of an epoch and of waiting, next to torch's own loader."""
    from gulliver.data import DataLoader

    side, count = run.sized(256, 16), run.sized(512, 16)
    work = torch.randn(run.sized(8192, 64), run.sized(8192, 64), device=run.device)
    workers: dict[str, Any] = {"num_workers": run.sized(8, 1)}
    found = DataLoader(Clips(count, side), 4, device=run.device, **workers)
    torchs = torch.utils.data.DataLoader(Clips(count, side), 4, pin_memory=not run.dry, **workers)
    for name, batches in (("gulliver", found), ("torch", torchs)):

        def epoch(batches: Any = batches) -> None:
            for batch in batches:
                batch.to(run.device, non_blocking=True).mean()
                torch.mm(work, work)

        run.figure(f"{name}: seconds of an epoch", run.seconds(epoch))
    run.figure("waited, seconds", found.statistics().waited_s)


def decode(run: GpuRun) -> None:
    """Tokens a second of many answers, next to transformers and, where it is installed, vLLM."""
    from gulliver.serve import LLM, SamplingParams

    model = llama(run, run.sized(2048, 128), run.sized(16, 2))
    model = model if run.dry else model.bfloat16()
    count, length = run.sized(16, 3), run.sized(128, 8)
    ids = torch.randint(1, 1024, (count, run.sized(64, 8)), device=run.device)
    sampling = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)

    def rate(name: str, call: Callable[[], object]) -> None:
        call()
        run.figure(f"{name}: tokens/s", count * length / run.seconds(call))

    with LLM(model, cache_tokens=count * 256) as llm:
        rate("gulliver", lambda: llm.generate(ids.tolist(), sampling))
    options = {"max_new_tokens": length, "do_sample": False}
    mask = torch.ones_like(ids)
    rate("transformers", lambda: model.generate(ids, attention_mask=mask, **options))
    if importlib.util.find_spec("vllm") is None:
        run.figure("vllm", "not installed")
        return
    folder = run.folder / "model"
    model.save_pretrained(folder)
    rate("vllm", vllm_call(folder, ids.tolist(), length))


def vllm_call(folder: Path, prompts: list[list[int]], length: int) -> Callable[[], object]:
    """Returns what makes the same tokens with vLLM."""
    import vllm  # pyright: ignore[reportMissingImports]

    llm = vllm.LLM(str(folder), skip_tokenizer_init=True, gpu_memory_utilization=0.5)
    sampling = vllm.SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return lambda: llm.generate(given, sampling)
