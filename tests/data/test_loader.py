"""The loader that resumes exactly and feeds a device."""

from __future__ import annotations

import json
import logging
import multiprocessing
import random
import threading
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import data as torch_data

from gulliver.data import Bucket, BucketSampler, DataLoader, transfer
from gulliver.data import loader as loader_module
from gulliver.errors import GulliverError

RESOLUTIONS = ((144, 256), (240, 426), (360, 640), (480, 854), (720, 1280))
LENGTHS = (1, 17, 33, 51)


class FakeEvent:
    """Stands for a device's: happens when the test says so."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def mixed_table(scale: int = 8) -> list[dict[str, Tensor]]:
    """Five resolutions x four lengths, each side divided by `scale`, and text beside them."""
    return [
        {
            "video": meta(2, 3, frames, height // scale, width // scale),
            "text": meta(2, 1, 30, 64, dtype=torch.bfloat16),
            "mask": meta(2, 30, dtype=torch.bool),
        }
        for height, width in RESOLUTIONS
        for frames in LENGTHS
    ]


# --- data ---

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Sample:
    x: Tensor
    name: str
    twice: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", self.x * 2)


class Numbers(torch_data.Dataset):
    """Item i is i."""

    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, index**2])


class Augmented(Numbers):
    """Item i and a draw of every generator."""

    def __getitem__(self, index: int) -> Any:
        return {
            "index": index,
            "python": random.random(),
            "numpy": np.random.rand(),
            "torch": torch.rand(3),
        }


def noisy(samples: list[Any]) -> Any:
    """Collates, and draws as well."""
    batch = torch_data.default_collate(samples)
    batch["noise"] = torch.randn(2)
    return batch


class Counted(Augmented):
    """Counts what is loaded, here in this process."""

    loaded = 0

    def __getitem__(self, index: int) -> Any:
        type(self).loaded += 1
        return super().__getitem__(index)


class Lines(torch_data.IterableDataset):
    """A stream of numbers with noise, sharded over workers."""

    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        info = torch_data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        assert info is None or isinstance(info.dataset, Lines)
        for index in range(first, self.length, step):
            yield {"index": index, "torch": torch.rand(2), "numpy": np.random.rand()}


class StatefulLines(Lines):
    """A stream that can go on where it was."""

    def __init__(self, length: int = 23) -> None:
        super().__init__(length)
        self.place, self.made = 0, 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.length:
            self.place += 1
            self.made += 1
            yield {"index": self.place - 1, "torch": torch.rand(2)}
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def flat(batch: Any) -> list[Any]:
    """A batch in a form that can be compared, bits and all."""
    if isinstance(batch, Tensor):
        return [str(batch.dtype), batch.tolist()]
    if isinstance(batch, dict):
        return [[key, flat(value)] for key, value in batch.items()]
    if isinstance(batch, Sample):
        return [flat(batch.x), batch.name, flat(batch.twice)]
    if isinstance(batch, list | tuple):
        return [type(batch).__name__, *map(flat, batch)]
    return [batch]


# --- the loader beside torch's ---


def nested(samples: list[Tensor]) -> Any:
    x = torch.stack(samples)
    return {
        "pair": Pair(x, x.double()),
        "list": [x[:, 0], (x[:, 1].bool(), "text")],
        "ordered": OrderedDict(a=x, b=None),
        "default": defaultdict(list, c=x),
        "sample": Sample(x, "name"),
        "number": 3.5,
        "array": np.arange(3).tolist(),
    }


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("rebuilt", [False, True])
def test_batches_equal_those_of_torch(
    workers: int, rebuilt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rebuilt:
        monkeypatch.setattr(loader_module, "copy_stream", lambda device, ahead: FakeLane())
        monkeypatch.setattr(transfer, "_locked", lambda leaf: leaf)

    def options() -> dict[str, Any]:
        return {
            "batch_size": 4,
            "shuffle": True,
            "collate_fn": nested,
            "num_workers": workers,
            "generator": torch.Generator().manual_seed(7),
        }

    ours = DataLoader(Numbers(), **options())
    theirs = torch_data.DataLoader(Numbers(), **options())
    assert len(ours) == len(theirs) == 6
    for _ in range(2):
        found, expected = list(ours), list(theirs)
        assert list(map(flat, found)) == list(map(flat, expected))
        for one, other in zip(found, expected, strict=True):
            assert [type(v) for v in one.values()] == [type(v) for v in other.values()]
            assert one["default"].default_factory is list


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": None},
        {"batch_size": 5, "drop_last": True},
        {"batch_sampler": [[3, 1], [2], [5, 4, 0]]},
        {"sampler": [5, 3, 1], "batch_size": 2},
    ],
    ids=str,
)
def test_all_ways_of_sampling_equal_torch(options: dict[str, Any]) -> None:
    found, expected = DataLoader(Numbers(), **options), torch_data.DataLoader(Numbers(), **options)
    assert list(map(flat, found)) == list(map(flat, expected))
    assert len(found) == len(expected)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [None, 4])
def test_streams_equal_torch(workers: int, size: int | None) -> None:
    options: dict[str, Any] = {"batch_size": size, "num_workers": workers}
    found = [flat(b["index"]) for b in DataLoader(Lines(), **options)]
    assert found == [flat(b["index"]) for b in torch_data.DataLoader(Lines(), **options)]


def test_a_loader_leaves_the_generators_of_training_alone() -> None:
    draws = []
    for loads in (False, True):
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        if loads:
            list(DataLoader(Augmented(), 4, shuffle=True))
            list(DataLoader(Numbers(), 4, sampler=torch_data.RandomSampler(Numbers())))
        draws.append((torch.rand(3).tolist(), np.random.rand(), random.random()))
    assert draws[0] == draws[1]


# --- resuming ---


def sampled(kind: str) -> dict[str, Any]:
    """A sampling of `Augmented(23)`, fresh every time, as another process would have it."""
    data = Augmented()
    generator = torch.Generator().manual_seed(11)
    return {
        "shuffle": {"shuffle": True, "batch_size": 4},
        "generator": {"shuffle": True, "batch_size": 4, "generator": generator},
        "in order": {"batch_size": 5, "drop_last": True},
        "distributed": {
            "sampler": torch_data.DistributedSampler(data, 2, 1, seed=5),
            "batch_size": 3,
        },
        "weighted": {
            "sampler": torch_data.WeightedRandomSampler([1.0, 2.0] * 11 + [3.0], 23),
            "batch_size": 4,
        },
        "buckets": {
            "batch_sampler": BucketSampler(
                [Bucket(1, 8, 8) if n % 3 else Bucket(5, 8, 8) for n in range(23)], 4, seed=3
            )
        },
    }[kind]


KINDS = ("shuffle", "generator", "in order", "distributed", "weighted", "buckets")


@pytest.mark.parametrize(
    ("kind", "workers", "persistent"),
    [
        *((kind, 0, False) for kind in KINDS),
        ("shuffle", 2, False),
        ("generator", 2, True),
        ("buckets", 2, False),
        ("weighted", 2, False),
    ],
)
def test_resuming_anywhere_gives_the_uninterrupted_sequence(
    kind: str, workers: int, persistent: bool
) -> None:
    def make() -> DataLoader:
        return DataLoader(
            Augmented(),
            **sampled(kind),
            num_workers=workers,
            persistent_workers=persistent,
            collate_fn=noisy,
            seed=9,
        )

    states, batches, loader = [], [], make()
    for _ in range(3):
        states.append(json.dumps(loader.state_dict()))
        for batch in loader:
            batches.append(flat(batch))
            states.append(json.dumps(loader.state_dict()))
        # Between epochs as well: the same place in the sequence as the last of the epoch.
        states.append(json.dumps(loader.state_dict()))
    epoch = len(batches) // 3
    assert batches[:epoch] != batches[epoch : 2 * epoch]
    # Number of batches handed out at each state.
    done = [e * epoch + n for e in range(3) for n in (*range(epoch + 1), epoch)]
    places = range(len(states)) if not workers else (2, epoch, epoch + 4)
    for place in places:
        resumed, found = make(), []
        torch.rand(place)
        resumed.load_state_dict(json.loads(states[place]))
        while resumed.epoch < 3:
            found += map(flat, resumed)
        assert found == batches[done[place] :], place


def test_the_number_of_workers_does_not_matter() -> None:
    runs = [
        list(map(flat, DataLoader(Augmented(), 4, shuffle=True, num_workers=n, collate_fn=noisy)))
        for n in (0, 1, 3)
    ]
    assert runs[0] == runs[1] == runs[2]


def test_resuming_loads_nothing_that_it_skips() -> None:
    loader = DataLoader(Counted(), 4, shuffle=True)
    state = next((loader.state_dict() for n, _ in enumerate(loader) if n == 3), {})
    assert state["done"] == 4
    Counted.loaded = 0
    resumed = DataLoader(Counted(), 4, shuffle=True)
    resumed.load_state_dict(state)
    assert len(list(resumed)) == 2
    assert Counted.loaded == 23 - 16


@pytest.mark.parametrize("workers", [0, 2])
def test_stateless_stream_is_skipped_with_log_message(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> DataLoader:
        return DataLoader(Lines(40), 4, num_workers=workers, seed=2)

    loader = make()
    whole = list(map(flat, loader))
    assert len(whole) > 6
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    resumed = make()
    state = loader.state_dict()
    assert (state["epoch"], state["done"]) == (1, 3)
    rest = list(map(flat, iterator))
    with caplog.at_level(logging.INFO, logger="gulliver"):
        resumed.load_state_dict(state)
        assert list(map(flat, resumed)) == rest
    assert "3 batches of the stream are loaded and passed over" in caplog.text


def test_stateful_stream_restores_itself() -> None:
    loader = DataLoader(StatefulLines(), 4)
    batches, states = [], [json.dumps(loader.state_dict())]
    for batch in loader:
        batches.append(flat(batch))
        states.append(json.dumps(loader.state_dict()))
    for place, state in enumerate(states):
        data = StatefulLines()
        resumed = DataLoader(data, 4)
        resumed.load_state_dict(json.loads(state))
        assert list(map(flat, resumed)) == batches[place:]
        assert data.made == 23 - min(23, 4 * place)


def test_an_epoch_that_was_set_is_kept_when_resuming_into_it() -> None:
    loader = DataLoader(Numbers(), 4, shuffle=True)
    loader.set_epoch(5)
    fifth = list(map(flat, loader))
    loader.set_epoch(5)
    iterator = iter(loader)
    next(iterator), next(iterator)
    resumed = DataLoader(Numbers(), 4, shuffle=True)
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(5)
    assert list(map(flat, resumed)) == fifth[2:]
    assert resumed.epoch == 6
    resumed.set_epoch(5)
    assert list(map(flat, resumed)) == fifth


def test_set_epoch_of_sampler_is_respected() -> None:
    def order(epoch: int) -> list[Any]:
        sampler = torch_data.DistributedSampler(Numbers(), 1, 0)
        sampler.set_epoch(epoch)
        return [flat(b) for b in torch_data.DataLoader(Numbers(), 4, sampler=sampler)]

    sampler = torch_data.DistributedSampler(Numbers(), 1, 0)
    loader = DataLoader(Numbers(), 4, sampler=sampler)
    sampler.set_epoch(4)
    assert list(map(flat, loader)) == order(4)
    assert list(map(flat, loader)) == order(5), "and moves on where nobody says anything"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 8}, r"seed 7\b.* 8\b"),
        ({"batch_size": 3}, r"batch size 4\b.* 3\b"),
        ({"world_size": 4}, r"world size 2\b.* 4\b"),
        ({"dataset": Numbers(99)}, r"dataset length 23\b.* 99\b"),
        ({"drop_last": True}, r"number of batches 6\b.* 5\b"),
        ({"generator": torch.Generator()}, r"0 sampler generators, .* has 1"),
        ({"shuffle": False}, r"order .*RandomSampler.*SequentialSampler"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_a_state_of_something_else_is_refused(changed: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {
        "dataset": Numbers(), "batch_size": 4, "seed": 7, "world_size": 2, "shuffle": True
    }  # fmt: skip
    state = DataLoader(**usual).state_dict()
    with pytest.raises(GulliverError, match=message):
        DataLoader(**usual | changed).load_state_dict(state)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (None, "not the state of a data loader: it has no position"),
        ({"rank": ...}, "not the state of a data loader: it has no position"),
        ({"inner": {"epoch": 1}}, "sampler"),
    ],
)
def test_a_state_made_by_hand_is_refused_at_once(changed: Any, message: str) -> None:
    loader = DataLoader(range(8), 2, shuffle=True, generator=torch.Generator())
    before = loader.state_dict()
    state: Any = changed
    if isinstance(changed, dict):
        state = {k: v for k, v in {**before, **changed}.items() if v is not ...}
    with pytest.raises(GulliverError, match=message):
        loader.load_state_dict(state)
    assert loader.state_dict() == before


def test_a_position_without_that_of_its_sampler_is_refused_at_once() -> None:
    sampler = BucketSampler([Bucket(1, 8, 8)] * 8, 2)
    loader = DataLoader(range(8), batch_sampler=sampler)
    for inner in (None, 5, {"epoch": 0}):
        with pytest.raises(GulliverError, match="not the state of a bucket sampler"):
            loader.load_state_dict({**loader.state_dict(), "inner": inner})
    with pytest.raises(GulliverError, match="not the state of a bucket sampler"):
        sampler.load_state_dict(None)  # type: ignore[arg-type]


def test_the_generator_of_another_rank_is_refused() -> None:
    loaders = [
        DataLoader(Numbers(), 4, shuffle=True, rank=r, world_size=2, generator=torch.Generator())
        for r in range(2)
    ]
    with pytest.raises(GulliverError, match=r"rank 0.* rank 1"):
        loaders[1].load_state_dict(loaders[0].state_dict())
    with pytest.raises(GulliverError, match="not the state of a data loader"):
        loaders[0].load_state_dict({"model": 1})


def test_a_thread_makes_the_same_batches_and_leaves_the_generators_alone() -> None:
    def loader(threaded: bool) -> DataLoader:
        sampler = BucketSampler([Bucket(1 + n % 2, 8, 8) for n in range(23)], 4, seed=3)
        return DataLoader(Numbers(), batch_sampler=sampler, threaded=threaded)

    usual = loader(False)
    wanted = [batch for _ in range(2) for batch in usual]
    threaded, before = loader(True), torch.get_rng_state()
    found, states = [], []
    for _ in range(2):
        for batch in threaded:
            found.append(batch)
            states.append(threaded.state_dict())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, found, wanted))
    assert len(found) == len(wanted)
    resumed = loader(True)
    resumed.load_state_dict(states[2])
    rest = list(resumed)
    assert all(map(torch.equal, rest, wanted[3 : 3 + len(rest)]))
    assert len(rest) == len(wanted) // 2 - 3
    with pytest.raises(GulliverError, match="threaded=True"):
        DataLoader(Lines(), 4, threaded=True)


# --- randomness ---


@pytest.mark.parametrize("data", [Augmented(40), Lines(40)], ids=["map", "stream"])
def test_no_two_ranks_workers_batches_or_epochs_draw_the_same(data: Any) -> None:
    draws: list[float] = []
    for rank in range(2):
        loader = DataLoader(data, 5, num_workers=2, rank=rank, world_size=2)
        for batch in (*loader, *loader):
            draws += batch["numpy"].tolist() + batch["torch"].flatten().tolist()
            draws += batch["python"].tolist() if "python" in batch else []
    assert len(set(draws)) == len(draws) >= 2 * 2 * 40 * 3


# --- bad days ---


class Broken(Numbers):
    """Sample 9 cannot be read."""

    error: Any = KeyError

    def __getitem__(self, index: int) -> Any:
        if index == 9:
            raise self.error("sample nine is broken")
        return super().__getitem__(index)


class Stopping(Broken):
    error = StopIteration


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_surfaces_at_its_batch_with_its_traceback(workers: int) -> None:
    before, children = set(threading.enumerate()), set(multiprocessing.active_children())
    loader, found = DataLoader(Broken(), 4, num_workers=workers, ahead=3), []
    with pytest.raises(KeyError) as caught:
        found.extend(batch[:, 0].tolist() for batch in loader)
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loader.state_dict()["done"] == 2
    frames = [str(entry.path) for entry in caught.traceback]
    text = str(caught.value) + "".join(frames)
    assert "test_loader.py" in text
    assert "sample nine is broken" in text
    # Even while the error is looked at: it holds frames, and they must not hold torch's iterator.
    _ended(before)
    assert set(multiprocessing.active_children()) <= children


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stop_iteration_in_a_sample_is_an_error_not_the_end(workers: int) -> None:
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(DataLoader(Stopping(), 4, num_workers=workers))


def bad_collate(samples: list[Any]) -> Any:
    raise ValueError("cannot collate")


def test_collate_and_transfer_errors_are_raised() -> None:
    with pytest.raises(ValueError, match="cannot collate"):
        list(DataLoader(Numbers(), 4, num_workers=1, collate_fn=bad_collate))

    class Unbuildable(list):
        def __init__(self, parts: Any = ()) -> None:
            if parts:
                raise RuntimeError("not to be built")
            super().__init__()
            self.append(torch.ones(2))

    loader = DataLoader(Numbers(), 4, collate_fn=lambda _: Unbuildable())
    loader._mover = transfer.Mover(FakeLane())
    with pytest.raises(RuntimeError, match="not to be built"):
        list(loader)


def _ended(threads: set[threading.Thread]) -> None:
    for thread in set(threading.enumerate()) - threads:
        if thread.name == "gulliver-loader":
            thread.join()


@pytest.mark.parametrize("persistent", [False, True])
def test_leaving_a_loop_early_ends_the_thread(persistent: bool) -> None:
    before = set(threading.enumerate())
    loader = DataLoader(Numbers(64), 2, num_workers=2, persistent_workers=persistent, shuffle=True)
    for batch in loader:
        assert batch.shape == (2, 2)
        break
    del batch
    _ended(before)
    # An epoch of its own follows, as with torch's.
    assert loader.state_dict()["done"] == 1
    assert sorted(i for b in loader for i in b[:, 0].tolist()) == list(range(64))
    iterator = iter(loader)
    next(iterator)
    gone = weakref.ref(iterator)
    del iterator
    assert gone() is None
    _ended(before)


def test_a_newer_iteration_ends_the_older_one() -> None:
    loader = DataLoader(Numbers(), 4, num_workers=1)
    older = iter(loader)
    first = next(older)
    assert torch.equal(next(iter(loader)), first)
    with pytest.raises(GulliverError, match="started another one"):
        next(older)


def test_an_iterator_at_its_end_stays_there() -> None:
    iterator = iter(DataLoader(Numbers(3), 4, num_workers=1))
    assert len(list(iterator)) == 1
    assert next(iterator, None) is None


def test_batches_out_of_order_have_no_position() -> None:
    with pytest.raises(GulliverError, match="in_order"):
        DataLoader(Numbers(), num_workers=1, in_order=False).state_dict()


# --- memory and devices ---


class Clips(torch_data.Dataset):
    """Small clips of all shapes of the table."""

    def __init__(self, table: list[dict[str, Tensor]], length: int) -> None:
        self.table, self.length = table, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        like = self.table[random.randrange(len(self.table))]
        return {k: torch.full(t.shape, index % 2, dtype=t.dtype) for k, t in like.items()}


def test_batches_for_the_host_pass_through_untouched() -> None:
    loader = DataLoader(Numbers(), 4, device="cpu", num_workers=1)
    assert [b[:, 0].tolist() for b in loader][:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert "6 batches" in str(loader.statistics())


class FakeLane:
    """A device whose copies are made, and whose events happen, only when it is told."""

    def __init__(self) -> None:
        self.under_way: list[tuple[list[Tensor], list[Tensor], FakeEvent]] = []
        self.received: list[FakeEvent] = []

    def send(self, leaves: list[Any]) -> tuple[list[Any], FakeEvent]:
        there = [torch.full_like(leaf, -1) for leaf in leaves]
        self.under_way.append((leaves, there, FakeEvent()))
        if len(self.under_way) > 2:
            self.finish()
        return there, self.under_way[-1][2]

    def finish(self) -> None:
        # Read now: whoever lent this memory to somebody else meanwhile is found out.
        sources, there, event = self.under_way.pop(0)
        for source, result in zip(sources, there, strict=True):
            result.copy_(source)
        event.done = True

    def receive(self, leaves: list[Any], event: Any) -> None:
        self.received.append(event)
        while not event.done:
            self.finish()


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_received_in_order_once_their_copies_are_complete(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeLane()
    monkeypatch.setattr(loader_module, "copy_stream", lambda device, ahead: fake)
    monkeypatch.setattr(transfer, "_locked", lambda leaf: leaf)
    loader = DataLoader(Numbers(64), 4, num_workers=workers)
    expected = [b.tolist() for b in torch_data.DataLoader(Numbers(64), 4)]
    assert [batch.tolist() for batch in loader] == expected
    assert len(fake.received) == len(set(fake.received)) == 16


def test_the_copy_is_ordered_on_its_stream_and_before_its_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            calls.append(f"in {self.name}")

        def __exit__(self, *_: object) -> None:
            calls.append(f"out of {self.name}")

        def wait_event(self, event: Any) -> None:
            calls.append(f"{self.name} waits")

    class Event(FakeEvent):
        def record(self, stream: Stream) -> None:
            calls.append(f"recorded on {stream.name}")

        def synchronize(self) -> None:
            calls.append("host waits for the oldest")
            super().synchronize()

    class Travelling:
        def to(self, device: Any, non_blocking: bool) -> Travelling:
            assert non_blocking
            calls.append("copy")
            return self

        def record_stream(self, stream: Stream) -> None:
            calls.append(f"kept for {stream.name}")

    side, main = Stream("side"), Stream("main")
    fake = SimpleNamespace(
        Stream=lambda device: side,
        Event=Event,
        stream=lambda stream: stream,
        device=lambda device: Stream("device"),
        current_stream=lambda device: main,
    )
    monkeypatch.setattr(transfer.torch, "cuda", fake)
    copy_stream = transfer.CudaCopyStream(torch.device("cuda", 0), depth=1)
    sent, event = copy_stream.send([Travelling()])
    copy_stream.receive(sent, event)
    once = ["in device", "in side", "copy", "recorded on side", "out of side", "out of device"]
    assert calls == [*once, "main waits", "kept for main"]
    calls.clear()
    copy_stream.send([Travelling()])
    assert calls == ["host waits for the oldest", *once]


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_on_a_gpu_as_they_were(workers: int) -> None:
    table = mixed_table(scale=16)
    loader = DataLoader(Clips(table, 200), None, device="cuda", num_workers=workers, seed=1)
    expected = DataLoader(Clips(table, 200), None, seed=1)
    for found, other in zip(loader, expected, strict=True):
        assert all(tensor.is_cuda for tensor in found.values())
        assert all(torch.equal(found[name].cpu(), other[name]) for name in other)


@pytest.mark.gpu
def test_pin_memory_without_device_is_torchs() -> None:
    loader = DataLoader(Numbers(), 4, pin_memory=True, num_workers=1)
    assert all(batch.is_pinned() for batch in loader)
