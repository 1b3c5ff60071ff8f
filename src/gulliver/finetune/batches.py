"""Builds batches: packed if the model supports this exactly, otherwise sorted by length."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gulliver.data.loader import DataLoader
from gulliver.data.sampler import ResumableSampler
from gulliver.errors import GulliverError
from gulliver.families.lookup import type_of
from gulliver.families.loss import asks_routers, has_known_forward, hugging_face_of
from gulliver.finetune.encode import Example
from gulliver.solve.packing import pack

_TESTED = (
    "apertus arcee aria_text axk1 beam bitnet codegen cohere cohere2 cohere2_moe ctrl cwm "
    "deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo "
    "flint gemma gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neo "
    "gpt_neox gpt_neox_japanese gptj granite granite_swa granitemoe granitemoe_swa "
    "granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 "
    "jetmoe kolibri1 laguna llama mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 "
    "mistral mixtral modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi "
    "phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 "
    "vaultgemma youtu "
)
EXACT = frozenset(_TESTED.split())  # model types of transformers for which packing is exact
ATTENTIONS = ("eager", "sdpa")  # attention implementations whose masks are exact
LAYERS = {"full_attention", "sliding_attention"}
"""Supported kinds of layers; others keep recurrent state or attend to selected tokens."""


# [Note: how a model knows] Windows, chunks and linear attention need other masks than full
# attention. Recent transformers models build all their masks from ``position_ids`` that restart, so
# packed batches have positions and no mask, and no mask of ours has to be right for each layer of
# each family. A test compares packed logits, loss and all gradients with those of each sequence
# alone, in float64, for every listed type (`tests/finetune/test_finetune_packing.py`); other types
# are rejected.
def packing_support(model: nn.Module, length: int | None = None) -> str | None:
    """Returns why packing would not be exact for a model; None if it would be.

    Args:
        model: any model, possibly adapted by PEFT.
        length: maximum sequence length in tokens; None if unknown.
    """
    model = hugging_face_of(model)
    kind = type_of(model)
    if kind not in EXACT or not has_known_forward(model):
        return f"{kind} is not known to support packing"
    config = getattr(model, "config", None)
    attention = getattr(config, "_attn_implementation", "eager")
    if attention not in ATTENTIONS:
        return (
            f"attention {attention!r} is not known to support packing; load the model with 'sdpa' "
            "or 'eager'"
        )
    others = {str(kind) for kind in getattr(config, "layer_types", None) or ()} - LAYERS
    if others:
        return f"layers of kind {sorted(others)[0]!r} do not support packing"
    if getattr(config, "use_cache", False):
        return "a model with a cache does not support packing; set model.config.use_cache to False"
    if _frequencies_vary(config, length):
        return "its rotary frequencies depend on the longest sequence of a row"
    if asks_routers(model, {}):
        return "the router loss would count padding; set output_router_logits to False"
    return None


def _frequencies_vary(config: Any, length: int | None) -> bool:
    """Whether a sequence of this length changes the rotary frequencies of others in its batch."""
    rope = getattr(config, "rope_parameters", None) or {}
    # One for all layers, or one per kind.
    for one in [value for value in rope.values() if isinstance(value, dict)] or [rope]:
        kind = str(one.get("rope_type"))
        if "dynamic" in kind or kind == "longrope":
            known = one.get("original_max_position_embeddings") or config.max_position_embeddings
            if length is None or length > known:
                return True
    return False


# Batches of sequences, packed or grouped by length; independent of the number of ranks.
#
# An epoch is a list of optimizer steps, each a list of rows; it depends only on the seed and the
# epoch. A step is split into a part for each micro-batch of each rank, so any number of ranks and
# any accumulation use the same tokens per step, and the position is a number of steps.


IGNORED = -100  # ignored label in the losses of torch and transformers
SHORTEST_GRAIN = 8
GRAINS = 32
"""Sorted batches treat lengths as equal if they differ by less than 1 / GRAINS of the longest."""

Rows = list[list[int]]  # indices of the sequences of each row


# [Note: as many steps in each epoch] Both orders are laid out once, on the sorted lengths:
# `_packed` fills rows of `length` tokens by best fit, `_sorted` forms batches with about as many
# tokens. An epoch then shuffles sequences of equal length among their positions, and shuffles the
# rows (or the steps, if lengths differ). So every epoch has another order and the same number of
# steps, which the learning rate schedule needs.
#
# [Note: the memory of a step] A step fits `tokens` // `length` rows of full length. A sorted step
# with sequences of at most half that length has twice as many rows, and so on: a multiple, so that
# no rank's part has more tokens than with full rows, if ranks times micro-batches divide the number
# of rows.
@dataclass(frozen=True)
class StepPart:
    """A rank's share of a micro-batch."""

    # Indices of the sequences of each row; empty if a step has fewer rows than parts.
    rows: Rows
    # Tokens per row, including padding.
    length: int
    # Trained tokens of the whole step, over all ranks and micro-batches.
    items: int


