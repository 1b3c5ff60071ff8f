"""Hooks and options that a user gives a model: as in one process once it is cut, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gulliver.booster import Booster, HybridParallelPlugin
from gulliver.comm import World
from gulliver.errors import GulliverError
from tests.hybrid.hybrid_cells import ULYSSES, largest
from tests.hybrid.hybrid_models import batch, build
from tests.pool import Pool

TENSOR = {"tp_size": 2}
SPLIT = {**TENSOR, "sequence_parallelism_mode": "split_gather"}
SHARED = {"sp_size": 2, **ULYSSES}
STAGES = {"pp_size": 2, "num_microbatches": 2}
ATTENTION = "model.layers.1.self_attn"


def _ramp(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Adds other noise to each token."""
    return output + torch.linspace(0, 1, output.shape[1], dtype=output.dtype)[None, :, None]


def _hook(path: str, kind: str = "forward_hook") -> Callable[[nn.Module], Any]:
    return lambda model: getattr(model.get_submodule(path), f"register_{kind}")(_ramp)


def _on_parameter(model: Any) -> None:
    model.model.embed_tokens.weight.register_hook(lambda gradient: 0 * gradient)


def _patched(model: Any) -> None:
    down = model.model.layers[1].mlp.down_proj
    down.forward = lambda x, forward=down.forward: 2 * forward(x)


def _option(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model.model.embed_tokens, name, value)


def _prompted(model: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return peft.get_peft_model(model, config)


def _normed(model: Any) -> None:
    model.model.layers[1].mlp.norm = nn.BatchNorm1d(4)


REFUSED: list[tuple[dict[str, Any], Callable[[Any], Any], str]] = [
    (TENSOR, _hook(f"{ATTENTION}.q_proj"), f"{ATTENTION}.q_proj has hooks, but tp_size=2"),
    (TENSOR, _hook("lm_head", "forward_pre_hook"), "lm_head has hooks"),
    (TENSOR, _hook("model.embed_tokens", "full_backward_hook"), "model.embed_tokens has hooks"),
    (TENSOR, _hook("model.layers.1.mlp.act_fn"), "one rank's features or heads"),
    (TENSOR, _on_parameter, "model.embed_tokens.weight has hooks, but tp_size=2"),
    (TENSOR, _patched, "model.layers.1.mlp.down_proj has a custom forward"),
    (SPLIT, _hook("model.layers.1"), "model.layers.1 has hooks, which would see only"),
    (SHARED, _hook("model.embed_tokens"), "model.embed_tokens has hooks, which would see only"),
    (SHARED, _option("max_norm", 0.05), "an embedding with max_norm"),
    (SHARED, _option("sparse", True), "an embedding with sparse gradients"),
    (STAGES, _option("scale_grad_by_freq", True), "an embedding with scale_grad_by_freq"),
    (STAGES, _normed, "model.layers.1.mlp.norm (BatchNorm1d) computes batch statistics"),
    (STAGES, _prompted, "adapter 'default' (PromptTuningConfig) adds virtual tokens"),
    (TENSOR, _prompted, "adds virtual tokens"),
]


def _refused(world: World) -> list[str]:
    said = []
    for plugin, change, _ in REFUSED:
        model = build("llama")
        changed = change(model)
        model = changed if isinstance(changed, nn.Module) else model
        booster = Booster(plugin=HybridParallelPlugin(**plugin, verbose=False))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(GulliverError) as raised:
            booster.boost(model, optimizer)
        said.append(str(raised.value))
    return said


def test_unsupported_hooks_are_rejected_on_every_rank(pool: Pool) -> None:
    for said in pool.run(_refused, 2):
        for line, (_, _, wanted) in zip(said, REFUSED, strict=True):
            assert wanted in line


def _adapted(model: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    names = ["embed_tokens", "q_proj"]
    config = peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False)
    torch.manual_seed(1)
    return peft.get_peft_model(model, config).double().train()


def _root(model: Any) -> None:
    """What leaves the model, with its loss and whole logits."""
    model.register_forward_hook(lambda module, args, out: setattr(out, "loss", 2 * out.loss))


def _uneven(data: dict[str, Tensor]) -> dict[str, Tensor]:
    labels = data["labels"].clone()
    labels[:1, 2:] = -100
    return {**data, "labels": labels}


EXACT: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "noise on embeddings": (TENSOR, _hook("model.embed_tokens")),
    "noise on embeddings, sequences cut": (SPLIT, _hook("model.embed_tokens")),
    "on a block": (TENSOR, _hook("model.layers.0")),
    "on the model, tensors cut": (TENSOR, _root),
    "on the model, sequences shared": (SHARED, _root),
    "adapters of embeddings": (TENSOR, _adapted),
    "adapters in stages": (STAGES, _adapted),
}


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _exact(world: World) -> dict[str, float]:
    errors = {}
    for name, (plugin, change) in EXACT.items():
        model = build("llama")
        changed = change(model)
        model = changed if isinstance(changed, nn.Module) else model
        twin = copy.deepcopy(model)
        data = _uneven(batch("llama", 4, seed=0))
        booster = Booster(plugin=HybridParallelPlugin(**plugin, verbose=False))
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(_trained(model), 0.1))
        if optimizer.pipeline is None:
            loss = model(**data).loss
            booster.backward(loss, optimizer)
        else:
            loss = booster.execute_pipeline(iter([data]), model, None, optimizer)["loss"]
        wanted = twin(**data).loss
        wanted.backward()
        gradients = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
        found = {n: g for n, g in optimizer.full_gradients().items() if n in gradients}
        assert set(found) == set(gradients), name
        errors[name] = max(abs(float(loss) - float(wanted)), largest(found, gradients))
    return errors


def test_hooks_and_adapters_compute_what_they_do_in_one_process(pool: Pool) -> None:
    for errors in pool.run(_exact, 2):
        # The models' own loss takes logits in float32.
        assert all(error < 3e-6 for error in errors.values()), errors
