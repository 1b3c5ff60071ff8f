"""Hugging Face models on shared sequences are what they are on one rank, loop and all."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.booster.hybrid.transformers import keep_logits, wire_sequence
from gulliver.comm import World, all_reduce
from gulliver.errors import GulliverError
from gulliver.parallel.sequence import SequencePlan, make_groups
from tests.covering import some
from tests.hybrid.hybrid_models import batch, build, exact_norms, precise_loss
from tests.pool import Pool
from tests.references import computed_once

pytest.importorskip("transformers")

WIRED = ("llama", "mistral", "qwen2", "gpt2", "opt", "bert", "vit")
PLANS = {
    "Ulysses 2": SequencePlan(2, layout="zigzag"),
    "ring 2": SequencePlan(inner=2, layout="zigzag"),
    "ring 3": SequencePlan(inner=3, layout="zigzag"),
    "ring 2 x 2": SequencePlan(outer=2, inner=2, layout="contiguous"),
    "ring 4": SequencePlan(inner=4, layout="zigzag"),
    "Ulysses 2 x ring 2": SequencePlan(2, inner=2, layout="zigzag"),
}


def make(family: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """A model whose norms compute in its own dtype: transformers' round to float32."""
    model = build(family, dtype)
    if dtype == torch.float64:
        exact_norms(model)
    for name, value in settings.items():
        setattr(model.config, name, value)
    return model


