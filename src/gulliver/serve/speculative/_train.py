"""Training of a draft: the target is frozen, and gives keys and values of each batch.

Read `train_draft`. The draft alone is boosted, so that any plugin shards it; each rank has the
target whole, in evaluation mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gulliver.booster import Booster, LowLevelZeroPlugin, TorchDDPPlugin
from gulliver.comm import World, all_reduce, init_world
from gulliver.errors import GulliverError
from gulliver.finetune import make_batches, read_text
from gulliver.serve._load import load
from gulliver.serve.speculative._folder import save_draft
from gulliver.serve.speculative._glide import Glide, GlideConfig, seen_keys
from gulliver.serve.speculative._target import glimpses_of, target_frequencies
from gulliver.serve.speculative._train_config import TrainDraftConfig, check_train_draft

EVERY = 20
"""Steps between two lines."""


@dataclass(frozen=True)
class Trained:
    """What a training came to.

    Attributes:
        steps: optimizer steps.
        loss: mean loss of held-out tokens, in nats; NaN without any.
        parameters: number of the draft's parameters.
    """

    steps: int
    loss: float
    parameters: int


def train_draft(
    config: TrainDraftConfig,
    target: tuple[Any, Any] | None = None,
    say: Callable[[str], None] = print,
) -> Trained:
    """Trains a draft and writes its folder; every rank calls it.

    Args:
        config: options.
        target: model and tokenizer, where they are loaded already.
        say: function that shows a line to the user.

    Raises:
        GulliverError: the options, the target or the data do not allow it.
    """
    check_train_draft(config)
    assert config.target is not None
    world = init_world()
    say = say if world.is_main else lambda _: None
    model, tokenizer = target or load(config.target, config.dtype)
    model = model.to(world.device).eval().requires_grad_(False)
    context = getattr(model.config, "max_position_embeddings", None)
    data = read_text(config, tokenizer, say, context=context)
    length = int(data.facts["length"])
    torch.manual_seed(config.seed)
    sizes = glide_config(config, model)
    draft = Glide(sizes, target_frequencies(model) if sizes.glimpses else ()).to(world.device)
    batches = make_batches(
        data.train,
        tokens=max(config.batch_tokens, length),
        length=length,
        packing=False,
        seed=config.seed,
        rank=world.rank,
        ranks=world.size,
    )
    steps = config.steps or len(batches)
    parameters = sum(p.numel() for p in draft.parameters())
    say(
        f"draft: {parameters:,} parameters, {sizes.layers} layer(s) of {sizes.hidden}, looking at "
        f"layer(s) {', '.join(map(str, sizes.glimpses)) or 'none'}; {steps} steps"
    )
    optimizer = torch.optim.AdamW(
        draft.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: _factor(config, s, steps))
    plugin = LowLevelZeroPlugin(stage=config.stage) if config.stage else TorchDDPPlugin()
    booster = Booster(plugin=plugin, verbose=False)
    boosted, optimizer, _, _, schedule = booster.boost(draft, optimizer, lr_scheduler=schedule)
    learner = _Learner(model, boosted, sizes, world, config.seed)
    done, total, epoch = 0, torch.zeros((), device=world.device), 0
    while done < steps:
        batches.set_epoch(epoch)
        for batch in batches:
            loss = learner.loss(batch)
            booster.backward(loss, optimizer)
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total, done = total + loss.detach(), done + 1
            if done % EVERY == 0 or done == steps:
                mean = float(total) / (done % EVERY or EVERY)
                if not math.isfinite(mean):
                    raise GulliverError(
                        f"the loss is {mean} at step {done}: give a lower --learning-rate"
                    )
                say(f"step {done} of {steps}: loss {mean:.3f}")
                total = torch.zeros((), device=world.device)
            if done == steps:
                break
        epoch += 1
    found = Trained(steps, _held_out(learner, boosted, data.held_out, config, length), parameters)
    whole = booster.release(boosted)  # every rank gathers the parameters
    if world.is_main:
        facts = {"steps": steps, "loss": found.loss, "target": str(config.target)}
        weights = {name: value.detach().cpu() for name, value in whole.state_dict().items()}
        save_draft(config.out, sizes, weights, facts)
        say(f"{config.out}: written, loss of held-out texts {found.loss:.3f}")
    return found


def glide_config(config: TrainDraftConfig, model: Any) -> GlideConfig:
    """Sizes of a draft for a target.

    Raises:
        GulliverError: it is to look at layers that the target does not have.
    """
    device = next(model.parameters()).device
    count = model.config.num_hidden_layers
    layers = config.glimpses or tuple(range(max(0, count - config.layers), count))
    layers = (layers[0],) * (config.layers - len(layers)) + tuple(layers)
    if not all(0 <= layer < count for layer in layers):
        raise GulliverError(f"--glimpses {layers}: the target has layers 0 to {count - 1}")
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    keys, _, heads = glimpses_of(model, token, layers)
    width = model.config.hidden_size
    hidden = config.hidden or max(64, -(-width // 2 // 64) * 64)
    heads_of_own = max(1, hidden // 64)
    if hidden % heads_of_own or hidden // heads_of_own % 2:
        raise GulliverError(f"--hidden {hidden}: give a multiple of 64, or an even number below")
    dim = keys[0].shape[-1]
    wide = config.feed_forward or -(-hidden * 8 // 3 // 16) * 16
    if config.plain:
        # Two matrices of the width and the target's heads; three in the feed-forward part.
        wide += round(2 * heads * dim / 3)
    return GlideConfig(
        model.get_output_embeddings().weight.shape[0],
        *(hidden, heads_of_own, wide, config.layers, () if config.plain else layers),
        *(model.config.model_type, heads, dim, width, config.block),
    )


class _Learner:
    """Losses of batches, with the target's keys and values of them."""

    def __init__(
        self, target: Any, draft: Any, sizes: GlideConfig, world: World, seed: int
    ) -> None:
        self._target, self._draft, self._sizes, self._device = target, draft, sizes, world.device
        self._random = np.random.Generator(np.random.Philox(key=[seed, 1 + world.rank]))

    def loss(self, batch: Any) -> Tensor:
        """Mean loss of a batch; the blocks of the mask begin anywhere."""
        tokens = batch["input_ids"].to(self._device)
        labels = tokens.masked_fill(batch["attention_mask"].to(self._device) == 0, -100)
        block, layers = self._sizes.block, self._sizes.glimpses
        offset = int(self._random.integers(block))
        seen = seen_keys(tokens.shape[1], block, offset).to(self._device)
        keys, values = [], []
        if layers:
            keys, values, _ = glimpses_of(self._target, tokens, layers)
        return self._draft(tokens, labels, seen, keys, values)


@torch.no_grad()
def _held_out(
    learner: _Learner, draft: Any, examples: Any, config: TrainDraftConfig, length: int
) -> float:
    """Mean loss of held-out texts, of all ranks alike."""
    if not examples:
        return math.nan
    batches = make_batches(
        examples,
        tokens=max(config.batch_tokens, length),
        length=length,
        packing=False,
        shuffle=False,
    )
    draft.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        count = int(batch["attention_mask"][:, 1:].sum())
        sums += torch.tensor([float(learner.loss(batch)) * count, count], dtype=torch.float64)
    draft.train()
    all_reduce(sums, op="sum")
    return float(sums[0] / sums[1])


def _factor(config: TrainDraftConfig, step: int, steps: int) -> float:
    """Learning rate over its peak: linear warm-up, then a cosine to a tenth."""
    warmup = min(config.warmup, steps // 4)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))
