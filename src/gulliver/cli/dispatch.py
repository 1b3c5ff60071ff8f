"""Finds the command, reads its options and runs it; errors are one line and an exit code.

Options are read, and refused, before torch is imported, so that help and mistakes come at once.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

from gulliver import __version__
from gulliver.errors import GulliverError, UsageError, nearest, usage_errors

FAILED, USAGE = 1, 2
"""Exit codes; 0 is success, 128 and more a signal: 130 Ctrl+C, 141 a closed pipe, 143 SIGTERM."""
STOPPED = 143
"""Exit code where a signal has ended a run before its result was there."""


class Command(NamedTuple):
    """A command: options, function and check of the options, each as module:name."""

    what: str
    options: str
    function: str
    # Of options that exclude each other; it imports no torch.
    check: str = ""
    # Whether the function takes the arguments, too, to start ranks with them.
    launches: bool = False


class Group(NamedTuple):
    """A command with commands of its own, and the one that is meant where none is named."""

    what: str
    usual: str = ""


_CLI, _VIDEO = "gulliver.cli", "gulliver.video"
COMMANDS = {
    "finetune": Command(
        "fine-tune a language model on texts",
        "gulliver.finetune.config:FinetuneConfig",
        f"{_CLI}.apps:finetune_command",
        "gulliver.finetune.config:check_finetune",
        True,
    ),
    "dreambooth": Command(
        "teach an image or video model a subject from a few pictures",
        "gulliver.dreambooth.config:DreamboothConfig",
        f"{_CLI}.apps:dreambooth_command",
        "gulliver.dreambooth.config:check_dreambooth",
        True,
    ),
    "train": Command(
        "train a text-to-video model",
        f"{_VIDEO}.config:TrainConfig",
        f"{_CLI}.video:train_command",
        f"{_CLI}.video:check_train",
        True,
    ),
    "train-autoencoder": Command(
        "train a video autoencoder",
        f"{_VIDEO}.autoencoder_config:TrainAutoencoderConfig",
        f"{_CLI}.video:train_autoencoder_command",
        f"{_VIDEO}.autoencoder_config:check_autoencoder_config",
        True,
    ),
    "generate": Command(
        "make clips from sentences",
        f"{_CLI}.options:GenerateConfig",
        f"{_CLI}.video:generate_command",
        "",
        True,
    ),
    "evaluate": Command(
        "measure how well a model shows the moving digits",
        f"{_CLI}.options:EvaluateConfig",
        f"{_CLI}.video:evaluate_command",
    ),
    "app": Command(
        "make clips in the browser, watch a training run",
        f"{_CLI}.options:AppConfig",
        f"{_CLI}.apps:app_command",
    ),
    "demo": Command(
        "train, generate and evaluate, and show the result",
        f"{_VIDEO}.config:DemoConfig",
        f"{_CLI}.video:demo_command",
    ),
    "data": Group("prepare a folder of clips for training"),
    "data scan": Command(
        "list the clips of a folder in a table",
        f"{_CLI}.data:Scan",
        f"{_CLI}.data:scan_folder",
    ),
    "data cut": Command(
        "cut videos into clips of one scene each",
        f"{_CLI}.data:Cut",
        f"{_CLI}.data:cut_scenes",
    ),
    "data score": Command(
        "add a column for each scorer",
        f"{_CLI}.data:Score",
        f"{_CLI}.data:score_clips",
    ),
    "data dedup": Command(
        "drop copies of clips",
        f"{_CLI}.data:Dedup",
        f"{_CLI}.data:drop_copies",
    ),
    "data filter": Command(
        "keep the rows for which a condition holds",
        f"{_CLI}.data:Filter",
        f"{_CLI}.data:filter_rows",
    ),
    "data caption": Command(
        "write captions by a command or a model",
        f"{_CLI}.data:Caption",
        f"{_CLI}.data:caption_clips",
    ),
    "data show": Command(
        "make a web page of a table",
        f"{_CLI}.data:Show",
        f"{_CLI}.data:show_clips",
    ),
    "data encode": Command(
        "keep the latents of clips for training",
        f"{_VIDEO}.config:EncodeConfig",
        f"{_CLI}.data:encode_clips",
        "",
        True,
    ),
    "chat": Command(
        "talk with a language model, or continue texts",
        f"{_CLI}.serve:ChatConfig",
        f"{_CLI}.serve:chat_command",
    ),
    "serve": Group("serve a language model over OpenAI's API, or measure a server", "start"),
    "serve start": Command(
        "serve a language model over OpenAI's API",
        f"{_CLI}.serve:Start",
        f"{_CLI}.serve:start_command",
    ),
    "serve bench": Command(
        "send requests to a server and measure latency and throughput",
        f"{_CLI}.serve:Bench",
        f"{_CLI}.serve:bench_command",
    ),
    "quantize": Command(
        "write an int8 or int4 folder of a language model or pipeline",
        f"{_CLI}.options:QuantizeConfig",
        f"{_CLI}.apps:quantize_command",
    ),
    "speculate": Group("train a draft for speculative decoding, or measure drafts"),
    "speculate train": Command(
        "train a draft for a language model",
        "gulliver.serve.speculative.train_config:TrainDraftConfig",
        f"{_CLI}.apps:train_draft_command",
        "gulliver.serve.speculative.train_config:check_train_draft",
        True,
    ),
    "speculate report": Command(
        "measure acceptance, cost and speed-up of drafts",
        "gulliver.serve.speculative.train_config:ReportConfig",
        f"{_CLI}.apps:report_drafts_command",
    ),
    "plan": Group("find the fastest plan of a model on a cluster, or what fits", "search"),
    "plan search": Command(
        "find the fastest ways to run a model on a cluster",
        f"{_CLI}.options:Search",
        f"{_CLI}.plan:search_command",
    ),
    "plan memory": Command(
        "predict where a model's state is kept under a memory limit",
        f"{_CLI}.options:Memory",
        f"{_CLI}.plan:memory_command",
    ),
    "plan show": Command(
        "summarize a plan.yaml",
        f"{_CLI}.options:Show",
        f"{_CLI}.plan:show_command",
    ),
    "plan data": Command(
        "draw the steps of data-centric training",
        f"{_CLI}.options:PlanData",
        f"{_CLI}.plan_data:plan_data",
    ),
    "fp8": Command(
        "predict which layers of a model FP8 speeds up",
        f"{_CLI}.options:PrecisionConfig",
        f"{_CLI}.precision:precision_command",
    ),
    "models": Command(
        "list the public video models and the memory they take",
        f"{_CLI}.options:ModelsConfig",
        f"{_CLI}.models:models_command",
    ),
    "embedding": Group("plan embedding tables larger than a device", "plan"),
    "embedding plan": Command(
        "predict bytes and seconds of embedding tables on each rank",
        f"{_CLI}.embedding:EmbeddingConfig",
        f"{_CLI}.embedding:embedding_command",
    ),
    "jobs": Group("run or simulate jobs that share a cluster"),
    "jobs simulate": Command(
        "simulate jobs under scheduling policies",
        f"{_CLI}.jobs:Simulate",
        f"{_CLI}.jobs:simulate_jobs",
    ),
    "jobs submit": Command(
        "submit a training script", f"{_CLI}.jobs:Submit", f"{_CLI}.jobs:submit"
    ),
    "jobs list": Command("list jobs", f"{_CLI}.jobs:Listing", f"{_CLI}.jobs:show"),
    "jobs logs": Command("print the log of a job", f"{_CLI}.jobs:Logs", f"{_CLI}.jobs:logs"),
    "jobs why": Command(
        "explain why a job waits or shrank", f"{_CLI}.jobs:Why", f"{_CLI}.jobs:explain"
    ),
    "jobs stop": Command("stop a job or the scheduler", f"{_CLI}.jobs:Stop", f"{_CLI}.jobs:stop"),
    "jobs scheduler": Command(
        "run the scheduler in the foreground", f"{_CLI}.jobs:Scheduler", f"{_CLI}.jobs:run"
    ),
    "checkpoint": Group("list, verify, compare and convert checkpoints"),
    "checkpoint ls": Command(
        "list the steps of a run, or what a step or file holds",
        f"{_CLI}.options:Ls",
        f"{_CLI}.checkpoint:ls",
    ),
    "checkpoint verify": Command(
        "check every byte of a step",
        f"{_CLI}.options:Verify",
        f"{_CLI}.checkpoint:verify_all",
    ),
    "checkpoint diff": Command(
        "compare two checkpoints",
        f"{_CLI}.options:Diff",
        f"{_CLI}.checkpoint:diff",
    ),
    "checkpoint convert": Command(
        "write a Hugging Face folder or a safetensors file",
        f"{_CLI}.options:Convert",
        f"{_CLI}.checkpoint:convert",
    ),
    "probe": Command(
        "measure the machine, its disk and its links",
        f"{_CLI}.options:ProbeConfig",
        f"{_CLI}.probe:probe_command",
    ),
    "doctor": Command(
        "show versions, devices, kernels, I/O engine and disk speed",
        f"{_CLI}.options:DoctorConfig",
        f"{_CLI}.probe:doctor_command",
    ),
    "capabilities": Command(
        "show what may be combined",
        f"{_CLI}.options:CapabilitiesConfig",
        f"{_CLI}.plan:capabilities_command",
    ),
}
OLD_NAMES = {"precision": "fp8"}
"""Present name of each command that was renamed."""
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
"""Completion scripts, which ask ``gulliver __complete`` for the words that may come next."""
OTHERS = {
    "completion": "print a completion script: gulliver completion bash|zsh|fish",
    "help": "show the help of a command: gulliver help plan memory",
}


def run(arguments: Sequence[str]) -> int:
    """Finds the command, reads its options and runs it; returns the exit code."""
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
    command = COMMANDS[name]
    if isinstance(command, Group):
        print(_group_help(name))
        return 0
    if words[1:] in (["-h"], ["--help"]) and name != words[0]:
        print(_group_help(words[0]), end="\n\n", flush=True)
    from gulliver.cli.parser import Printed, parse

    try:
        config = parse(_found(command.options), rest, f"gulliver {name}")
    except Printed:
        return 0
    with usage_errors():
        _check_out(config)
        if command.check:
            _found(command.check)(config)
    function = _found(command.function)
    return function(config, [*name.split(), *rest]) if command.launches else function(config)


def _find(words: list[str]) -> tuple[str, list[str]]:
    """The command that words begin with, and the words after it."""
    name, rest = OLD_NAMES.get(words[0], words[0]), words[1:]
    if name not in COMMANDS or " " in name:
        known = [*(n for n in COMMANDS if " " not in n), *OTHERS]
        raise UsageError(f"unknown command {name!r}: {nearest(name, known)}")
    group = COMMANDS[name]
    if not isinstance(group, Group):
        return name, rest
    actions = _actions(name)
    if rest and rest[0] in actions:
        return f"{name} {rest[0]}", rest[1:]
    usual = f"{name} {group.usual}"
    if rest and not rest[0].startswith("-"):
        # What looks like a command and is no file is one that is misspelt.
        cutoff = 0.75 if group.usual else 0.0
        near = difflib.get_close_matches(rest[0], actions, 1, cutoff)
        if near and not Path(rest[0]).exists():
            raise UsageError(f"unknown command '{name} {rest[0]}': {nearest(rest[0], actions)}")
    if group.usual and rest:
        return usual, rest
    if not rest or rest[0] in ("-h", "--help"):
        return name, rest
    raise UsageError(f"gulliver {name} needs a command: {', '.join(actions)}")


def _check_out(config: Any) -> None:
    """Refuses a result that cannot be written, before anything is imported or computed."""
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
    return [other.split()[1] for other in COMMANDS if other.startswith(f"{name} ")]


def _found(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _help() -> str:
    lines = ["usage: gulliver COMMAND [options]", ""]
    tops = {name: command.what for name, command in COMMANDS.items() if " " not in name}
    lines += [f"  {name:<18} {what}" for name, what in (tops | OTHERS).items()]
    lines += ["", "gulliver COMMAND --help lists the options; -V prints the version."]
    return "\n".join(lines)


def _group_help(name: str) -> str:
    group = COMMANDS[name]
    lines = [f"usage: gulliver {name} COMMAND [options]", "", group.what, ""]
    lines += [f"  {a:<18} {COMMANDS[f'{name} {a}'].what}" for a in _actions(name)]
    if isinstance(group, Group) and group.usual:
        lines += ["", f"gulliver {name} without a command means gulliver {name} {group.usual}."]
    return "\n".join(lines)


def _completions(words: list[str]) -> list[str]:
    """Words that may come in place of the last one; none where the shell completes files."""
    *before, last = words or [""]
    if not before:
        known = [*(name for name in COMMANDS if " " not in name), *OTHERS]
        return [name for name in known if name.startswith(last)]
    if before[0] in OTHERS:
        known = list(SHELLS) if before[0] == "completion" else list(COMMANDS)
        return [name for name in known if name.startswith(last) and " " not in name]
    name = OLD_NAMES.get(before[0], before[0])
    command = COMMANDS.get(name)
    if command is None:
        return []
    found: list[str] = []
    if isinstance(command, Group):
        actions = _actions(name)
        if len(before) > 1 and before[1] in actions:
            command = COMMANDS[f"{name} {before[1]}"]
        else:
            found = actions if len(before) == 1 else []
            command = COMMANDS.get(f"{name} {command.usual}")
    if isinstance(command, Command):
        from gulliver.cli.parser import choices_of, options_of

        options = {o.flag: o for o in options_of(_found(command.options))}
        if before[-1] in options and (choices := choices_of(options[before[-1]].hint)):
            found = list(map(str, choices))
        elif last.startswith("-"):
            flags = [flag for flag, option in options.items() if not option.positional]
            found = [*flags, "--config", "--print-config", "--help"]
    return [word for word in found if word.startswith(last)]


def main(arguments: list[str] | None = None) -> None:
    """Runs a command of `gulliver` and exits with its code."""
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