def relative(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def averaged(model: nn.Module, groups: Any) -> dict[str, Tensor]:
    """Gradients as they are after their mean over the ranks of the sequence."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        all_reduce(grad, group=groups.all.process_group)
        found[name] = grad / groups.all.size
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()
    }


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    # Of keys' biases, whose gradient is zero but for rounding, the rounding is not compared.
    scale = max(float(g.abs().max()) for g in wanted.values())
    return max(
        float((found[n] - wanted[n]).abs().max()) / max(float(wanted[n].abs().max()), 1e-3 * scale)
        for n in wanted
    )


def _trained(world: World, family: str, plan: SequencePlan, dtype: torch.dtype) -> dict[str, float]:
    """Errors of losses and gradients of batches of several shapes, and of logits in evaluation."""
    groups = make_groups(plan)
    model = make(family, dtype)
    wire_sequence(model, groups)
    errors: dict[str, float] = {}
    for step, (size, length, padded) in enumerate([(2, 12, False), (1, 17, False), (3, 11, True)]):
        data = batch(family, size, step, length, dtype, padded and family != "vit")
        model.zero_grad()
        out = model(**data)
        out.loss.backward()
        logits, loss, wanted = _alone(family, dtype, data)
        errors[f"loss {step}"] = relative(out.loss, loss)
        errors[f"gradients {step}"] = worst(averaged(model, groups), wanted)
        with torch.no_grad():
            found = model.eval()(**data).logits
            model.train()
        errors[f"logits {step}"] = relative(found, logits)
    return errors


@computed_once
def _alone(
    family: str, dtype: torch.dtype, data: dict[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, loss and gradients of one process."""
    model = make(family, dtype)
    logits = model(**{k: v for k, v in data.items() if k != "labels"}).logits
    loss = precise_loss(family, logits, data)
    loss.backward()
    return logits.detach(), loss.detach(), gradients(model)


CELLS = [
    *(("llama", plan) for plan in PLANS),
    *((family, "ring 3") for family in ("qwen2", "opt", "bert", "vit")),
    *((family, "Ulysses 2 x ring 2") for family in ("mistral", "gpt2", "bert", "vit")),
]


LEFT_OUT = [("bert", "ring 3"), ("vit", "Ulysses 2 x ring 2")]
"""The families that see both ways: by default each with one plan."""


@pytest.mark.parametrize(
    ("family", "plan"), some(CELLS, [cell for cell in CELLS if cell not in LEFT_OUT]), ids=str
)
def test_loss_gradients_and_logits_are_those_of_one_process(
    pool: Pool, family: str, plan: str
) -> None:
    for errors in pool.run(_trained, PLANS[plan].degree, family, PLANS[plan], torch.float64):
        assert max(errors.values()) <= 1e-12, errors


def test_float32_is_as_exact_as_float32_is(pool: Pool) -> None:
    for errors in pool.run(_trained, 4, "llama", PLANS["Ulysses 2 x ring 2"], torch.float32):
        assert max(errors.values()) <= 1e-5, errors


def _both(
    world: World,
    plan: SequencePlan,
    make_model: Any,
    calls: list[dict[str, Any]],
    loss_of: Any,
    prepare: Any = None,
) -> list[float]:
    """Errors of losses and gradients: all forwards first, then all backwards, last one first."""
    groups = make_groups(plan)
    model, twin = make_model(), make_model()
    if prepare is not None:
        prepare(model)
        prepare(twin)
    wire_sequence(model, groups)
    losses = [(loss_of(model, call), loss_of(twin, call)) for call in calls]
    for pair in reversed(losses):
        for loss in pair:
            loss.backward()
    errors = [relative(a, b) for a, b in losses]
    return [*errors, worst(averaged(model, groups), gradients(twin))]


def _logits_loss(model: nn.Module, call: dict[str, Any]) -> Tensor:
    """A criterion of the user's own, on whole logits; tokens of weight 0 are padding."""
    inputs = {k: v for k, v in call.items() if k not in ("weights", "cu_seq_lens_q")}
    if hasattr(model, "gulliver_adapter") and "cu_seq_lens_q" in call:
        inputs["cu_seq_lens_q"] = call["cu_seq_lens_q"]
    logits = model(**inputs).logits
    weights = call.get("weights", torch.ones(logits.shape[:2], dtype=logits.dtype))
    return (logits.square().mean(-1) * weights).sum() + logits[:, -1].exp().mean()


def _ids(size: int, length: int, seed: int = 0) -> Tensor:
    return batch("llama", size, seed, length)["input_ids"]


def _masked(world: World, family: str, plan: SequencePlan) -> list[float]:
    ids, hole = _ids(3, 13), torch.ones(3, 13, dtype=torch.int64)
    hole[0, 9:11] = hole[1, 4] = hole[2, 11:12] = 0
    calls = [{"input_ids": ids, "attention_mask": hole, "weights": hole.double()}]
    if family != "bert":
        left = torch.ones(2, 11, dtype=torch.int64)
        left[0, :4] = left[1, :7] = 0
        calls.append({"input_ids": _ids(2, 11), "attention_mask": left, "weights": left.double()})
    return _both(world, plan, partial(make, family), calls, _logits_loss)


@pytest.mark.parametrize(
    "family", some(["llama", "mistral", "gpt2", "opt", "bert"], ["llama", "gpt2", "bert"])
)
def test_padding_may_stand_anywhere_and_the_criterion_may_be_ones_own(
    pool: Pool, family: str
) -> None:
    plan = PLANS["Ulysses 2 x ring 2" if family == "llama" else "ring 2"]
    for errors in pool.run(_masked, plan.degree, family, plan):
        assert max(errors) <= 1e-12, errors


def _packed(world: World, family: str, plan: SequencePlan) -> list[float]:
    ends = torch.tensor([0, 3, 4, 11, 16], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in ends.diff().tolist()]).unsqueeze(0)
    both = torch.cat([positions, positions.flip(1).cumsum(1)[:, -1:] * 0 + torch.arange(16)])
    plain = {"input_ids": _ids(1, 16), "position_ids": positions}
    calls = [
        plain,
        {**plain, "cu_seq_lens_q": ends},
        {"input_ids": _ids(2, 16), "position_ids": both},
    ]
    return _both(world, plan, partial(make, family), calls, _logits_loss)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_documents_are_packed_as_the_model_packs_them(pool: Pool, family: str) -> None:
    plan = PLANS["Ulysses 2 x ring 2" if family == "llama" else "ring 2"]
    for errors in pool.run(_packed, plan.degree, family, plan):
        assert max(errors) <= 1e-12, errors


def _document_ids(world: World, family: str) -> float:
    model, twin = make(family), make(family)
    wire_sequence(model, make_groups(PLANS["ring 2"]))
    ids = torch.tensor([[7] * 5 + [2] * 4, [0] * 2 + [1] * 7])
    positions = torch.tensor([[*range(5), *range(4)], [*range(2), *range(7)]])
    dense = (ids.unsqueeze(1) == ids.unsqueeze(2)).unsqueeze(1)
    dense = dense if family == "bert" else dense.tril()
    data = _ids(2, 9)
    wanted = twin(input_ids=data, position_ids=positions, attention_mask=dense).logits
    return relative(model(input_ids=data, document_ids=ids).logits, wanted)


