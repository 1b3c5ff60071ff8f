"""accelerate's loop with Gulliver's ranks and limits: the values of accelerate's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gulliver.comm import World
from gulliver.errors import GulliverError
from tests.integrations.framework_runs import EXACT, distance, launched, limited, llama, texts
from tests.pool import Pool

pytest.importorskip("accelerate")


def _made(gulliver: dict[str, Any] | None, **options: Any) -> Any:
    """An accelerator, plain or Gulliver's."""
    if gulliver is None:
        import accelerate

        return accelerate.Accelerator(cpu=True, **options)
    from gulliver.integrations.accelerate import Accelerator

    return Accelerator(gulliver={**EXACT, **gulliver}, **options)


def _parts(world: World, factor: float = 0.5) -> tuple[nn.Module, Any, Any, Any]:
    """A model with two groups of parameters, its optimizer, a schedule and a loader."""
    model = llama()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor**step)
    order = torch.Generator().manual_seed(1)
    loader = DataLoader(texts(), 4 // world.size, shuffle=True, generator=order)
    return model, optimizer, schedule, loader


def _loop(
    world: World, gulliver: dict[str, Any] | None, precision: str = "no", clip: float = 0.5
) -> Any:
    """The loop of accelerate's documentation: accumulation, clipping, evaluation for metrics."""
    with launched(world):
        accelerator = _made(gulliver, gradient_accumulation_steps=4, mixed_precision=precision)
        # accelerate steps a schedule once for each rank.
        model, optimizer, schedule, loader = _parts(world, 0.5 ** (1 / world.size))
        judged = DataLoader(texts(7), 2)
        # In another order than usual.
        schedule, optimizer, judged, loader, model = accelerator.prepare(
            schedule, optimizer, judged, loader, model
        )
        losses, norms, rates = [], [], []
        for _ in range(2):
            model.train()
            for batch in loader:
                with accelerator.accumulate(model):
                    # The mean over all ranks' tokens; on one rank the model's own.
                    count = (batch["labels"][:, 1:] != -100).sum()
                    whole = accelerator.reduce(count, "sum")
                    loss = model(**batch, num_items_in_batch=whole).loss * world.size
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                losses.append(float(accelerator.gather(loss.detach()).mean()))
                rates.append(schedule.get_last_lr()[0])
        model.eval()
        found = []
        with torch.no_grad():
            for batch in judged:
                logits = model(**batch).logits
                found.append(accelerator.gather_for_metrics(logits))
        state = {n: p.clone() for n, p in accelerator.unwrap_model(model).state_dict().items()}
        return losses, norms, rates, torch.cat(found), state


def _same(ours: Any, plain: Any, tolerance: float) -> None:
    for mine, theirs in zip(ours[:3], plain[:3], strict=True):
        assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance)
    assert ours[3].shape == plain[3].shape
    assert float((ours[3] - plain[3]).abs().max()) <= 100 * tolerance
    assert distance(ours[4], plain[4]) <= 10 * tolerance


def test_ranks_stages_and_limits_change_nothing(pool: Pool, tmp_path: Path, full: bool) -> None:
    plain = pool.run(_loop, 1, None)[0]
    assert max(plain[1]) > 0.5  # so that clipping does something
    ways: list[dict[str, Any]] = [{"stage": 3}, {}, limited(tmp_path)][: 3 if full else 1]
    for ranks in (1, 2) if full else (2,):
        for options in ways:
            for one in pool.run(_loop, ranks, options):
                _same(one, plain, 1e-6)


def test_bf16_is_accelerates_own(pool: Pool) -> None:
    plain, ours = (pool.run(_loop, 1, options, "bf16", math.inf)[0] for options in (None, {}))
    assert ours[0] == plain[0]
    assert distance(ours[4], plain[4]) == 0.0


