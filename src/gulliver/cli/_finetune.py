"""``gulliver finetune``: a better model from a folder and files of texts."""

from __future__ import annotations

from gulliver.comm import default_ranks, launch, under_launcher
from gulliver.finetune import FinetuneConfig, check_finetune, finetune


def finetune_command(config: FinetuneConfig, arguments: list[str]) -> int:
    """Fine-tunes, on ranks of this machine that are started where a launcher has not."""
    check_finetune(config)
    ranks = config.ranks or max(default_ranks(), config.ranks_of_a_model)
    if not under_launcher() and ranks > 1 and not config.dry_run:
        return launch("gulliver.cli", ["finetune", *arguments], ranks)
    outcome = finetune(config)
    # Stopped by a signal: what was asked for is not there yet.
    return 0 if outcome.finished else 143
