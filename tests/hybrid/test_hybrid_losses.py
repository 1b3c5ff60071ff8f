"""Losses of somebody's own in hybrid runs: those that one process computes, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.booster import Booster, HybridParallelPlugin
from gulliver.comm import World
from gulliver.errors import GulliverError
from tests.hybrid.hybrid_cells import RING, largest, make_optimizer, relative
from tests.hybrid.hybrid_models import HEADS, HIDDEN, VOCABULARY, WIDE, batch, build, exact_norms
from tests.pool import Pool

BAR = 1e-10
SHARED = {
    "tensor": {"tp_size": 2},
    "split gather": {"tp_size": 2, "sequence_parallelism_mode": "split_gather"},
    "ring": {"sp_size": 2, **RING},
}


def focal_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """A loss that is no cross-entropy, over tokens that are not shifted."""
    losses = F.cross_entropy(logits.mT, labels, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean() + logits.square().mean()


def _subclass(model: nn.Module) -> nn.Module:
    """The model with a forward of its own, under a name as transformers has them."""

    class OwnForCausalLM(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
            return {"loss": None if labels is None else focal_loss(logits, labels)}

    model.__class__ = OwnForCausalLM
    return model


def _method(model: nn.Module) -> nn.Module:
    class MethodForCausalLM(type(model)):  # type: ignore[misc]
        def loss_function(self, logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
            return focal_loss(logits, labels)

    model.__class__ = MethodForCausalLM
    return model


def _attribute(model: Any) -> Any:
    model.loss_function = focal_loss
    return model


OWN = {"forward": _subclass, "method": _method, "attribute": _attribute}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _boosted(plugin: dict[str, Any], model: Any) -> tuple[Booster, Any, Any]:
    booster = Booster(plugin=HybridParallelPlugin(**plugin, verbose=False))
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    return booster, model, optimizer


def _own_losses(world: World, plugin: dict[str, Any]) -> dict[str, float | str]:
    """The errors of each kind of own loss; what is said when it comes after boost."""
    data = batch("llama", 2, seed=1)
    found: dict[str, float | str] = {}
    for kind, change in {**OWN, "after boost": _attribute}.items():
        whole, model = build("llama"), build("llama")
        wanted = (change(whole))(**data)["loss"]
        wanted.backward()
        late = kind == "after boost"
        booster, model, optimizer = _boosted(plugin, model if late else change(model))
        try:
            loss = (change(model) if late else model)(**data)["loss"]
        except GulliverError as error:
            found[kind] = str(error)
            continue
        booster.backward(loss, optimizer)
        gradients = largest(optimizer.full_gradients(), _gradients(whole))
        found[kind] = max(relative(loss.detach(), wanted.detach()), gradients)
    return found


@pytest.mark.parametrize("name", SHARED)
def test_custom_loss_is_trained(pool: Pool, name: str) -> None:
    for found in pool.run(_own_losses, 2, SHARED[name]):
        late = found.pop("after boost")
        if "sp_size" in SHARED[name]:
            assert "set it before boost" in str(late)
        else:
            assert float(late) <= BAR
        assert max(map(float, found.values())) <= BAR, found


def _whisper() -> Any:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperForCausalLM

    torch.manual_seed(5)
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        decoder_layers=2,
        decoder_attention_heads=HEADS,
        decoder_ffn_dim=WIDE,
        max_target_positions=32,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        use_cache=False,
    )
    return WhisperForCausalLM(config).double().train()


def _mixture(asked: bool = False) -> Any:
    """Its routers' loss is asked for by its configuration, or is not."""
    model = build("mixtral")
    model.config.output_router_logits = asked
    exact_norms(model)
    return model


