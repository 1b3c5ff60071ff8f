"""Dropout by position: any grid drops what one process drops, and the masks are good ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gulliver.booster import Booster, HybridParallelPlugin
from gulliver.booster.hybrid.dropout import check_positions
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.parallel.dropout import Along, attention_with_dropout, drop, keep_mask, mix
from tests.hybrid.hybrid_cells import RING, ULYSSES, largest, make_optimizer, next_token_loss
from tests.hybrid.hybrid_models import DECODERS, batch, build, exact_norms
from tests.pool import Pool

CPU = torch.device("cpu")


def _splitmix(key: int, count: int) -> np.ndarray:
    """Java's SplittableRandom, as its authors write it, of counters from 0 on."""
    with np.errstate(over="ignore"):
        z = np.uint64(key) + np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def test_a_mask_is_that_of_splitmix_over_the_numbers_of_the_elements() -> None:
    key, shape = mix(3, 4), (5, 7, 6)
    words = _splitmix(key, 210).reshape(shape)
    # The signed order of the words is the unsigned one, turned by half.
    wanted = torch.from_numpy((words ^ np.uint64(1 << 63)).astype(np.float64) < 0.7 * 2.0**64)
    assert torch.equal(keep_mask(key, 0.3, [Along.whole(n) for n in shape], CPU), wanted)
    own = torch.tensor([1, 2, 6])
    part = [Along.whole(3, start=2), Along(own, 7), Along(torch.arange(4, 6), 6)]
    assert torch.equal(keep_mask(key, 0.3, part, CPU), wanted[2:][:, own, 4:])


def test_dropout_masks_have_rate_and_are_independent() -> None:
    size, p = 1 << 17, 0.2
    sites = [mix(seed, site) for seed in (1, 2) for site in (7, 8)]
    masks = torch.stack([keep_mask(key, p, [Along.whole(size)], CPU).double() for key in sites])
    # Neighbours, rows of a power of two, and other sites and steps.
    shifted = [masks[0].roll(n) for n in (1, 2, 64, 1024)]
    centred = (torch.stack([*masks, *shifted]) - (1 - p)) / (p * (1 - p)) ** 0.5
    correlation = centred @ centred.T / size
    assert (masks.mean(1) - (1 - p)).abs().max() < 5 * (p * (1 - p) / size) ** 0.5
    assert (correlation - torch.eye(len(centred))).abs().max() < 5 / size**0.5


def test_dropout_scales_kept_values() -> None:
    x = torch.rand(3, 50, dtype=torch.float64, requires_grad=True)
    dims = [Along.whole(3), Along.whole(50)]
    keep = keep_mask(9, 0.25, dims, CPU)
    y = drop(x, 0.25, 9, dims)
    assert torch.allclose(y, torch.where(keep, x / 0.75, 0.0))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(grad, keep.double() / 0.75)
    assert not drop(x, 1.0, 9, dims).any()


@pytest.mark.parametrize("case", ["plain", "causal", "bool", "float", "grouped"])
def test_attention_without_a_draw_is_torchs(case: str) -> None:
    torch.manual_seed(0)
    heads = 2 if case == "grouped" else 4
    q = torch.rand(2, 4, 5, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.rand(2, heads, 5, 8, dtype=torch.float64, requires_grad=True) for _ in "kv")
    seen = torch.rand(2, 1, 5, 5) < 0.5
    seen[0, 0, 2] = False
    how: dict[str, Any] = {
        "plain": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": seen},
        "float": {"attn_mask": torch.rand(5, 5, dtype=torch.float64)},
        "grouped": {"enable_gqa": True, "scale": 0.3},
    }[case]
    wanted = F.scaled_dot_product_attention(q, k, v, **how)
    found = attention_with_dropout(q, k, v, **how, drop=lambda x, p: x)
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-14)
    grads = [torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (found, wanted)]
    for one, other in zip(*grads, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-13)


def _model(family: str, attention: str = "sdpa", inside: bool = True) -> Any:
    """A model all of whose dropouts drop, each at its own rate."""
    model = build(family)
    exact_norms(model)
    model.config._attn_implementation = attention
    for number, (path, module) in enumerate(model.named_modules()):
        of_attention = any(part in path for part in ("attn_drop", "attention", "self_attn"))
        rate = 0.1 + 0.01 * (number % 7)
        if isinstance(module, nn.Dropout) and (inside or not of_attention):
            module.p = rate
        for name, value in vars(module).items():
            if "drop" in name and name != "layerdrop" and isinstance(value, float):
                setattr(module, name, rate if inside or "attention" not in name else value)
    return model


