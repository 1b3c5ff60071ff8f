"""Models of `benchmarks.speculation`: a target and its drafts, trained on Python's own sources."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks._models import llama

CONTEXT = 256
VOCABULARY = 1024  # Tokens of the byte-pair encoding: few, so that a draft's embedding is small
ROWS, PEAK, FALLING = 6, 3e-3, 250
"""Texts of a step of the target, its highest learning rate, and steps in which that falls."""
DRAFTS = {
    # Kind: what `gulliver speculate train` is told beside. All have as many parameters.
    "glide": {"block": 5, "glimpses": (2,)},
    "glide without block mask": {"block": 1, "glimpses": (2,)},
    "plain": {"plain": True},
}
HIDDEN = 128  # Width of the drafts
DRAFT_ROWS = 8  # Texts of a step of a draft


def sources(most: int) -> list[str]:
    """Files of the standard library, in an order that does not depend on the machine."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path for path in folder.glob("*.py") if path.stat().st_size > 4000)
    return [path.read_text(encoding="utf-8", errors="ignore") for path in names[:most]]


def make_tokenizer(texts: Sequence[str]) -> Any:
    """A byte-pair encoding of the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")


def train_target(folder: Path, steps: int) -> None:
    """Trains the target: a Llama of 4 layers and 2 M parameters, on all but every tenth text."""
    texts = sources(150)
    tokenizer = make_tokenizer(texts)
    rows = [tokenizer(text)["input_ids"] for n, text in enumerate(texts) if n % 10]
    ids = torch.tensor([token for row in rows for token in (*row, 0)])
    torch.manual_seed(0)
    special = {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 0}
    model = llama(VOCABULARY, 192, 512, 4, 3, length=CONTEXT, **special)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95))
    begun = perf_counter()
    for step in range(steps):
        rate = PEAK * min(1, (step + 1) / 50, max((steps - step) / FALLING, 0.02))
        optimizer.param_groups[0]["lr"] = rate
        starts = torch.randint(len(ids) - CONTEXT, (ROWS,))
        batch = torch.stack([ids[start : start + CONTEXT] for start in starts])
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            spent = perf_counter() - begun
            print(f"target, step {step + 1}: {loss.item():.3f}, {spent:.0f} s", file=sys.stderr)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_texts(folder: Path) -> tuple[Path, Path]:
    """Writes the texts that drafts learn from, and those that are kept apart, as JSON Lines."""
    import json

    files = folder / "learnt.jsonl", folder / "apart.jsonl"
    texts = sources(150)
    for file, apart in zip(files, (False, True), strict=True):
        kept = [text for n, text in enumerate(texts) if (n % 10 == 0) == apart]
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in kept))
    return files


def make_models(folder: Path, target_steps: int, draft_steps: int, seeds: int = 1) -> None:
    """Trains what is not in the folder yet."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "target" / "config.json").exists():
        train_target(folder / "target", target_steps)
    write_texts(folder)
    for seed in range(seeds):
        for name in DRAFTS:
            if not (draft_folder(folder, name, seed) / "config.json").exists():
                print(f"training the draft: {name}, seed {seed}", file=sys.stderr)
                train_one(folder, name, seed, draft_steps)


def draft_folder(folder: Path, name: str, seed: int) -> Path:
    return folder / f"{name.replace(' ', '-')}-{seed}"


def train_one(folder: Path, name: str, seed: int, steps: int) -> None:
    """Trains a draft, or goes on with it."""
    from gulliver.serve.speculative import TrainDraftConfig
    from gulliver.serve.speculative.train import train_draft

    out = draft_folder(folder, name, seed)
    config = TrainDraftConfig(
        data=(folder / "learnt.jsonl",),
        held_out=folder / "apart.jsonl",
        seq_length=CONTEXT,
        target=folder / "target",
        out=out,
        hidden=HIDDEN,
        steps=steps,
        seed=seed,
        batch_tokens=DRAFT_ROWS * CONTEXT,
        learning_rate=3e-3,
        save_every=100,
        resume=(out / "training" / "config.json").exists(),
        **DRAFTS[name],  # type: ignore[arg-type]
    )
    train_draft(config, say=lambda line: print(line, file=sys.stderr))