def make_batches(
    examples: Sequence[Example],
    *,
    tokens: int,
    length: int,
    packing: bool,
    seed: int = 0,
    accumulate: int = 1,
    rank: int = 0,
    ranks: int = 1,
    shuffle: bool = True,
    multiple: int = 1,
    padding: int = 0,
) -> DataLoader:
    """Creates the loader for training or evaluation.

    A batch is a dict of arguments for a transformers model, plus `num_items`: the number of trained
    tokens in the whole step, over all ranks and micro-batches. A batch's share of the step's mean
    loss is the sum of its token losses divided by `num_items`.

    - packed: ``input_ids``, ``labels``, ``position_ids``, each ``[B, L]``. Positions restart with
      each sequence, so that sequences do not attend to each other (with ``use_cache=False``).
    - otherwise: ``input_ids``, ``labels``, ``attention_mask``, each ``[B, L]``, padded at the end.

    Args:
        examples: sequences of at most `length` tokens.
        tokens: maximum tokens of an optimizer step over all ranks and micro-batches, including
            padding; at least one row of `length`.
        length: length of a packed row and maximum sequence length, in tokens.
        packing: whether several sequences share a row; see `packing_support`.
        seed: seed for shuffling.
        accumulate: number of micro-batches per step.
        rank: data-parallel rank of this process.
        ranks: number of data-parallel ranks.
        shuffle: whether to reshuffle each epoch; otherwise the longest sequences come first.
        multiple: number that must divide the length of every batch.
        padding: padding token; it is never trained on or attended to.

    Returns:
        A loader that resumes from its state at the next step, with any `ranks` and `accumulate`.
        All ranks have the same number of batches, `accumulate` per step.

    Raises:
        GulliverError: there are no sequences, one is too long, the rank is out of range, or
            `tokens` is too small.
    """
    sampler = StepSampler(
        examples, tokens, length, packing, seed, accumulate, rank, ranks, shuffle, multiple
    )
    return _Loader(
        _Batches(examples, packing, padding),
        batch_sampler=sampler,
        collate_fn=_as_is,
        seed=abs(seed),
        rank=rank,
        world_size=ranks,
        threaded=True,
    )


class _Loader(DataLoader):
    """Iterates over the micro-batches of steps; its position is counted in steps."""

    batch_sampler: StepSampler

    def __len__(self) -> int:
        return super().__len__() * self.batch_sampler.accumulate

    def __iter__(self) -> Iterator[Any]:
        for step in super().__iter__():
            yield from step


