"""``gulliver speculate``: trains a draft for a model, and reports what drafts are worth."""

from __future__ import annotations

import json

from gulliver.comm import default_ranks, launch, under_launcher
from gulliver.serve.speculative import (
    ReportConfig,
    SpeculateConfig,
    check_train_draft,
    report,
    train_draft,
)


def speculate_command(config: SpeculateConfig, arguments: list[str]) -> int:
    """Trains on ranks of this machine where a launcher has started none, or reports."""
    action = config.action
    if isinstance(action, ReportConfig):
        found = report(action)
        print(json.dumps(found.to_plain()) if action.json else found)
        return 0
    check_train_draft(action)
    ranks = action.ranks or default_ranks()
    if not under_launcher() and ranks > 1:
        return launch("gulliver.cli", ["speculate", *arguments], ranks)
    train_draft(action)
    return 0
