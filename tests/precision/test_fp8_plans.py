"""FP8 on ranks: the numerics of one process with the same recipe, on every grid, or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gulliver.booster import (
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
)
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.hardware import described, fp8_seconds
from gulliver.hardware.operators import fp8_break_even
from gulliver.plan import Fp8Plan, Plan
from gulliver.planner.fp8 import weight_bytes
from gulliver.precision.fp8 import convert_to_fp8, revert_fp8, state_of
from tests.hybrid.hybrid_models import batch
from tests.pool import Pool
from tests.references import computed_once

STEPS, PARTS = 3, 2
BAR = 1e-9
"""In float64 a value falls on another side of a rounding to FP8 about never."""


def llama(wired: bool = False, layers: int = 2) -> Any:
    """A decoder whose layers FP8 takes on two tensor ranks, with a loss in its own dtype.

    Where tensors or sequences are shared the plugin puts such a loss in.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.hybrid.hybrid_cells import next_token_loss
    from tests.hybrid.hybrid_models import exact_norms

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=67,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model: Any = LlamaForCausalLM(config).double().train()
    exact_norms(model)
    if not wired:
        model.loss_function = next_token_loss
    return model


def data(step: int, place: int, part: int) -> dict[str, Tensor]:
    return batch("llama", 2, seed=100 * step + 10 * place + part)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


@computed_once
def reference(scaling: str, places: int, layers: int) -> dict[str, Tensor]:
    """One process that runs the micro-batches of all data ranks."""
    model = llama(layers=layers)
    convert_to_fp8(model, scaling, emulate=True)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        for place in range(places):
            for part in range(PARTS):
                (model(**data(step, place, part)).loss / PARTS / places).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


def layers_of(options: dict[str, Any]) -> int:
    return 4 if "pp_style" in options else 2


def trained(world: World, plugin: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    """The same by a plugin, with accumulation; returns weights and the plan's layers."""
    from tests.hybrid.hybrid_cells import saved_weights

    torch.set_num_threads(1)
    wired = options.get("tp_size", 1) * options.get("sp_size", 1) > 1
    model = llama(wired, layers_of(options))
    booster = Booster(plugin=plugin(**options, fp8_emulation=True, verbose=False))
    model, optimizer, *_ = booster.boost(model, optimizer_of(model))
    place = optimizer.mesh.data.rank if hasattr(optimizer, "mesh") else world.rank
    for step in range(STEPS):
        if options.get("pp_size", 1) > 1:
            halves = [data(step, place, part) for part in range(PARTS)]
            whole = {k: torch.cat([half[k] for half in halves]) for k in halves[0]}
            booster.execute_pipeline(iter([whole]), model, None, optimizer, weight="shifted_labels")
        for part in range(PARTS if options.get("pp_size", 1) == 1 else 0):
            loss = model(**data(step, place, part)).loss / PARTS
            if part + 1 < PARTS:
                with booster.no_sync(model, optimizer):
                    booster.backward(loss, optimizer)
            else:
                booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    fp8 = booster.plan.precision.fp8
    return saved_weights(booster, model), fp8.layers


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    errors = [float((found[n] - wanted[n]).abs().max() / wanted[n].abs().max()) for n in wanted]
    return max(errors)


ZERO, HYBRID, GEMINI = LowLevelZeroPlugin, HybridParallelPlugin, GeminiPlugin
ULYSSES = {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"}
RING = {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}
PIPE = {"pp_size": 2, "num_microbatches": PARTS}
CASES: dict[str, tuple[type, int, dict[str, Any], int]] = {
    "DDP": (TorchDDPPlugin, 2, {}, 2),
    "ZeRO 0": (ZERO, 2, {"stage": 0, "chunk_mb": 0.01}, 2),
    "ZeRO 1": (ZERO, 2, {"stage": 1, "chunk_mb": 0.01}, 2),
    "ZeRO 2": (ZERO, 2, {"stage": 2, "chunk_mb": 0.01}, 2),
    "ZeRO 3": (ZERO, 2, {"stage": 3, "chunk_mb": 0.01}, 2),
    "tensor 2": (HYBRID, 2, {"tp_size": 2}, 1),
    "pipeline 2": (HYBRID, 2, PIPE, 1),
    "Ulysses 2": (HYBRID, 2, ULYSSES, 1),
    "ring 2": (HYBRID, 2, RING, 1),
    "Gemini": (GEMINI, 2, {"memory_limit": "64MiB", "activations": "recompute"}, 2),
    "recomputed": (HYBRID, 2, {"tp_size": 2, "checkpoint_activations": True}, 1),
    "tensor 2 x data 2, ZeRO 3": (HYBRID, 4, {"tp_size": 2, "zero_stage": 3}, 2),
    "tensor 2 x pipeline 2": (HYBRID, 4, {"tp_size": 2, **PIPE}, 1),
    "pipeline 2, zbv": (HYBRID, 2, {**PIPE, "pp_style": "zbv"}, 1),
}
QUICK = ("ZeRO 1", "ZeRO 3", "tensor 2", "pipeline 2", "Ulysses 2")


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in CASES]
)
def test_ranks_compute_the_fp8_of_one_process(pool: Pool, name: str, scaling: str) -> None:
    plugin, ranks, options, places = CASES[name]
    wanted = reference(scaling, places, layers_of(options))
    for found, layers in pool.run(trained, ranks, plugin, {**options, "use_fp8": scaling}):
        assert worst(found, wanted) <= BAR
        assert len(layers) == 7 * layers_of(options)


