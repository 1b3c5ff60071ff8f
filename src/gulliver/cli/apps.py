"""Commands that are one call into a package: app, finetune, dreambooth, quantize and speculate.

Each imports its package when it runs, so that startup is fast.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict
from typing import TYPE_CHECKING

from gulliver.cli.dispatch import STOPPED
from gulliver.cli.options import AppConfig, QuantizeConfig
from gulliver.errors import UsageError

if TYPE_CHECKING:
    from gulliver.dreambooth.config import DreamboothConfig
    from gulliver.finetune.config import FinetuneConfig
    from gulliver.jobs.loop import Outcome
    from gulliver.serve.speculative.train_config import ReportConfig, TrainDraftConfig


def ended(outcome: Outcome) -> int:
    """Returns the exit code of a run; rank 0 prints the path of a finished run's result."""
    if outcome.finished and outcome.result is not None and os.environ.get("RANK", "0") == "0":
        print(outcome.result)
    return 0 if outcome.finished else STOPPED


def app_command(config: AppConfig) -> int:
    from gulliver.app.server import find_run, serve
    from gulliver.app.worker import Source

    if config.model is None:
        config.refuse_parts()
        source = Source(run=find_run(config.run))
    elif config.run is not None:
        raise UsageError(f"run {config.run} and --model {config.model} cannot be combined")
    else:
        parts = config.autoencoder, config.text_encoder, config.clip
        source = Source(None, config.model, *parts, keep=config.keep)

    def ended(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, ended)
    serve(source, config.out, config.host, config.port)
    return 0


def finetune_command(config: FinetuneConfig, arguments: list[str]) -> int:
    """Fine-tunes, starting ranks on this machine if no launcher has done so."""
    from gulliver.comm.launcher import default_ranks, launch, under_launcher
    from gulliver.finetune.finetuner import finetune

    ranks = config.ranks or max(default_ranks(), config.ranks_of_a_model)
    if not under_launcher() and ranks > 1 and not config.dry_run:
        return launch("gulliver.cli", arguments, ranks)
    return ended(finetune(config))


def dreambooth_command(config: DreamboothConfig, arguments: list[str]) -> int:
    """Trains on a subject, starting ranks on this machine if no launcher has done so."""
    from gulliver.comm.launcher import default_ranks, launch, under_launcher
    from gulliver.dreambooth.trainer import dreambooth

    ranks = config.ranks or default_ranks()
    if not under_launcher() and ranks > 1 and not config.plan:
        return launch("gulliver.cli", arguments, ranks)
    return ended(dreambooth(config))


def quantize_command(config: QuantizeConfig) -> int:
    from gulliver.io.hub import check_push, push
    from gulliver.quantize.job import quantize_folder

    values = asdict(config)
    values["prompts"] = values.pop("prompt")
    check_push(repository := values.pop("push_to_hub"))
    done = quantize_folder(**values)
    for name, report in done.reports.items():
        print(f"{name}, {report}")
    for line in done.lines:
        print(line)
    if repository is not None:
        print(f"pushed: {push(config.out, repository)}")
    print(config.out)
    return 0


def report_drafts_command(config: ReportConfig) -> int:
    from gulliver.serve.speculative.report import report

    found = report(config)
    print(json.dumps(found.to_plain()) if config.json else found)
    return 0


def train_draft_command(config: TrainDraftConfig, arguments: list[str]) -> int:
    """Trains a draft model, starting ranks on this machine if no launcher has done so."""
    from gulliver.comm.launcher import default_ranks, launch, under_launcher
    from gulliver.jobs.loop import Outcome
    from gulliver.serve.speculative.train import train_draft

    ranks = config.ranks or default_ranks()
    if not under_launcher() and ranks > 1:
        return launch("gulliver.cli", arguments, ranks)
    trained = train_draft(config)
    return ended(Outcome(trained.steps, trained.over, result=config.out))
