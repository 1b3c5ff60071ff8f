"""The arithmetic of the sequence benchmark: what it counts, and how it chooses its links."""

from __future__ import annotations

import pytest
import torch
from benchmarks._harness import Spread
from benchmarks._sequence_memory import Case, Layer, Live, counted, explicit, largest
from benchmarks._sequence_overlap import of_overlap, predicted, rate_for
from benchmarks._sequence_shared import Options, slowest
from benchmarks._sequence_wire import totals
from benchmarks.netlab import NetlabError
from benchmarks.sequence import PARTS, REPORTS, measure
from torch.nn.functional import scaled_dot_product_attention

CONNECTIONS = """\
0      0               10.77.0.1:45815          10.77.0.7:38708 bbr rto:204 bytes_sent:400 \
bytes_acked:384 bytes_received:776
0      0      [::ffff:10.77.0.1]:44263 [::ffff:10.77.0.7]:52898 bbr bytes_acked:16 segs_out:1
0      0               10.77.0.1:44264          10.77.0.3:52898 bbr bytes_received:8
"""


def test_delivered_bytes_are_summed_by_the_other_end() -> None:
    assert totals(CONNECTIONS) == {"10.77.0.7": 400}


def test_a_link_is_as_fast_as_the_ratio_asks() -> None:
    # 25 MB in a second are 200 Mbit/s; three times as slow a link takes three seconds.
    assert rate_for(1.0, 1.0, 25e6) == "200mbit"
    assert rate_for(3.0, 1.0, 75e6) == "200mbit"


def test_of_each_turn_the_slowest_rank_counts() -> None:
    found = slowest([{"ring": (1.0, 5.0)}, {"ring": (2.0, 3.0)}])
    assert found == {"ring": Spread((2.0, 5.0))}


def test_a_slow_link_is_predicted_to_take_what_it_carries() -> None:
    shape = of_overlap(Options())
    assert predicted(shape, "10mbit", 1.0) > 2.9 * predicted(shape, "30mbit", 1.0)
    assert predicted(shape, "100000mbit", 1.0) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("most", [1, 2, 3, 100, 255, 256])
def test_the_largest_that_fits_is_found(most: int) -> None:
    assert largest(lambda n: n <= most) == most
    assert 0.99 * 300 * most <= largest(lambda n: n <= 300 * most) <= 300 * most


def test_nothing_fits_is_none() -> None:
    assert largest(lambda n: False) == 0


def test_what_is_alive_is_counted_and_what_is_gone_is_not() -> None:
    known = torch.zeros(1000)
    with Live([known]) as live:
        view = known[:10]
        first = torch.zeros(100)
        again = first[5:]
        assert live.now == 400
        del first
        assert live.now == 400  # the view keeps it
        del again
        second = torch.zeros(50)
    assert (live.now, live.peak) == (200, 400)
    assert view.numel() + second.numel() == 60


def test_activations_grow_with_the_sequence_and_weights_do_not() -> None:
    short, long = (Case("tensor", 1, length, heads=2) for length in (1024, 2048))
    assert counted(long) == pytest.approx(2 * counted(short), rel=0.05)
    weights = sum(2 * p.nbytes for p in short.model().parameters())
    added = counted(short, whole=True) - counted(short)
    assert added == weights + 1024 * short.width * 4


def test_explicit_scores_grow_with_the_square() -> None:
    long, longer = (Case("tensor, explicit scores", 1, n, heads=2) for n in (1024, 2048))
    assert counted(longer) > 3 * counted(long)


def test_tensor_parallelism_needs_as_many_heads_as_ranks() -> None:
    assert Case("tensor", 2, 64, heads=2).possible
    assert not Case("tensor", 4, 64, heads=2).possible
    assert Case("ring", 4, 64, heads=2).possible


def test_the_shares_of_a_layer_add_up_to_the_layer() -> None:
    torch.manual_seed(0)
    whole = Layer(16, 4, 1, scaled_dot_product_attention)
    shares = [Layer(16, 4, 2, explicit) for _ in range(2)]
    x = torch.randn(1, 6, 16)
    parts = []
    for number, share in enumerate(shares):
        rows = slice(8 * number, 8 * number + 8)
        qkv = whole.qkv.weight.view(3, 16, 16)[:, rows].reshape(24, 16)
        bias = whole.qkv.bias.view(3, 16)[:, rows].reshape(24)
        share.load_state_dict(
            {
                **{k: v for k, v in whole.state_dict().items() if k.startswith("norm")},
                **{"qkv.weight": qkv, "qkv.bias": bias, "out.weight": whole.out.weight[:, rows]},
                "up.weight": whole.up.weight.chunk(2)[number],
                "up.bias": whole.up.bias.chunk(2)[number],
                "down.weight": whole.down.weight.chunk(2, 1)[number],
            }
        )
        parts.append(share.out(share._attend(share.norm1(x))))
    expected = whole.out(whole._attend(whole.norm1(x)))
    assert torch.allclose(sum(parts), expected, atol=1e-6)


def test_every_part_has_a_report_and_others_are_refused() -> None:
    assert set(REPORTS) == set(PARTS) == set(Options().parts)
    with pytest.raises(NetlabError, match=r"unknown part 'byts'.*bytes"):
        measure(Options(parts=("byts",)))


def test_quick_is_smaller_and_says_so_nowhere_else() -> None:
    quick = Options(quick=True).sized()
    assert quick.local < Options().local
    assert quick.parts == Options().parts
    assert Options().sized() == Options()
