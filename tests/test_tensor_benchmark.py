"""The arithmetic of tensor parallelism's benchmark, and a small run of it from end to end."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from benchmarks._harness import Bar, Spread
from benchmarks._tensor_models import (
    COMPUTE,
    DTENSOR,
    DTENSOR_SEQUENCE,
    OURS,
    RING,
    SPLIT_GATHER,
    TENSOR,
    Sizes,
    counting,
    dtensor_styles,
)
from benchmarks._tensor_ranks import Entry, Found, Options
from benchmarks._tensor_report import (
    Network,
    Result,
    bars,
    formula_bytes,
    joined,
    loss_differences,
    rate_for,
    reductions,
    report,
)
from benchmarks.netlab import NetlabError
from benchmarks.tensor import check, is_ratio

from tests.programs import module, run_program

SIZES = Sizes(hidden=512, wide=1408, blocks=4, vocabulary=2048, batch=4, length=256)


def at(seconds: float) -> Spread:
    return Spread((seconds,))


def network(steps: dict[str, float], ratio: float = 1.0, name: str = "1gbit") -> Network:
    """Four ranks that send what the formulas say, keep less when the sequence is cut, and agree."""
    results = {}
    for contestant, seconds in steps.items():
        wire = formula_bytes(contestant, 4, SIZES) if name != "loopback" else None
        kept = 100 if contestant == TENSOR else 70
        results[contestant] = Result(at(seconds), wire, kept, (3.0, 2.0))
    reduction = at(ratio * steps[COMPUTE] / reductions(SIZES))
    return Network(name, 4, results, reduction, SIZES)


GOOD = {
    COMPUTE: 1.0,
    DTENSOR: 2.0,
    DTENSOR_SEQUENCE: 2.0,
    TENSOR: 1.9,
    SPLIT_GATHER: 1.7,
    RING: 1.5,
}


def failing(found: list[Bar]) -> list[str]:
    return [bar.name for bar in found if not bar.holds]


@pytest.mark.parametrize("ranks", [2, 4])
def test_formulas_count_every_collective(ranks: int) -> None:
    activation = 4 * SIZES.batch * SIZES.length * SIZES.hidden
    gather = activation * (ranks - 1) / ranks
    per_block, cut_block, ends, cut_ends = 4 * 2, 4 + 6, 2 * 2, 2 * 2 + 2
    plain, cut = (formula_bytes(name, ranks, SIZES) / gather for name in (TENSOR, RING))
    # What the loss and the norms add is small.
    assert plain == pytest.approx(SIZES.blocks * per_block + ends, rel=2e-3)
    assert cut == pytest.approx(SIZES.blocks * cut_block + cut_ends, rel=2e-3)
    assert formula_bytes(SPLIT_GATHER, ranks, SIZES) == formula_bytes(RING, ranks, SIZES)


def test_a_rate_is_chosen_so_that_plain_communication_takes_the_time_asked_for() -> None:
    rate = rate_for(0.5, compute_s=1.0, ranks=2, sizes=SIZES)
    bits = float(rate.removesuffix("mbit")) * 1e6
    seconds = formula_bytes(TENSOR, 2, SIZES) * 8 / (0.95 * bits)
    assert seconds == pytest.approx(0.5, rel=0.01)


def test_bars_hold_where_communication_is_hidden() -> None:
    found = bars([network(GOOD), network(GOOD, name="loopback")])
    assert failing(found) == []
    limits = {bar.bar for bar in found if "faster" in bar.name and DTENSOR_SEQUENCE in bar.name}
    assert limits == {1.2, 0.97}


def test_each_broken_promise_is_named() -> None:
    measured = network(GOOD | {SPLIT_GATHER: 2.0, RING: 1.8, TENSOR: 2.1})
    off = dataclasses.replace(measured.results[RING], wire=1e6, saved=101, losses=(3.0, 2.1))
    measured.results[RING] = off
    assert [name.split(", ", 1)[1] for name in failing(bars([measured]))] == [
        f"{RING}: losses, off",
        f"{RING}: bytes sent, off the formula",
        f"{RING}: activations kept, over tensor's",
        f"1gbit (1 x compute), {RING}: times faster than {DTENSOR_SEQUENCE}",
        f"1gbit (1 x compute), {TENSOR}: times faster than {DTENSOR}",
    ]


def test_on_fast_links_it_is_enough_not_to_be_slower() -> None:
    even = {COMPUTE: 1.0, DTENSOR_SEQUENCE: 1.5, RING: 1.5}
    (bar,) = (b for b in bars([network(even, 0.3)]) if "faster" in b.name)
    assert bar.bar == 0.97
    assert bar.holds


def test_losses_are_compared_after_every_step() -> None:
    found = network({COMPUTE: 1.0, DTENSOR: 1.0, TENSOR: 1.0})
    found.results[TENSOR] = dataclasses.replace(found.results[TENSOR], losses=(3.3, 2.0))
    assert loss_differences(found) == {DTENSOR: 0.0, TENSOR: pytest.approx(0.1)}


def test_what_ranks_found_is_joined_by_its_worst() -> None:
    def rank(wire: float, saved: int, loss: float) -> Found:
        entry = Entry(at(1.0), wire, saved, (loss,))
        return Found({COMPUTE: Entry(at(1.0)), TENSOR: entry}, at(1.0))

    joint = joined("1gbit", [rank(1.0e6, 70, 2.0), rank(1.5e6, 80, 4.0)], SIZES, 0.5)
    result = joint.results[TENSOR]
    assert (result.wire, result.saved, result.losses) == (1.5e6, 80, (3.0,))


def test_the_report_has_a_row_for_each_contestant_of_each_network() -> None:
    made = report([network(GOOD), network(GOOD, name="loopback")], SIZES)
    assert [row[0] for row in made.rows].count(RING) == 2
    assert {len(row) for row in made.rows} == {len(made.columns)}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"contestants": ("DTenser",)}, "unknown contestant 'DTenser'"),
        ({"ranks": (1,)}, "ranks must be at least 2"),
        ({"batch": 3, "ranks": (2,)}, "batch is 3: it must divide by 2 ranks"),
        ({"hidden": 256, "ranks": (4,)}, "hidden / 128 is 2: it must divide by 4 ranks"),
        ({"rounds": 0}, "rounds must be at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(change: dict, error: str) -> None:
    with pytest.raises(NetlabError, match=error):
        check(dataclasses.replace(Options(), **change))


def test_networks_are_rates_or_multiples_of_compute() -> None:
    assert is_ratio("0.3")
    assert is_ratio("3")
    assert not is_ratio("1gbit")
    assert not is_ratio("loopback")


def test_shares_of_a_batch_make_the_whole() -> None:
    tokens, labels = SIZES.batch_of(3)
    shares = [SIZES.batch_of(3, place, 2) for place in range(2)]
    assert torch.equal(torch.cat([share[0] for share in shares]), tokens)
    assert torch.equal(tokens[:, 1:], labels[:, :-1])


def test_a_storage_that_is_saved_twice_counts_once_and_parameters_do_not() -> None:
    weight = torch.ones(8, 8, requires_grad=True)
    x = torch.ones(4, 8, requires_grad=True)
    with counting({weight.untyped_storage().data_ptr()}) as storages:
        y = x @ weight
        (y.view(-1) * y.view(-1)).sum()
    assert sum(storages.values()) == x.nbytes + y.nbytes


@pytest.mark.parametrize("sequence", [False, True])
def test_every_linear_of_a_block_is_cut(sequence: bool) -> None:
    styles = dtensor_styles(1, sequence)
    names = {name.rsplit(".", 1)[-1] for name in styles}
    linears = {f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down")}
    assert names >= linears | {"embed_tokens", "lm_head"}
    assert ("norm" in names) is sequence


def test_a_small_run_ends_with_bars() -> None:
    sizes = {"hidden": 256, "wide": 128, "blocks": 1, "vocabulary": 64, "batch": 2, "length": 8}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    command = ["benchmarks.tensor", *options, "--rounds=1"]
    command += ["--ranks", "2", "--networks", "loopback", "--contestants", "DTensor"]
    done = run_program(module, *command, *OURS, timeout=120)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    losses = [bar for bar in line["bars"] if "losses" in bar["name"]]
    assert len(losses) == len(OURS)
    assert all(bar["holds"] for bar in losses)
