"""Commands that are one call into a package: app, finetune, dreambooth, quantize and speculate.

Each imports its package when it runs, so that none waits for the others.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from typing import TYPE_CHECKING

from gulliver.cli.options import AppConfig, QuantizeConfig
from gulliver.errors import GulliverError

if TYPE_CHECKING:
    from gulliver.dreambooth.config import DreamboothConfig
    from gulliver.finetune.config import FinetuneConfig
    from gulliver.serve.speculative.train_config import SpeculateConfig

STOPPED = 143
"""Exit code where a signal has ended a run before its result was there."""


def app_command(config: AppConfig, arguments: list[str]) -> int:
    """Serves a page in the browser until Ctrl+C or SIGTERM."""
    del arguments
    from gulliver.app.server import find_run, serve
    from gulliver.app.worker import Source

    if config.model is None:
        config.refuse_parts()
        source = Source(run=find_run(config.run))
    elif config.run is not None:
        raise GulliverError(f"run {config.run} and --model {config.model} exclude each other")
    else:
        parts = config.autoencoder, config.text_encoder, config.clip
        source = Source(None, config.model, *parts, keep=config.keep)

    def ended(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, ended)
    serve(source, config.out, config.host, config.port)
    return 0


def finetune_command(config: FinetuneConfig, arguments: list[str]) -> int:
    """Fine-tunes, on ranks of this machine that are started where a launcher has not."""
    from gulliver.comm.launcher import default_ranks, launch, under_launcher
    from gulliver.finetune.config import check_finetune
    from gulliver.finetune.finetuner import finetune

    check_finetune(config)
    ranks = config.ranks or max(default_ranks(), config.ranks_of_a_model)
    if not under_launcher() and ranks > 1 and not config.dry_run:
        return launch("gulliver.cli", ["finetune", *arguments], ranks)
    return 0 if finetune(config).finished else STOPPED


def dreambooth_command(config: DreamboothConfig, arguments: list[str]) -> int:
    """Teaches a subject, on ranks of this machine that are started where a launcher has not."""
    from gulliver.comm.launcher import default_ranks, launch, under_launcher
    from gulliver.dreambooth.config import check_dreambooth
    from gulliver.dreambooth.trainer import dreambooth

    check_dreambooth(config)
    ranks = config.ranks or default_ranks()
    if not under_launcher() and ranks > 1 and not config.plan:
        return launch("gulliver.cli", ["dreambooth", *arguments], ranks)
    return 0 if dreambooth(config).finished else STOPPED


def quantize_command(config: QuantizeConfig, arguments: list[str]) -> int:
    """Quantises a folder, and prints what became of it."""
    del arguments
    from gulliver.io.hub import check_push, push
    from gulliver.quantize.job import quantize_folder

    options = asdict(config)
    check_push(repository := options.pop("push_to_hub"))
    done = quantize_folder(**options)
    for name, report in done.reports.items():
        print(f"{name}, {report}")
    for line in (*done.lines, f"{config.out}: written"):
        print(line)
    if repository is not None:
        print(f"pushed: {push(config.out, repository)}")
    return 0


def speculate_command(config: SpeculateConfig, arguments: list[str]) -> int:
    """Trains a draft on ranks of this machine where a launcher has started none, or reports."""
    from gulliver.comm.launcher import default_ranks, launch, under_launcher
    from gulliver.serve.speculative.report import report
    from gulliver.serve.speculative.train import train_draft
    from gulliver.serve.speculative.train_config import ReportConfig, check_train_draft

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
