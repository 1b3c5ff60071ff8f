"""The trainable model, and the samples of each step: images, weights and random seeds.

Samples depend only on the options and the step: resumed runs, and runs with a different number of
ranks or micro-batches, use the same samples and noise.
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

    # Index of its picture; prior pictures follow the subject's.
    number: int
    # Weight of its loss in the step.
    weight: float
    # Seed of all its random numbers.
    seed: int


class SampleOrder:
    """Selects the samples of every step."""

    def __init__(self, config: DreamboothConfig, subjects: int, priors: int) -> None:
        self.config, self.subjects, self.priors = config, subjects, priors

    def samples(self, step: int) -> list[StepSample]:
        """Returns a step's samples, weighted for the mean loss of subjects plus that of priors."""
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
        """Selects an image; every image is used once per epoch."""
        count = (self.subjects, self.priors)[kind]
        epoch, place = divmod(step * self.config.batch_size + number, count)
        seed = derive(self.config.seed, 4 + kind, epoch)
        return int(np.random.default_rng(seed).permutation(count)[place])


def shares(
    samples: Sequence[StepSample], place: int, places: int, micro: int | None
) -> list[list[StepSample]]:
    """Returns a rank's micro-batches; their number and sizes are equal on all ranks."""
    # Pads with samples of weight zero.
    each = math.ceil(len(samples) / places)
    size = min(micro or each, each)
    each = math.ceil(each / size) * size
    padding = [replace(samples[0], weight=0.0)] * (each * places - len(samples))
    own = [*samples, *padding][place * each : (place + 1) * each]
    return [own[start : start + size] for start in range(0, each, size)]


# The trainable module of a base: its networks with adapters, and the optimizer.


# [Note: one module for two networks] Denoiser and text encoder are children of one module, whose
# forward is the base's loss. So there is a single model to boost: any plugin shards, offloads or
# saves both at once, and need not know which parts are trained.
class Losses(NamedTuple):
    """Losses of a micro-batch: weighted sum, and one per sample ``[N]``."""

    loss: Tensor
    each: Tensor


class SubjectModel(nn.Module):
    """The trainable networks of a base model, with its loss as forward."""

    def __init__(self, base: Base, train_text: bool) -> None:
        super().__init__()
        self._base = (base,)  # in a tuple, because a base may itself be a module
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
        """Computes losses of samples, or calls `job` if given, to run it in the boosted forward."""
        if job is not None:
            return job()
        assert latents is not None, "samples are given"
        each = self._base[0].loss(latents, texts, generators)
        weight = torch.tensor(list(weights), dtype=each.dtype, device=each.device)
        return Losses((each * weight).sum(), each.detach())


def make_student(
    base: Base, config: DreamboothConfig, texts: Sequence[str]
) -> tuple[SubjectModel, tuple[TokenHandle, ...]]:
    """Makes a base model trainable as the options specify: new tokens, adapters or all weights."""
    train_text, tokens = config.text_encoder or config.trains_token, ()
    if config.trains_token:
        if config.method != "full" and (name := getattr(base, "wordless", "")):
            option = "--method token" if config.method == "token" else "--learn-token"
            raise GulliverError(
                f"{option}: diffusers cannot load a token embedding into a {name}; omit it and "
                "use a rare word, or use --method full, which writes the whole pipeline"
            )
        tokens = (base.add_token(config.token, config.initial or config.class_word or None),)
    base.encode_prompts(texts, train_text)
    if train_text and base.text is None:
        raise GulliverError("the base model has no trainable text encoder; omit --text-encoder")
    networks = {"trained": base.trained, **({"text": base.text} if train_text else {})}
    for network in networks.values():
        assert network is not None, "the base was checked"
        network.requires_grad_(False)
    learning = [n for n in networks if n == "trained" or config.text_encoder]
    if config.method == "lora":
        _adapt(base, config, {name: networks[name] for name in learning})
    elif config.method == "full":
        for name in learning:
            networks[name].requires_grad_(True)
    _freeze_unused(base, train_text)
    for rows in rows_of(base, tokens):
        rows.requires_grad_(True)
    return SubjectModel(base, train_text), tokens


def rows_of(base: Base, tokens: Iterable[TokenHandle]) -> list[nn.Parameter]:
    found = [token.rows for token in tokens]
    for module in base.text.modules() if base.text is not None else ():
        found += [module.rows] if isinstance(module, TokenEmbedding) else []
    return list(dict.fromkeys(found))


def _freeze_unused(base: Base, train_text: bool) -> None:
    """Freezes parameters that no loss depends on, because DDP would wait for their gradients."""
    unused = getattr(base, "unused", None)
    if unused is None or not train_text or base.text is None:
        return
    starts = unused()
    for name, parameter in base.text.named_parameters():
        if name.startswith(starts):
            parameter.requires_grad_(False)


def _adapt(base: Base, config: DreamboothConfig, networks: Mapping[str, Any]) -> None:
    """Adds new adapters to networks, or those of ``--adapter``."""
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
    """Raises an error if only the adapter or only the options include the text encoder."""
    has = any(name.startswith("text.") for name in tensors)
    if has != ("text" in networks):
        wrong = "adapters for the text encoder; add" if has else "no text encoder adapters; omit"
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


def make_optimizer(student: SubjectModel, config: DreamboothConfig) -> torch.optim.AdamW:
    """Creates AdamW; token embeddings have their own learning rate and no weight decay."""
    trained = [(name, p) for name, p in student.named_parameters() if p.requires_grad]
    rows = [p for name, p in trained if name.endswith(".rows")]
    others = [p for name, p in trained if not name.endswith(".rows")]
    groups: list[dict[str, Any]] = [
        {"params": others, "lr": config.rate, "weight_decay": config.weight_decay},
        {"params": rows, "lr": config.token_rate, "weight_decay": 0.0},
    ]
    # The fused kernel cannot be selected for a model on meta.
    fused = not any(p.is_meta for _, p in trained)
    return torch.optim.AdamW([group for group in groups if group["params"]], fused=fused)
