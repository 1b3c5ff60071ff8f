"""``gulliver checkpoint``: lists, verifies, compares and converts checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn
from rich.table import Table

from gulliver.checkpoint.comparison import Comparison, any_step, compare, verify
from gulliver.checkpoint.files import read_json
from gulliver.checkpoint.folder import steps_of
from gulliver.checkpoint.interchange import export_huggingface
from gulliver.checkpoint.loading import step_folder
from gulliver.checkpoint.manifest import read_manifest
from gulliver.checkpoint.reader import StepReader
from gulliver.checkpoint.weights import Weights, is_step_or_run, open_weights
from gulliver.cli.options import Convert, Diff, Ls, Verify
from gulliver.errors import GulliverError, UsageError, usage_errors
from gulliver.jobs.display import print_json, report_console
from gulliver.options import DTYPES, size_text

ALL = "all"
"""Value of ``--entry`` for all entries."""


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    console = Console(stderr=True)
    text = TextColumn("{task.description}", markup=False)
    columns = text, BarColumn(), DownloadColumn(), SpeedColumn(), TimeRemainingColumn()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# --- ls ------------------------------------------------------------------------------------------


def ls(options: Ls) -> int:
    path = options.folder
    if options.json:
        print_json(_listing(options))
        return 0
    if is_step_or_run(path):
        if options.step is None and not (path / "manifest.json").is_file():
            _list_run(path)
        else:
            _list_step(step_folder(path, options.step), options.tensors)
        return 0
    with open_weights(path) as weights:
        nbytes = sum(info.nbytes for info in weights.infos.values())
        report_console().print(
            f"{path}: {len(weights.infos)} tensors, {size_text(nbytes)}, {_dtypes(weights)}, in "
            + ", ".join(file.name for file in weights.files)
        )
        if options.tensors:
            _list_tensors(weights)
    return 0


def _listing(options: Ls) -> dict[str, Any]:
    path = options.folder
    is_run = is_step_or_run(path) and options.step is None
    if is_run and not (path / "manifest.json").is_file():
        newest, rows = step_folder(path), []
        for number, folder in steps_of(path):
            manifest = read_manifest(folder)
            state = _row(folder, folder == newest)[0]
            rows.append(
                {
                    **{"step": number, "state": state, "bytes": manifest.nbytes},
                    **{"ranks": manifest.world_size, "entries": list(manifest.tensors)},
                }
            )
        return {"run": path, "steps": rows}
    folder = step_folder(path, options.step) if is_step_or_run(path) else path
    with open_weights(folder, None) as weights:
        infos = weights.infos.items()
        tensors = [
            {"name": n, "shape": list(i.shape), "dtype": _name(i.dtype), "bytes": i.nbytes}
            for n, i in infos
        ]
        files = [file.name for file in weights.files]
        nbytes = sum(info.nbytes for _, info in infos)
    return {"path": folder, "bytes": nbytes, "files": files, "tensors": tensors}


def _list_run(path: Path) -> None:
    steps = steps_of(path)
    try:
        newest = step_folder(path)
    except GulliverError:
        newest = None
    table = Table(title=str(path), title_justify="left")
    for name in ("step", "state", "size", "written", "ranks", "entries"):
        right = name in ("step", "size", "ranks")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for number, folder in steps:
        state, *rest = _row(folder, folder == newest)
        table.add_row(str(number), state, *rest)
    report_console().print(table)
    for partial in sorted(path.glob("step-*.partial")):
        report_console().print(f"{partial.name}: being written, or left over from a killed save")


def _row(folder: Path, is_newest: bool) -> tuple[str, ...]:
    try:
        manifest = read_manifest(folder)
    except GulliverError as error:
        text = str(error)
        for kind in ("newer", "older"):
            if f"{kind} version" in text:
                return f"of a {kind} version", "", "", "", ""
        return "broken: no manifest" if "not exist" in text else "broken manifest", "", "", "", ""
    state = "complete, latest" if is_newest else "complete"
    if not all(
        (folder / name).is_file() and (folder / name).stat().st_size == entry.nbytes
        for name, entry in manifest.files.items()
    ):
        state = "INCOMPLETE"
    written = str(manifest.about.get("time", "")).replace("T", " ").replace("+00:00", " UTC")
    entries = ", ".join(entry for entry in manifest.tensors if "@" not in entry)
    return state, size_text(manifest.nbytes), written, str(manifest.world_size), entries


def _list_step(folder: Path, tensors: bool) -> None:
    manifest = read_manifest(folder)
    out = report_console()
    out.print(
        f"{folder}: step {manifest.step}, saved by {manifest.world_size} "
        f"rank{'s' * (manifest.world_size > 1)}, {size_text(manifest.nbytes)}"
    )
    for name, value in manifest.about.items():
        if name == "plan" or not isinstance(value, dict | list):
            out.print(f"{name}: {value}")
    table = Table()
    for name in ("entry", "tensors", "size", "dtypes", "files"):
        right = name in ("tensors", "size")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for entry, saved in manifest.tensors.items():
        files = {part.file for tensor in saved.values() for part in tensor.parts}
        table.add_row(
            entry,
            f"{len(saved):,}",
            size_text(sum(tensor.nbytes for tensor in saved.values())),
            ", ".join(sorted({_name(tensor.dtype) for tensor in saved.values()})),
            _files(sorted(files)),
        )
    out.print(table)
    with StepReader(folder) as reader:
        plain = [entry for entry in reader.entries if entry not in manifest.tensors]
    if plain:
        out.print(f"without tensors: {', '.join(plain)}")
    if tensors:
        with open_weights(folder, None) as weights:
            _list_tensors(weights)


def _files(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more"


def _list_tensors(weights: Weights) -> None:
    for name, info in weights.infos.items():
        report_console().print(
            f"{name}  {list(info.shape)}  {_name(info.dtype)}  {size_text(info.nbytes)}"
        )


def _dtypes(weights: Weights) -> str:
    return ", ".join(sorted({_name(info.dtype) for info in weights.infos.values()}))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- verify --------------------------------------------------------------------------------------


def verify_all(options: Verify) -> int:
    """Prints damaged files and the read speed; the exit code is 1 if anything is damaged."""
    path = options.folder
    if options.all and options.step is not None:
        raise UsageError("--step and --all cannot be combined: omit one of them")
    if not is_step_or_run(path):
        with open_weights(path, step=options.step) as weights:
            if options.json:
                print_json({"checked": [], "broken": False})
                return 0
            print(
                f"{path}: {len(weights.infos)} tensors; file headers and sizes are valid. There "
                "are no checksums: only steps have them"
            )
        return 0
    steps: list[Path | None] = [folder for _, folder in steps_of(path)] if options.all else [None]
    code, checked = 0, list[dict[str, Any]]()
    for folder in steps or [None]:
        step = options.step if folder is None else None
        try:
            code = max(code, _verify_one(folder or path, step, checked, options.json))
        except GulliverError as error:
            if not options.all:
                raise
            checked.append({"step": folder, "problems": [str(error)]})
            if not options.json:
                print(f"{error}: BROKEN", flush=True)
            code = 1
    if options.json:
        print_json({"checked": checked, "broken": bool(code)})
    return code


def _verify_one(
    path: Path, step: int | None, checked: list[dict[str, Any]], quiet: bool = False
) -> int:
    begun, read, folder = time.monotonic(), 0, path
    with _bar(path.name) as report:

        def count(done: int, total: int) -> None:
            nonlocal read
            read = done
            report(done, total)

        folder = any_step(path, step)
        problems = verify(folder, progress=count)
    rate = read / max(time.monotonic() - begun, 1e-9)
    texts = [f"{folder / problem.file}: {_after_file(problem)}" for problem in problems]
    checked.append({"step": folder, "bytes": read, "problems": texts})
    if quiet:
        return 1 if problems else 0
    for text in texts:
        print(text)
    verdict = "BROKEN" if problems else "all bytes match their checksums"
    print(f"{folder}: {verdict}; {size_text(read)} read, {size_text(rate)}/s", flush=True)
    return 1 if problems else 0


def _after_file(problem: Any) -> str:
    return str(problem).removeprefix(f"{problem.file}, ")


# --- diff ----------------------------------------------------------------------------------------


def diff(options: Diff) -> int:
    """Prints differences; the exit code is 1 if there are any."""
    with usage_errors():  # as with diff(1), 1 means that they differ
        found = _compared(options)
    if options.json:
        names = ("missing", "unexpected", "shapes", "dtypes", "values", "compared", "equal")
        values = {name: getattr(found, name) for name in names}
        print_json({**values, "differences": [vars(d) for d in found.differences]})
        return 0 if found.equal else 1
    _print_names(found, options.show)
    if found.differences:
        _print_values(found, options.show)
    verdict = "no difference" if found.equal else "DIFFERENT"
    print(f"{found.compared} tensors compared, {len(found.differences)} differ: {verdict}")
    return 0 if found.equal else 1


def _compared(options: Diff) -> Comparison:
    with _bar("comparing") as report:
        return compare(
            options.a,
            options.b,
            None if options.entry == ALL else options.entry,
            options.tolerance,
            options.relative,
            options.any_dtype,
            options.step_a,
            options.step_b,
            report,
        )


def _print_names(found: Comparison, show: int) -> None:
    lines = {
        "only in the first": found.missing,
        "only in the second": found.unexpected,
        "other shapes": [f"{n}: {list(a)} and {list(b)}" for n, (a, b) in found.shapes.items()],
        "other dtypes": [f"{n}: {_name(a)} and {_name(b)}" for n, (a, b) in found.dtypes.items()],
        "different non-tensor values in": found.values,
    }
    for what, names in lines.items():
        if names:
            print(f"{what} ({len(names)}):")
        for name in _first(names, show):
            print(f"  {name}")


def _print_values(found: Comparison, show: int) -> None:
    table = Table()
    table.add_column("tensor", overflow="fold")
    for name in ("absolute", "relative", "elements", "of"):
        table.add_column(name, justify="right")
    shown = found.differences[: show or None]
    for d in shown:
        table.add_row(
            d.name, f"{d.absolute:.3g}", f"{d.relative:.3g}", f"{d.unequal:,}", f"{d.numel:,}"
        )
    report_console().print(table)
    if len(shown) < len(found.differences):
        print(f"and {len(found.differences) - len(shown)} more (--show 0 lists all)")


def _first(names: list[str], show: int) -> list[str]:
    if not show or len(names) <= show:
        return names
    return [*names[:show], f"and {len(names) - show} more (--show 0 lists all)"]


# --- convert -------------------------------------------------------------------------------------


def convert(options: Convert) -> int:
    with _bar("converting") as report:
        made = export_huggingface(
            options.source,
            options.target,
            options.entry,
            options.max_shard_gb * 1e9,
            None if options.dtype is None else getattr(torch, DTYPES[options.dtype]),
            options.prefix,
            None if options.model_config is None else read_json(options.model_config),
            options.step,
            report,
        )
    print(made)
    return 0