class Blocks(nn.Sequential):
    def __init__(self) -> None:
        sizes = ((4096, 4096), (4096, 512), (512, 512), (512, 40))
        super().__init__(*(nn.Linear(a, b, bias=False, device="meta") for a, b in sizes))


def test_the_gate_keeps_layers_that_would_lose() -> None:
    cluster = described("8xh100-infiniband").resized(1)
    model = Blocks()
    plugin = LowLevelZeroPlugin(1, use_fp8=Fp8Plan("rowwise"), verbose=False)
    plan = plugin.make_plan(model, torch.optim.SGD(model.parameters(), lr=0.1), cluster)
    fp8 = plan.precision.fp8
    assert fp8 is not None
    assert fp8.layers == ("0",)
    assert fp8.kept["3"] == "40 outputs are no multiple of 16"
    gain = fp8_seconds(cluster.device, 8192, 512, 512, "rowwise").gain
    assert gain < 1
    assert fp8.kept["2"] == f"{gain:.2f} x as fast in FP8"
    assert "square layers pay from" in plan.reasons["precision.fp8"]
    assert "FP8: rowwise scales, 1 linear layers" in plan.summary()
    assert plan.memory.parameters == plugin_bytes(model)  # row-wise, no copy is kept
    again = Plan.from_yaml(plan.to_yaml())
    assert again.precision.fp8 == fp8


def plugin_bytes(model: nn.Module) -> int:
    plain = LowLevelZeroPlugin(1, verbose=False)
    cluster = described("8xh100-infiniband").resized(1)
    found = plain.make_plan(model, torch.optim.SGD(model.parameters(), lr=0.1), cluster)
    return found.memory.parameters


def kept_for_backward(model: nn.Module, sample: dict[str, Tensor]) -> int:
    """Bytes of storages that autograd saves, without parameters."""
    sizes: dict[int, int] = {}

    def note(value: Tensor) -> Tensor:
        sizes[value.untyped_storage().data_ptr()] = value.nbytes
        return value

    with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        out = model(**sample)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    out.loss.backward()
    return sum(size for place, size in sizes.items() if place not in own)


