"""Trains, evaluates and samples with micro-batches on one rank.

Start with `FinetuneStep.learn`. A step's loss is the sum of token losses divided by the number of
trained tokens, over all ranks and micro-batches, so it does not depend on how the step is split.
The loss of each micro-batch is its sum divided by that number, times a factor that cancels the
averaging of gradients over ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.booster.booster import Booster
from gulliver.comm.collectives import all_reduce
from gulliver.comm.world import World
from gulliver.families.loss import hugging_face_of, own_loss
from gulliver.finetune.encode import Example
from gulliver.parallel.optimizer import BoostedOptimizer

IGNORED = -100
INPUTS = ("input_ids", "attention_mask", "position_ids")


class FinetuneStep:
    """A boosted model that trains on micro-batches."""

    def __init__(
        self,
        booster: Booster,
        model: nn.Module,
        optimizer: BoostedOptimizer,
        world: World,
        places: int,
    ) -> None:
        self.booster, self.model, self.optimizer = booster, model, optimizer
        self.world, self.places = world, places
        self.stages = optimizer.pipeline is not None
        self.micro_batches = booster.plan.pipeline.micro_batches if self.stages else 1
        plain = hugging_face_of(_plain(model))
        known = own_loss(plain)
        # The model's own loss works on sharded logits without materializing the whole.
        self._own = known is not None and known.shifted and bool(known.items)
        self._takes = set(inspect.signature(type(plain).forward).parameters)

    def learn(self, batches: Sequence[Mapping[str, Any]]) -> Tensor:
        """Runs forward and backward of a step's micro-batches; returns the loss."""
        share = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            context = nullcontext() if last else self.booster.no_sync(self.model, self.optimizer)
            with context:
                if self.stages:
                    share += self._through_stages(batch, batch["num_items"], self.optimizer)
                    continue
                loss = self._loss(self._on_device(batch), max(1, batch["num_items"]))
                self.booster.backward(loss * self.places, self.optimizer)
                share += loss.detach()
        return share

    @torch.no_grad()
    def judge(self, batches: Iterator[Mapping[str, Any]]) -> float:
        """Returns the mean loss over all labeled tokens of all ranks; called on every rank."""
        total = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        with self.evaluating():
            for batch in batches:
                count = int((batch["labels"][:, 1:] != IGNORED).sum())
                if self.stages:
                    loss = self._through_stages(batch, count, None)
                else:
                    loss = self._loss(self._on_device(batch), max(1, count)).detach()
                total += torch.stack([loss.double() * count, torch.tensor(float(count))])
        all_reduce(total, op="sum")
        return float(total[0] / total[1]) if total[1] else float("nan")

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()

    @torch.no_grad()
    def continuation(self, ids: Sequence[int], tokens: int, end: int | None) -> list[int]:
        """Greedy continuation of a prompt; called on every rank with the same tokens."""
        model: Any = _plain(self.model)
        given = torch.tensor([list(ids)], device=self.world.device)
        shared = self.booster.plan.mesh.of("sequence") > 1
        options = {} if shared else {"use_cache": True}
        with self.evaluating():
            found = model.generate(
                input_ids=given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=end,
                pad_token_id=end or 0,
                **options,
            )
        return found[0, given.shape[1] :].tolist()

    def _on_device(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        known = {name: batch[name] for name in (*INPUTS, "labels") if name in batch}
        taken = {n: v for n, v in known.items() if n in self._takes}
        return {name: value.to(self.world.device) for name, value in taken.items()}

    def _loss(self, batch: dict[str, Tensor], items: int) -> Tensor:
        if self._own:
            return self.model(**batch, num_items_in_batch=items).loss
        labels = batch.pop("labels")
        return token_losses(self.model(**batch).logits, labels) / items

    def _through_stages(
        self, batch: Mapping[str, Any], items: int, optimizer: BoostedOptimizer | None
    ) -> Tensor:
        """Returns the loss through pipeline stages; runs backward if there is an optimizer."""
        given = self._on_device(self._with_enough_rows(batch))
        count = int((given["labels"][:, 1:] != IGNORED).sum())
        factor = (self.places if optimizer is not None else 1) * count / max(1, items)

        def criterion(output: Any, micro: Mapping[str, Tensor]) -> Tensor:
            labels = micro["labels"]
            learnt = (labels[:, 1:] != IGNORED).sum().clamp(min=1)
            return token_losses(output.logits, labels) / learnt * factor

        def weight(micro: Mapping[str, Tensor]) -> float:
            # If nothing is trained, all micro-batches have the same weight, because the loss is 0.
            return float((micro["labels"][:, 1:] != IGNORED).sum()) if count else 1.0

        done = self.booster.execute_pipeline(
            iter([given]), self.model, criterion, optimizer, weight=weight
        )
        return done["loss"].double() * (1 / self.places if optimizer is not None else 1)

    def _with_enough_rows(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Pads a batch so that each pipeline micro-batch has a row; the loss ignores added rows.

        Added rows repeat the first row, so that they do not affect the others.
        """
        lacking = self.micro_batches - len(batch["labels"])
        if lacking <= 0:
            return dict(batch)
        rows = {n: v for n, v in batch.items() if isinstance(v, Tensor)}
        more = {n: torch.cat([v, v[:1].expand(lacking, *v.shape[1:])]) for n, v in rows.items()}
        more["labels"][-lacking:] = IGNORED
        return {**batch, **more}


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the sum of token losses of ``[B, L, vocabulary]`` logits, in float32."""
    found = logits[:, :-1].flatten(0, 1).float()
    wanted = labels[:, 1:].flatten().to(found.device)
    return F.cross_entropy(found, wanted, ignore_index=IGNORED, reduction="sum")


def _plain(model: nn.Module) -> nn.Module:
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) else model


# Prompts for sampling during training: from held-out texts and from the user.


SHOWN = 32  # maximum number of prompt tokens taken from a plain text


@dataclass(frozen=True)
class Prompt:
    """The beginning of a text, and its continuation in the data."""

    # Tokens of the prompt.
    ids: list[int]
    # Tokens that follow in the data; none for a user's prompt.
    expected: list[int]
    # File and line of its origin.
    source: str

    def continued(self, learner: FinetuneStep, tokenizer: Any, tokens: int) -> dict[str, str]:
        """Returns the model's continuation and the data's; called on every rank."""
        made = learner.continuation(self.ids, tokens, tokenizer.eos_token_id)

        def text(ids: Sequence[int]) -> str:
            return tokenizer.decode(ids, skip_special_tokens=True)

        return {
            "source": self.source,
            "prompt": text(self.ids),
            "made": text(made),
            "expected": text(self.expected[:tokens]),
        }


def prompts_of(
    examples: Sequence[Example], count: int, texts: Sequence[str], tokenizer: Any
) -> list[Prompt]:
    chosen = sorted({len(examples) * n // count for n in range(count)}) if count else []
    found = [_prompt_of(examples[number]) for number in chosen if number < len(examples)]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found.append(Prompt(list(ids), [], "--prompt"))
    return [prompt for prompt in found if prompt.ids]


def _prompt_of(example: Example) -> Prompt:
    """Returns a text up to its first answer; of a plain text, the first tokens."""
    first = int(np.argmax(example.answer)) if example.answer.any() else len(example)
    if first <= 1:
        first = min(SHOWN, max(1, len(example) // 2))
    ids = [int(one) for one in example.ids]
    return Prompt(ids[:first], ids[first:], example.source)
