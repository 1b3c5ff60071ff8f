"""Worlds and collectives: right with any number of ranks, and lost ranks are named."""

from __future__ import annotations

import gc
import os
import signal
import threading
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from gulliver.comm import (
    World,
    all_gather,
    all_reduce,
    broadcast,
    gather_objects,
    group_rank,
    init_world,
    launch,
    reduce_scatter,
    shutdown,
    steps,
)
from gulliver.comm.collectives import any_rank, broadcast_object, group_size
from gulliver.comm.groups import RankGroup
from gulliver.comm.messages import exchange, operations, shift
from gulliver.errors import GulliverError
from gulliver.precision.wire.formats import WireFormat
from tests.covering import grid
from tests.patience import patient
from tests.pool import Pool
from tests.programs import Program, rank_environment, text


def _value(rank: int, size: int) -> torch.Tensor:
    return torch.arange(6.0 * size).double() * (rank + 1)


def _collect(world: World, async_op: bool) -> dict[str, torch.Tensor]:
    size, mine = world.size, _value(world.rank, world.size)
    found = {}
    for op in ("sum", "mean", "max"):
        found[f"all {op}"] = mine.clone()
        all_reduce(found[f"all {op}"], op, async_op=async_op).wait()
        found[f"scatter {op}"] = torch.empty(6).double()
        reduce_scatter(found[f"scatter {op}"], mine.clone(), op, async_op=async_op).wait()
    found["gather"] = torch.empty(6 * size).double()
    all_gather(found["gather"], mine[:6].contiguous(), async_op=async_op).wait()
    whole = torch.zeros(6 * size).double()
    part = whole[6 * world.rank : 6 * world.rank + 6]
    part.fill_(world.rank + 1)
    all_gather(whole, part, async_op=async_op).wait()  # from its own place
    found["in place"] = whole
    return found


def _expected(size: int, rank: int) -> dict[str, torch.Tensor]:
    values = torch.stack([_value(r, size) for r in range(size)])
    found = {}
    for op, reduced in (("sum", values.sum(0)), ("mean", values.mean(0)), ("max", values.amax(0))):
        found[f"all {op}"] = reduced
        found[f"scatter {op}"] = reduced[6 * rank : 6 * rank + 6]
    found["gather"] = values[:, :6].flatten()
    found["in place"] = torch.arange(1.0, size + 1).double().repeat_interleave(6)
    return found


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives_equal_their_definition(pool: Pool, size: int, async_op: bool) -> None:
    for rank, found in enumerate(pool.run(_collect, size, async_op)):
        expected = _expected(size, rank)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-15, atol=0, msg=name)


def _large_sums(world: World) -> list[bytes]:
    found = []
    for way in ("auto", "direct"):
        os.environ["GULLIVER_ALL_REDUCE"] = way
        for op in ("sum", "mean"):
            for dtype in (torch.float32, torch.float64):
                generator = torch.Generator().manual_seed(world.rank)
                # More than goes to everybody at once, and no multiple of anything.
                tensor = torch.randn(20_011, generator=generator, dtype=dtype)
                all_reduce(tensor, op, async_op=op == "sum").wait()
                found.append(tensor.numpy().tobytes())
    del os.environ["GULLIVER_ALL_REDUCE"]
    return found


def test_two_ranks_get_the_same_bits_from_the_backend_and_from_direct_messages(pool: Pool) -> None:
    first, second = pool.run(_large_sums, 2)
    assert first[:4] == first[4:] == second[:4] == second[4:]


def _term(rank: int) -> torch.Tensor:
    return torch.randn(300_000, generator=torch.Generator().manual_seed(rank))


def _sums_in_any_order(world: World) -> list[torch.Tensor]:
    found = []
    for way, any_order in (("auto", False), ("auto", True), ("direct", True)):
        os.environ["GULLIVER_ALL_REDUCE"] = way
        total = _term(world.rank)
        all_reduce(total, any_order=any_order, async_op=True).wait()
        found.append(total)
    del os.environ["GULLIVER_ALL_REDUCE"]
    return found


def test_terms_are_added_in_the_order_of_ranks_unless_any_order_will_do(pool: Pool) -> None:
    expected = _term(0) + _term(1) + _term(2)
    answers = pool.run(_sums_in_any_order, 3)
    for ordered, free, direct in answers:
        assert torch.equal(ordered, expected)
        assert torch.equal(direct, expected)
        torch.testing.assert_close(free, expected)
        assert torch.equal(free, answers[0][1])
        assert not torch.equal(free, expected)  # or it was not the ring


def _abandoned(world: World) -> torch.Tensor:
    parts = torch.zeros(world.size * 50_000)
    own = torch.full((50_000,), world.rank + 1.0)
    handle = all_gather(parts, own, async_op=True)
    if world.rank == 0:
        del handle  # nobody waits for it here; the other needs this rank's part all the same
        gc.collect()
    else:
        handle.wait()
    total = torch.ones(50_000, dtype=torch.int64)
    all_reduce(total)
    return parts if world.rank else total


