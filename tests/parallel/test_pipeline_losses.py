"""Means over labels that micro-batches have different numbers of, for losses of all kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.parallel.pipeline.batches import split, weigh
from tests.hybrid.hybrid_models import HEADS, HIDDEN, VOCABULARY, WIDE, batch
from tests.parallel.pipelines import difference, grad_of, gradients_of, pipeline_of
from tests.pool import Pool

BAR = 2e-6
"""transformers computes the loss of a float64 model in float32."""


def _make(name: str) -> Any:
    import transformers

    kind = "Bert" if name.startswith("Bert") else "Llama"
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    fields: dict[str, Any] = (
        dropouts if kind == "Bert" else {"use_cache": False, "classifier_dropout": 0.0}
    )
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        max_position_embeddings=64,
        num_labels=5,
        pad_token_id=0,
        is_decoder=name == "BertLMHeadModel",
        **fields,
    )
    torch.manual_seed(7)
    return getattr(transformers, name)(config).double().train()


def _uneven(name: str) -> dict[str, Tensor]:
    data = batch("llama", 4, seed=2)
    labels = data["labels"]
    labels[0], labels[2, 1:] = -100, -100
    if "Classification" in name:
        data["labels"] = labels.where(labels == -100, labels % 5)
    if "Sequence" in name:
        data["labels"] = torch.tensor([-100, 3, 1, 2])
    return data


def _errors(model: Any, whole: Any, data: dict[str, Any], **how: Any) -> float:
    wanted = whole(**data).loss
    wanted.backward()
    found = model.run(data, **how)
    gradients = dict(whole.named_parameters())
    errors = [difference(g, grad_of(gradients[n])) for n, g in gradients_of(model).items()]
    return max(difference(found["loss"], wanted.detach()), *errors)


CLASSES = (
    "LlamaForTokenClassification",
    "LlamaForSequenceClassification",
    "BertForSequenceClassification",
    "BertLMHeadModel",
)


def _own_losses(world: World) -> dict[str, float]:
    found = {}
    for name in CLASSES:
        pipe = pipeline_of(world, _make(name), "gpipe", 4)
        found[name] = _errors(pipe, _make(name), _uneven(name))
    for items in (31, torch.tensor(17)):
        data = {**_uneven("LlamaForCausalLM"), "num_items_in_batch": items}
        for own in (None, lambda out, _: out.loss):
            pipe = pipeline_of(world, _make("LlamaForCausalLM"), "1f1b", 4)
            key = f"{items} items, {own}"
            found[key] = _errors(pipe, _make("LlamaForCausalLM"), data, criterion=own)
    return found


def test_a_models_own_loss_is_weighed_by_what_it_counts(pool: Pool) -> None:
    for found in pool.run(_own_losses, 2):
        assert max(found.values()) <= BAR, found


def _refused(world: World) -> dict[str, str]:
    """Nothing has run when it is said, so that a pipeline goes on."""
    said = {}
    for name, change in {
        "BertForPreTraining": {"next_sentence_label": torch.tensor([0, 1, 1, 0])},
        "LlamaForTokenClassification": {"num_items_in_batch": 3},
    }.items():
        pipe = pipeline_of(world, _make(name), "gpipe", 2)
        with pytest.raises(GulliverError) as raised:
            pipe.run({**_uneven(name), **change})
        said[name] = str(raised.value)
        if "items" not in next(iter(change)):
            with pytest.raises(GulliverError, match="weight= to 'labels'"):
                pipe.run({**_uneven(name), **change}, lambda out, _: out.loss * 1)
        even = batch("llama", 4, seed=2)
        even["labels"] %= 5
        pipe.run({**even, **{n: v for n, v in change.items() if "label" in n}})
    return said


def test_a_loss_that_is_not_known_is_refused_where_it_would_matter(pool: Pool) -> None:
    for said in pool.run(_refused, 2):
        assert "weight= to 'labels'" in said["BertForPreTraining"]
        assert "num_items_in_batch" in said["LlamaForTokenClassification"]


def test_weights_are_those_of_the_labels_that_count() -> None:
    labels = torch.tensor([[-100, 1, 1, -100], [1, 1, 1, 1], [1, -100, -100, -100], [1, 1, 1, 1]])
    micros = split({"labels": labels}, 2)
    assert weigh(micros, "labels", None).own == pytest.approx([6 / 11, 5 / 11])
    assert weigh(micros, "shifted_labels", None).own == pytest.approx([5 / 8, 3 / 8])
    assert weigh(micros, "samples", None).own == [0.5, 0.5]
    with pytest.raises(GulliverError, match="different numbers of labels"):
        weigh(micros, None, None, criterion=True)


def _uncounted(world: World) -> float:
    """A criterion of one's own is seen in mid-schedule, by the last stage alone."""
    pipe = pipeline_of(world, _make("LlamaForCausalLM"), "1f1b", 4)
    data = _uneven("LlamaForCausalLM")
    with pytest.raises(GulliverError, match="weight= to 'labels'"):
        pipe.run(data, lambda out, _: out.loss * 1)
    pipe.model.zero_grad()
    return _errors(pipe, _make("LlamaForCausalLM"), data, criterion=lambda out, _: out.loss)


def test_a_criterion_that_is_not_known_is_refused_on_all_ranks(pool: Pool) -> None:
    assert max(pool.run(_uncounted, 2)) <= BAR
