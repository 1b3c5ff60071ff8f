"""Options of data-centric steps, and which other options they exclude.

Nothing here imports torch: `gulliver train --help` reads this module.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from gulliver.errors import GulliverError
from gulliver.options import POSITIVE, Options, Range


@dataclass(frozen=True)
class PlannerConfig(Options):
    """Steps of --data-centric: what each of them takes, and what is chosen for it."""

    tokens: Annotated[int | None, Range(1, 2**40)] = None
    """Tokens of an optimizer step, in place of --data.batch-size samples."""
    seconds: Annotated[float | None, POSITIVE] = None
    """Most predicted seconds of an optimizer step, in place of --data.batch-size samples."""
    window: Annotated[int | None, Range(1, 2**24)] = None
    """Samples that are looked at ahead; by default 16 steps' worth."""
    intra: bool = True
    """Groups of ranks choose how many share a clip; with --planner.no-intra all have
    --planner.degree."""
    degree: Annotated[int | None, Range(1, 4096)] = None
    """Ranks that share a clip, with --planner.no-intra."""
    inter: bool = True
    """Groups run several micro-batches in a step; with --planner.no-inter one each."""
    pac: bool = True
    """Memory that is left keeps activations; with --planner.no-pac every block is computed
    again."""
    arrange: Annotated[int | None, Range(1, 4096)] = None
    """Ranks that steps are put together for, in steps of unequal tokens; with --planner.tokens."""
    unfit: Literal["refuse", "skip"] = "refuse"
    """What becomes of clips that fit at no degree."""
    costs: Path | None = None
    """File of costs that a run on such machines has kept; by default measured when the run begins,
    and kept in its folder as costs.json."""
    memory: Annotated[float | None, POSITIVE] = None
    """GiB of a rank; by default nine tenths of a GPU, or for each rank a tenth of the machine's."""
    offload: Annotated[float | None, POSITIVE] = None
    """GiB of a rank's host memory that activations may move to, where that saves time; on GPUs."""
    refine: bool = False
    """Correct the costs by what steps took; a resumed run then plans otherwise."""


NAMES = tuple(field.name for field in fields(PlannerConfig))
PLANS_MAY_CHANGE = frozenset(
    f"planner.{name}"
    for name in ("intra", "degree", "inter", "pac", "costs", "memory", "offload", "refine")
)
"""Options that change who runs a sample, and not which samples there are."""


def planner_needs(config: Any) -> dict[str, tuple[bool, str]]:
    """Lists what the options need to have an effect, for `check_needs`."""
    centric, planner = config.data_centric, config.planner
    need = centric, "add --data-centric, which it is for"
    other = planner.tokens is None and planner.seconds is None
    needs: dict[str, tuple[bool, str]] = {f"planner.{name}": need for name in NAMES}
    budget = "leave it out, --planner.tokens or --planner.seconds say what a step takes"
    needs["data.batch_size"] = other, budget
    stages = centric and config.pp_size > 1
    if stages:
        several, overlap = "need several micro-batches a group", "run several at once"
        apart = "keep activations or compute them again"
        for name, why in {"inter": several, "refine": overlap, "offload": apart}.items():
            needs[f"planner.{name}"] = False, f"leave it out: stages of a pipeline {why}"
    told = "leave it out with --data-centric: "
    for name, why in {
        "plugin": f"{told}its steps need ZeRO",
        "sp_size": f"{told}each step chooses how many ranks share a clip, or --planner.degree does",
        "accumulate": f"{told}each step has the micro-batches that its plan says",
        "autoencoder.share": f"{told}each rank encodes the clips of its group",
        "data.bucket_ranks": f"{told}a step is of --data.batch-size samples, of any buckets",
    }.items():
        needs[name] = not centric, why
    return needs


def check_planner(config: Any) -> None:
    """Refuses budgets and degrees that exclude each other."""
    planner = config.planner
    if planner.tokens is not None and planner.seconds is not None:
        raise GulliverError(
            f"--planner.tokens {planner.tokens} and --planner.seconds {planner.seconds:g} exclude "
            "each other: give one budget of a step"
        )
    whole = planner.tokens is not None and planner.intra and planner.inter
    if planner.arrange is not None and not whole:
        raise GulliverError(
            f"--planner.arrange {planner.arrange} needs --planner.tokens, and neither "
            "--planner.no-intra nor --planner.no-inter"
        )
    if planner.offload is not None and not planner.pac:
        raise GulliverError(
            f"--planner.offload {planner.offload:g} and --planner.no-pac exclude each other: with "
            "the latter every block is computed again"
        )
    if planner.intra and planner.degree is not None:
        raise GulliverError(
            f"--planner.degree {planner.degree} is of all groups: add --planner.no-intra"
        )
    if not planner.intra and planner.degree is None:
        raise GulliverError("--planner.no-intra needs a --planner.degree, that of all groups")