@pytest.mark.parametrize("family", ["llama", "opt", "bert"])
def test_documents_may_be_named(pool: Pool, family: str) -> None:
    assert max(pool.run(_document_ids, 2, family)) <= 1e-12


def _own_loss(model: Any, call: dict[str, Any]) -> Tensor:
    if hasattr(model, "gulliver_adapter"):
        return model(**call).loss
    logits = model(**{k: v for k, v in call.items() if k != "labels"}).logits
    return precise_loss(model.config.model_type, logits, call)


def _recomputed(world: World, family: str, reentrant: bool) -> list[float]:
    def prepare(model: Any) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()

    calls = [batch(family, 2, 0, 12), batch(family, 1, 1, 15), batch(family, 3, 2, 9)]
    plan = PLANS["ring 2"]
    return _both(world, plan, partial(make, family), calls, _own_loss, prepare)


@pytest.mark.parametrize(
    ("family", "reentrant"),
    some(
        [("mistral", False), ("gpt2", False), ("vit", False), ("mistral", True), ("gpt2", True)],
        [("gpt2", False), ("vit", False), ("mistral", True)],
    ),
)
def test_micro_batches_in_flight_and_recomputed_blocks_keep_their_own_call(
    pool: Pool, family: str, reentrant: bool
) -> None:
    for errors in pool.run(_recomputed, 2, family, reentrant):
        assert max(errors) <= 1e-12, errors


def _named(name: str, base: str, **fields: Any) -> Any:
    """A model of another class, of the same small configuration."""
    import transformers

    torch.manual_seed(5)
    config = copy.deepcopy(build(base).config)
    for key, value in fields.items():
        setattr(config, key, value)
    model = getattr(transformers, name)(config).double().train()
    exact_norms(model)
    return model


def _all_outputs(model: nn.Module, call: dict[str, Any]) -> Tensor:
    out = model(**call, output_hidden_states=True)
    total: Any = sum((n + 1) * h.square().mean() for n, h in enumerate(out.hidden_states))
    for name in ("logits", "last_hidden_state", "pooler_output"):
        if getattr(out, name, None) is not None:
            total = total + getattr(out, name).sin().mean()
    return total + (out.loss.double() if getattr(out, "loss", None) is not None else 0)


def _other_class(world: World, name: str, base: str, labels: int | None) -> list[float]:
    data = batch(base, 2, 0, 13)
    data.pop("labels")
    if labels is not None:
        data["labels"] = _ids(2, 13 if labels == 2 else 1, seed=4).squeeze(1) % 3
    fields = {"num_labels": 3, "pad_token_id": 0} if labels is not None else {}
    plan = PLANS["ring 2"]
    return _both(world, plan, partial(_named, name, base, **fields), [data], _all_outputs)


CLASSES = [
    ("LlamaModel", "llama", None),
    ("LlamaForCausalLM", "llama", None),
    ("BertModel", "bert", None),
    ("BertForMaskedLM", "bert", None),
    ("ViTModel", "vit", None),
    ("OPTForSequenceClassification", "opt", 1),
    ("LlamaForSequenceClassification", "llama", 1),
    ("BertForSequenceClassification", "bert", 1),
    ("BertForTokenClassification", "bert", 2),
]


@pytest.mark.parametrize(("name", "base", "labels"), some(CLASSES, CLASSES[::3]), ids=str)
def test_other_classes_get_whole_hidden_states(
    pool: Pool, name: str, base: str, labels: int | None
) -> None:
    # Losses of these classes are transformers' own, some of them in float32.
    bar = 1e-12 if labels is None else 1e-6
    for errors in pool.run(_other_class, 2, name, base, labels):
        assert max(errors) <= bar, errors


def _embedded(world: World) -> list[float]:
    """Errors of gradients of what the user embeds, which all ranks have whole."""
    model, twin = make("llama"), make("llama")
    wire_sequence(model, make_groups(PLANS["ring 3"]))
    errors = []
    given = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = []
    for each in (model, twin):
        x = given.clone().requires_grad_()
        each(inputs_embeds=x).logits.square().mean().backward()
        grads.append(x.grad)
    errors.append(relative(grads[0], grads[1]))
    return errors


def test_inputs_embeds_get_full_gradient(pool: Pool) -> None:
    assert max(e for errors in pool.run(_embedded, 3) for e in errors) <= 1e-12