class Counter:
    """Something of the user's that is saved, too."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def _steps(accelerator: Any, parts: Any, batches: Any) -> list[float]:
    model, optimizer, schedule, _ = parts
    losses = []
    for batch in batches:
        # As many tokens in each row, so that means of ranks are those of all.
        loss = model(**{**batch, "labels": batch["input_ids"]}).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def _resumed(world: World, gulliver: dict[str, Any], folder: Path, begin: bool) -> Any:
    """Three steps and three more; or the three more alone, from what was saved between."""
    with launched(world):
        accelerator = _made(gulliver, step_scheduler_with_optimizer=False)
        counter = Counter()
        accelerator.register_for_checkpointing(counter)
        parts = accelerator.prepare(*_parts(world))
        if begin:
            batches = iter(parts[3])
            _steps(accelerator, parts, [next(batches) for _ in range(3)])
            counter.count = 3
            accelerator.save_state(str(folder))
        else:
            accelerator.load_state(str(folder))
            batches = accelerator.skip_first_batches(parts[3], 3)
        drawn = float(torch.rand(()))
        losses = _steps(accelerator, parts, batches)
        accelerator.save_model(parts[0], folder / f"model-{world.size}")
        state = {n: p.clone() for n, p in parts[0].state_dict().items()}
        return losses, counter.count, drawn, state


def test_resume_is_bitwise_and_works_on_other_ranks(pool: Pool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    first = pool.run(_resumed, 2, {"stage": 3}, tmp_path, True)
    later = pool.run(_resumed, 2, {"stage": 3}, tmp_path, False)
    for one, other in zip(later, first, strict=True):
        assert one[:3] == other[:3]
        assert distance(one[3], other[3]) == 0.0
    limit = limited(tmp_path)
    [alone] = pool.run(_resumed, 1, limit, tmp_path, False)
    assert alone[1] == 3
    assert distance(alone[3], first[0][3]) < 1e-6
    for ranks in (1, 2):
        saved = load_file(tmp_path / f"model-{ranks}" / "model.safetensors")
        assert distance({**first[0][3], **saved}, first[0][3]) < 1e-6
        assert {"model.norm.weight", "model.embed_tokens.weight"} <= saved.keys()


def _two_models(world: World, gulliver: dict[str, Any] | None) -> Any:
    """Two models that train against each other, prepared one by one."""
    with launched(world):
        accelerator = _made(gulliver)
        torch.manual_seed(2)
        one, two = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        first = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        second = torch.optim.Adam(two.parameters(), lr=0.01)
        one, two = accelerator.prepare(one), accelerator.prepare(two)
        first, second = accelerator.prepare(first, second)
        noise = torch.randn(6, 4, 6)
        mine = slice(world.rank, None, world.size)
        for batch in noise:
            made = one(batch[mine])
            accelerator.backward(two(made.detach()).sigmoid().mean())
            accelerator.clip_grad_value_(two.parameters(), 0.01)
            second.step()
            second.zero_grad()
            accelerator.backward(-two(made).sigmoid().mean())
            first.step()
            first.zero_grad()
            second.zero_grad()
        return {**one.state_dict(), **{f"two.{n}": p for n, p in two.state_dict().items()}}


def test_two_models_with_an_optimizer_each(pool: Pool) -> None:
    [plain] = pool.run(_two_models, 1, None)
    for ranks, options in ((1, {"stage": 1}), (2, {"stage": 3}), (2, {"stage": 1})):
        for one in pool.run(_two_models, ranks, options):
            assert distance(one, plain) < 1e-6


def _refused(world: World) -> dict[str, str]:
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    from gulliver.booster.hybrid_plugin import HybridParallelPlugin
    from gulliver.integrations.accelerate import Accelerator

    found: dict[str, str] = {}

    def tell(name: str, action: Any) -> None:
        with launched(world):
            try:
                action()
            except GulliverError as error:
                found[name] = str(error)

    def prepared(**options: Any) -> tuple[Any, Any, Any]:
        accelerator = _made({}, **options)
        model, optimizer, *_ = _parts(world)
        return accelerator, *accelerator.prepare(model, optimizer)

    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    tell("fsdp", lambda: Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()))
    tell("fp16", lambda: Accelerator(mixed_precision="fp16"))
    tell("hook", lambda: Accelerator(kwargs_handlers=[hook]))
    tell("hybrid", lambda: Accelerator(gulliver=HybridParallelPlugin(tp_size=1)))
    tell("compiled", lambda: _made({"stage": 3}, dynamo_backend="eager"))
    tell("alone", lambda: _made({}).prepare(_parts(world)[1]))

    def forgotten() -> None:
        accelerator = _made({})
        model = accelerator.prepare(llama())
        accelerator.backward(model(**_batch()).loss)

    def between() -> None:
        accelerator, model, _ = prepared(gradient_accumulation_steps=2)
        with accelerator.accumulate(model):
            accelerator.backward(model(**_batch()).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)

    def some() -> None:
        accelerator, model, _ = prepared()
        accelerator.clip_grad_norm_(model.lm_head.parameters(), 1.0)

    def norm() -> None:
        accelerator, model, _ = prepared()
        accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)

    def state() -> None:
        prepared()[2].state_dict()

    def argument() -> None:
        accelerator, model, _ = prepared()
        accelerator.backward(model(**_batch()).loss, retain_graph=True)

    for action in (forgotten, between, some, norm, state, argument):
        tell(action.__name__, action)
    return found


def _batch() -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in texts(2)]) for name in texts(1)[0]}


REFUSED = {
    "fsdp": "FSDP",
    "fp16": "mixed_precision='fp16'",
    "hook": "comm_hook",
    "hybrid": "gulliver=HybridParallelPlugin",
    "compiled": "torch_compile",
    "alone": "AdamW",
    "forgotten": "optimizer",
    "between": "sync_gradients",
    "some": "model.parameters()",
    "norm": "norm_type=1",
    "state": "accelerator.save_state",
    "argument": "retain_graph",
}


def test_incompatible_options_are_rejected(pool: Pool) -> None:
    [told] = pool.run(_refused, 1)
    for name, text in REFUSED.items():
        assert text in told.get(name, "nothing was said"), name


def _phases(world: World, gulliver: dict[str, Any] | None) -> Any:
    """Two phases of a model; before the second its first optimizer is given up."""
    told = dict[str, str]()
    with launched(world):
        accelerator = _made(gulliver)
        plain = llama()
        for rate in (0.1, 0.05):
            model, optimizer = accelerator.prepare(
                plain, torch.optim.SGD(plain.parameters(), lr=rate, momentum=0.9)
            )
            for _ in range(2):
                accelerator.backward(model(**_batch()).loss)
                gradients = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
                if gulliver is not None:
                    gradients = optimizer.full_gradients()
                gradients = {name: value.clone() for name, value in gradients.items()}
                optimizer.step()
                optimizer.zero_grad()
            if rate == 0.1:
                try:
                    if gulliver is not None:
                        accelerator.prepare(torch.optim.SGD(plain.parameters(), lr=0.0))
                except GulliverError as error:
                    told["early"] = str(error)
                accelerator.free_memory(model, optimizer)
        accelerator.backward(model(**_batch()).loss)
        try:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        except GulliverError as error:
            told["clipped"] = str(error)
        state = {name: value.clone() for name, value in plain.state_dict().items()}
        return state, gradients, told


def test_a_model_has_a_second_optimizer_once_the_first_is_freed(pool: Pool) -> None:
    [plain] = pool.run(_phases, 1, None)
    for options in ({"stage": 1}, {"stage": 3}):
        for state, gradients, told in pool.run(_phases, 2, options):
            assert distance(state, plain[0]) < 1e-6
            assert distance(gradients, plain[1]) < 1e-6
            assert "accelerator.free_memory(model, optimizer)" in told["early"]
            assert "accelerator.clip_grad_norm_" in told["clipped"]


"""The loop of accelerate's quick tour."""


