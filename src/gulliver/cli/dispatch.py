"""Finds the command, and prints errors as one line with a non-zero exit code.

Options are read, and refused, before torch is imported, so that help comes at once.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from gulliver import __version__
from gulliver.errors import GulliverError, nearest


class Command(NamedTuple):
    """A command: its options and its function, each as module:name, and what it does."""

    options: str
    function: str
    what: str


COMMANDS = {
    "finetune": Command(
        "gulliver.finetune.config:FinetuneConfig",
        "gulliver.cli.apps:finetune_command",
        "fine-tune a language model on texts",
    ),
    "data": Command(
        "gulliver.cli.data:PrepareConfig",
        "gulliver.cli.data:data_command",
        "make a table to train on of a folder of clips",
    ),
    "dreambooth": Command(
        "gulliver.dreambooth.config:DreamboothConfig",
        "gulliver.cli.apps:dreambooth_command",
        "teach an image or video model a subject from a few pictures",
    ),
    "train": Command(
        "gulliver.video.config:TrainConfig",
        "gulliver.cli.video:train_command",
        "train a text-to-video model",
    ),
    "train-autoencoder": Command(
        "gulliver.video.autoencoder_config:TrainAutoencoderConfig",
        "gulliver.cli.video:train_autoencoder_command",
        "train a video autoencoder",
    ),
    "generate": Command(
        "gulliver.cli.options:GenerateConfig",
        "gulliver.cli.video:generate_command",
        "make clips from sentences",
    ),
    "app": Command(
        "gulliver.cli.options:AppConfig",
        "gulliver.cli.apps:app_command",
        "make clips in the browser, look at a training run",
    ),
    "evaluate": Command(
        "gulliver.cli.options:EvaluateConfig",
        "gulliver.cli.video:evaluate_command",
        "judge what a model shows",
    ),
    "checkpoint": Command(
        "gulliver.cli.options:CheckpointConfig",
        "gulliver.cli.checkpoint:checkpoint_command",
        "list, check and convert checkpoints",
    ),
    "probe": Command(
        "gulliver.cli.options:ProbeConfig",
        "gulliver.cli.video:probe_command",
        "measure what the machine and its links can do",
    ),
    "doctor": Command(
        "gulliver.cli.options:DoctorConfig",
        "gulliver.cli.video:doctor_command",
        "say which I/O engine runs and how fast the disk is",
    ),
    "plan": Command(
        "gulliver.cli.options:PlanConfig",
        "gulliver.cli.plan:plan_command",
        "find the fastest plan of a model on a cluster, or what fits",
    ),
    "embedding": Command(
        "gulliver.cli.embedding:EmbeddingConfig",
        "gulliver.cli.embedding:embedding_command",
        "plan tables larger than a device: bytes and seconds of each rank",
    ),
    "jobs": Command(
        "gulliver.cli.jobs:JobsConfig",
        "gulliver.cli.jobs:jobs_command",
        "run or simulate jobs that share a cluster: when each ends, and why it waits",
    ),
    "precision": Command(
        "gulliver.cli.options:PrecisionConfig",
        "gulliver.cli.precision:precision_command",
        "say which layers of a model FP8 would speed up on a cluster",
    ),
    "models": Command(
        "gulliver.cli.options:ModelsConfig",
        "gulliver.cli.models:models_command",
        "list the public video models and the memory they take",
    ),
    "quantize": Command(
        "gulliver.cli.options:QuantizeConfig",
        "gulliver.cli.apps:quantize_command",
        "make an int8 or int4 folder of a language model's",
    ),
    "chat": Command(
        "gulliver.cli.serve:ChatConfig",
        "gulliver.cli.serve:chat_command",
        "talk with a language model, or continue texts",
    ),
    "speculate": Command(
        "gulliver.serve.speculative.train_config:SpeculateConfig",
        "gulliver.cli.apps:speculate_command",
        "train a draft for a language model, and measure what drafts are worth",
    ),
    "serve": Command(
        "gulliver.cli.serve:ServeConfig",
        "gulliver.cli.serve:serve_command",
        "serve a language model to clients of OpenAI's interface, or send a load to one",
    ),
    "capabilities": Command(
        "gulliver.cli.options:CapabilitiesConfig",
        "gulliver.cli.video:capabilities_command",
        "show what may be combined",
    ),
    "demo": Command(
        "gulliver.video.config:DemoConfig",
        "gulliver.cli.video:demo_command",
        "train, generate and judge, and show the result",
    ),
}


def run(arguments: list[str]) -> int:
    """Finds the command, reads its options and runs it; returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(
            "usage: gulliver COMMAND [options]      (gulliver COMMAND --help lists the options)\n"
        )
        for name, command in COMMANDS.items():
            print(f"  {name:<18} {command.what}")
        return 0
    if arguments[0] == "--version":
        print(f"gulliver {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        raise GulliverError(f"unknown command {name!r}: {nearest(name, COMMANDS)}")
    config = _options(name, rest)
    return _found(COMMANDS[name].function)(config, rest)


def _options(name: str, arguments: list[str]) -> Any:
    """Reads the options of a command from its arguments."""
    import tyro

    from gulliver.options import check_options, unchecked

    if "--out=" in arguments or ("--out", "") in pairwise(arguments):
        # As a path it would be the folder that one is in.
        raise GulliverError("--out is empty: name a place, . is the folder you are in")
    kind = _found(COMMANDS[name].options)
    # Checked below, where nested options have the names that the command line gives them.
    with unchecked():
        default, options = _from_file(kind, arguments)
        options = _with_action(name, options)
        config = tyro.cli(
            kind,
            args=options,
            default=default,
            prog=f"gulliver {name}",
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    # Of a command with commands of its own, those of the one that is asked for.
    check_options(getattr(config, "action", config))
    return config


def _with_action(name: str, arguments: list[str]) -> list[str]:
    """``gulliver plan MODEL ...`` is ``gulliver plan search MODEL ...``, and so for serve."""
    if name == "plan":
        from gulliver.cli.options import PLAN_ACTIONS as actions

        usual = "search"
    elif name == "serve":
        from gulliver.cli.serve import SERVE_ACTIONS as actions

        usual = "start"
        if arguments[:1] in (["-h"], ["--help"]):
            return [usual, *arguments]  # most want the options, which say that there is a bench
    else:
        return arguments
    bare = arguments and arguments[0] not in (*actions, "-h", "--help")
    return [usual, *arguments] if bare else arguments


def _found(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _from_file(kind: type, arguments: list[str]) -> tuple[Any, list[str]]:
    """Takes ``--config FILE`` out of the options: its values are the defaults of the others."""
    if "--config" not in arguments:
        return kind(), arguments
    place = arguments.index("--config")
    if place + 1 == len(arguments):
        raise GulliverError("--config needs a file, such as the config.json of a run")
    from gulliver.checkpoint.files import read_json
    from gulliver.options import from_plain

    default = from_plain(read_json(Path(arguments[place + 1])), kind)
    return default, arguments[:place] + arguments[place + 2 :]


def main(arguments: list[str] | None = None) -> None:
    """Runs a command of `gulliver` and exits with its code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = run(arguments)
    except GulliverError as error:
        rank = os.environ.get("RANK", "0")
        prefix = "" if rank == "0" else f"rank {rank}: "
        print(f"gulliver: {prefix}{error}", file=sys.stderr, flush=True)
        code = 1
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader of the output, such as head, has seen enough; the rest is dropped.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    _leave(code)


def _leave(code: int) -> None:
    """Exits; a rank leaves its world first, or the others would wait for it."""
    if code == 0 and "RANK" in os.environ:
        from gulliver.comm.world import shutdown

        shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if code and "RANK" in os.environ:
        # Threads of a broken process group may never end by themselves.
        os._exit(code)
    sys.exit(code)
