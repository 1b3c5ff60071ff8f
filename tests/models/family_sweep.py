"""Which Hugging Face types hybrid runs take: each type in each mode, against one process.

    python -m tests.models.family_sweep --out out/families.json                 # all, resumes
    python -m tests.models.family_sweep --out f.json --only llama,gpt_oss --modes tp,pp --again
    python -m tests.models.family_sweep --out f.json --write docs/parity.md     # the section of
    the page

A tiny model of every type (`tests/models/family_models.py`) is trained for one step in float64 on
two ranks. Its loss and every gradient are held against the same model in one process: *exact*,
*refused* with the reason, *WRONG*, or *error* where anything but a refusal ends it.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gulliver.booster import Booster, HybridParallelPlugin
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.memory import region_of
from tests.hybrid.hybrid_cells import largest
from tests.hybrid.hybrid_models import Precise
from tests.models.family_models import TASKS, batch, build, types

BAR = 1e-9
DEADLINE_S = 180.0
MODES: dict[str, dict[str, Any]] = {
    "tp": {"tp_size": 2},
    "pp": {"pp_size": 2, "num_microbatches": 2},
    "tp, split_gather": {"tp_size": 2, "sequence_parallelism_mode": "split_gather"},
    "tp, ring": {"tp_size": 2, "sequence_parallelism_mode": "ring"},
    "ring_attn": {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"},
    "ZeRO 1": {"zero_stage": 1},
    "tp, logits": {"tp_size": 2},
    "tp, router": {"tp_size": 2},
    "pp, router": {"pp_size": 2, "num_microbatches": 1},
}
"""Column of the table to arguments of the plugin; `router` trains with the routers' losses."""


def case(world: World, task: str, kind: str, mode: str) -> dict[str, Any]:
    """One type in one mode on one rank of two.

    Returns:
        The largest relative errors of loss and gradients, and the share of the parameters of the
        blocks that this rank has.
    """
    torch.set_num_threads(1)
    arguments = MODES[mode]
    router = {"output_router_logits": True} if mode.endswith("router") else {}
    try:
        model = build(task, kind, **router)
        data, bare = batch(task, model), mode.endswith("logits")
        with Precise():
            wanted = _loss(model, data, bare)
            wanted.backward()
    except Exception as error:
        # It has no tiny model that trains in one process.
        return {"unbuilt": f"{type(error).__name__}: {error}"[:200]}
    whole = sum(p.numel() for _, p in _in_blocks(model))
    with Precise():
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plugin = HybridParallelPlugin(**arguments, verbose=False)
        booster = Booster(plugin=plugin)
        model, optimizer, *_ = booster.boost(model, optimizer)
        if "pp_size" in arguments:
            loss = booster.execute_pipeline(iter([data]), model, None, optimizer)["loss"]
        else:
            loss = _loss(model, data, bare)
            booster.backward(loss, optimizer)
        found = {
            n: g for n, g in optimizer.full_gradients().items() if n in gradients or bool(g.any())
        }
    held = sum(p.numel() for _, p in _in_blocks(model))
    cut = sum(1 for p in model.parameters() if region_of(p) is not None)
    return {
        "loss": abs(float(loss) - float(wanted)) / abs(float(wanted)),
        "gradients": largest(found, gradients),
        "held": held / max(1, whole),
        "cut": cut,
    }


def _loss(model: Any, data: dict[str, Tensor], bare: bool) -> Tensor:
    """The model's own loss; `bare`: one of its logits, in training without labels."""
    if not bare:
        return model(**data).loss
    given = {name: value for name, value in data.items() if name != "labels"}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = data["labels"]
    logits = model(**given).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), data["labels"].flatten())


