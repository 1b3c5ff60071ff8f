"""Generation by a model whose sequences are shared: the prompt by the ring, then token by token.

Keys and values stay on the ranks that computed them. Each new token goes through the model on all
ranks; in each layer they exchange one output and one log-sum-exp. One rank chooses the next token
and broadcasts it, so that ranks cannot diverge.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.booster.hybrid.inputs import ShardedCache
from gulliver.comm.collectives import broadcast
from gulliver.comm.groups import RankGroup
from gulliver.errors import GulliverError, nearest

OPTIONS = (
    "attention_mask",
    "max_new_tokens",
    "max_length",
    "eos_token_id",
    "pad_token_id",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
)
# Settings of a model's generation_config that change nothing here.
UNTOLD = ("bos_token_id", "decoder_start_token_id", "use_cache", "transformers_version")

# Values with which other settings do nothing, besides None, 0 and False.
NEUTRAL = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "typical_p": 1.0,
    "return_dict_in_generate": False,
}


@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int | None = None,
    max_length: int | None = None,
    eos_token_id: int | Iterable[int] | None = None,
    pad_token_id: int | None = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    **others: Any,
) -> Tensor:
    """Continues prompts, as the model's own `generate` does; all ranks get the same."""
    # Settings that are not given are those of the model's generation_config.
    defaults: Any = getattr(model, "generation_config", None)
    _refuse(others, defaults)

    def setting(name: str, given: Any) -> Any:
        return getattr(defaults, name, None) if given is None else given

    mask = _left_padding(input_ids, attention_mask)
    ends = _ids(setting("eos_token_id", eos_token_id))
    pad = setting("pad_token_id", pad_token_id)
    count = _count(input_ids.shape[1], max_new_tokens, max_length, defaults)
    pick = _Pick(
        bool(setting("do_sample", do_sample)),
        setting("temperature", temperature),
        setting("top_k", top_k),
        setting("top_p", top_p),
    )
    adapter: Any = model.gulliver_adapter
    cache = ShardedCache(adapter.groups)
    found, going = [input_ids], torch.ones(len(input_ids), dtype=torch.bool)
    tokens = input_ids
    for _ in range(count):
        logits = _logits(model, tokens, mask, cache)
        new = pick(logits)
        _tell(new, adapter.tensor)
        _tell(new, adapter.groups.all)
        if ends:
            new = new.masked_fill(~going.to(new.device), ends[0] if pad is None else pad)
            going &= ~torch.isin(new.cpu(), torch.tensor(ends))
        tokens = new.unsqueeze(1)
        found.append(tokens)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1) if mask is not None else None
        if not bool(going.any()):
            break
    return torch.cat(found, 1)


def _logits(model: nn.Module, tokens: Tensor, mask: Tensor | None, cache: ShardedCache) -> Tensor:
    """The logits of the last token, ``[batch, vocabulary]``."""
    given: dict[str, Any] = {}
    if mask is not None:
        # Padding has no position: a row counts from its first token.
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        given = {"attention_mask": mask, "position_ids": positions[:, -tokens.shape[1] :]}
    elif cache.length:
        given = {"position_ids": torch.tensor([[cache.length]], device=tokens.device)}
    out: Any = model(
        input_ids=tokens, gulliver_cache=cache, logits_to_keep=1, return_dict=True, **given
    )
    return out.logits[:, -1]


class _Pick:
    """The next token of each row."""

    def __init__(
        self, sample: bool, temperature: float | None, top_k: int | None, top_p: float | None
    ) -> None:
        from transformers import (
            LogitsProcessorList,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        self.sample, self.steps = sample, LogitsProcessorList()
        if sample and temperature not in (None, 1.0):
            self.steps.append(TemperatureLogitsWarper(temperature))
        if sample and top_k:
            self.steps.append(TopKLogitsWarper(top_k))
        if sample and top_p is not None and top_p < 1:
            self.steps.append(TopPLogitsWarper(top_p))

    def __call__(self, logits: Tensor) -> Tensor:
        scores: Any = self.steps(None, logits.float())  # pyright: ignore[reportArgumentType]
        if not self.sample:
            return logits.argmax(-1)
        return torch.multinomial(scores.softmax(-1), 1).squeeze(1)


def _tell(tokens: Tensor, rank_group: RankGroup) -> None:
    if rank_group.size > 1:
        broadcast(tokens, _first(rank_group), rank_group.process_group)


def _first(rank_group: RankGroup) -> int:
    """Number that the process group gives the rank group's first rank."""
    return rank_group.group_order().index(0)


def _left_padding(ids: Tensor, mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    if mask.shape != ids.shape or not bool((mask[:, -1] != 0).all()):
        raise GulliverError(
            f"attention_mask {tuple(mask.shape)} of prompts {tuple(ids.shape)}: padding must be on "
            "the left, so that each row ends with a token"
        )
    return None if bool((mask != 0).all()) else mask


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else [int(v) for v in value]


def _count(prompt: int, new: int | None, whole: int | None, defaults: Any) -> int:
    if new is None and whole is None:
        new, whole = (getattr(defaults, n, None) for n in ("max_new_tokens", "max_length"))
    if new is not None:
        return new
    if whole is None:
        raise GulliverError("say how much to generate: max_new_tokens=...")
    return max(0, whole - prompt)


def _refuse(others: dict[str, Any], defaults: Any) -> None:
    changed = defaults.to_diff_dict() if defaults is not None else {}
    asked = {k: v for k, v in changed.items() if k not in OPTIONS and k[0] != "_"} | others
    for name, value in asked.items():
        if value and name not in UNTOLD and value != NEUTRAL.get(name):
            raise GulliverError(
                f"generate with {name}={value!r} is not supported where sequences are shared: "
                f"{nearest(name, OPTIONS)}"
            )
