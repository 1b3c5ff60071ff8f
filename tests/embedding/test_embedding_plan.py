"""Plans of tables, budgets of caches, ids that are admitted."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

from dynamic_ids import DynamicIds
from gulliver.cli.dispatch import main
from gulliver.embedding import (
    CachedEmbeddingBag,
    ShardedEmbeddingBag,
    TablesJob,
    plan_tables,
)
from gulliver.embedding.planning import DATA_SETS
from gulliver.errors import GulliverError
from gulliver.hardware.operators import LookupLoad, lookup_seconds
from gulliver.hardware.probe import named_cluster
from gulliver.solve.tables import TableOption, place_tables


def test_placements_are_near_the_best_of_all_and_never_below_the_bound() -> None:
    draw, optimal = np.random.default_rng(0), 0
    for _ in range(120):
        ranks = int(draw.integers(2, 4))
        tables = []
        for _ in range(int(draw.integers(1, 6))):
            work = float(draw.integers(1, 30))
            whole = [
                TableOption(
                    f"whole:{r}", tuple(work * (r == o) for o in range(ranks)), (1,) * ranks
                )
                for r in range(ranks)
            ]
            shared = float(draw.uniform(1.0, 1.6)) * work / ranks
            tables.append([*whole, TableOption("row", (shared,) * ranks, (1,) * ranks)])
        found = place_tables(tables, 100)
        best = min(
            max(map(sum, zip(*(o.seconds for o in choice), strict=True)))
            for choice in product(*tables)
        )
        assert found.bound <= best + 1e-9
        assert best - 1e-9 <= found.slowest <= 1.25 * best
        assert max(found.seconds) == found.slowest
        optimal += found.slowest <= best + 1e-9
    assert optimal >= 100


def test_placements_keep_within_memory_or_are_refused() -> None:
    def option(name: str, seconds: tuple[float, ...], nbytes: tuple[int, ...]) -> TableOption:
        return TableOption(name, seconds, nbytes)

    tables = [[option("whole:0", (1, 0), (8, 0)), option("row", (1, 1), (4, 4))]] * 2
    assert [o.name for o in place_tables(tables, 20).options] == ["whole:0", "whole:0"] or (
        place_tables(tables, 20).slowest <= 2
    )
    assert [o.name for o in place_tables(tables, 8).options] == ["row", "row"]
    with pytest.raises(GulliverError, match="which only has 7"):
        place_tables(tables, 7)


def test_criteo_1tb_on_one_gpu_takes_the_bytes_that_were_counted_by_hand() -> None:
    rows = DATA_SETS["criteo-1tb"]
    assert (len(rows), sum(rows)) == (26, 177_944_275)
    tables = {f"C{n + 1}": count for n, count in enumerate(rows)}
    plan = plan_tables(TablesJob(tables, 128), named_cluster("h100x1"))
    slots = sum(max(int(0.01 * count), 1) for count in rows)
    assert plan.host_bytes == (sum(rows) * 512,)
    assert plan.device_bytes == (slots * (512 + 4),)
    assert plan.device_bytes[0] <= 1.3e9
    assert plan.index_bytes[0] <= 16 * sum(rows) / 3


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "row-wise adagrad", "sparse adam"])
def test_device_bytes_are_those_of_the_tables_that_are_made(optimizer: str) -> None:
    from tests.embedding.embedding_runs import OPTIMIZERS

    job = TablesJob({"a": 4000, "b": 1000}, 16, cache=0.05, optimizer=optimizer)
    plan = plan_tables(job, named_cluster("h100x1"))
    table = CachedEmbeddingBag(dict(job.tables), 16, cache=0.05)
    table.attach(OPTIMIZERS[optimizer](table.parameters()))
    assert plan.device_bytes[0] == table.device_bytes
    assert plan.host_bytes[0] == sum(column.nbytes for column in table.columns.values())
    assert plan.index_bytes[0] == table._store.replacement.index.nbytes


def test_a_plan_spreads_tables_and_is_one_that_can_be_made() -> None:
    job = TablesJob({"a": 4000, "b": 1000, "c": 90_000}, 16, ranks=4, batch=4096)
    plan = plan_tables(job, named_cluster("h100x4"))
    assert plan.bound <= max(plan.seconds) < sum(plan.seconds)
    assert len(plan.seconds) == 4
    assert set(plan.placement) == {"a", "b", "c"}
    alone = plan_tables(TablesJob(dict(job.tables), 16), named_cluster("h100x1"))
    ShardedEmbeddingBag(dict(job.tables), 16, alone.placement)
    whole = sum(count * 64 for count in job.tables.values())
    assert sum(plan.host_bytes) == whole
    split = plan_tables(
        TablesJob(dict(job.tables), 16, ranks=4, host_bytes=90_000 * 64 // 2),
        named_cluster("h100x4"),
    )
    assert split.placement["c"] in ("row", "column")
    with pytest.raises(GulliverError, match=r"\b1000000;"):
        plan_tables(
            TablesJob(dict(job.tables), 16, ranks=2, host_bytes=10**6), named_cluster("h100x2")
        )


def test_seconds_of_a_lookup_are_those_of_its_bytes() -> None:
    cluster = named_cluster("h100x2")
    device = cluster.device
    load = LookupLoad(rows=1000, width=128, state=128, missed=100, sent=4e6)
    found = lookup_seconds(cluster, load)
    touched = 4 * 1000 * (4 * 128 + 2 * 128)
    assert found["memory"] == pytest.approx(device.launch_s + touched / device.memory_rate)
    record = 4 * 100 * 256
    assert device.to_device_rate
    assert device.to_host_rate
    fetch = 2 * device.launch_s + record / device.to_device_rate + record / device.to_host_rate
    assert found["fetch"] == pytest.approx(fetch)
    link = cluster.axes[-1].link
    assert found["exchange"] == pytest.approx(2 * (link.alpha_s + 4e6 / link.bandwidth))


def test_ids_have_a_row_of_their_own_when_they_have_come_often_enough() -> None:
    draw = np.random.default_rng(0)
    ids, counts, known = DynamicIds(4000, admit_after=3), dict[int, int](), dict[int, int]()
    for _ in range(60):
        raw = torch.from_numpy((draw.zipf(1.3, 15) % 200) * 10**12 - 7)
        rows = ids.rows_of(raw)
        for key, count in zip(*(t.tolist() for t in raw.unique(return_counts=True)), strict=True):
            if key in known:
                continue
            counts[key] = counts.get(key, 0) + count
            if counts[key] >= 3:
                known[key] = len(known) + 1
        assert rows.tolist() == [known.get(key, 0) for key in raw.tolist()]
    assert ids.admitted == len(known) > 10
    again = DynamicIds(4000, admit_after=3)
    again.load_state_dict(ids.state_dict())
    probe = torch.tensor([*known, 5, 6])
    assert torch.equal(again.rows_of(probe, learn=False), ids.rows_of(probe, learn=False))
    more = torch.tensor([5, 5, 5])
    assert torch.equal(again.rows_of(more), ids.rows_of(more))


def test_random_streams_of_ids_are_admitted_neither_early_nor_late(full: bool) -> None:
    """Brute force; late is an id that came with fewer others between than there are rows."""
    for seed in range(200 if full else 12):
        draw = np.random.default_rng(seed)
        rows, after = int(draw.integers(1024, 2000)), int(draw.integers(1, 6))
        ids, skew = DynamicIds(rows, admit_after=after), float(draw.uniform(1.02, 1.5))
        total, run, seen, known = Counter[int](), Counter[int](), dict[int, int](), dict[int, int]()
        others = 0
        for step in range(40):
            raw = torch.from_numpy(draw.zipf(skew, int(draw.integers(1, 400))))
            found = dict(zip(raw.tolist(), ids.rows_of(raw).tolist(), strict=True))
            if step == 20:
                state, ids = ids.state_dict(), DynamicIds(rows, admit_after=after)
                ids.load_state_dict(state)
            total.update(raw.tolist())
            for key in found:
                if others - seen.get(key, others) >= rows:
                    run[key] = 0
            run.update(raw.tolist())
            others += len(found)
            for key, row in found.items():
                assert row == known.get(key, row)
                assert not row or total[key] >= after
                assert row or run[key] < after or ids.left_out
                seen[key] = others
                if row:
                    known[key] = row
        assert sorted(known.values()) == list(range(1, ids.admitted + 1))


def test_the_command_plans_criteo_1tb_and_says_each_table_and_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["embedding", "plan", "criteo-1tb", "--cluster", "h100x8", "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["placement"]) == 26
    assert sum(found["host_bytes"]) == 512 * 177_944_275
    assert sum(found["device_bytes"]) <= 1.3e9
    with pytest.raises(SystemExit):
        main(["embedding", "plan", "user=1_000_000", "item=5000", "--dim", "16"])
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("user", "1,000,000", "placement", "rank", "slowest"))
    with pytest.raises(SystemExit) as refused:
        main(["embedding", "plan", "criteo"])
    assert refused.value.code == 2
    assert "use NAME=ROWS" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["embedding", "plan", "user=5", "user=6"])
    assert "'user' is defined twice" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["embedding", "plan", "user=6"])
    told = " ".join(capsys.readouterr().out.split())
    assert "rank 0 has 1 slots, and a batch of 16,384 samples needs up to 6 different rows" in told