def _rest(world: World, folder: Path) -> dict[str, Any]:
    """What else scripts call, on two ranks with sharded parameters."""
    from accelerate.utils import ProjectConfiguration

    with launched(world):
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
        accelerator = _made({"stage": 3}, project_config=project)
        plain = llama()
        before = {name: value.clone() for name, value in plain.state_dict().items()}
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(plain, optimizer)
        state = accelerator.get_state_dict(model)
        saved = []
        accelerator.register_save_state_pre_hook(lambda models, weights, where: saved.append(where))
        for _ in range(3):
            with accelerator.no_sync(model):
                accelerator.backward(model(**_batch()).loss)
            accelerator.backward(model(**_batch()).loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.save_state()
        taught = {name: value.clone() for name, value in model.state_dict().items()}
        accelerator.backward(model(**_batch()).loss)
        optimizer.step()
        accelerator.load_state()
        with accelerator.autocast(), accelerator.join_uneven_inputs([model]):
            pass
        accelerator.free_memory()
        again = accelerator.prepare(model)
        accelerator.wait_for_everyone()
        return {
            "kept": sorted(p.name for p in (folder / "checkpoints").iterdir()),
            "unwrapped": accelerator.unwrap_model(model) is plain and again is plain,
            "state": distance(state, before) if accelerator.is_main_process else len(state),
            "loaded": distance({n: p.clone() for n, p in plain.state_dict().items()}, taught),
            "hooks": len(saved),
            "moved": distance(taught, before) > 1e-3,
        }


def test_remaining_accelerator_calls(pool: Pool, tmp_path: Path) -> None:
    for rank, found in enumerate(pool.run(_rest, 2, tmp_path)):
        assert found == {
            "kept": ["checkpoint_1", "checkpoint_2"],
            "unwrapped": True,
            "state": 0.0 if rank == 0 else 0,
            "loaded": 0.0,
            "hooks": 3,
            "moved": True,
        }
