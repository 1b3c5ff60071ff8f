"""Trains a draft model on its target's keys and values."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from gulliver.booster.booster import Booster
from gulliver.booster.plugins import LowLevelZeroPlugin, TorchDDPPlugin
from gulliver.comm.collectives import all_reduce, barrier
from gulliver.comm.world import World, guard, init_world
from gulliver.errors import GulliverError
from gulliver.finetune.base import fingerprint_of
from gulliver.finetune.batches import make_batches
from gulliver.finetune.encode import load_tokenizer
from gulliver.finetune.texts import TextData, read_text
from gulliver.io.hub import fetch
from gulliver.jobs.log import derive
from gulliver.jobs.loop import LoopOptions, TrainingLoop, rate_factor
from gulliver.jobs.run_folder import RunFolder
from gulliver.jobs.stop import StopRequest
from gulliver.options import resolved
from gulliver.serve.attention import PagedSpan, attached, attention_bias, forward
from gulliver.serve.speculative.glide import Glide, GlideConfig, save_draft, seen_keys
from gulliver.serve.speculative.train_config import (
    MAY_CHANGE,
    ReportConfig,
    TrainDraftConfig,
    check_train_draft,
)
from gulliver.serve.weights import free_bytes, load

HALVES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "granite"),
    *("olmo", "olmo2", "olmoe", "starcoder2", "gemma"),
)
"""Targets whose rotary embeddings rotate halves of a head."""
UNROTATED = ("gpt2", "gpt_bigcode", "opt", "bloom")
"""Targets without rotary embeddings."""


def target_frequencies(model: Any) -> list[float]:
    """Frequencies of a model's rotary positions; empty if it has none."""
    kind = model.config.model_type
    if kind in UNROTATED:
        return []
    found = [m.inv_freq for m in model.modules() if isinstance(getattr(m, "inv_freq", 0), Tensor)]
    if kind not in HALVES or not found:
        raise GulliverError(
            f"drafts cannot attend to the keys of a {kind} model, only of {', '.join(HALVES)}, "
            f"{', '.join(UNROTATED)}; for others, use a small model or a lookup method"
        )
    return found[0].tolist()


class _KeptKeys:
    """Attention of packed texts of equal length, which keeps the keys of some layers."""

    def __init__(self, texts: int, layers: Sequence[int]) -> None:
        self._texts, self._layers = texts, set(layers)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.heads = 0

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        parts = [
            tensor.unflatten(1, (self._texts, -1)).transpose(0, 1) for tensor in (query, key, value)
        ]
        self.heads, length = query.shape[0], parts[0].shape[2]
        if layer in self._layers:
            self.keys[layer], self.values[layer] = parts[1].clone(), parts[2].clone()
        bias = None
        if slopes is not None or (window is not None and window < length):
            places = torch.arange(length, device=query.device)
            whole = PagedSpan(0, length, 0, places, None, places)
            bias = attention_bias(query, whole, window, slopes)
        out = F.scaled_dot_product_attention(
            *parts,
            attn_mask=bias,
            is_causal=bias is None,
            scale=scale,
            enable_gqa=query.shape[0] != key.shape[0],
        )
        return out.permute(0, 2, 1, 3).flatten(0, 1)


def glimpses_of(
    model: Any, tokens: Tensor, layers: Sequence[int]
) -> tuple[list[Tensor], list[Tensor], int]:
    """Returns the keys and values that serving would cache for texts, and the query head count."""
    kept, _ = _read(model, tokens, layers, False)
    return [kept.keys[n] for n in layers], [kept.values[n] for n in layers], kept.heads


