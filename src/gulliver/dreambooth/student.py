"""Samples of a step: which pictures, how they weigh, and what their random numbers come of.

All of it follows from the options and the number of the step, so that a run on other ranks, in
other micro-batches, or resumed, sees the same samples with the same noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gulliver.dreambooth.base import Base, TokenHandle
from gulliver.dreambooth.config import DreamboothConfig
from gulliver.dreambooth.words import TokenEmbedding
from gulliver.errors import GulliverError, missing_extra, nearest
from gulliver.finetune.adapters import adapter_name, fill_adapters
from gulliver.jobs.log import derive


@dataclass(frozen=True)
class StepSample:
    """A sample of a step."""

    # Number of its picture among the subject's, and after them the prior ones.
    number: int
    # Weight of its loss in that of the step.
    weight: float
    # Seed of all that is random about it.
    seed: int


class SampleOrder:
    """The samples of every step."""

    def __init__(self, config: DreamboothConfig, subjects: int, priors: int) -> None:
        self.config, self.subjects, self.priors = config, subjects, priors

    def samples(self, step: int) -> list[StepSample]:
        """Samples of a step: the mean loss of the subject's, and of the prior ones by a weight."""
        config, size = self.config, self.config.batch_size
        found = [(self._picture(0, step, n), 1 / size) for n in range(size)]
        if self.priors:
            share = config.prior_weight / size
            found += [(self.subjects + self._picture(1, step, n), share) for n in range(size)]
        return [
            StepSample(picture, weight, derive(config.seed, 3, step, number))
            for number, (picture, weight) in enumerate(found)
        ]

    def _picture(self, kind: int, step: int, number: int) -> int:
        """A picture: each is shown once before one is shown again."""
        count = (self.subjects, self.priors)[kind]
        epoch, place = divmod(step * self.config.batch_size + number, count)
        seed = derive(self.config.seed, 4 + kind, epoch)
        return int(np.random.default_rng(seed).permutation(count)[place])


def shares(
    samples: Sequence[StepSample], place: int, places: int, micro: int | None
) -> list[list[StepSample]]:
    """Micro-batches of a rank; all ranks have as many, of the same sizes."""
    # What does not divide is filled up with samples that weigh nothing.
    each = math.ceil(len(samples) / places)
    size = min(micro or each, each)
    each = math.ceil(each / size) * size
    padding = [replace(samples[0], weight=0.0)] * (each * places - len(samples))
    own = [*samples, *padding][place * each : (place + 1) * each]
    return [own[start : start + size] for start in range(0, each, size)]


# What learns of a base: one module with its networks, adapters in them, and the optimizer.


# [Note: one module for two networks] Denoiser and text encoder are children of one module, whose
# forward is the base's loss. So there is one model to boost: whichever plugin shards, off-loads or
# saves it does so for both at once, and every combination of what learns is the same to it.
class Losses(NamedTuple):
    """Losses of a micro-batch: their weighted sum, and each of them ``[N]``."""

    loss: Tensor
    each: Tensor


class Student(nn.Module):
    """The networks of a base that learn, with its loss as forward."""

    def __init__(self, base: Base, train_text: bool) -> None:
        super().__init__()
        self._base = (base,)  # in a tuple: a base may be a module itself
        self.trained = base.trained
        if train_text:
            self.text = base.text

    def forward(
        self,
        latents: Tensor | None = None,
        texts: Sequence[str] = (),
        generators: Sequence[torch.Generator] = (),
        weights: Sequence[float] = (),
        job: Callable[[], Any] | None = None,
    ) -> Any:
        """The losses of samples; or what `job` gives, called with the boosted networks."""
        if job is not None:
            return job()
        assert latents is not None, "there are samples"
        each = self._base[0].loss(latents, texts, generators)
        weight = torch.tensor(list(weights), dtype=each.dtype, device=each.device)
        return Losses((each * weight).sum(), each.detach())


def make_student(
    base: Base, config: DreamboothConfig, texts: Sequence[str]
) -> tuple[Student, tuple[TokenHandle, ...]]:
    """Lets a base learn as the options say: new words, adapters, or all weights."""
    train_text, tokens = config.text_encoder or config.learns_token, ()
    if config.learns_token:
        if config.method != "full" and (name := getattr(base, "wordless", "")):
            option = "--method token" if config.method == "token" else "--learn-token"
            raise GulliverError(
                f"{option}: diffusers loads no embedding of a word into a {name}: take a rare word "
                "and leave it out, or take --method full, which writes the whole pipeline"
            )
        tokens = (base.add_token(config.token, config.initial or config.class_word or None),)
    base.settle(texts, train_text)
    if train_text and base.text is None:
        raise GulliverError("the base has no text encoder that could learn: leave that out")
    networks = {"trained": base.trained, **({"text": base.text} if train_text else {})}
    for network in networks.values():
        assert network is not None, "it is checked"
        network.requires_grad_(False)
    learning = [n for n in networks if n == "trained" or config.text_encoder]
    if config.method == "lora":
        _adapt(base, config, {name: networks[name] for name in learning})
    elif config.method == "full":
        for name in learning:
            networks[name].requires_grad_(True)
    _leave_unused(base, train_text)
    for rows in rows_of(base, tokens):
        rows.requires_grad_(True)
    return Student(base, train_text), tokens