def _losses(world: World) -> list[float]:
    """Errors of losses asked for in all the ways that transformers knows."""
    model, twin = make("llama", torch.float32), make("llama", torch.float32)
    wire_sequence(model, make_groups(PLANS["ring 3"]))
    data = batch("llama", 2, 0, 14)
    data["labels"][0, 2:9] = -100
    shifted = torch.nn.functional.pad(data["labels"][:, 1:], (0, 1), value=-100)
    calls = [
        {"num_items_in_batch": 40},
        {"num_items_in_batch": torch.tensor(31)},
        {"shift_labels": shifted},
        {"ignore_index": 5},
    ]
    data["labels"][1, 6] = 5
    calls[-1]["labels"] = data["labels"].clamp(min=5)
    errors = [relative(model(**{**data, **c}).loss, twin(**{**data, **c}).loss) for c in calls]
    as_tuple = model.eval()(**data, return_dict=False), twin(**data, return_dict=False)
    errors += [relative(a, b) for a, b in zip(as_tuple[0][:2], as_tuple[1][:2], strict=True)]
    nothing = model(**{**data, "labels": torch.full_like(data["labels"], -100)}).loss
    assert bool(nothing.isnan())
    return errors


def test_losses_are_counted_as_transformers_counts_them(pool: Pool) -> None:
    assert max(e for errors in pool.run(_losses, 3) for e in errors) <= 1e-6


def _tails(world: World, plan: SequencePlan) -> list[float]:
    groups = make_groups(plan)
    model, twin = make("llama"), make("llama")
    wire_sequence(model, groups)
    ids, errors = _ids(2, 13), []
    for count in (1, 4, 13):
        found, wanted = (m(input_ids=ids, logits_to_keep=count).logits for m in (model, twin))
        errors.append(relative(found, wanted))
        found.sin().sum().backward()
        wanted.sin().sum().backward()
    return [*errors, worst(averaged(model, groups), gradients(twin))]


@pytest.mark.parametrize("plan", ["ring 3", "Ulysses 2 x ring 2"])
def test_logits_to_keep_is_supported(pool: Pool, plan: str) -> None:
    for errors in pool.run(_tails, PLANS[plan].degree, PLANS[plan]):
        assert max(errors) <= 1e-12, errors


def _held(world: World) -> None:
    model = make("llama")
    wire_sequence(model, make_groups(PLANS["ring 2"]))
    data = batch("llama", 2, 0, 12)
    assert model(**data).logits is None
    keep_logits(model)
    assert model(**data).logits.shape == (2, 12, 67)


def test_logits_are_gathered_in_training_only_with_keep_logits(pool: Pool) -> None:
    pool.run(_held, 2)


