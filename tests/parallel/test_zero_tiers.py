"""Training whose state lies in tiers of memory is the same training, to the bit on one rank."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gulliver._compat import step_without_hooks
from gulliver.booster import Booster, LowLevelZeroPlugin
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.memory.buffers import OPTIMIZER_STATE
from gulliver.memory.manager import Manager
from gulliver.parallel import ZeroOptimizer
from gulliver.parallel.zero import state as _updates
from gulliver.parallel.zero.elementwise import ELEMENTWISE
from tests.covering import some
from tests.pool import Pool
from tests.tiers import (
    CHUNK,
    adamw,
    backward,
    boosted,
    differing,
    groups_of,
    loss_of,
    manager_of,
    model_of,
    plain,
    result,
    states_of,
    steps,
)

SHARES = (0.15, 0.3, 0.6, 1.0)


def _trained(share: float = 0.25, **options: Any) -> dict[str, Tensor]:
    model = model_of()
    with manager_of(model, share) as manager:
        optimizer = boosted(model, manager=manager, **options)
        steps(model, optimizer)
        return result(model, optimizer)


@pytest.mark.parametrize("early", [False, True], ids=["step", "backward"])
def test_every_budget_gives_the_bits_of_torch(early: bool, full: bool) -> None:
    expected = plain()
    for share in SHARES if full else SHARES[:2]:
        model = model_of()
        with manager_of(model, share) as manager:
            optimizer = boosted(
                model, manager=manager, step_in_backward=early, ordered=share == 0.3
            )
            manager.counter.restart()  # the whole model was there before
            steps(model, optimizer)
            assert sum(manager.counter.fullest.values()) <= manager.budget
            assert sum(optimizer.memory().values()) <= manager.budget
            assert not differing(result(model, optimizer), expected), share
            assert manager.minimum <= 0.15 * states_of(model)


def test_without_a_disk_everything_stays() -> None:
    model = model_of()
    with manager_of(model, 1.0, disk=False) as manager:
        optimizer = boosted(model, manager=manager, step_in_backward=True)
        steps(model, optimizer)
        assert not differing(result(model, optimizer), plain())
        assert manager.stats()["bytes_out"] == 0


VARIANTS: dict[str, dict[str, Any]] = {
    "AdamW": {"amsgrad": True},
    "Adam": {"fused": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "SGD": {"momentum": 0.9, "foreach": True},
    "Adadelta": {"foreach": True},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "NAdam": {"weight_decay": 0.1, "decoupled_weight_decay": True},
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_elementwise_optimizer_gives_the_bits_of_torch(name: str) -> None:
    make = partial(getattr(torch.optim, name), lr=1e-2, **VARIANTS.get(name, {}))
    found = _trained(make=make, step_in_backward=name < "B")
    assert not differing(found, plain(make))


def test_first_steps_make_their_moments_inside_the_budget() -> None:
    for make in (adamw, partial(torch.optim.SGD, lr=1e-2, momentum=0.9)):
        model = model_of()
        with manager_of(model, 0.25) as manager:
            optimizer = boosted(model, make, manager)

            def stepped(inner: torch.optim.Optimizer, manager: Manager = manager) -> None:
                before = manager.counter.live[OPTIMIZER_STATE]
                places = {tensor.untyped_storage().data_ptr() for tensor in _held(manager)}
                step_without_hooks(inner)
                places |= {tensor.untyped_storage().data_ptr() for tensor in _held(manager)}
                for group in inner.param_groups:
                    for owned in group["params"]:
                        made = [v for v in inner.state[owned].values() if v.ndim]
                        outside = [v for v in made if v.untyped_storage().data_ptr() not in places]
                        assert sum(v.nbytes for v in outside) <= before

            with patch.object(_updates, "step_without_hooks", stepped):
                steps(model, optimizer, 0, 1)


def _held(manager: Manager) -> list[Tensor]:
    return [p.memory for p in manager._placed.values() if p.memory is not None]


def test_optimizers_over_all_parameters_are_rejected() -> None:
    class Own(torch.optim.SGD):
        pass

    Own.__module__ = "elsewhere"
    model = model_of()
    with manager_of(model, 0.5) as manager, pytest.raises(GulliverError, match="Own"):
        boosted(model, Own, manager, assume_elementwise=True)
    with pytest.raises(GulliverError, match="Own"):
        boosted(model, Own, assume_elementwise=True, step_in_backward=True)
    with manager_of(model, 0.5) as manager, pytest.raises(GulliverError, match="need stage 3"):
        boosted(model, adamw, manager, stage=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_and_clipping_are_the_same_as_without_tiers(dtype: torch.dtype) -> None:
    def run(optimizer: ZeroOptimizer) -> dict[str, Tensor]:
        steps(model, optimizer, parts=2)
        norms = {"norm": optimizer.grad_norm, "skipped": torch.tensor(optimizer.skipped)}
        return result(model, optimizer) | {k: v for k, v in norms.items() if v is not None}

    model = model_of(dtype)
    expected = run(boosted(model, max_norm=0.05))
    for early in (False, True):
        model = model_of(dtype)
        with manager_of(model, 0.25) as manager:
            found = run(boosted(model, manager=manager, step_in_backward=early, max_norm=0.05))
        assert not differing(found, expected), early


def test_gradients_are_read_clipped_zeroed_and_added_up_in_tiers() -> None:
    def run(optimizer: ZeroOptimizer) -> dict[str, Tensor]:
        seen = {}
        for number in range(3):
            backward(optimizer, loss_of(model, number))
            backward(optimizer, loss_of(model, number + 9))
            optimizer.clip_grad_by_value(0.01)
            seen |= {f"{n} {number}": g.clone() for n, g in optimizer.full_gradients().items()}
            optimizer.step()
            optimizer.zero_grad(set_to_none=number != 1)
        return seen | result(model, optimizer)

    model = model_of()
    expected = run(boosted(model))
    model = model_of()
    with manager_of(model, 0.25) as manager:
        assert not differing(run(boosted(model, manager=manager)), expected)


def test_parameters_may_be_read_and_written_whenever() -> None:
    def run(optimizer: ZeroOptimizer) -> dict[str, Tensor]:
        with torch.no_grad():
            first = model(torch.arange(5))
        steps(model, optimizer, 0, 2)
        with torch.no_grad():
            model.layers[2].weight.clamp_(-0.05, 0.05)
            model.frozen.weight.data[0] = 1.0
        steps(model, optimizer, 2, 4)
        # In a forward, by whoever is the first to read the layer; rows change places.
        hook = model.layers[7].register_forward_pre_hook(_write)
        with torch.no_grad():
            model(torch.arange(5))
        hook.remove()
        model.layers[5].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.arange(5))
        model.layers[5]._forward_pre_hooks.clear()
        steps(model, optimizer, 4, 6)
        return result(model, optimizer) | {"first": first}

    def _write(layer: Any, _: Any) -> None:
        layer.weight.data.copy_(layer.weight.data.flip(0))
        layer.bias.data.mul_(2)

    model = model_of()
    expected = run(boosted(model))
    model = model_of()
    with manager_of(model, 0.2) as manager:
        found = run(boosted(model, manager=manager, step_in_backward=True))
        assert not differing(found, expected)


def test_optimizer_state_between_steps_is_not_stale() -> None:
    model = model_of()
    with manager_of(model, 0.5) as manager:
        optimizer = boosted(model, manager=manager)
        steps(model, optimizer)
        for sharded in optimizer.chunks:
            for owned in sharded.owned:
                assert owned.isnan().all()
                state = optimizer.inner.state.get(owned, {})
                assert all(v.is_meta for v in state.values() if v.ndim)


def _checkpoints(world: World, folder: str) -> list[list[str]]:
    """Differences of runs that were saved with or without tiers, and go on with or without."""

    def run(share: float | None, begin: int, end: int, load: str = "", save: int = -1) -> Any:
        model = model_of()
        with ExitStack() as stack:
            manager = None if share is None else stack.enter_context(manager_of(model, share))
            stack.enter_context(patch("gulliver.booster.apply._manager", lambda *_: manager))
            booster = Booster(LowLevelZeroPlugin(3, chunk_mb=CHUNK / 2**20, verbose=False))
            _, optimizer, *_ = booster.boost(model, adamw(groups_of(model)))
            assert (optimizer.shards.manager is not None) == (share is not None)
            optimizer.options = replace(optimizer.options, step_in_backward=True)
            if load:
                booster.load(f"{folder}/{load}", model, optimizer)
            if save >= 0:
                steps(model, optimizer, begin, save, world.rank)
                # What moves next overwrites the places that are being copied.
                booster.save(f"{folder}/{share}", save, model, optimizer)
                begin = save
            steps(model, optimizer, begin, end, world.rank)
            booster.wait()
            found = result(model, optimizer)
            optimizer.gatherer.finish_all()
            booster.close()
        return found

    expected = run(None, 0, 5, save=2)
    found = [differing(run(0.5, 0, 5, save=2), expected)]
    for share, load in ((0.5, "None"), (None, "0.5"), (0.6, "0.5")):
        found.append(differing(run(share, 2, 5, load), expected))
    return found


@pytest.mark.parametrize("size", some([1, 2], [2]))
def test_runs_are_saved_and_resumed_with_and_without_tiers(
    pool: Pool, tmp_path: Path, size: int
) -> None:
    for found in pool.run(_checkpoints, size, str(tmp_path)):
        assert found == [[]] * 4