def _in_blocks(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters of the blocks: those with a number in their name."""
    return ((n, p) for n, p in model.named_parameters() if re.search(r"\.\d+\.", n))


def outcome(pool: Any, task: str, kind: str, mode: str) -> dict[str, Any]:
    """What became of a type in a mode."""
    try:
        found = pool.run(case, 2, task, kind, mode, deadline_s=DEADLINE_S)
    except GulliverError as error:
        hung = any("hung" in note for note in getattr(error, "__notes__", ()))
        return {"is": "error" if hung else "refused", "why": str(error)}
    except Exception as error:
        lines = str(error.__cause__ or "").strip().splitlines()[-8:]
        return {"is": "error", "why": f"{type(error).__name__}: {error}"[:600], "at": lines}
    if "unbuilt" in found[0]:
        return {"is": "not built", "why": found[0]["unbuilt"]}
    worst = max(max(one["loss"], one["gradients"]) for one in found)
    held = max(one["held"] for one in found)
    return {"is": "exact" if worst < BAR else "WRONG", "error": worst, "held": round(held, 3)}


def buildable(task: str, kind: str, router: bool) -> str | None:
    """Why a type has no tiny model, or None; with `router`, whether it has routers' losses."""
    from tests.models.family_models import config_of

    try:
        config = config_of(task, kind)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return "no router" if router and not hasattr(config, "output_router_logits") else None


def sweep(
    out: Path, tasks: list[str], only: list[str], modes: list[str], again: bool
) -> dict[str, Any]:
    """Runs what is not in the file yet, and keeps each result as it comes."""
    from tests.pool import Pool, start_server

    start_server()
    pool = Pool()
    done: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for task in tasks:
        for kind in types(task):
            if only and kind not in only:
                continue
            row = done.setdefault(task, {}).setdefault(kind, {})
            for mode in modes:
                if mode in row and not (again or row[mode]["is"] == again):
                    continue
                if buildable(task, kind, mode.endswith("router")) == "no router":
                    continue
                begun = time.monotonic()
                row[mode] = outcome(pool, task, kind, mode)
                if "BrokenPipe" in row[mode].get("why", ""):
                    pool = Pool()
                    row[mode] = outcome(pool, task, kind, mode)
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(done, indent=1))
                what = row[mode]
                print(
                    f"{task} {kind} {mode}: {what['is']} {what.get('error', '')} "
                    f"{what.get('held', '')} {what.get('why', '')[:300]} "
                    f"({time.monotonic() - begun:.1f} s)",
                    flush=True,
                )
    pool.close()
    return done


def counts(done: dict[str, Any]) -> str:
    """How many of each outcome, by task and mode."""
    lines = []
    for task, rows in done.items():
        for mode in MODES:
            found = Counter(row[mode]["is"] for row in rows.values() if mode in row)
            if found:
                lines.append(f"{task}, {mode}: " + ", ".join(f"{n} {w}" for w, n in found.items()))
    return "\n".join(lines)


BEGIN, END = "<!-- families -->", "<!-- /families -->"
REAL = 0.75
"""Of the parameters of the blocks: a rank of two that keeps more has them cut in name only."""


def section(done: dict[str, Any]) -> str:
    """The section of `docs/parity.md`: how many types of each task, then each type."""
    modes = [m for m in MODES if any(m in row for rows in done.values() for row in rows.values())]
    lines = [
        BEGIN,
        "",
        "## Hugging Face types",
        "",
        "Written by `python -m tests.models.family_sweep`. A tiny model of each type is trained "
        "for one step in float64 on two ranks: its loss and all gradients are those of one process "
        f"to {BAR:g} (*exact*), or it is *refused* by name. Behind *exact* stands the share of the "
        "parameters of the blocks that a rank keeps, where it is more than three quarters. *tp, "
        "logits* takes the loss of the logits in place of the model's own. Types without a "
        "line have no configuration that is tiny and runs on text or pictures alone.",
        "",
    ]
    for task, rows in done.items():
        built = {
            k: r for k, r in rows.items() if r and all(c["is"] != "not built" for c in r.values())
        }
        lines += [f"### {task}: {len(built)} types", "", "| type | " + " | ".join(modes) + " |"]
        lines += ["|---" * (len(modes) + 1) + "|"]
        total = Counter(
            m for r in built.values() for m in modes if r.get(m, {}).get("is") == "exact"
        )
        lines += ["| exact | " + " | ".join(str(total[m]) for m in modes) + " |"]
        lines += [
            f"| {kind} | " + " | ".join(_shown(row.get(mode)) for mode in modes) + " |"
            for kind, row in built.items()
        ]
        lines += [""]
    return "\n".join([*lines, END, ""])


def _shown(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    if found["is"] == "exact":
        return "exact" if found["held"] <= REAL else f"exact, keeps {found['held']:.0%}"
    why = found.get("why", "").split(";")[0].split(": give")[0].replace("|", "/")
    return f"{found['is']}: {' '.join(why.split())[:120]}" if why else found["is"]


def write(page: Path, text: str) -> None:
    """Puts the section in its place in a page, or at its end."""
    before = page.read_text() if page.exists() else ""
    head, _, rest = before.partition(BEGIN)
    page.write_text(head.rstrip("\n") + "\n\n" + text + rest.partition(END)[2].lstrip("\n"))


def main() -> None:
    """Runs the sweep as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--only", default="")
    parser.add_argument("--modes", default="tp;pp")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    only = [kind for kind in given.only.split(",") if kind]
    done = sweep(given.out, given.tasks.split(","), only, given.modes.split(";"), given.again)
    print(counts(done))
    if given.write:
        write(given.write, section(done))


if __name__ == "__main__":
    main()
