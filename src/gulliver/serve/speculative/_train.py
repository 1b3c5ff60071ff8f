"""Training of a draft: the target is frozen, and gives keys, values and logits of each batch.

Read `train_draft`, then `_Training`. The draft alone is boosted, so that any plugin shards it; each
rank has the target whole, in evaluation mode. What a run has done lies in ``training`` under the
draft's folder, until the draft is whole.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gulliver.booster import Booster, LowLevelZeroPlugin, TorchDDPPlugin
from gulliver.comm import World, all_reduce, barrier, init_world
from gulliver.errors import GulliverError
from gulliver.finetune import Run, TextData, fingerprint_of, make_batches, read_text
from gulliver.jobs import Display, StopRequest, derive
from gulliver.options import resolved
from gulliver.serve._load import load
from gulliver.serve._measure import sign_of, sign_token
from gulliver.serve.speculative._folder import save_draft
from gulliver.serve.speculative._glide import Glide, GlideConfig, seen_keys
from gulliver.serve.speculative._target import glimpses_of, lesson_of, target_frequencies
from gulliver.serve.speculative._train_config import (
    MAY_CHANGE,
    TrainDraftConfig,
    check_train_draft,
)

EVERY = 20
"""Steps between two lines of the log."""
HELD_OUT = 1 << 40
"""Number of a step that no training reaches: from it on the blocks of held-out texts are drawn."""
FINGERPRINTS = {
    "target": "--target is not the one that the draft was begun for",
    "data": "--data are not those that the draft was begun with",
}


@dataclass(frozen=True)
class Trained:
    """What a training came to.

    Attributes:
        steps: optimizer steps so far.
        loss: mean loss of held-out tokens, in nats; NaN without any, or before the end.
        parameters: number of the draft's parameters.
        over: whether it has come to its end; a signal stops it at the end of a step.
    """

    steps: int
    loss: float
    parameters: int
    over: bool = True


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
        GulliverError: the options, the target or the data do not allow it, or a run is to be
            continued that was begun with others.
    """
    check_train_draft(config)
    assert config.target is not None
    world = init_world()
    say = say if world.is_main else lambda _: None
    model, tokenizer = target or load(config.target, config.dtype)
    model = model.to(world.device).eval().requires_grad_(False)
    context = getattr(model.config, "max_position_embeddings", None)
    data = read_text(config, tokenizer, say, context=context)
    run = Run(config.out / "training", 2, MAY_CHANGE, FINGERPRINTS)
    handed = f"{type(model).__name__} of {sum(p.numel() for p in model.parameters())} parameters"
    known = {
        "target": handed if target else fingerprint_of(config.target),
        "data": data.fingerprint,
    }
    checkpoint = run.open(config, known)
    if checkpoint is None and run.values():
        say(
            f"{run.folder} holds a training that ended before its first checkpoint (--save-every "
            f"{config.save_every}): it begins anew"
        )
    training = _Training(config, model, data, run, world, say)
    if checkpoint is not None:
        training.restore(checkpoint)
    if world.is_main:
        run.write(options=resolved(config), fingerprints=known)
        run.cut(training.done if checkpoint is not None else -1)
    barrier()
    with StopRequest().listening() as stop:
        return training.run_to_end(stop)