def _trained(plugin: dict[str, Any], *model: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps and the gradients of the last."""
    torch.manual_seed(5)
    whole = _model(*model)
    if model[0] in DECODERS and not plugin.keys() & {"tp_size", "sp_size"}:
        # transformers' own goes through float32.
        whole.loss_function = next_token_loss
    booster = Booster(plugin=HybridParallelPlugin(**plugin, verbose=False))
    model_, optimizer, *_ = booster.boost(whole, make_optimizer(whole))
    losses, gradients = [], {}
    torch.manual_seed(6)
    for seed in range(3):
        data = batch(model[0], 4, seed=seed)
        optimizer.zero_grad()
        done = booster.execute_pipeline(iter([data]), model_, None, optimizer)
        losses.append(float(done["loss"]))
        gradients = optimizer.full_gradients()
        optimizer.step()
    return losses, gradients


def _alone(world: World, models: list[Any]) -> dict[Any, Any]:
    return {model: _trained({"dropout": "exact"}, *model) for model in models}


TENSOR = {"tp_size": 2}
SPLIT = {**TENSOR, "sequence_parallelism_mode": "split_gather"}
STAGES = {"pp_size": 2, "num_microbatches": 2}
AGAIN = {"checkpoint_activations": True}
CASES: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
    (TENSOR, ("gpt2",)),
    (TENSOR, ("t5",)),
    ({**TENSOR, **AGAIN}, ("llama", "eager")),
    ({**SPLIT, **AGAIN}, ("gpt2", "eager")),
    (SPLIT, ("bert",)),
    ({**STAGES, **AGAIN}, ("gpt2",)),
    (STAGES, ("t5",)),
    ({"sp_size": 2, **RING, **AGAIN}, ("gpt2", "sdpa", False)),
    ({"sp_size": 2, **ULYSSES}, ("vit", "sdpa", False)),
]
GRIDS = [
    ({**TENSOR, **STAGES, **AGAIN}, ("gpt2",)),
    ({**STAGES, "sp_size": 2, **RING}, ("gpt2", "sdpa", False)),
]


def _errors(world: World, cases: list[Any], alone: dict[Any, Any]) -> list[float]:
    found = []
    for plugin, model in cases:
        losses, gradients = _trained(plugin, *model)
        wanted, of_one = alone[model]
        assert len(set(wanted)) == 3
        error = max(abs(a / b - 1) for a, b in zip(losses, wanted, strict=True))
        found.append(max(error, largest(gradients, of_one)))
    return found


def _compare(pool: Pool, ranks: int, cases: list[Any]) -> None:
    (alone,) = pool.run(_alone, 1, list(dict.fromkeys(model for _, model in cases)))
    for errors in pool.run(_errors, ranks, cases, alone):
        assert max(errors) <= 1e-10, dict(zip(map(str, cases), errors, strict=True))


def test_ranks_that_share_a_model_drop_what_one_process_drops(pool: Pool) -> None:
    _compare(pool, 2, CASES)


def test_stages_of_shared_tensors_and_sequences_drop_what_one_process_drops(pool: Pool) -> None:
    _compare(pool, 4, GRIDS)


class Odd(nn.Module):
    """A block that drops in a way of its own."""

    def __init__(self, drops: nn.Module | None = None, **rates: float) -> None:
        super().__init__()
        self.block = drops or nn.Identity()
        self.linear = nn.Linear(4, 4)
        vars(self).update(rates)


ODD = {
    "features": (Odd(nn.AlphaDropout(0.1)), r"block\.p \(AlphaDropout\) drops full features"),
    "attention": (Odd(nn.MultiheadAttention(4, 2, dropout=0.1)), "torch's own attention module"),
    "layers": (Odd(dropout=0.2, layerdrop=0.1), r"\.layerdrop skips blocks or samples"),
    "paths": (Odd(drop_path_rate=0.1), "skips blocks or samples"),
    "noise": (Odd(jitter_noise=0.1), "adds noise"),
}


@pytest.mark.parametrize("case", ODD)
def test_what_is_not_drawn_by_position_is_refused_by_name(case: str) -> None:
    model, message = ODD[case]
    with pytest.raises(GulliverError, match=f"{message}.*dropout='alike'"):
        check_positions(model, None)


def test_kernels_and_compilers_that_hide_dropout_are_refused() -> None:
    with pytest.raises(GulliverError, match=r"layers\.0\.dropout drops in a block whose forward"):
        check_positions(_model("opt"), None, ["model.decoder.layers.0"])
    model = _model("gpt2")
    check_positions(model, None)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(GulliverError, match="'flash_attention_2', which hides it: use 'sdpa'"):
        check_positions(model, None)
    model.config._attn_implementation = "sdpa"
    model.transformer.h[0].compile(backend="eager")
    with pytest.raises(GulliverError, match="in a compiled model"):
        check_positions(model, None)


class Shared(nn.Module):
    """A module that drops twice in each forward, and draws masks by itself if asked."""

    def __init__(self, again: bool = False, own: bool = False) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)
        self.again, self.own = again, own

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            half = partial(checkpoint, use_reentrant=False) if self.again else lambda f, y: f(y)
            x = x + half(lambda y: self.dropout(self.linear(y)), x)
        return x * torch.bernoulli(torch.full_like(x, 0.5)) if self.own else x


def _run(module: Shared) -> Tensor:
    booster = Booster(plugin=HybridParallelPlugin(dropout="exact", verbose=False))
    model, optimizer, *_ = booster.boost(module, torch.optim.SGD(module.parameters(), lr=0.1))
    torch.manual_seed(1)
    x = torch.ones(4, 8)
    out = model(x)
    if not module.again:
        # A seed for each forward, and the generator goes on as if nothing had been drawn but that.
        assert not torch.equal(model(x), out)
        torch.manual_seed(1)
        _ = torch.randint(2**62, (2,))
        wanted = torch.rand(3)
        torch.manual_seed(1)
        _ = model(x), model(x)
        assert torch.equal(torch.rand(3), wanted)
    booster.backward(out.sum(), optimizer)
    return out


def _runs(world: World) -> list[str]:
    torch.manual_seed(0)
    _run(Shared())
    said = []
    for module in (Shared(again=True), Shared(own=True)):
        with pytest.raises(GulliverError) as raised:
            _run(module)
        said.append(str(raised.value))
    return said


def test_forwards_draw_new_masks_and_recomputation_is_checked(pool: Pool) -> None:
    ((again, own),) = pool.run(_runs, 1)
    assert "dropout has dropout, runs several times" in again
    assert "calls bernoulli" in own
