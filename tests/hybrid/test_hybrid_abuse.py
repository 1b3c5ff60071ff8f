"""Demanding and wrong uses of hybrid parallelism: right as one process, or refused in a line.

What is checked against one process is in `tests/hybrid/hybrid_cells.py` for plain loops; here the
loops are those that real runs have.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.booster import Booster, HybridParallelPlugin
from gulliver.comm import World, barrier
from gulliver.comm.collectives import broadcast_object
from gulliver.errors import GulliverError
from tests.covering import grid as grid_of
from tests.hybrid.hybrid_cells import (
    PIPED,
    RING,
    SPLIT,
    ULYSSES,
    Cell,
    criterion,
    grid,
    largest,
    make_model,
    make_optimizer,
    next_token_loss,
    relative,
    samples,
    saved_weights,
)
from tests.hybrid.hybrid_models import batch, build
from tests.pool import Pool

STAGES = {"pp_size": 2, "num_microbatches": 2}
TENSOR = {"tp_size": 2}
GRIDS = {
    "tensor": TENSOR,
    "split gather": {**TENSOR, **SPLIT},
    "ring": {"sp_size": 2, **RING},
    "Ulysses, ZeRO 3": {"sp_size": 2, "zero_stage": 3, **ULYSSES},
    "pipeline": STAGES,
    "pipeline, ZeRO 2": {**STAGES, "zero_stage": 2},
    "pipeline, ZeRO 3": {**STAGES, "zero_stage": 3},
    "data, ZeRO 3": {"zero_stage": 3},
}
BAR = 1e-10


def _is_piped(plugin: dict[str, Any]) -> bool:
    return plugin.get("pp_size", 1) > 1


def _boost(
    plugin: dict[str, Any], family: str = "llama", model: Any = None, **options: Any
) -> tuple[Booster, Any, Any]:
    model = model or build(family, layers=4 if _is_piped(plugin) else 2)
    booster = Booster(plugin=HybridParallelPlugin(**plugin, chunk_mb=0.01, verbose=False))
    model, optimizer, *_ = booster.boost(model, make_optimizer(model), **options)
    return booster, model, optimizer


def _once(booster: Booster, model: Any, optimizer: Any, data: dict[str, Tensor]) -> float:
    if optimizer.pipeline is not None:
        done = booster.execute_pipeline(
            iter([data]), model, None, optimizer, weight="shifted_labels"
        )
        return float(done["loss"])
    loss = criterion(model(**data), data)
    booster.backward(loss, optimizer)
    return loss.item()


def _said(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except GulliverError as error:
        return str(error)
    return ""


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    """One group is the head alone, which one stage has nothing of."""
    head = [p for n, p in model.named_parameters() if "lm_head" in n]
    rest = [p for n, p in model.named_parameters() if "lm_head" not in n]
    groups = [{"params": ps, "lr": lr} for ps, lr in ((head, 0.05), (rest, 0.02)) if ps]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)


def _adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)


def _train(cell: Cell, how: dict[str, Any], hybrid: bool) -> dict[str, Any]:
    plugin, dtype = cell.grid.plugin, torch.float64
    shared = plugin.get("tp_size", 1) * plugin.get("sp_size", 1) > 1
    model = make_model(cell, dtype, wired=hybrid and shared)
    for name, parameter in model.named_parameters():
        if any(part in name for part in how.get("frozen", ())):
            parameter.requires_grad_(False)
    optimizer: Any = how.get("optimizer", make_optimizer)(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    booster, place = Booster(), 0
    if hybrid:
        booster = Booster(plugin=HybridParallelPlugin(**plugin, chunk_mb=0.01, verbose=False))
        model, optimizer, *_ = booster.boost(model, optimizer, lr_scheduler=scheduler)
        place = optimizer.mesh.data.rank
    norms: list[float] = []

    def accumulate(number: int) -> None:
        if hybrid:
            _once(booster, model, optimizer, samples(cell, place, number, dtype))
            return
        for other in range(cell.grid.data):
            data = samples(cell, other, number, dtype)
            (criterion(model(**data), data) / cell.grid.data).backward()

    def clip(limit: float) -> None:
        if hybrid:
            norms.append(float(optimizer.clip_grad_by_norm(limit)))
        else:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))

    for step in range(2):
        if hybrid and how.get("no_sync"):
            with booster.no_sync(model, optimizer):
                accumulate(2 * step)
        else:
            accumulate(2 * step)
        if how.get("look"):
            clip(float("inf"))
        accumulate(2 * step + 1)
        if how.get("value"):
            if hybrid:
                optimizer.clip_grad_by_value(how["value"])
            else:
                nn.utils.clip_grad_value_(model.parameters(), how["value"])
        clip(0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if hybrid:
        return {"norms": norms, "weights": saved_weights(booster, model)}
    return {"norms": norms, "weights": dict(model.state_dict())}


def _loop_errors(world: World, cell: Cell, how: dict[str, Any]) -> float:
    wanted, found = _train(cell, how, hybrid=False), _train(cell, how, hybrid=True)
    norms = relative(torch.tensor(found["norms"]), torch.tensor(wanted["norms"]))
    return max(norms, largest(found["weights"], wanted["weights"]))


LOOPS = {
    "accumulated, looked at between": {"look": True},
    "no_sync, momentum, value": {"no_sync": True, "optimizer": _momentum, "value": 1e-3},
    "state before the first step": {"optimizer": _adagrad},
    "frozen embedding and block": {"frozen": ("embed", "layers.0.")},
}


@pytest.mark.parametrize(("name", "kind"), grid_of(list(GRIDS), list(LOOPS), strength=1))
def test_loops_of_real_runs_train_as_one_process(pool: Pool, name: str, kind: str) -> None:
    plugin, how = GRIDS[name], LOOPS[kind]
    # Tied weights lie on two stages, and are no stage's own.
    family = "llama" if "frozen" in how else "qwen2"
    cell = Cell(family, grid("abused", 2, **plugin))
    # The norm adds 1e-6 before it divides, as torch's own does.
    assert max(pool.run(_loop_errors, 2, cell, how)) <= BAR


@pytest.mark.parametrize(
    "plugin",
    [
        {**TENSOR, **PIPED},
        {"sp_size": 2, "zero_stage": 3, **RING},
        {**STAGES, "zero_stage": 3},
    ],
    ids=["ring of tensors", "ring, ZeRO 3", "pipeline, ZeRO 3"],
)
def test_recomputed_blocks_train_as_one_process(pool: Pool, plugin: dict[str, Any]) -> None:
    cell = Cell("llama", grid("recomputed", 2, checkpoint_activations=True, **plugin))
    assert max(pool.run(_loop_errors, 2, cell, {})) <= BAR


def _own(out: Any, data: dict[str, Tensor]) -> Tensor:
    logits = out["logits"] if isinstance(out, dict) else out.logits
    return F.cross_entropy(logits.flatten(0, 1), data["labels"].flatten()) + logits.pow(2).mean()


def _logits_errors(world: World, plugin: dict[str, Any]) -> float:
    piped = _is_piped(plugin)
    data = batch("llama", 4, seed=3, length=13)
    given = {"input_ids": data["input_ids"]}
    model = build("llama", layers=4 if piped else 2)
    out = model(**given)
    wanted = _own(out, data)
    wanted.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    booster, model, optimizer = _boost(plugin)
    loss, logits = wanted, None
    for _ in range(2):  # in evaluation between, and again
        optimizer.zero_grad()
        model.train()
        if piped:
            done = booster.execute_pipeline(
                iter([data]), model, _own, optimizer, return_outputs=True
            )
            loss, logits = done["loss"], (done["outputs"] or {}).get("logits")
        else:
            found = model(**given)
            loss, logits = _own(found, data), found.logits
            booster.backward(loss, optimizer)
        model.eval()
        with torch.no_grad():
            if piped:
                booster.execute_pipeline(iter([given]), model, optimizer=optimizer)
            else:
                assert relative(model(**data).logits, out.logits) <= BAR
    errors = [relative(loss, wanted), largest(optimizer.full_gradients(), gradients)]
    return max(errors + ([relative(logits, out.logits)] if logits is not None else []))


@pytest.mark.parametrize("name", ["tensor", "split gather", "ring", "pipeline"])
def test_custom_criteria_see_full_logits_in_order(pool: Pool, name: str) -> None:
    assert max(pool.run(_logits_errors, 2, GRIDS[name])) <= BAR


def _uneven_criterion(world: World) -> float:
    data = batch("llama", 4, seed=3)
    data["labels"][0, 5:] = -100
    model = build("llama", layers=4)
    wanted = F.cross_entropy(model(data["input_ids"]).logits.mT, data["labels"])
    booster, model, optimizer = _boost(STAGES)
    given = {"input_ids": data["input_ids"], "labels": data["labels"]}

    def own(out: Any, micro: Any) -> Tensor:
        return F.cross_entropy(out.logits.mT, micro["labels"])

    done = booster.execute_pipeline(iter([given]), model, own, optimizer, weight="labels")
    return relative(done["loss"], wanted.detach())


def test_a_criterion_says_what_it_is_a_mean_over(pool: Pool) -> None:
    assert max(pool.run(_uneven_criterion, 2)) <= BAR


def _padded(world: World, plugin: dict[str, Any]) -> float:
    data = batch("llama", 4, seed=1)
    data["attention_mask"] = torch.ones_like(data["input_ids"])
    data["attention_mask"][0, :4] = 0
    data["labels"][0, :4] = -100
    data["labels"][2:] = -100  # nothing counts in the second micro-batch
    model = build("llama", layers=4 if _is_piped(plugin) else 2)
    model.loss_function = next_token_loss
    wanted = model(**data).loss
    wanted.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    model = build("llama", layers=4 if _is_piped(plugin) else 2)
    if _is_piped(plugin):
        model.loss_function = next_token_loss
    booster, model, optimizer = _boost(plugin, model=model)
    loss = _once(booster, model, optimizer, data)
    return max(abs(loss - wanted.item()), largest(optimizer.full_gradients(), gradients))


@pytest.mark.parametrize("name", ["tensor", "split gather", "ring", "pipeline"])
def test_padding_on_the_left_and_rows_without_labels(pool: Pool, name: str) -> None:
    assert max(pool.run(_padded, 2, GRIDS[name])) <= BAR


def _halved(world: World, plugin: dict[str, Any], mixed: bool) -> tuple[float, float]:
    model = build("llama", torch.float32, layers=4 if _is_piped(plugin) else 2)
    data = batch("llama", 4, seed=1)
    alone = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        wanted = (alone if mixed else alone.to(torch.bfloat16))(**data).loss.item()
    plug = HybridParallelPlugin(**plugin, precision=None if mixed else "bf16", verbose=False)
    booster = Booster(plugin=plug, mixed_precision="bf16" if mixed else None)
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    first = _once(booster, model, optimizer, data)
    optimizer.step()
    optimizer.zero_grad()
    second = _once(booster, model, optimizer, data)
    return abs(first - wanted), second - first


@pytest.mark.parametrize("mixed", [False, True], ids=["bf16", "mixed"])
@pytest.mark.parametrize("name", ["tensor", "split gather", "ring", "pipeline"])
def test_sixteen_bits_are_close_to_one_process(pool: Pool, name: str, mixed: bool) -> None:
    for error, gained in pool.run(_halved, 2, GRIDS[name], mixed):
        assert error < 5e-3
        assert gained < 0


def _overflow(world: World, plugin: dict[str, Any]) -> tuple[bool, int, float, bool]:
    model = build("llama", torch.float32, layers=4 if _is_piped(plugin) else 2)
    booster = Booster(plugin=HybridParallelPlugin(**plugin, precision="fp16", verbose=False))
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    place = optimizer.mesh.data.rank
    data = batch("llama", 4, seed=place)
    states, scale = [saved_weights(booster, model)], optimizer.scaler.scale

    def explode(out: Any, micro: Any) -> Tensor:
        return out.loss * (1e30 if place == 0 else 1.0)

    for own in (explode, None):
        booster.execute_pipeline(iter([data]), model, own, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        states.append(saved_weights(booster, model))
    before, skipped, stepped = states
    same = all(torch.equal(before[name], skipped[name]) for name in before)
    moved = any(not torch.equal(skipped[name], stepped[name]) for name in before)
    return same, optimizer.skipped, scale / optimizer.scaler.scale, moved


@pytest.mark.parametrize("plugin", [STAGES, TENSOR], ids=["pipeline", "tensor"])
def test_an_overflow_of_one_data_rank_is_skipped_by_all(pool: Pool, plugin: Any) -> None:
    assert pool.run(_overflow, 4, plugin) == [(True, 1, 2.0, True)] * 4


class Adapted(nn.Module):
    """A linear layer with something small beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(7)
        down = torch.randn(3, base.in_features, generator=generator, dtype=torch.float64)
        up = torch.randn(base.out_features, 3, generator=generator, dtype=torch.float64)
        self.down, self.up = nn.Parameter(down / 10), nn.Parameter(up / 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def _adapted(layers: int) -> Any:
    model = build("llama", layers=layers)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.gate_proj = Adapted(layer.mlp.gate_proj)
        layer.mlp.gate_proj.base.requires_grad_(False)
    return model


def _adapters(world: World, plugin: dict[str, Any]) -> float | str:
    layers = 4 if _is_piped(plugin) else 2
    alone, data = _adapted(layers), batch("llama", 4, seed=1)
    alone.loss_function = next_token_loss
    alone(**data).loss.backward()
    wanted = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    model = _adapted(layers)
    if _is_piped(plugin):
        model.loss_function = next_token_loss
    try:
        booster, model, optimizer = _boost(plugin, model=model)
    except GulliverError as error:
        return str(error)
    _once(booster, model, optimizer, data)
    return largest(optimizer.full_gradients(), wanted)


@pytest.mark.parametrize("name", ["ring", "pipeline", "tensor"])
def test_adapters_train_as_one_process(pool: Pool, name: str) -> None:
    for error in pool.run(_adapters, 2, GRIDS[name]):
        assert isinstance(error, float)
        assert error <= BAR


def _wrong_uses(world: World, plugin: dict[str, Any]) -> dict[str, str]:
    booster, model, optimizer = _boost(plugin)
    others = _boost(plugin)[2]
    data = batch("llama", 4, seed=1)
    piped = _is_piped(plugin)
    folder = Path(broadcast_object(tempfile.mkdtemp()))
    said = {
        "boosted twice": _said(booster.boost, model, make_optimizer(model)),
        "another optimizer": _said(booster.execute_pipeline, iter([data]), model, None, others),
        "state": _said(optimizer.state_dict),
        "another save": _said(model.save_pretrained, folder / "pretrained"),
        "copy": _said(booster.save_model, copy.deepcopy(model), folder / "copy.safetensors"),
        "copy of a step": _said(booster.save, folder, 1, copy.deepcopy(model)),
        "called": _said(model, **data) if piped else "Pipeline.run",
        "too small": _said(
            booster.execute_pipeline, iter([batch("llama", 1)]), model, None, optimizer
        )
        if piped
        else "at least",
    }
    _once(booster, model, optimizer, data)
    said["torch clips"] = _said(nn.utils.clip_grad_norm_, model.parameters(), 1.0)
    optimizer.step()
    model.to(torch.float32)
    said["converted"] = _said(_once, booster, model, optimizer, data)
    barrier()
    return said


WRONG = {
    "boosted twice": "Muon and AdamW, need LowLevelZeroPlugin below stage 3",
    "another optimizer": "another model",
    "state": "booster.save_optimizer",
    "another save": "save_huggingface",
    "copy": "not a copy",
    "copy of a step": "not a copy",
    "called": "Pipeline.run",
    "too small": "at least",
    "torch clips": "clip_grad_by_norm",
    "converted": "before boost",
}


@pytest.mark.parametrize("plugin", [STAGES, TENSOR], ids=["pipeline", "tensor"])
def test_wrong_uses_are_refused_on_every_rank(pool: Pool, plugin: dict[str, Any]) -> None:
    for said in pool.run(_wrong_uses, 2, plugin):
        for use, message in WRONG.items():
            assert message in said[use], use
            assert "\n" not in said[use]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_frozen_first_stage_trains_as_one_process(pool: Pool, stage: int) -> None:
    cell = Cell("llama", grid("frozen", 2, **STAGES, zero_stage=stage))
    frozen = {"frozen": ("embed", "layers.0.", "layers.1.")}
    assert max(pool.run(_loop_errors, 2, cell, frozen)) <= BAR


def _woken(world: World, plugin: dict[str, Any]) -> str:
    model = build("llama")
    block = model.model.layers[0].requires_grad_(False)
    booster = Booster(plugin=HybridParallelPlugin(**plugin, verbose=False))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    block.requires_grad_(True)
    _once(booster, model, optimizer, batch("llama", 4))
    return _said(optimizer.step)


@pytest.mark.parametrize("name", ["tensor", "ring"])
def test_unfreezing_after_boost_is_detected(pool: Pool, name: str) -> None:
    for message in pool.run(_woken, 2, GRIDS[name]):
        assert "unfreeze it before boost" in message


WHAT_IS_COMPILED = {
    "": "the model is compiled together with",
    "model": "model is compiled together with",
    "model.layers.1": "",
    "model.layers.1.mlp.up_proj": "model.layers.1.mlp.up_proj is compiled",
}


def _compiled(world: World, plugin: dict[str, Any]) -> list[str]:
    found = []
    for path in WHAT_IS_COMPILED:
        model = build("llama", layers=4)
        model.get_submodule(path).compile(backend="eager")
        found.append("" if path.endswith(".1") else _said(_boost, plugin, model=model))
    model = build("llama", layers=4)
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    return [*found, _said(_boost, plugin, model=model)]


def test_compiled_modules_that_cannot_be_cut_are_refused_by_name(pool: Pool) -> None:
    for *found, wrapped in pool.run(_compiled, 2, TENSOR):
        for message, wanted in zip(found, WHAT_IS_COMPILED.values(), strict=True):
            assert wanted in message
        assert "model.layers.0 is the result of torch.compile(module)" in wrapped


@pytest.mark.parametrize(
    "plugin",
    [
        {**TENSOR, "sequence_parallelism_mode": "split_gather"},
        {**STAGES, "pp_style": "zero_bubble"},
    ],
    ids=["split gather", "zero bubble"],
)
def test_compiled_blocks_are_refused_where_they_cannot_be_exact(
    pool: Pool, plugin: dict[str, Any]
) -> None:
    for message in pool.run(_block_compiled, 2, plugin):
        assert "model.layers.0 is compiled" in message


def _block_compiled(world: World, plugin: dict[str, Any]) -> str:
    model = build("llama", layers=4)
    model.model.layers[0].compile(backend="eager")
    return _said(_boost, plugin, model=model)


def _shares(world: World, plugin: dict[str, Any]) -> list[list[int]]:
    plug = HybridParallelPlugin(**plugin, verbose=False)
    loader = plug.prepare_dataloader(list(range(10)), 2, shuffle=True)  # type: ignore[arg-type]
    return [sorted(int(n) for b in loader for n in b) for _ in range(2)]


@pytest.mark.parametrize("plugin", [STAGES, TENSOR], ids=["pipeline", "tensor"])
def test_ranks_of_one_model_read_the_same_and_others_the_rest(pool: Pool, plugin: Any) -> None:
    found = pool.run(_shares, 4, plugin)
    models = [(0, 2), (1, 3)] if "pp_size" in plugin else [(0, 1), (2, 3)]
    for first, second in models:
        assert found[first] == found[second]
    assert sorted(found[models[0][0]][0] + found[models[1][0]][0]) == list(range(10))


def test_one_rank_is_a_plain_loop(pool: Pool) -> None:
    cell = Cell("gpt2", grid("one", 1))
    assert max(pool.run(_loop_errors, 1, cell, {"value": 1e-3, "look": True})) <= BAR
