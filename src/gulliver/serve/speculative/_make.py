"""`speculator`: what ``LLM(folder, speculation=...)`` understands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError, nearest
from gulliver.serve.speculative._folder import is_draft, load_draft
from gulliver.serve.speculative._glide_draft import GlideDraft
from gulliver.serve.speculative._lookup import LookUp
from gulliver.serve.speculative._proposal import Proposer
from gulliver.serve.speculative._small import SmallModel, check_tokenizers
from gulliver.serve.speculative._speculator import SpeculationOptions, Speculator

LOOK_UPS = ("ngram", "suffix")


def make_speculator(
    kind: str | Path,
    options: SpeculationOptions | None = None,
    tokenizer: Any | None = None,
    sequences: int = 64,
) -> Speculator:
    """Makes a drafter.

    Args:
        kind: ``"ngram"`` looks up what followed the same tokens in the same text, ``"suffix"`` in
            any text; otherwise the folder of a draft: of a small model that transformers wrote, or
            one that ``gulliver speculate train`` made.
        options: limits.
        tokenizer: tokenizer of the target, with which that of a small model is compared.
        sequences: sequences that run at a time.

    Raises:
        GulliverError: the folder is none of a draft.
    """
    return Speculator(_proposer(kind, tokenizer, sequences), options)


def _proposer(kind: str | Path, tokenizer: Any | None, sequences: int) -> Proposer:
    if kind in LOOK_UPS:
        return LookUp(shared=kind == "suffix")
    folder = Path(kind)
    if not folder.is_dir():
        raise GulliverError(
            f"speculation={str(kind)!r} is neither a folder of a draft nor a look-up: "
            f"{nearest(str(kind), LOOK_UPS)}"
        )
    if is_draft(folder):
        return GlideDraft(load_draft(folder))
    from gulliver.serve._load import load

    model, own = load(folder)
    check_tokenizers(own, tokenizer)
    return SmallModel(model, sequences=sequences)