def lesson_of(
    model: Any, tokens: Tensor, layers: Sequence[int], head: nn.Module | None = None
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Returns training data of a draft: the target's keys and values of texts, and its logits.

    With a `head`, logits are those of this output layer.
    """
    own = model.get_output_embeddings()
    model.set_output_embeddings(own if head is None else head)
    try:
        kept, logits = _read(model, tokens, layers, True)
    finally:
        model.set_output_embeddings(own)
    keys, values = ([of[n] for n in layers] for of in (kept.keys, kept.values))
    return keys, values, logits.unflatten(0, tokens.shape)


@torch.no_grad()
def _read(
    model: Any, tokens: Tensor, layers: Sequence[int], rows: bool
) -> tuple[_KeptKeys, Tensor]:
    """Runs a model on texts; if no logits are needed, computes only one row of them."""
    count, length = tokens.shape
    kept = _KeptKeys(count, layers)
    positions = torch.arange(length, device=tokens.device).repeat(count)
    wanted = torch.arange(count * length if rows else 1, device=tokens.device)
    with attached(model, kept):
        logits = forward(model, tokens.flatten(), positions, wanted)
    return kept, logits


# Trains a draft; the frozen target provides keys, values and logits of each batch.
#
# Read `train_draft`, then `DraftTrainer`. Only the draft is boosted, so any plugin can shard it;
# each rank has the full target, in evaluation mode. The run is stored in ``training`` in the
# draft's folder; its checkpoints are deleted when the draft is written.


LOG_EVERY = 20
HELD_OUT = 1 << 40
"""Step number, beyond any training step, that seeds the masks of held-out texts."""
FINGERPRINTS = {
    "target": "--target differs from the target of the run to resume",
    "data": "--data differs from the data of the run to resume",
}


def load_with_tokenizer(folder: Path, config: TrainDraftConfig | ReportConfig) -> tuple[Any, Any]:
    """Loads a target, and transformers' tokenizer, which reading data needs."""
    model, _ = load(folder, config.dtype)
    return model, load_tokenizer(fetch(folder), config.chat_template)


@dataclass(frozen=True)
class Trained:
    """Result of a training run."""

    # Optimizer steps so far.
    steps: int
    # Mean loss of held-out tokens, in nats; NaN without any, or before the end.
    loss: float
    # Number of the draft's parameters.
    parameters: int
    # Whether the run is complete; a signal stops it after a step.
    over: bool = True


def train_draft(
    config: TrainDraftConfig,
    target: tuple[Any, Any] | None = None,
    say: Callable[[str], None] = print,
) -> Trained:
    """Trains a draft model and writes its folder (collective)."""
    check_train_draft(config)
    assert config.target is not None
    world = init_world()
    say = say if world.is_main else lambda _: None
    with guard():
        model, tokenizer = target or load_with_tokenizer(config.target, config)
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
    """Trains a draft model to predict its target's tokens."""

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
        draft = Glide(sizes, frequencies)
        answers = torch.as_tensor(np.concatenate([e.ids[e.answer] for e in data.train]))
        counts = torch.bincount(answers.long(), minlength=sizes.vocabulary)
        frequent = counts.argsort(descending=True, stable=True)
        vectors, head = target.get_input_embeddings(), target.get_output_embeddings()
        draft.start_from(vectors.weight.cpu(), head.weight.cpu(), frequent[: sizes.drafted])
        draft.to(world.device)
        self.head = rows_of(target.get_output_embeddings(), draft.drafted)
        self._lessons: dict[bytes, list[Tensor]] = {}
        self._room = free_bytes(torch.device("cpu")) // 4 // world.size
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
        """Trains until the last step or a signal, then evaluates and writes the draft."""
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
        """Mean loss of a batch; the mask's block boundaries are random in each step."""
        device, sizes = self.world.device, self.sizes
        tokens, labels = (batch[name].to(device) for name in ("input_ids", "labels"))
        # Each step has its own seed, so a resumed run needs no saved generator.
        offset = derive(self.config.seed, 7, step, self.world.rank) % sizes.block
        seen = seen_keys(tokens.shape[1], sizes.block, offset).to(device)
        if not self.config.distill and not sizes.glimpses:
            return self.model(tokens, labels, seen)
        lengths = batch["attention_mask"].sum(1).tolist()
        lessons = [self._lesson(row[:n]) for row, n in zip(tokens, lengths, strict=True)]
        columns = [
            pad_sequence(list(of), batch_first=True).to(device) for of in zip(*lessons, strict=True)
        ]
        kept = [of.transpose(1, 2) for of in columns[: 2 * len(sizes.glimpses)]]
        teacher = columns[-1:] if self.config.distill else []
        return self.model(tokens, labels, seen, kept[::2], kept[1::2], *teacher)

    def _lesson(self, text: Tensor) -> list[Tensor]:
        """The target's keys and values [T, H, D] of a text, and its logits [T, N] if needed."""
        # Computed text by text, so that they do not depend on the batch and each is computed once
        # in all epochs, if memory allows: the target takes most of the time.
        name = text.cpu().numpy().tobytes()
        if name in self._lessons:
            return self._lessons[name]
        keys, values, logits = lesson_of(self.target, text[None], self.sizes.glimpses, self.head)
        lesson = [of[0].transpose(0, 1) for pair in zip(keys, values, strict=True) for of in pair]
        if self.config.distill:
            lesson.append(logits[0].half())
        self._room -= sum(of.nbytes for of in lesson)
        if self._room >= 0:
            self._lessons[name] = lesson = [of.cpu().contiguous() for of in lesson]
        return lesson

    @torch.no_grad()
    def _held_out(self) -> float:
        """Mean loss on held-out texts, equal on all ranks."""
        if not self.data.held_out:
            return math.nan
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        for number, batch in enumerate(self._loader(self.data.held_out, shuffle=False)):
            count = int((batch["labels"][:, 1:] != -100).sum())
            loss = float(self._loss(batch, HELD_OUT + number))
            sums += torch.tensor([loss * count, count], dtype=torch.float64)
        all_reduce(sums, op="sum")
        return float(sums[0] / sums[1])


def rows_of(layer: nn.Linear, rows: Tensor) -> nn.Linear:
    """A linear layer with some of the outputs of another one; the same one if there are none."""
    if not len(rows):
        return layer
    part = copy.copy(layer)
    part._parameters = dict(layer._parameters)
    part.weight = nn.Parameter(layer.weight[rows], requires_grad=False)
    if layer.bias is not None:
        part.bias = nn.Parameter(layer.bias[rows], requires_grad=False)
    return part


def glide_config(config: TrainDraftConfig, model: Any) -> GlideConfig:
    device = next(model.parameters()).device
    count = model.config.num_hidden_layers
    layers = config.glimpses or tuple(range(max(0, count - config.layers), count))
    layers = (layers[0],) * (config.layers - len(layers)) + tuple(layers)
    if not all(0 <= layer < count for layer in layers):
        raise GulliverError(f"--glimpses {layers}: the target has layers 0 to {count - 1}")
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    keys, _, heads = glimpses_of(model, token, (*layers, count - 1))
    width = model.config.hidden_size
    hidden = config.hidden or max(64, -(-width // 2 // 64) * 64)
    heads_of_own = max(1, hidden // 64)
    if hidden % heads_of_own or hidden // heads_of_own % 2:
        raise GulliverError(f"--hidden {hidden}: use a multiple of 64, or an even number below 128")
    dim = keys[0].shape[-1]
    wide = config.feed_forward or -(-hidden * 8 // 3 // 16) * 16
    if config.plain:
        # Adds the size of two matrices (width x target heads) to the feed-forward part's three.
        wide += round(2 * heads * dim / 3)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    return GlideConfig(
        vocabulary,
        *(hidden, heads_of_own, wide, config.layers, () if config.plain else layers),
        *(heads, dim, config.block),
        0 if config.drafted >= vocabulary else config.drafted,
    )
