"""``gulliver dreambooth``: a subject taught from a few pictures."""

from __future__ import annotations

from gulliver.comm import default_ranks, launch, under_launcher
from gulliver.dreambooth import DreamboothConfig, check_dreambooth, dreambooth


def dreambooth_command(config: DreamboothConfig, arguments: list[str]) -> int:
    """Teaches, on ranks of this machine that are started where a launcher has not."""
    check_dreambooth(config)
    ranks = config.ranks or max(default_ranks(), config.tp)
    if not under_launcher() and ranks > 1 and not config.plan:
        return launch("gulliver.cli", ["dreambooth", *arguments], ranks)
    # Stopped by a signal: what was asked for is not there yet.
    return 0 if dreambooth(config).finished else 143