class StepSampler(ResumableSampler):
    """Selects this rank's part of each micro-batch; arguments as in `make_batches`."""

    kind = "sampler of sequences"

    def __init__(
        self,
        examples: Sequence[Example],
        tokens: int,
        length: int,
        packing: bool,
        seed: int = 0,
        accumulate: int = 1,
        rank: int = 0,
        ranks: int = 1,
        shuffle: bool = True,
        multiple: int = 1,
    ) -> None:
        super().__init__(rank, ranks, seed)
        self.lengths = np.array([len(one) for one in examples], dtype=np.int64)
        self._learnt = np.array([one.learnt for one in examples], dtype=np.int64)
        if not len(examples):
            raise GulliverError("there are no sequences to batch; add some to the data")
        if self.lengths.max() > length:
            raise GulliverError(
                f"a sequence of {examples[int(self.lengths.argmax())].source} has "
                f"{self.lengths.max()} tokens, more than length={length}"
            )
        if tokens < length or accumulate < 1:
            raise GulliverError(
                f"tokens={tokens} per step is less than one sequence of {length}; use {length} or "
                "more"
            )
        self._length, self._rows, self._packing = length, tokens // length, packing
        self.accumulate, self._shuffle, self._multiple = accumulate, shuffle, multiple
        grain = 1 if packing else max(SHORTEST_GRAIN, length // GRAINS)
        # Lengths that count as equal; shuffled together in each epoch.
        self._alike = np.minimum(-(-self.lengths // grain) * grain, length)
        self._places = (_packed if packing else _sorted)(
            np.sort(self._alike)[::-1], length, self._rows
        )

    def __len__(self) -> int:
        if self._packing:
            return -(-len(self._places[0]) // self._rows)
        return len(self._places)

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        digest.update(
            f"{self.seed}:{self._length}:{self._rows}:{self._packing}:{self._shuffle}".encode()
        )
        digest.update(self.lengths.tobytes() + self._learnt.tobytes())
        return digest.hexdigest()

    def batches(self, epoch: int) -> list[Rows]:
        draw = np.random.Generator(np.random.Philox(key=[self.seed % 2**64, epoch]))
        ties = (
            draw.permutation(len(self.lengths)) if self._shuffle else np.arange(len(self.lengths))
        )
        # Longest first; equal lengths in the order of the ties.
        order = np.lexsort((ties, -self._alike))
        groups = [[order[row].tolist() for row in group] for group in self._places]
        if self._packing:
            rows = groups[0]
            if self._shuffle:
                rows = [rows[n] for n in draw.permutation(len(rows))]
            return [rows[at : at + self._rows] for at in range(0, len(rows), self._rows)]
        return [groups[n] for n in draw.permutation(len(groups))] if self._shuffle else groups

    def _share(self, batch: Rows, epoch: int, number: int) -> list[StepPart]:
        longest = max(int(self.lengths[row].sum()) for row in batch)
        length = -(-longest // self._multiple) * self._multiple
        items = int(sum(self._learnt[row].sum() for row in batch))
        count, found = self.world_size * self.accumulate, []
        for part in range(self.rank, count, self.world_size):
            rows = batch[len(batch) * part // count : len(batch) * (part + 1) // count]
            found.append(StepPart(rows, length, items))
        return found


def _packed(lengths: np.ndarray[Any, Any], length: int, rows: int) -> list[Rows]:
    """Packs sequences into rows; returns one group of rows, as positions in the sorted lengths."""
    return [pack(lengths.tolist(), length).bins]


def _sorted(lengths: np.ndarray[Any, Any], length: int, rows: int) -> list[Rows]:
    """Returns a group per step: adjacent positions in the sorted lengths, one per row."""
    groups, at = [], 0
    while at < len(lengths):
        size = rows * max(1, length // int(lengths[at]))
        groups.append([[place] for place in range(at, min(at + size, len(lengths)))])
        at += size
    return groups


class _Batches(torch.utils.data.Dataset[Any]):
    """Builds the tensors of a step's parts."""

    def __init__(self, examples: Sequence[Example], packing: bool, padding: int) -> None:
        self._examples, self._packing, self._padding = examples, packing, padding

    def __len__(self) -> int:
        return len(self._examples)

    def __getitems__(self, parts: Sequence[StepPart]) -> list[dict[str, Any]]:
        return [self._batch(part) for part in parts]

    def _batch(self, part: StepPart) -> dict[str, Any]:
        # A rank without rows still takes part in the step, with a token that is not trained.
        rows = part.rows or [[]]
        ids = torch.full((len(rows), part.length), self._padding, dtype=torch.int64)
        labels = torch.full_like(ids, IGNORED)
        positions = torch.zeros_like(ids)
        mask = torch.zeros_like(ids)
        mask[:, 0] = 1
        for number, row in enumerate(rows):
            at = 0
            for one in (self._examples[place] for place in row):
                where = slice(at, at := at + len(one))
                ids[number, where] = torch.from_numpy(one.ids)
                learnt = torch.from_numpy(one.answer)
                labels[number, where][learnt] = ids[number, where][learnt]
                positions[number, where] = torch.arange(len(one))
                mask[number, where] = 1
        batch: dict[str, Tensor | int] = {"input_ids": ids, "labels": labels}
        batch |= {"position_ids": positions} if self._packing else {"attention_mask": mask}
        return {**batch, "num_items": part.items}


def _as_is(batch: Any) -> Any:
    return batch
