"""Training of a draft: the target is frozen, and gives keys, values and logits of each batch.

Read `train_draft`, then `DraftTrainer`. The draft alone is boosted, so that any plugin shards it;
each rank has the target whole, in evaluation mode. The run lies in ``training`` in the draft's
folder; its checkpoints go when the draft is written.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gulliver.booster import Booster, LowLevelZeroPlugin, TorchDDPPlugin
from gulliver.comm import World, all_reduce, barrier, guard, init_world
from gulliver.errors import GulliverError
from gulliver.finetune import TextData, fingerprint_of, make_batches, read_text
from gulliver.jobs import StopRequest, derive
from gulliver.jobs._loop import LoopOptions, TrainingLoop, rate_factor
from gulliver.jobs._run_folder import RunFolder
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

LOG_EVERY = 20
HELD_OUT = 1 << 40
"""Number of a step that no training reaches: from it on the blocks of held-out texts are drawn."""
FINGERPRINTS = {
    "target": "--target is not the one that the draft was begun for",
    "data": "--data are not those that the draft was begun with",
}


@dataclass(frozen=True)
class Trained:
    """What a training came to."""

    # Optimizer steps so far.
    steps: int
    # Mean loss of held-out tokens, in nats; NaN without any, or before the end.
    loss: float
    # Number of the draft's parameters.
    parameters: int
    # Whether it has come to its end; a signal stops it at the end of a step.
    over: bool = True


def train_draft(
    config: TrainDraftConfig,
    target: tuple[Any, Any] | None = None,
    say: Callable[[str], None] = print,
) -> Trained:
    """Trains a draft and writes its folder; every rank calls it."""
    check_train_draft(config)
    assert config.target is not None
    world = init_world()
    say = say if world.is_main else lambda _: None
    with guard():
        model, tokenizer = target or load(config.target, config.dtype)
        model = model.to(world.device).eval().requires_grad_(False)
        context = getattr(model.config, "max_position_embeddings", None)
        data = read_text(config, tokenizer, say, context=context)
        count = sum(p.numel() for p in model.parameters())
        handed = f"{type(model).__name__} of {count} parameters"
        known = {
            "target": handed if target else fingerprint_of(config.target),
            "data": data.fingerprint,
        }
        run = RunFolder(config.out / "training", 2, MAY_CHANGE, FINGERPRINTS)
        checkpoint = run.open(config, known)
        barrier()  # nobody writes before everybody has looked
        trainer = DraftTrainer(config, model, data, run, world, say)
        trainer.start(checkpoint, options=resolved(config), fingerprints=known)
        with StopRequest().listening() as stop:
            return trainer.run_to_end(stop)


class DraftTrainer(TrainingLoop):
    """A draft that learns what its target says of texts."""

    def __init__(
        self,
        config: TrainDraftConfig,
        target: Any,
        data: TextData,
        run: RunFolder,
        world: World,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.target, self.data, self.say = config, target, data, say
        torch.manual_seed(config.seed)
        self.sizes = sizes = glide_config(config, target)
        frequencies = target_frequencies(target) if sizes.glimpses else ()
        draft = Glide(sizes, frequencies).to(world.device)
        self.loader = self._loader(data.train, seed=config.seed, rank=world.rank, ranks=world.size)
        steps = config.steps or len(self.loader)
        self.parameters = sum(p.numel() for p in draft.parameters())
        say(
            f"draft: {self.parameters:,} parameters, {sizes.layers} layer(s) of {sizes.hidden}, "
            f"looking at layer(s) {', '.join(map(str, sizes.glimpses)) or 'none'}; "
            f"{steps} steps"
        )
        optimizer = torch.optim.AdamW(
            draft.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: rate_factor(step, steps, min(config.warmup, steps // 4), final=0.1),
        )
        plugin = LowLevelZeroPlugin(stage=config.stage) if config.stage else TorchDDPPlugin()
        booster = Booster(plugin=plugin, verbose=False)
        model, boosted, _, _, scheduler = booster.boost(draft, optimizer, lr_scheduler=scheduler)
        options = LoopOptions(
            "draft", steps, config.save_every, config.seed, log_every=LOG_EVERY, clip=1.0
        )
        place = world.rank, world.size
        super().__init__(run, world, options, booster, (model, boosted, scheduler), place)

    def _loader(self, examples: Any, **options: Any) -> Any:
        length = int(self.data.facts["length"])
        tokens = max(self.config.batch_tokens, length)
        return make_batches(examples, tokens=tokens, length=length, packing=False, **options)

    def load_state(self, run: dict[str, Any], folder: Path) -> None:
        self.loader.load_state_dict(run["position"])

    def batches(self) -> Iterator[tuple[Any, Any]]:
        while True:
            for batch in self.loader:
                yield batch, self.loader.state_dict()

    def forward_backward(self, batch: Any) -> dict[str, Tensor]:
        loss = self._loss(batch, self.step_number)
        self.booster.backward(loss, self.optimizer)
        return {"loss": loss.detach() / self.world.size}

    def run_to_end(self, stop: StopRequest) -> Trained:
        """Steps until the last, or until a signal; judges the draft at the end and writes it."""
        if not self.train(stop):
            return Trained(self.step_number, math.nan, self.parameters, False)
        loss = self._held_out()
        whole = self.booster.release(self.model)  # every rank gathers the parameters
        if self.world.is_main:
            steps, target = self.step_number, str(self.config.target)
            weights = {name: value.detach().cpu() for name, value in whole.state_dict().items()}
            facts = {"steps": steps, "loss": loss, "target": target}
            save_draft(self.config.out, self.sizes, weights, facts)
            shutil.rmtree(self.run.checkpoints.root, ignore_errors=True)
            self.say(f"{self.config.out}: written, loss of held-out texts {loss:.3f}")
        return Trained(self.step_number, loss, self.parameters)

    def _loss(self, batch: Any, step: int) -> Tensor:
        """Mean loss of a batch; the blocks of the mask begin anywhere, drawn for each step."""
        device, sizes = self.world.device, self.sizes
        tokens = batch["input_ids"].to(device)
        labels = tokens.masked_fill(batch["attention_mask"].to(device) == 0, -100)
        # A seed of its own for each step: a resumed run needs no saved generator.
        offset = derive(self.config.seed, 7, step, self.world.rank) % sizes.block
        seen = seen_keys(tokens.shape[1], sizes.block, offset).to(device)
        if self.config.distill:
            lesson = lesson_of(self.target, tokens, sizes.glimpses)
            return self.model(tokens, labels, seen, *lesson)
        keys, values = [], []
        if sizes.glimpses:
            keys, values, _ = glimpses_of(self.target, tokens, sizes.glimpses)
        return self.model(tokens, labels, seen, keys, values)

    @torch.no_grad()
    def _held_out(self) -> float:
        """Mean loss of held-out texts, of all ranks alike."""
        if not self.data.held_out:
            return math.nan
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        for number, batch in enumerate(self._loader(self.data.held_out, shuffle=False)):
            count = int(batch["attention_mask"][:, 1:].sum())
            loss = float(self._loss(batch, HELD_OUT + number))
            sums += torch.tensor([loss * count, count], dtype=torch.float64)
        all_reduce(sums, op="sum")
        return float(sums[0] / sums[1])


def glide_config(config: TrainDraftConfig, model: Any) -> GlideConfig:
    """Sizes of a draft for a target."""
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