class _Training:
    """A draft, its optimizer and its data, and the loop over them."""

    def __init__(
        self,
        config: TrainDraftConfig,
        target: Any,
        data: TextData,
        run: Run,
        world: World,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.data, self.run, self.world, self.say = config, data, run, world, say
        self.length = int(data.facts["length"])
        torch.manual_seed(config.seed)
        self.sizes = sizes = glide_config(config, target)
        frequencies = target_frequencies(target) if sizes.glimpses else ()
        draft = Glide(sizes, frequencies).to(world.device)
        self.batches = make_batches(
            data.train,
            tokens=max(config.batch_tokens, self.length),
            length=self.length,
            packing=False,
            seed=config.seed,
            rank=world.rank,
            ranks=world.size,
        )
        self.steps = config.steps or len(self.batches)
        self.parameters = sum(p.numel() for p in draft.parameters())
        say(
            f"draft: {self.parameters:,} parameters, {sizes.layers} layer(s) of {sizes.hidden}, "
            f"looking at layer(s) {', '.join(map(str, sizes.glimpses)) or 'none'}; "
            f"{self.steps} steps"
        )
        optimizer = torch.optim.AdamW(
            draft.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: _factor(config, step, self.steps)
        )
        plugin = LowLevelZeroPlugin(stage=config.stage) if config.stage else TorchDDPPlugin()
        self.booster = Booster(plugin=plugin, verbose=False)
        boosted = self.booster.boost(draft, optimizer, lr_scheduler=schedule)
        self.draft, self.optimizer, _, _, self.schedule = boosted
        self.learner = _Learner(target, self.draft, sizes, config, world)
        self.position = self.batches.state_dict()
        self.done, self.total = 0, torch.zeros((), device=world.device)

    def restore(self, folder: Path) -> None:
        """Takes up the state of a checkpoint; every rank calls it."""
        loaded = self.booster.load(
            folder, self.draft, self.optimizer, self.schedule, state={"run": None}, random=False
        )
        state = loaded.values["run"]
        self.batches.load_state_dict(state["batches"])
        self.position, self.done = state["batches"], state["step"]
        self.total.fill_(state["total"])
        self.say(f"continued at step {self.done} from {folder}")

    def _save(self) -> None:
        """Begins a checkpoint of this step; every rank calls it."""
        # Each rank has a mean of its own: the first one's is what was told.
        run = {"step": self.done, "batches": self.position, "total": float(self.total)}
        self.booster.save(
            self.run.checkpoints.root,
            self.done,
            *(self.draft, self.optimizer, self.schedule),
            state={"run": run},
            keep=self.run.keep,
        )

    def run_to_end(self, stop: StopRequest) -> Trained:
        """Steps until the last, or until a signal, after which the state is saved."""
        try:
            stopped = self._train(stop)
        finally:
            self.booster.close()
        if stopped and self.done < self.steps:
            self.say(f"stopped at step {self.done} of {self.steps}; continue with --resume")
            return Trained(self.done, math.nan, self.parameters, False)
        return self._finish()

    def _train(self, stop: StopRequest) -> bool:
        """Steps until the last, or until a signal; whether it was that."""
        stopped = False
        with Display("draft", self.steps, self.done, self.world.is_main) as display:
            while self.done < self.steps and not stopped:
                for batch in self.batches:
                    self._step(batch)
                    self._tell(display)
                    stopped = self._wished(stop)
                    last = self.done == self.steps
                    if not last and (stopped or self.done % self.config.save_every == 0):
                        self._save()
                    if last or stopped:
                        break
        return stopped

    def _step(self, batch: Any) -> None:
        loss = self.learner.loss(batch, self.done)
        self.booster.backward(loss, self.optimizer)
        self.optimizer.clip_grad_by_norm(1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.position = self.batches.state_dict()
        self.total, self.done = self.total + loss.detach(), self.done + 1

    def _tell(self, display: Display) -> None:
        """Shows the mean loss of the last steps, and writes it down."""
        if self.done % EVERY and self.done < self.steps:
            display.advance()
            return
        mean = float(self.total) / (self.done % EVERY or EVERY)
        if not math.isfinite(mean):
            raise GulliverError(
                f"the loss is {mean} at step {self.done}: give a lower --learning-rate"
            )
        display.advance(loss=f"{mean:.3f}")
        if self.world.is_main:
            self.run.log.append({"step": self.done, "loss": mean})
        self.total = torch.zeros((), device=self.world.device)

    def _wished(self, stop: StopRequest) -> bool:
        """Whether a rank wishes to stop."""
        if self.world.size == 1:
            return stop.wanted
        wish = torch.tensor([float(stop.wanted)], device=self.world.device)
        all_reduce(wish, op="sum")
        return float(wish) > 0

    def _finish(self) -> Trained:
        """Judges the draft, and writes it."""
        loss = self._held_out()
        whole = self.booster.release(self.draft)  # every rank gathers the parameters
        if self.world.is_main:
            facts = {"steps": self.steps, "loss": loss, "target": str(self.config.target)}
            weights = {name: value.detach().cpu() for name, value in whole.state_dict().items()}
            save_draft(self.config.out, self.sizes, weights, facts)
            shutil.rmtree(self.run.checkpoints.root, ignore_errors=True)
            self.say(f"{self.config.out}: written, loss of held-out texts {loss:.3f}")
        return Trained(self.steps, loss, self.parameters)

    @torch.no_grad()
    def _held_out(self) -> float:
        """Mean loss of held-out texts, of all ranks alike."""
        if not self.data.held_out:
            return math.nan
        batches = make_batches(
            self.data.held_out,
            tokens=max(self.config.batch_tokens, self.length),
            length=self.length,
            packing=False,
            shuffle=False,
        )
        self.draft.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        for number, batch in enumerate(batches):
            count = int(batch["attention_mask"][:, 1:].sum())
            loss = float(self.learner.loss(batch, HELD_OUT + number))
            sums += torch.tensor([loss * count, count], dtype=torch.float64)
        self.draft.train()
        all_reduce(sums, op="sum")
        return float(sums[0] / sums[1])


class _Learner:
    """Losses of batches, with what the target says of them."""

    def __init__(
        self, target: Any, draft: Any, sizes: GlideConfig, config: TrainDraftConfig, world: World
    ) -> None:
        self._target, self._draft, self._sizes, self._config = target, draft, sizes, config
        self._world = world

    def loss(self, batch: Any, step: int) -> Tensor:
        """Mean loss of a batch; the blocks of the mask begin anywhere, drawn anew at each step."""
        device, layers = self._world.device, self._sizes.glimpses
        tokens = batch["input_ids"].to(device)
        labels = tokens.masked_fill(batch["attention_mask"].to(device) == 0, -100)
        # A seed of its own for each step: a resumed run needs no saved generator.
        offset = derive(self._config.seed, 7, step, self._world.rank) % self._sizes.block
        seen = seen_keys(tokens.shape[1], self._sizes.block, offset).to(device)
        if self._config.distill:
            return self._draft(tokens, labels, seen, *lesson_of(self._target, tokens, layers))
        keys, values = [], []
        if layers:
            keys, values, _ = glimpses_of(self._target, tokens, layers)
        return self._draft(tokens, labels, seen, keys, values)


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
    token = torch.full((1, 1), sign_token(model), device=device)
    keys, values, heads = glimpses_of(model, token, (*layers, count - 1))
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
        *(model.config.model_type, heads, dim, width, config.block, sign_of(values[-1][0])),
    )


def _factor(config: TrainDraftConfig, step: int, steps: int) -> float:
    """Learning rate over its peak: linear warm-up, then a cosine to a tenth."""
    warmup = min(config.warmup, steps // 4)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))