def test_unawaited_gather_completes(pool: Pool) -> None:
    total, parts = pool.run(_abandoned, 2)
    assert total.eq(2).all()
    assert parts.view(2, -1).eq(torch.tensor([[1.0], [2.0]])).all()


def _objects(world: World) -> tuple:
    flags = (any_rank(world.rank == 1, world.device), any_rank(False, world.device))
    sent = broadcast_object({"from": world.rank})
    tensor = torch.full((3,), float(world.rank))
    broadcast(tensor, 0)
    return flags, sent, gather_objects(world.rank**2), tensor.tolist(), (group_rank(), group_size())


class _Gate:
    """Messages that arrive when a test says."""

    def __init__(self) -> None:
        self.arrived = threading.Event()

    def wait(self) -> None:
        assert self.arrived.wait(60)


@pytest.mark.parametrize("size", [2, 4])
def test_few_bytes_are_in_flight_whatever_the_size_of_a_group(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, group = Mock(), Mock(size=size)
    monkeypatch.setattr(steps, "_threads", threads)
    steps.start(Mock(), [group], limited=5)
    assert threads.enqueue.call_args.args[:2] == (group.process_group, 5)


def test_few_bytes_of_a_group_are_in_flight_and_each_end_begins_the_next() -> None:
    threads, gates = steps._Threads(), [_Gate() for _ in range(8)]
    begun: SimpleQueue[int] = SimpleQueue()

    def collective(number: int) -> steps.Steps:
        begun.put(number)
        yield gates[number]
        if number == 1:
            raise GulliverError("lost")

    class Group:
        pass

    def submit(group: Any, number: int, nbytes: int) -> steps.PendingCollective:
        exchange = steps.PendingCollective()
        threads.enqueue(group, nbytes, collective(number), exchange)
        return exchange

    one, other = Group(), Group()
    third = [submit(one, number, steps.IN_FLIGHT_BYTES // 3) for number in range(5)]
    assert [begun.get(timeout=60) for _ in range(3)] == [0, 1, 2]
    submit(other, 5, 2 * steps.IN_FLIGHT_BYTES)  # of another group: it does not wait
    large = submit(other, 6, 1)
    assert begun.get(timeout=60) == 5
    for number in range(2):
        gates[number].arrived.set()
        if number == 1:  # an error makes room, too
            with pytest.raises(GulliverError, match="lost"):
                third[number].wait()
        else:
            third[number].wait()
        assert begun.get(timeout=60) == number + 3
        assert begun.empty()
    for gate in gates:
        gate.arrived.set()
    large.wait()


def test_objects_and_votes(pool: Pool) -> None:
    for rank, answer in enumerate(pool.run(_objects, 3)):
        assert answer == ((True, False), {"from": 0}, [0, 1, 4], [0.0] * 3, (rank, 3))


def test_inputs_that_gloo_corrupts_are_rejected() -> None:
    column = torch.ones(4, 8)[:, :4]
    with pytest.raises(GulliverError, match="not contiguous"):
        all_reduce(column)
    with pytest.raises(GulliverError, match="did you mean 'mean'"):
        all_reduce(torch.ones(2), "meen")  # type: ignore[arg-type]
    with pytest.raises(GulliverError, match=r"mean of torch\.int64"):
        all_reduce(torch.ones(2).long(), "mean")
    with pytest.raises(GulliverError, match=r"1 parts of 2 elements .* 5 elements"):
        all_gather(torch.ones(5), torch.ones(2))


def test_unknown_wire_formats_are_rejected() -> None:
    wire = WireFormat("identify")
    row = torch.ones(2)
    for travel in (
        lambda: all_reduce(row, wire=wire),
        lambda: reduce_scatter(row, row, wire=wire),
        lambda: all_gather(row, row, wire=wire),
        lambda: exchange(RankGroup((0,)), [row], [2], wire),
        lambda: shift(RankGroup((0, 1)), row, row, 1, wire),
        lambda: operations([], [(1, row)], None, 1, wire),
    ):
        with pytest.raises(GulliverError, match="'identify': did you mean 'identity'"):
            travel()


def test_a_world_of_one_has_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    shutdown()
    world = init_world()
    assert (world.rank, world.size, world.is_main) == (0, 1, True)
    assert not torch.distributed.is_initialized()
    monkeypatch.setenv("WORLD_SIZE", "2")
    shutdown()
    with pytest.raises(GulliverError, match=r"RANK, MASTER_ADDR, MASTER_PORT is not set.*torchrun"):
        init_world()
    shutdown()


LOOP = """
import sys, time, torch
from gulliver.comm import Torus, all_reduce, guard, init_world
from gulliver.errors import GulliverError
world = init_world(silence_s=4)
torus = Torus({"node": 2, "local": 2}) if world.size == 4 else None
try:
    with guard():
        for step in range(100_000):
            # In the background where there are axes, so that threads meet the error.
            all_reduce(torch.ones(10), group=torus, async_op=torus is not None).wait()
            if step == 20:
                print("running", flush=True)
            if step == 25 and world.rank == world.size - 1 and sys.argv[1:] == ["raise"]:
                raise ValueError("no more data")
            if step == 25 and world.rank == world.size - 1 and sys.argv[1:] == ["end"]:
                sys.exit()
            time.sleep(0.01)
except GulliverError as error:
    print(error, file=sys.stderr, flush=True)
    sys.exit(3)
"""


FAILS = """
import sys, time, torch
from gulliver.comm import guard, init_world
from gulliver.comm.world import together
from gulliver.errors import GulliverError
world = init_world()
print("running", flush=True)
try:
    with guard(), together():
        torch.distributed.barrier()
        if world.rank == 1:
            raise ValueError("the label 99 is outside the vocabulary")
        torch.distributed.recv(torch.ones(1), 1)
except GulliverError as error:
    print(error, file=sys.stderr, flush=True)
    sys.exit(3)
except ValueError:
    # It goes on with something else, as a notebook would.
    time.sleep(60 if sys.argv[1] == "stay" else 2)
"""


def _start(size: int, program: str = LOOP, *arguments: str) -> list[Program]:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        Program(text, program, *arguments, env=rank_environment(rank, size, store.port))
        for rank in range(size)
    ]
    processes[0].store = store  # type: ignore[attr-defined]
    for process in processes:
        assert process.stdout.readline() == "running\n"
    return processes


@pytest.mark.parametrize(
    ("how", "size"), grid([signal.SIGKILL, signal.SIGSTOP], [3, 4], strength=1), ids=str
)
def test_a_rank_that_dies_or_hangs_is_named_in_bounded_time(how: signal.Signals, size: int) -> None:
    processes = _start(size)
    try:
        processes[2].send_signal(how)
        for process in (*processes[:2], *processes[3:]):
            _, errors = process.communicate(timeout=patient(40))
            assert process.returncode in (1, 3)
            assert "rank 2 was lost" in errors
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("raise", "it failed with ValueError: no more data"),
        pytest.param("end", "it ended, having made fewer steps", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_ends_too_early_is_named_with_its_reason(how: str, why: str) -> None:
    processes = _start(2, LOOP, how)
    try:
        _, errors = processes[0].communicate(timeout=60)
        assert processes[0].returncode in (1, 3)
        assert f"rank 1 was lost: {why}" in errors
        _, errors = processes[1].communicate(timeout=60)
        assert processes[1].returncode == (1 if how == "raise" else 0), errors
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("then", ["stay", "go"])
def test_an_error_of_one_rank_ends_those_that_wait_for_it(then: str) -> None:
    processes = _start(2, FAILS, then)
    try:
        _, errors = processes[0].communicate(timeout=40)
        assert processes[0].returncode == (1 if then == "stay" else 3)
        assert "rank 1 failed: ValueError: the label 99 is outside the vocabulary" in errors
    finally:
        for process in processes:
            process.kill()
            process.wait()


ALONE = """
import signal, torch
from gulliver.comm import all_gather, init_world, world as _world
_world.LEAVING_S = 0.5
world = init_world()
torch.distributed.barrier()
print("running", flush=True)
if world.rank == 0:
    # It has caught what went wrong before the other came so far.
    all_gather(torch.ones(8), torch.ones(4), async_op=True)
else:
    signal.pause()
"""


def test_a_collective_that_never_ends_does_not_abort_the_process() -> None:
    processes = _start(2, ALONE)
    try:
        _, errors = processes[0].communicate(timeout=patient(40))
        assert processes[0].returncode == 1, errors
        assert "failed at exit" in errors
    finally:
        for process in processes:
            process.kill()
            process.wait()


JOB = """
import os, pathlib, signal, sys
if sys.argv[1] == "die" and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "die":
    signal.pause()
if sys.argv[1] == "fail":
    os._exit(7)
import torch
from gulliver.comm import all_reduce, init_world, make_axes, shutdown
world = init_world()
make_axes({"node": 1, "local": 2})
all_reduce(torch.ones(2))
found = []
for pid in (os.getpid(), os.getppid()):
    links = [os.readlink(f) for f in pathlib.Path(f"/proc/{pid}/fd").iterdir() if f.is_symlink()]
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{table}").readlines()[1:]:
            _, address, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in links:
                found.append(address.split(":")[0])
pathlib.Path(sys.argv[1], str(world.rank)).write_text(" ".join(found))
shutdown()
"""


def test_the_launcher_listens_on_localhost_passes_exit_codes_on_and_names_killed_ranks(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # put back at the end, also where there was none
        monkeypatch.delenv(name)
    assert launch("job", [str(tmp_path)], 2) == 0
    for rank in ("0", "1"):
        found = (tmp_path / rank).read_text().split()
        # The store in the launcher, and the backend's in the rank.
        assert len(found) >= 2
        assert {int(address[-8:], 16).to_bytes(4, "little")[0] for address in found} == {127}
    assert launch("job", ["fail"], 2) == 7
    with pytest.raises(GulliverError, match="rank 1 was killed by SIGKILL"):
        launch("job", ["die"], 2)
