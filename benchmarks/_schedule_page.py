"""Puts what was kept of the scheduler into its page: `python -m benchmarks._schedule_page`.

The figures of the newest kept result of each part, in three tables: ours beside the best other and
beside what any schedule could do, ONES and what it is made of, and real jobs beside the simulator.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks._harness import RESULTS, markdown_table

PAGE = Path(__file__).parent.parent / "docs" / "scheduling.md"
OURS, PUBLISHED = "rollout", "pollux, as published"
ARTIFACT = (
    "optimus", "tiresias", "pollux", "ones", "ones, greedy fill", "ones, no mutation",
    "ones, no predictor", "ones, perfect", "ones, greedy fill, perfect",
    "ones, no mutation, perfect", "rollout, lengths", "rollout, progress", "rollout, curves",
    "rollout, perfect",
)  # fmt: skip


def newest(claim: str) -> tuple[str, dict[str, Any]]:
    """Title and JSON of the newest kept result; nothing where none is kept."""
    found = sorted(RESULTS.glob(f"schedule_{claim}_*.md"), key=lambda path: path.stem[-10:])
    found = [path for path in found if re.fullmatch(rf"schedule_{claim}_[^_]*_[^_]*", path.stem)]
    if not found:
        return "", {}
    text = found[-1].read_text(encoding="utf-8")
    told = re.findall(r"^\{.*\}$", text, re.MULTILINE)[-1]
    return text.splitlines()[0].lstrip("# "), json.loads(told)


def kinds_table() -> str:
    """A line for each kind of traces: means, of the best other policy's."""
    title, kinds = newest("kinds")
    _, searched = newest("attainable")
    rows = []
    for trace, means in kinds.get("figures", {}).items():
        others = {n: s for n, s in means.items() if n not in (OURS, "gap")}
        best = min(others, key=lambda name: others[name])
        known = searched.get("figures", {}).get(trace, {})
        parts = (known[key] / known["pollux"] for key in ("clairvoyant", "bound")) if known else ()
        told = [f"{part:.3f}" for part in parts] or ["", ""]
        published = f"{means[OURS] / means[PUBLISHED]:.3f}" if PUBLISHED in means else ""
        row = (trace, f"{best}, {others[best]:.0f} s", f"{means[OURS] / others[best]:.3f}")
        rows.append((*row, published, *told))
    head = ("traces", "best other", "ours of it", "ours of Pollux as published")
    return f"{title}.\n\n" + markdown_table(
        (*head, "found knowing all, of Pollux", "bound, of Pollux"), rows
    )


def artifact_table() -> str:
    """A line for each policy on traces in the manner of the artifact."""
    title, found = newest("artifact")
    means = found.get("figures", {})
    rows = [
        (name, f"{means[name]:.0f}", f"{means[name] / means['optimus']:.2f}")
        for name in ARTIFACT
        if name in means
    ]
    return f"{title}.\n\n" + markdown_table(("policy", "mean s", "of optimus"), rows)


def real_table() -> str:
    """A line for each place that jobs ran in, and policy."""
    rows = []
    for claim, where in (("real", "processes of this machine"), ("real_ray", "Ray")):
        _, found = newest(claim)
        figures = found.get("figures", {})
        rows += [
            (where, policy, f"{one['mean']:.3f}", f"{one['makespan']:.3f}",
             f"{min(one['jobs']):.2f} to {max(one['jobs']):.2f}")
            for policy, one in figures.items()
            if isinstance(one, dict) and "makespan" in one
        ]  # fmt: skip
    head = ("where", "policy", "mean completion, real of simulated", "makespan", "single jobs")
    return markdown_table(head, rows)


def filled(text: str) -> str:
    """The page with its tables as they are now."""
    tables = {"kinds": kinds_table(), "artifact": artifact_table(), "real": real_table()}
    for mark, table in tables.items():
        pattern = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
        text = pattern.sub(lambda m, table=table: f"{m[1]}\n{table}\n\n{m[2]}", text)
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