def rows_of(base: Base, tokens: Iterable[TokenHandle]) -> list[nn.Parameter]:
    """Rows of new words, in all text encoders."""
    found = [token.rows for token in tokens]
    for module in base.text.modules() if base.text is not None else ():
        found += [module.rows] if isinstance(module, TokenEmbedding) else []
    return list(dict.fromkeys(found))


def _leave_unused(base: Base, train_text: bool) -> None:
    """Freezes parameters that no loss depends on: some ways to share would wait for them."""
    unused = getattr(base, "unused", None)
    if unused is None or not train_text or base.text is None:
        return
    starts = unused()
    for name, parameter in base.text.named_parameters():
        if name.startswith(starts):
            parameter.requires_grad_(False)


def _adapt(base: Base, config: DreamboothConfig, networks: Mapping[str, Any]) -> None:
    """Puts new adapters into networks, or those of ``--adapter``."""
    try:
        import peft
    except ImportError:
        raise missing_extra("--method lora needs PEFT", "dreambooth") from None
    tensors, given = ({}, {}) if config.adapter is None else base.read_adapter(config.adapter)
    usual = {"trained": base.targets, "text": base.text_targets}
    for number, (name, network) in enumerate(networks.items()):
        values = dict(given.get(name) or {})
        targets: Any = values.get("target_modules") or usual[name]
        if name == "trained" and config.lora_targets:
            targets = config.lora_targets
            _check_targets(network, targets)
        rank = int(values.get("r") or config.lora_rank)  # type: ignore[call-overload]
        wanted = peft.LoraConfig(
            r=rank,
            lora_alpha=values.get("lora_alpha") or config.lora_alpha or rank,  # type: ignore[arg-type]
            target_modules=targets if isinstance(targets, str) else list(targets),
        )
        torch.manual_seed(derive(config.seed, 0, number))
        with next(network.parameters()).device:
            peft.inject_adapter_in_model(wanted, network)
        for path, parameter in network.named_parameters():
            parameter.requires_grad_(".lora_" in path)
    if config.adapter is not None:
        own = {
            adapter_name(f"{side}.{path}"): parameter
            for side, network in networks.items()
            for path, parameter in network.named_parameters()
            if ".lora_" in path
        }
        _check_sides(config, tensors, networks)
        fill_adapters(own, tensors, config.adapter)


def _check_sides(
    config: DreamboothConfig, tensors: Mapping[str, Tensor], networks: Mapping[str, Any]
) -> None:
    """Refuses an adapter of a text encoder that does not learn, or of none where it does."""
    has = any(name.startswith("text.") for name in tensors)
    if has != ("text" in networks):
        wrong = (
            "adapters of the text encoder: add" if has else "none of the text encoder: leave out"
        )
        raise GulliverError(f"--adapter {config.adapter} has {wrong} --text-encoder")


def _check_targets(network: nn.Module, targets: Sequence[str]) -> None:
    paths = [path for path, module in network.named_modules() if not list(module.children())]
    for target in targets:
        if not any(path == target or path.endswith(f".{target}") for path in paths):
            last = {path.rpartition(".")[2] for path in paths}
            raise GulliverError(
                f"--lora-targets {target}: {type(network).__name__} has no such layer; "
                f"{nearest(target, last)}"
            )


def adapters_of(base: Base) -> dict[str, dict[str, object]]:
    """PEFT's configurations of the adapters in a base's networks, as plain values."""
    found = {}
    for name in ("trained", "text"):
        configs = getattr(getattr(base, name), "peft_config", None)
        if configs:
            values = configs["default"].to_dict()
            plain = {k: sorted(v) if isinstance(v, set) else v for k, v in values.items()}
            found[name] = {k: v if _is_plain(v) else str(v) for k, v in plain.items()}
    return found


def _is_plain(value: object) -> bool:
    return value is None or type(value) in (bool, int, float, str, list, dict, tuple)


def make_optimizer(student: Student, config: DreamboothConfig) -> torch.optim.AdamW:
    """AdamW of what learns; rows of new words have a rate of their own, and do not decay."""
    trained = [(name, p) for name, p in student.named_parameters() if p.requires_grad]
    rows = [p for name, p in trained if name.endswith(".rows")]
    others = [p for name, p in trained if not name.endswith(".rows")]
    groups: list[dict[str, Any]] = [
        {"params": others, "lr": config.rate, "weight_decay": config.weight_decay},
        {"params": rows, "lr": config.token_rate, "weight_decay": 0.0},
    ]
    # A model on meta has no device that the fused kernel could be asked for.
    fused = not any(p.is_meta for _, p in trained)
    return torch.optim.AdamW([group for group in groups if group["params"]], fused=fused)