def _tensor_too(world: World, family: str, sequence: bool) -> list[float]:
    """Errors of loss and gradients on a grid of tensor ranks inside sequence ranks."""
    from gulliver.comm.groups import RankGroup
    from gulliver.parallel.tensor import apply_tensor, plan_tensor

    pairs = [[0, 1], [2, 3]]
    made: list[Any] = [torch.distributed.new_group(pair) for pair in pairs[: world.size // 2]]
    mine = world.rank // 2
    line = RankGroup(tuple(pairs[mine]), world.rank % 2, made[mine])
    plan = PLANS["ring 2"] if sequence else SequencePlan()
    groups = make_groups(plan, [[0, 2], [1, 3]] if sequence else None)
    model, twin = make(family), make(family)
    apply_tensor(model, plan_tensor(model, 2), line)
    exact_norms(model)
    wire_sequence(model, groups, line)
    if family != "vit":
        start, stop = model.get_output_embeddings().columns
        assert 0 < stop - start < 67
    data = batch(family, 2, 0, 13, padded=family != "vit")
    plain = {k: v for k, v in data.items() if k != "labels"}
    loss = model(**data).loss
    loss.backward()
    wanted_logits = twin(**plain).logits
    wanted = precise_loss(family, wanted_logits, data)
    wanted.backward()
    with torch.no_grad():
        logits = model.eval()(**plain).logits
    errors = [relative(loss, wanted), relative(logits, wanted_logits)]
    theirs = gradients(twin)
    own = averaged(model, groups) if sequence else gradients(model)
    # Of what is whole on all tensor ranks; the rest is compared where tensors are cut.
    whole = {n: g for n, g in own.items() if g.shape == theirs[n].shape}
    assert whole
    return [*errors, worst(whole, {n: theirs[n] for n in whole})]


@pytest.mark.parametrize(
    ("family", "sequence"),
    some(
        [("llama", False), ("bloom", False), *((family, True) for family in WIRED)],
        [("bloom", False), ("llama", True), ("gpt2", True), ("vit", True)],
    ),
)
def test_tensor_parallelism_can_be_combined(pool: Pool, family: str, sequence: bool) -> None:
    for errors in pool.run(_tensor_too, 4 if sequence else 2, family, sequence):
        assert max(errors) <= 1e-12, errors


def _refused(world: World) -> dict[str, str]:
    groups, said = make_groups(PLANS["ring 2"]), {}
    for kind, (use, _) in REFUSED.items():
        with pytest.raises(GulliverError) as raised:
            use(groups)
        said[kind] = str(raised.value)
    return said


def _wired(groups: Any, family: str = "llama", **settings: Any) -> Any:
    model = make(family, **settings)
    wire_sequence(model, groups)
    return model


def _call(groups: Any, family: str = "llama", **call: Any) -> Any:
    return _wired(groups, family)(**{**batch(family, 2, 0, 12), **call})


def _refuse_loss(groups: Any) -> None:
    model = _wired(groups)
    model.loss_function = F.cross_entropy
    model(**batch("llama", 2, 0, 12))


def _rewire(groups: Any) -> None:
    wire_sequence(_wired(groups), groups)


REFUSED: dict[str, tuple[Any, str]] = {
    "bloom": (lambda g: _wired(g, "bloom"), "adds a bias.*split_gather"),
    "t5": (lambda g: _wired(g, "t5"), "adds a bias.*split_gather"),
    "whisper": (lambda g: _wired(g, "whisper"), "convolution.*split_gather"),
    "twice": (_rewire, "already shards sequences"),
    "late loss function": (_refuse_loss, "set it before boost, or omit labels"),
    "dropout": (lambda g: _wired(g, attention_dropout=0.1), "attention_dropout=0.1"),
    "later dropout": (
        lambda g: _refuse_later_dropout(g),
        "attention_dropout=0.2.*set it to 0",
    ),
    "rope": (lambda g: _wired(g, rope_parameters={"rope_type": "dynamic"}), "'dynamic'"),
    "upcast": (lambda g: _wired(g, "gpt2", reorder_and_upcast_attn=True), "reorder_and_upcast"),
    "dense mask": (
        lambda g: _call(g, attention_mask=torch.ones(2, 1, 12, 12)),
        "expected 0s and 1s",
    ),
    "cache": (lambda g: _call(g, use_cache=True), "gulliver.LLM"),
    "past": (lambda g: _call(g, past_key_values=()), "past_key_values"),
    "weights": (lambda g: _call(g, output_attentions=True), "output_attentions=True"),
    "short": (lambda g: _call(g, input_ids=_ids(2, 1), labels=_ids(2, 1)), "1 tokens is too short"),
    "unknown": (lambda g: _call(g, "bert", bonus=torch.ones(2, 12)), "bonus is not supported"),
    "cross": (
        lambda g: _call(g, "bert", encoder_hidden_states=torch.ones(2, 3, 32)),
        "encoder_hidden_states is not supported",
    ),
    "generate": (lambda g: _wired(g).generate(_ids(1, 9), max_new_tokens=2), "gulliver.LLM"),
}


def _refuse_later_dropout(groups: Any) -> None:
    model = _wired(groups)
    model.config.attention_dropout = 0.2
    model(**batch("llama", 2, 0, 12))


def test_inexact_combinations_are_rejected(pool: Pool) -> None:
    for found in pool.run(_refused, 2):
        for kind, said in found.items():
            assert re.search(REFUSED[kind][1], said), said


def _apart(world: World) -> tuple[bool, str]:
    """Whether a model of the same configuration, and a copy, are what they should be."""
    model = make("llama")
    other = type(model)(model.config).double()
    wire_sequence(model, make_groups(PLANS["ring 2"]))
    ids = _ids(1, 8)
    copied = copy.deepcopy(model)
    same = torch.equal(copied(input_ids=ids).logits, model(input_ids=ids).logits)
    other(input_ids=ids[:, : 3 + world.rank])
    return same, other.config._attn_implementation


def test_other_models_of_the_same_configuration_are_left_alone(pool: Pool) -> None:
    for same, attention in pool.run(_apart, 2):
        assert same
        assert attention != "gulliver_sequence"