def _own_kinds(world: World) -> dict[str, float]:
    """Unshifted labels of a causal class, and routers' losses, asked for in both ways."""
    data = batch("llama", 2, seed=1)
    data["labels"][0, :5] = -100
    cases = {
        "whisper": (_whisper, {"tp_size": 2}, {}),
        "routers": (lambda: _mixture(asked=True), {"tp_size": 2}, {}),
        "routers in the call": (_mixture, {"tp_size": 2}, {"output_router_logits": True}),
        "routers on shared sequences": (_mixture, SHARED["ring"], {"output_router_logits": True}),
    }
    found = {}
    for name, (make, plugin, given) in cases.items():
        whole = make()
        wanted = whole(**data, **given).loss
        wanted.backward()
        booster, model, optimizer = _boosted(plugin, make())
        loss = model(**data, **given).loss
        booster.backward(loss, optimizer)
        gradients = largest(optimizer.full_gradients(), _gradients(whole))
        found[name] = max(relative(loss.detach(), wanted.detach()), gradients)
    return found


def test_losses_of_other_kinds_are_those_of_the_model(pool: Pool) -> None:
    for found in pool.run(_own_kinds, 2):
        # transformers' losses go through float32.
        assert max(found.values()) <= 1e-5, found


def _qwen3() -> Any:
    """Its norms of queries and keys are whole, and see each rank's heads."""
    model = build("qwen3")
    exact_norms(model)
    return model


def _llama() -> Any:
    return build("llama")


def _gpt2() -> Any:
    return build("gpt2")


PENALIZED = {
    "tensor": ({"tp_size": 2}, _qwen3),
    "split gather": (SHARED["split gather"], _llama),
    "ring of tensors": ({"tp_size": 2, "sequence_parallelism_mode": "ring"}, _qwen3),
    "split gather, ZeRO 3": ({**SHARED["split gather"], "zero_stage": 3}, _llama),
    "ring": (SHARED["ring"], _llama),
    "biases": (SHARED["split gather"], _gpt2),
}


def _penalized(world: World, plugin: dict[str, Any], make: Any) -> list[float]:
    """Errors with a penalty, of all layers' hidden states and of the parameters, written plainly
    and by the optimizer's sum."""
    data = batch("llama", 2, seed=1, length=13)
    del data["labels"]

    def loss_of(model: Any, penalty: Any) -> Tensor:
        out = model(**data, output_hidden_states=True)
        hidden = sum(h.square().mean() for h in out.hidden_states)
        assert all(h.shape[1] == 13 for h in out.hidden_states)
        return out.logits.square().mean() + hidden + 0.1 * penalty(model)

    def plain(model: Any) -> Tensor:
        return sum(p.square().sum() for p in model.parameters())  # type: ignore[return-value]

    whole = make()
    wanted = loss_of(whole, plain)
    wanted.backward()
    booster, model, optimizer = _boosted(plugin, make())
    errors = []
    for penalty in (plain, lambda _: optimizer.penalty(lambda p: p.square().sum())):
        loss = loss_of(model, penalty)
        booster.backward(loss, optimizer)
        errors.append(largest(optimizer.full_gradients(), _gradients(whole)))
        optimizer.zero_grad()
    # Written plainly it counts what this rank has; the gradients are right all the same.
    return [*errors, relative(loss.detach(), wanted.detach())]


@pytest.mark.parametrize("name", PENALIZED)
def test_penalties_and_hidden_states_of_all_layers_are_those_of_one_process(
    pool: Pool, name: str
) -> None:
    for errors in pool.run(_penalized, 2, *PENALIZED[name]):
        assert max(errors) <= BAR, errors


def _partial_outputs(world: World) -> list[str]:
    """What is said when a rank would return, or train on, its part."""
    said = []
    data = batch("llama", 2, seed=1)
    for plugin in ({"tp_size": 2}, SHARED["split gather"], SHARED["ring"]):
        _, model, _ = _boosted(plugin, build("llama"))
        with pytest.raises(GulliverError) as raised:
            model(**data, output_attentions=True)
        said.append(str(raised.value))
    with pytest.raises(GulliverError) as raised:
        _boosted({"pp_size": 2, "num_microbatches": 2}, _mixture(asked=True))
    return [*said, str(raised.value)]


def test_parts_of_attentions_and_of_routers_losses_are_refused_by_name(pool: Pool) -> None:
    for said in pool.run(_partial_outputs, 2):
        assert all("output_attentions=True" in text for text in said[:3]), said
        assert "output_router_logits=True" in said[3], said
