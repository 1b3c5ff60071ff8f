"""Costs of samples: fitted rates, tables, files and what is refused of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks._data_centric_costs import TABLE, Parts, video_costs

from gulliver.errors import GulliverError
from gulliver.hardware import (
    SampleCosts,
    SampleShape,
    TableCosts,
    all_reduce_seconds,
    described,
    fit_samples,
    load_samples,
    measure_samples,
    save_samples,
)
from gulliver.hardware.batch_costs import BlockKind
from gulliver.hardware.costs import all_to_all_seconds
from gulliver.hardware.samples import SampleFit, SampleModel

MODEL = SampleModel("tiny", 1000, 64, (BlockKind("block", 4, 500.0),))
TRUE = SampleFit(0.01, 1e-3, 1e-10, 1e-6, 2e-8, 1e6, 40.0, 100.0)


def clock(shape: SampleShape, batch: int, depth: int) -> tuple[float, int]:
    """Seconds and bytes of a machine whose rates are `TRUE`."""
    linear = 2 * 1000 * shape.tokens
    attention = 4 * 64 * (shape.pairs + shape.tokens * shape.text)
    seconds = (
        0.01
        + depth * 1e-3
        + batch
        * (4 * depth * (linear + attention) * 1e-10 + shape.tokens * 1e-6 + shape.pixels * 2e-8)
    )
    return seconds, int(1e6 + batch * shape.tokens * (40 + 100 * depth))


def test_few_points_find_the_rates_of_a_machine() -> None:
    shapes = [SampleShape.document(128), SampleShape.document(512), SampleShape(64, 9.0, 3, 4096)]
    fit = fit_samples(MODEL, measure_samples(clock, shapes))
    for name in ("fixed_s", "call_s", "flop_s", "token_s", "pixel_s", "block_bytes", "states"):
        assert getattr(fit, name) == pytest.approx(getattr(TRUE, name), rel=1e-6)
    assert fit.worst < 1e-9
    far = SampleShape(4000, 1e6, 10, 1000)
    costs = SampleCosts(MODEL, fit, 1e9)
    found = costs.batches(far, 1, pac=False)
    assert found.seconds[6] == pytest.approx(clock(far, 7, 4)[0], rel=1e-6)
    assert found.bytes[6] == pytest.approx(clock(far, 7, 4)[1], rel=1e-6)


def test_four_points_of_one_shape_predict_that_shape() -> None:
    shape = SampleShape.clip(4, 6, 8)
    fit = fit_samples(MODEL, measure_samples(clock, [shape]))
    costs = SampleCosts(MODEL, fit, 1e9)
    for batch in (1, 3, 9):
        told = costs.batches(shape, 1, pac=False).seconds[batch - 1]
        assert told == pytest.approx(clock(shape, batch, 4)[0], rel=1e-6)


def test_the_error_is_that_of_points_left_out() -> None:
    shapes = [SampleShape.document(n) for n in (64, 128, 256, 512)]
    points = measure_samples(clock, shapes)
    wrong = replace(points[5], seconds=1.5 * points[5].seconds)
    fit = fit_samples(MODEL, [*points[:5], wrong, *points[6:]])
    assert fit.worst > 0.2
    assert fit_samples(MODEL, points).worst < 1e-6


def test_the_median_of_repeats_counts_and_the_first_run_does_not() -> None:
    times = iter([99.0, 1.0, 5.0, 2.0] * 4)
    points = measure_samples(lambda *_: (next(times), 10), [SampleShape(8, 1.0)])
    assert [point.seconds for point in points] == [2.0] * 4
    assert [(point.batch, point.depth) for point in points] == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_more_ranks_share_compute_and_bytes_and_pay_messages() -> None:
    cluster = described("8xh100-infiniband").resized(8)
    costs = SampleCosts(MODEL, TRUE, 1e9, cluster)
    shape = SampleShape.document(4096)
    one, four = (costs.batches(shape, d, pac=False) for d in (1, 4))
    sent = 4 * 3 * 4 * all_to_all_seconds(cluster.crossed(1, 4), 4096 // 4 * 64 * 4)
    assert four.communication[0] == pytest.approx(sent)
    inside = one.seconds[0] - 0.014
    assert four.seconds[0] == pytest.approx(0.014 + inside / 4 + sent)
    assert four.bytes[0] - 1e6 == pytest.approx((one.bytes[0] - 1e6) / 4)
    assert costs.degrees(5) == (1, 2, 3, 4, 5)
    assert replace(costs, allowed=(1, 2, 4)).degrees(8) == (1, 2, 4)
    assert replace(costs, cluster=None).degrees(8) == (1,)


def test_tensor_ranks_share_blocks_and_sum_their_outputs() -> None:
    cluster = described("8xh100-infiniband").resized(8)
    costs = SampleCosts(MODEL, TRUE, 1e9, cluster, tensor=2)
    shape = replace(SampleShape.document(4096), text=7)
    alone, two = costs.alone.batches(shape, 2, pac=False), costs.batches(shape, 2, pac=False)
    sums = 3 * 3 * 4 * all_reduce_seconds(cluster.crossed(1, 2), 4096 // 2 * 64 * 4)
    # Ranks of a sequence lie as far apart as there are tensor ranks between.
    exchanges = 4 * 3 * 4 * all_to_all_seconds(cluster.crossed(2, 2), 4096 // 2 * 64 * 4)
    assert two.communication[0] == pytest.approx(sums + exchanges)
    blocks = 4 * 4 * MODEL.forward_flops(shape) * TRUE.flop_s / 2
    rest = alone.seconds[0] - alone.communication[0] - blocks
    assert two.seconds[0] - two.communication[0] == pytest.approx(rest + blocks / 2)
    assert two.bytes.tolist() == alone.bytes.tolist()
    with pytest.raises(GulliverError, match="tensor=2"):
        replace(costs, cluster=None).batches(shape, 1)


def test_packed_documents_pay_for_their_own_attention_only() -> None:
    assert SampleShape.document(8).pairs == 32
    assert SampleShape.clip(4, 3, 5).pairs == 60 * (15 + 4) / 2


def test_a_file_is_good_for_its_model_and_machine_only(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    save_samples(path, MODEL, TRUE)
    assert load_samples(path, MODEL) == TRUE
    with pytest.raises(GulliverError, match=r"another model .*other"):
        load_samples(path, replace(MODEL, name="other"))
    with pytest.raises(GulliverError, match="another dtype"):
        load_samples(path, replace(MODEL, dtype="bfloat16"))
    values = json.loads(path.read_text())
    values["fingerprint"]["machine"]["processor"] = "abacus"
    path.write_text(json.dumps(values))
    with pytest.raises(GulliverError, match=r"another machine .*abacus.*measure the costs again"):
        load_samples(path, MODEL)
    save_samples(path, MODEL, TRUE)
    values = json.loads(path.read_text())
    values["fingerprint"]["torch"] = "1.0"
    path.write_text(json.dumps(values))
    with pytest.raises(GulliverError, match=r"another version of torch \(1.0, but"):
        load_samples(path, MODEL)
    path.write_text("{}")
    with pytest.raises(GulliverError, match="has no sample costs"):
        load_samples(path, MODEL)
    with pytest.raises(GulliverError, match="No such file"):
        load_samples(tmp_path / "none", MODEL)


def test_the_table_is_its_own_formula() -> None:
    costs, values = video_costs(), json.loads(TABLE.read_text())
    parts = Parts(values["cost_model"]["resolutions"])
    for shape, degree, batch in (("144p/1", 1, 64), ("480p/204", 4, 2), ("720p/408", 8, 1)):
        tokens = parts.tokens(shape) * batch
        name, frames = shape.split("/")
        per_frame = tokens // batch // (1 if frames == "1" else int(frames) // 17 * 5)
        latents = tokens // batch // per_frame
        work = tokens * 1.15e9 * 6 * 1.33 + 4 * 28 * tokens * (per_frame + latents) * 1152 * 3
        busy = min(1, 0.35 + 0.65 * tokens / degree / 6000)
        told = work / 300e12 / degree / busy + parts(shape, degree, batch)[0] + 0.12
        assert name in values["cost_model"]["resolutions"]
        assert costs.seconds[shape][degree][batch] == pytest.approx(told, rel=1e-3)
        assert costs.batches(shape, degree, pac=False).seconds[batch - 1] == pytest.approx(
            told, rel=1e-3
        )


def test_table_costs_are_piecewise_linear() -> None:
    row = {1: 1.0, 2: 1.5, 4: 3.5}
    costs = TableCosts({"a": {1: row}}, {"a": 10}, 1.0, 65.0)
    assert costs.batches("a", 1).seconds.tolist() == [1.0, 1.5, 2.5, 3.5, 4.5, 5.5]
    assert len(costs.batches("a", 2)) == 0
    with pytest.raises(GulliverError, match="no shape 'b'"):
        costs.batches("b", 1)
