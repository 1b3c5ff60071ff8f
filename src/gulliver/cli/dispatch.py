"""Finds the command, reads its options and runs it; errors are one line and an exit code.

Options are parsed and validated before torch is imported, so that help and errors appear quickly.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from gulliver import __version__
from gulliver.errors import GulliverError, UsageError, nearest, usage_errors

FAILED, USAGE = 1, 2
"""Exit codes. 0 is success, and 128 or more a signal: 130 Ctrl+C, 141 closed pipe, 143 SIGTERM."""
STOPPED = 143
"""Exit code of a run that a signal stopped before its result was complete."""


WHAT = {
    "finetune": "fine-tune a language model on texts",
    "dreambooth": "teach an image or video model a subject from a few pictures",
    "train": "train a text-to-video model",
    "train-autoencoder": "train a video autoencoder",
    "generate": "make clips from sentences",
    "evaluate": "measure how well a model generates the moving digits",
    "app": "make clips in the browser, watch a training run",
    "demo": "train, generate and evaluate, and show the result",
    "data": "prepare a folder of clips for training",
    "data scan": "list the clips of a folder in a table",
    "data cut": "cut videos into clips of one scene each",
    "data score": "add a column for each scorer",
    "data dedup": "drop copies of clips",
    "data filter": "keep the rows that satisfy a condition",
    "data caption": "write captions by a command or a model",
    "data show": "make a web page of a table",
    "data encode": "store the latents of clips for training",
    "chat": "chat with a language model, or continue texts",
    "serve": "serve a language model over OpenAI's API",
    "serve start": "serve a language model over OpenAI's API",
    "quantize": "write an int8 or int4 folder of a language model or pipeline",
    "speculate": "train a draft for speculative decoding, or measure drafts",
    "speculate train": "train a draft for a language model",
    "speculate report": "measure acceptance, cost and speed-up of drafts",
    "plan": "find the fastest plan of a model on a cluster, and its memory",
    "plan search": "find the fastest ways to run a model on a cluster",
    "plan memory": "predict where a model's state is kept under a memory limit",
    "plan show": "summarize a plan.yaml",
    "plan data": "plan the steps of data-centric training",
    "fp8": "predict which layers of a model FP8 speeds up",
    "models": "list the public video models and the memory they take",
    "embedding": "plan embedding tables larger than a device",
    "embedding plan": "predict bytes and seconds of embedding tables on each rank",
    "jobs": "run or simulate jobs that share a cluster",
    "jobs simulate": "simulate jobs under scheduling policies",
    "jobs submit": "submit a training script",
    "jobs list": "list jobs",
    "jobs logs": "print the log of a job",
    "jobs why": "explain why a job waits or shrank",
    "jobs stop": "stop a job or the scheduler",
    "jobs scheduler": "run the scheduler in the foreground",
    "checkpoint": "list, verify, compare and convert checkpoints",
    "checkpoint ls": "list the steps of a run, or the contents of a step or file",
    "checkpoint verify": "check every byte of a step",
    "checkpoint diff": "compare two checkpoints",
    "checkpoint convert": "write a Hugging Face folder or a safetensors file",
    "probe": "measure the machine, its disk and its links",
    "doctor": "show versions, devices, kernels, I/O engine and disk speed",
    "capabilities": "show the supported combinations of features",
}
"""Description of every command and command group."""
PLACES = {
    "finetune": "finetune.config:FinetuneConfig cli.apps:finetune_command"
    " finetune.config:check_finetune",
    "dreambooth": "dreambooth.config:DreamboothConfig cli.apps:dreambooth_command"
    " dreambooth.config:check_dreambooth",
    "train": "video.config:TrainConfig cli.video:train_command cli.video:check_train",
    "train-autoencoder": "video.autoencoder_config:TrainAutoencoderConfig"
    " cli.video:train_autoencoder_command video.autoencoder_config:check_autoencoder_config",
    "generate": "cli.options:GenerateConfig cli.video:generate_command",
    "evaluate": "cli.options:EvaluateConfig cli.video:evaluate_command",
    "app": "cli.options:AppConfig cli.apps:app_command",
    "demo": "video.config:DemoConfig cli.video:demo_command",
    "data scan": "cli.data:Scan cli.data:scan_folder",
    "data cut": "cli.data:Cut cli.data:cut_scenes",
    "data score": "cli.data:Score cli.data:score_clips",
    "data dedup": "cli.data:Dedup cli.data:drop_copies",
    "data filter": "cli.data:Filter cli.data:filter_rows",
    "data caption": "cli.data:Caption cli.data:caption_clips",
    "data show": "cli.data:Show cli.data:show_clips",
    "data encode": "video.config:EncodeConfig cli.data:encode_clips",
    "chat": "cli.serve:ChatConfig cli.serve:chat_command",
    "serve start": "cli.serve:Start cli.serve:start_command",
    "quantize": "cli.options:QuantizeConfig cli.apps:quantize_command",
    "speculate train": "serve.speculative.train_config:TrainDraftConfig"
    " cli.apps:train_draft_command serve.speculative.train_config:check_train_draft",
    "speculate report": "serve.speculative.train_config:ReportConfig"
    " cli.apps:report_drafts_command",
    "plan search": "cli.options:Search cli.plan:search_command",
    "plan memory": "cli.options:Memory cli.plan:memory_command",
    "plan show": "cli.options:Show cli.plan:show_command",
    "plan data": "cli.options:PlanData cli.plan_data:plan_data",
    "fp8": "cli.options:PrecisionConfig cli.precision:precision_command",
    "models": "cli.options:ModelsConfig cli.models:models_command",
    "embedding plan": "cli.embedding:EmbeddingConfig cli.embedding:embedding_command",
    "jobs simulate": "cli.jobs:Simulate cli.jobs:simulate_jobs",
    "jobs submit": "cli.jobs:Submit cli.jobs:submit",
    "jobs list": "cli.jobs:Listing cli.jobs:show",
    "jobs logs": "cli.jobs:Logs cli.jobs:logs",
    "jobs why": "cli.jobs:JobDecision cli.jobs:explain",
    "jobs stop": "cli.jobs:Stop cli.jobs:stop",
    "jobs scheduler": "cli.jobs:Scheduler cli.jobs:run",
    "checkpoint ls": "cli.options:Ls cli.checkpoint:ls",
    "checkpoint verify": "cli.options:Verify cli.checkpoint:verify_all",
    "checkpoint diff": "cli.options:Diff cli.checkpoint:diff",
    "checkpoint convert": "cli.options:Convert cli.checkpoint:convert",
    "probe": "cli.options:ProbeConfig cli.probe:probe_command",
    "doctor": "cli.options:DoctorConfig cli.probe:doctor_command",
    "capabilities": "cli.options:CapabilitiesConfig cli.plan:capabilities_command",
}
"""Options class, function and optional check of each command, as module:name."""
LAUNCHING = (
    *("finetune", "dreambooth", "train", "train-autoencoder", "generate"),
    *("data encode", "speculate train"),
)
"""Commands whose functions also receive the arguments, to start ranks with them."""
USUAL = {"serve": "start", "plan": "search", "embedding": "plan"}
"""Default command of a group."""
TOP = {name: what for name, what in WHAT.items() if " " not in name}
OLD_NAMES = {"precision": "fp8"}
"""New name of each renamed command."""
SHELLS = {
    "bash": """_gulliver() {
    COMPREPLY=($(gulliver __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    [ ${#COMPREPLY[@]} -gt 0 ] || compopt -o default
}
complete -F _gulliver gulliver""",
    "zsh": """#compdef gulliver
_gulliver() {
    local found=(${(f)"$(gulliver __complete "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( $#found )); then compadd -a found; else _files; fi
}
compdef _gulliver gulliver""",
    "fish": """function __gulliver
    gulliver __complete (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null
end
complete -c gulliver -a '(__gulliver)'""",
}
"""Completion scripts, which ask ``gulliver __complete`` for the possible next words."""
OTHERS = {
    "completion": "print a completion script: gulliver completion bash|zsh|fish",
    "help": "show the help of a command: gulliver help plan memory",
}


def run(arguments: Sequence[str]) -> int:
    words = list(arguments)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"gulliver {__version__}")
        return 0
    if words[0] == "completion":
        if len(words) != 2 or words[1] not in SHELLS:
            raise UsageError(f"usage: gulliver completion {'|'.join(SHELLS)}")
        print(SHELLS[words[1]])
        return 0
    if words[0] == "__complete":
        print("\n".join(_completions(words[1:])))
        return 0
    name, rest = _find(words)
    if name not in PLACES:
        print(_group_help(name))
        return 0
    if words[1:] in (["-h"], ["--help"]) and name != words[0]:
        print(_group_help(words[0]), end="\n\n", flush=True)
    from gulliver.cli.parser import Printed, parse

    options, function, *checks = PLACES[name].split()
    try:
        config = parse(_found(options), rest, f"gulliver {name}")
    except Printed:
        return 0
    with usage_errors():
        _check_out(config)
        for check in checks:
            _found(check)(config)
    command = _found(function)
    return command(config, [*name.split(), *rest]) if name in LAUNCHING else command(config)


def _find(words: list[str]) -> tuple[str, list[str]]:
    """Splits the words into the command and its arguments."""
    name, rest = OLD_NAMES.get(words[0], words[0]), words[1:]
    if name not in TOP:
        raise UsageError(f"unknown command {name!r}: {nearest(name, [*TOP, *OTHERS])}")
    if name in PLACES:
        return name, rest
    actions, usual = _actions(name), USUAL.get(name)
    if rest and rest[0] in actions:
        return f"{name} {rest[0]}", rest[1:]
    if rest and not rest[0].startswith("-"):
        # A word that resembles a command and is not a file is a typo.
        cutoff = 0.75 if usual else 0.0
        near = difflib.get_close_matches(rest[0], actions, 1, cutoff)
        if near and not Path(rest[0]).exists():
            raise UsageError(f"unknown command '{name} {rest[0]}': {nearest(rest[0], actions)}")
    if usual and rest:
        return f"{name} {usual}", rest
    if not rest or rest[0] in ("-h", "--help"):
        return name, rest
    raise UsageError(f"gulliver {name} needs a command: {', '.join(actions)}")


def _check_out(config: Any) -> None:
    """Rejects an output that cannot be written, before anything is imported or computed."""
    out = getattr(config, "out", None)
    planned = getattr(config, "dry_run", False) or getattr(config, "plan", False)
    if out is None or planned or os.environ.get("RANK", "0") != "0":
        return
    steps = sorted((out / "checkpoints").glob("step-*[0-9]"))
    if steps and not getattr(config, "resume", True):
        raise UsageError(
            f"{out} already holds a run ({steps[-1].name}): add --resume to continue it, with more "
            "--steps to extend it, or choose another --out"
        )
    folder = out
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        with NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error.strerror}") from None


def _actions(name: str) -> list[str]:
    return [other.split()[1] for other in WHAT if other.startswith(f"{name} ")]


def _found(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"gulliver.{module}"), name)


def _help() -> str:
    lines = ["usage: gulliver COMMAND [options]", ""]
    lines += [f"  {name:<18} {what}" for name, what in (TOP | OTHERS).items()]
    lines += ["", "gulliver COMMAND --help lists the options; -V prints the version."]
    return "\n".join(lines)


def _group_help(name: str) -> str:
    lines = [f"usage: gulliver {name} COMMAND [options]", "", WHAT[name], ""]
    lines += [f"  {action:<18} {WHAT[f'{name} {action}']}" for action in _actions(name)]
    if name in USUAL:
        lines += ["", f"gulliver {name} without a command means gulliver {name} {USUAL[name]}."]
    return "\n".join(lines)


def _completions(words: list[str]) -> list[str]:
    """Completions of the last word; none if the shell completes files."""
    *before, last = words or [""]
    if not before:
        return [name for name in [*TOP, *OTHERS] if name.startswith(last)]
    name, found = OLD_NAMES.get(before[0], before[0]), list[str]()
    if name in OTHERS:
        found = list(SHELLS if name == "completion" else TOP)
    elif name not in PLACES:
        found = _actions(name) if len(before) == 1 else []
        action = before[1] if before[1:2] and before[1] in _actions(name) else USUAL.get(name)
        name = f"{name} {action}"
    if name in PLACES:
        from gulliver.cli.parser import choices_of, options_of

        options = {o.flag: o for o in options_of(_found(PLACES[name].split()[0]))}
        if before[-1] in options and (choices := choices_of(options[before[-1]].hint)):
            found = list(map(str, choices))
        elif last.startswith("-"):
            flags = [flag for flag, option in options.items() if not option.positional]
            found = [*flags, "--config", "--print-config", "--help"]
    return [word for word in found if word.startswith(last)]


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = run(arguments)
    except GulliverError as error:
        rank = os.environ.get("RANK", "0")
        prefix = "" if rank == "0" else f"rank {rank}: "
        print(f"gulliver: {prefix}{error}", file=sys.stderr, flush=True)
        code = USAGE if isinstance(error, UsageError) else FAILED
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader of the output, such as head, has closed it; the rest is dropped.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    _leave(code)


def _leave(code: int) -> None:
    """Exits; a rank first leaves its world, because the others would otherwise wait for it."""
    if code == 0 and "RANK" in os.environ:
        from gulliver.comm.world import shutdown

        shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if code and "RANK" in os.environ:
        # Threads of a broken process group may never end by themselves.
        os._exit(code)
    sys.exit(code)