def test_predicted_activations_are_those_that_fp8_layers_keep() -> None:
    found, sample = {}, data(0, 0, 0)
    for scaling in (None, "tensorwise", "rowwise"):
        model = llama().float()
        chosen = {"use_fp8": scaling, "fp8_emulation": True} if scaling else {}
        plugin = LowLevelZeroPlugin(1, verbose=False, **chosen)
        cluster = described("cpu-loopback").resized(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = plugin.make_plan(model, optimizer, cluster, sample)
        found[scaling] = plan.predicted.bytes.activations
        assert not any(state_of(m) for m in model.modules())
        if scaling:
            # With them, the copies of the weights are saved, which the plan counts as parameters.
            convert_to_fp8(model, scaling, emulate=True)
            copies = weight_bytes(plan, {n: p.numel() for n, p in model.named_parameters()})
            whole = kept_for_backward(model, sample)
            revert_fp8(model)
            convert_to_fp8(model, scaling, emulate=True, keep_weights=False)
            assert whole - kept_for_backward(model, sample) == pytest.approx(copies, rel=0.002)
        counted = kept_for_backward(model, sample)
        assert found[scaling] == pytest.approx(counted, rel=0.02), scaling
    # A quarter of float32 for inputs that no other layer keeps.
    assert found["tensorwise"] < 0.93 * found[None]
    assert found["rowwise"] == pytest.approx(found[None], rel=0.02)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_the_break_even_side_is_the_first_that_pays(scaling: str) -> None:
    device = described("8xh100-infiniband").device
    for tokens in (2048, 16384):
        side = fp8_break_even(device, tokens, scaling)
        assert side is not None
        assert fp8_seconds(device, tokens, side, side, scaling).gain > 1
        assert fp8_seconds(device, tokens, side - 16, side - 16, scaling).gain <= 1
    slow = replace(device, matmul={**device.matmul, "float8_e4m3fn": 1e12})
    assert fp8_break_even(slow, 8192, scaling) is None
    one = fp8_seconds(device, 8192, 4096, 14336, scaling)
    # By hand: three products of 2 m k n; each operand is read for its magnitude, and cast.
    flops = 3 * 2 * 8192 * 4096 * 14336
    assert one.plain == pytest.approx(flops / 989e12 + 3 * 4e-6, rel=1e-6)
    assert one.products == pytest.approx(flops / 1979e12 + 3 * 4e-6, rel=1e-6)
    operands = 8192 * 4096 + 8192 * 14336 + 4096 * 14336
    each = {"tensorwise": (6, 2), "rowwise": (10, 4)}[scaling]
    assert one.casts == pytest.approx(each[0] * operands / 3.35e12 + each[1] * 3 * 4e-6, rel=1e-6)


def plan_of(model: nn.Module, plugin: Any, ranks: int = 1) -> Plan:
    cluster = described("cpu-loopback").resized(ranks)
    return plugin.make_plan(model, torch.optim.SGD(model.parameters(), lr=0.1), cluster)


def test_unsupported_fp8_options_are_rejected() -> None:
    model, on = Blocks(), {"fp8_emulation": True, "verbose": False}
    with pytest.raises(GulliverError, match="has no FP8 rate"):
        plan_of(model, LowLevelZeroPlugin(1, use_fp8=True, verbose=False))
    split = HybridParallelPlugin(2, sequence_parallelism_mode="split_gather", use_fp8=True, **on)
    with pytest.raises(GulliverError, match="FP8 layers need full sequences on tensor ranks"):
        plan_of(llama(), split, 2)
    chosen = LowLevelZeroPlugin(1, use_fp8=Fp8Plan(layers=("3",)), **on)
    with pytest.raises(GulliverError, match="'3' cannot compute in FP8: 40 outputs"):
        plan_of(model, chosen)


def test_without_units_boost_refuses_and_changes_nothing() -> None:
    model = llama()
    plan = replace(
        plan_of(model, LowLevelZeroPlugin(1, use_fp8=True, fp8_emulation=True, verbose=False)),
        mesh=LowLevelZeroPlugin(1).choices(1).mesh,
    )
    assert plan.precision.fp8 is not None
    hard = replace(plan.precision.fp8, emulated=False, gate=False)
    booster = Booster(plan=replace(plan, precision=replace(plan.precision, fp8=hard)))
    with pytest.raises(GulliverError, match="a CPU has no FP8 units"):
        booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not any(state_of(module) for module in model.modules())


def test_release_gives_back_plain_layers() -> None:
    model = llama()
    data = batch("llama", 2)
    with torch.no_grad():
        before = model(**data).loss
    booster = Booster(TorchDDPPlugin(use_fp8="tensorwise", fp8_emulation=True, verbose=False))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        assert not torch.equal(boosted(**data).loss, before)
    plain = booster.release(boosted, optimizer)
    with torch.no_grad():
        assert torch.equal(plain(**data).loss, before)


def test_fp8_command_prints_gain_and_memory(capsys: Any, tmp_path: Path) -> None:
    import json

    from gulliver.cli.dispatch import run

    words = ["precision", "--model", "llama-3-8b", "--cluster", "h100x8"]
    assert run([*words, "--json", "--scaling", "rowwise", "--tokens", "16384"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plain_s"] / found["fp8_s"] > 1.2
    # Not keys and values: 4096 x 1024 is too small for row-wise scales.
    blocks = 32 * (2 * 4096 * 4096 + 3 * 4096 * 14336)
    taken = sum(
        s["inputs"] * s["outputs"] * s["layers"] for s in found["layers"] if not s["why_not"]
    )
    assert taken == blocks
    assert found["copies"] == 0  # backward casts with other scales
