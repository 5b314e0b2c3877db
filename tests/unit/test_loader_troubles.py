"""What goes wrong around a `stoker.DataLoader` is told, and costs others nothing."""

from __future__ import annotations

import copy
import os
import pickle
import random
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loading import Records, Stream
from PIL import Image
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, Subset
from torch.utils.data import DataLoader as TorchLoader

from stoker import DataLoader, UsageError
from stoker.loader import connection

pytestmark = pytest.mark.usefixtures("loader_in_this_process")


class NoSample(Exception):  # noqa: N818
    def __init__(self, text: str, code: int) -> None:
        super().__init__(text, code)
        self.code = code


class TwoArguments(Exception):  # noqa: N818
    """Cannot be unpickled."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)


def test_without_workers_the_exception_itself_is_raised_as_by_torch() -> None:
    def get(index: int) -> Any:
        raise NoSample("none", 7)

    for of in (TorchLoader, DataLoader):
        with pytest.raises(NoSample) as caught:
            next(iter(of(Records(get))))
        assert caught.value.args == ("none", 7) and caught.value.code == 7
    assert re.search(
        r"(?s)at index 0 \(batch 0\), on host .*Traceback.*in __getitem__",
        caught.value.__notes__[0],
    )


@pytest.mark.parametrize(
    "raises",
    [
        lambda: next(iter(())),
        lambda: sys.exit(0),
        lambda: (_ for _ in ()).throw(TwoArguments("", 7)),
    ],
    ids=["StopIteration", "SystemExit", "TwoArguments"],
)
def test_an_exception_that_would_end_the_pass_is_an_error_of_its_batch_alone(
    raises: Any, request: pytest.FixtureRequest
) -> None:
    """The pass neither ends as if it were whole, nor does what cannot be pickled hide what it was."""
    name = request.node.callspec.id
    dataset = Records(lambda index: raises() if index == 9 else index)
    iterator = iter(DataLoader(dataset, batch_size=4))
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(RuntimeError, match=rf"(?s){name} at index 9 \(batch 2\).*in __getitem__"):
        next(iterator)
    assert next(iterator).tolist() == [12, 13, 14, 15]
    if name == "SystemExit":
        options: dict[str, Any] = {"on_error": "quarantine", "bad_record_budget": 1.0}
        with pytest.raises(RuntimeError, match=name):
            list(DataLoader(dataset, batch_size=4, **options))


def broken(index: int) -> Any:
    if index % 10 == 3:
        raise KeyError(f"no record {index}")
    return torch.tensor(index)


def skipping(budget: float, **options: Any) -> DataLoader[Any]:
    options = {"dataset": Records(broken), **options}
    return DataLoader(on_error="quarantine", bad_record_budget=budget, **options)


@pytest.mark.parametrize("size", [4, None])
def test_quarantine_leaves_records_out_and_counts_them(size: int | None) -> None:
    loader = skipping(0.2, batch_size=size)
    found = [i for batch in loader for i in batch.reshape(-1).tolist()]
    assert found == [i for i in range(43) if i % 10 != 3]
    assert [index for index, _ in loader.quarantine.records] == [3, 13, 23, 33]
    assert "KeyError" in loader.quarantine.records[0][1]


def test_a_quarantined_record_has_the_index_that_its_dataset_takes() -> None:
    def get(index: Any) -> Any:
        return broken(3 if index == (0, 1) else 0)

    loader = skipping(1.0, dataset=Records(get), sampler=[(0, 0), (0, 1)])
    list(loader)
    assert [index for index, _ in loader.quarantine.records] == [(0, 1)]


class Uncounted(Records):
    def __len__(self) -> int:
        raise NotImplementedError


SHARE = [3, 13, *range(4, 9)]


@pytest.mark.parametrize(
    ("budget", "options", "text"),
    [
        (0.05, {"batch_size": 4}, "3 of 43 records cannot be loaded"),
        (0.1, {"sampler": SHARE}, "of 7 records cannot be loaded"),
        (0.1, {"dataset": Uncounted(broken), "sampler": iter(SHARE)}, "of 7 records cannot be"),
        (0.1, {"batch_sampler": [SHARE[:2], SHARE[2:]]}, "of 7 records cannot be loaded"),
    ],
    ids=["whole", "a rank's share", "no length", "a batch sampler"],
)
def test_quarantine_beyond_its_budget_is_an_error(
    budget: float, options: dict[str, Any], text: str
) -> None:
    """The budget is a share of what the pass reads."""
    with pytest.raises(RuntimeError, match=text):
        list(skipping(budget, **options))


def test_what_a_pass_has_left_out_counts_also_after_it_was_resumed(tmp_path: Path) -> None:
    def loader(budget: float) -> DataLoader[Any]:
        return skipping(budget, batch_size=4, sampler=[np.int64(13), (3,), "b", *range(14, 54)])

    made = loader(0.2)
    next(iter(made))
    torch.save(made.state_dict(), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    again = loader(0.2)
    again.load_state_dict(state)
    assert len(list(again)) == 10
    assert [index for index, _ in again.quarantine.records] == [13, "(3,)", "b", 23, 33, 43, 53]
    strict = loader(4.5 / 43)
    strict.load_state_dict(state)
    with pytest.raises(RuntimeError, match="5 of 43 records cannot be loaded"):
        list(strict)


def test_a_batch_without_a_good_record_does_not_vanish_on_one_rank_alone() -> None:
    """Its rank would make a step fewer, and the others would wait for it."""
    sampler = DistributedSampler(range(43), 2, 1, shuffle=False)
    iterator = iter(skipping(0.2, batch_size=1, sampler=sampler))
    assert int(next(iterator)) == 1
    with pytest.raises(RuntimeError, match=r"no record of batch 1 can be loaded: KeyError"):
        next(iterator)
    assert [int(n) for n in skipping(0.2, batch_size=1)][:4] == [0, 1, 2, 4]


def test_what_cannot_be_sent_is_named() -> None:
    lock, records, wrapped = threading.Lock(), Records(), Subset(Records(), [0])
    vars(records)["parts"] = {"tf": [1, (lock,)]}
    vars(wrapped.dataset)["rows"] = (row for row in range(3))
    for loader, path in (
        (DataLoader(records), r"dataset.parts \(dict\)"),
        (DataLoader(wrapped), r"dataset.dataset.rows \(generator\)"),
        (DataLoader(Records(), collate_fn=lambda rows: lock), r"collate_fn.__closure__ \(tuple\)"),
    ):
        with pytest.raises(UsageError, match=path):
            iter(loader)


def fails(worker: int) -> None:
    raise LookupError(f"not for {worker}")


def test_what_worker_init_fn_raises_comes_as_from_torch() -> None:
    with pytest.raises(LookupError, match=r"(?s)worker_init_fn\(0\).*not for 0"):
        next(iter(DataLoader(Records(), worker_init_fn=fails, num_workers=1)))


def breaks_off() -> Iterator[int]:
    yield from range(5)
    raise OSError("no more indices")


def test_what_a_sampler_raises_comes_behind_the_batches_before_it() -> None:
    found: list[int] = []
    with pytest.raises(OSError, match="no more indices"):
        found.extend(DataLoader(Records(), batch_size=None, sampler=breaks_off()))
    assert found == [0, 1, 2, 3, 4]


class Own(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return super().__iter__()


@pytest.mark.parametrize(
    ("dataset", "arguments", "named"),
    [
        (
            Records(),
            {"batch_sampler": Own(range(43), 8, drop_last=False)},
            "batch_size 4 (here 8), batches 11 (here 6)",
        ),
        (Records(count=20), {"batch_size": 4}, "records 43 (here 20)"),
        (
            Records(),
            {"batch_size": 4, "sampler": DistributedSampler(range(86), 2, 0)},
            "length of the order 43 (here 86)",
        ),
    ],
)
def test_a_state_within_a_pass_of_another_shape_is_refused(
    dataset: Any, arguments: dict[str, Any], named: str
) -> None:
    loader = DataLoader(Records(), batch_size=4)
    next(iter(loader))
    again = DataLoader(dataset, **arguments)
    with pytest.raises(ValueError, match=re.escape(named)):
        again.load_state_dict(loader.state_dict())
        iter(again)
    list(loader)
    again.load_state_dict(loader.state_dict())  # between two passes there is no position to lose
    assert len(list(again)) == len(again)


class Countless(list[int]):
    def __len__(self) -> int:
        raise NotImplementedError


class Permuted(Countless):
    """Draws from a generator that no state includes."""

    drawn = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.drawn.permutation(43).tolist())


def shuffled(worker: int, workers: int) -> list[int]:
    return random.Random(None).sample(numbers := range(worker, 23, workers), len(numbers))


def at_epoch(epoch: int) -> dict[str, Any]:
    sampler = DistributedSampler(Records(), 1, 0)
    sampler.set_epoch(epoch)
    return {"sampler": sampler}


OTHER = r"after 2 batches, and the sampler now gives other .*set_epoch"
CHANGED: dict[str, tuple[Any, Any, int, str]] = {
    "fewer batches": (
        {"sampler": Countless(range(43))},
        {"sampler": Countless(range(20))},
        9,
        "after 9 batches, but the sampler now has 5",
    ),
    "draws that no state includes": (*[{"sampler": Permuted()}] * 2, 2, OTHER),
    "no set_epoch": (at_epoch(3), at_epoch(0), 2, OTHER),
    "a shorter stream": (
        {"dataset": Stream(lambda *_: range(20))},
        {"dataset": Stream(lambda *_: range(12))},
        4,
        "its first 4 batches are not those delivered",
    ),
    "a shuffled stream at its end": (
        *[{"dataset": Stream(shuffled), "num_workers": 2}] * 2,
        6,
        r"was opened again.* are not those delivered",
    ),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_state_of_batches_that_no_longer_come_is_refused(change: str) -> None:
    """Records would be lost and repeated."""
    before, after, taken, text = CHANGED[change]
    made, again = (
        DataLoader(**{"dataset": Records(), **each}, batch_size=4) for each in (before, after)
    )
    iterator = iter(made)
    for _ in range(taken):
        next(iterator)
    again.load_state_dict(made.state_dict())
    for _ in range(1 if "stream" in change else 2):  # a pass that cannot be opened uses up no state
        with pytest.raises((ValueError, RuntimeError), match=text):
            list(again)


WHOLE = torch.arange(1 << 16, dtype=torch.int32)
VALUES = [
    *(WHOLE, WHOLE.clone(), WHOLE.clone(), WHOLE.clone(), WHOLE.to(torch.int64)),
    *(WHOLE.reshape(2, -1), WHOLE.numpy(), torch.zeros(0), torch.tensor(True), np.float32(2)),
    *({"a": 1}, {"a": 2}, {"b": 1}, [1], ["1"], (1 << 70, 2j, frozenset({"p", "q"}))),
    {"b": torch.ones(2, dtype=torch.bfloat16), "a": [1, 2.5, "c", None, b"d"]},
    np.array(["x", None], object),
    *(Image.new("RGB", (3, 2), (1, 2, 3)), Image.new("RGB", (3, 2), (1, 2, 4))),
]
VALUES[1][0] = 1
VALUES[2][-1] = 1
VALUES[3][[0, 50_000]] = VALUES[3][[50_000, 0]]


def test_a_state_is_that_of_a_stream_with_the_same_values_alone() -> None:
    def stream(value: Any) -> DataLoader[Any]:
        return DataLoader(Stream(lambda *_: [value, 0]), batch_size=None, collate_fn=lambda x: x)

    for number, value in enumerate(VALUES):
        next(iter(made := stream(value)))
        for other in VALUES[max(number - 6, 0) : number + 7]:
            again = stream(copy.deepcopy(other))
            again.load_state_dict(made.state_dict())
            if other is value:
                assert list(again) == [0]
            else:
                with pytest.raises(RuntimeError, match="its first 1 batches are not those"):
                    list(again)


def test_a_loader_may_be_copied_in_the_midst_of_a_pass() -> None:
    loader = DataLoader(Records(), batch_size=4)
    next(iter(loader))
    other = pickle.loads(pickle.dumps(loader))  # noqa: S301
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in loader]


@pytest.mark.long
def test_accelerate_may_be_imported_after_a_loader_was_made() -> None:
    pytest.importorskip("accelerate")
    script = (
        "import sys; from stoker import DataLoader; loader = DataLoader(range(8), batch_size=4);"
        "assert 'accelerate' not in sys.modules; from accelerate import Accelerator;"
        "print(type(Accelerator(cpu=True).prepare(loader).base_dataloader).__module__)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "stoker.loader.dataloader"


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("stall_timeout_s", 0, "is a .*, not 0"),
        ("stall_timeout_s", float("nan"), "is a .*, not nan"),
        ("bad_record_budget", 5, "is a .*, not 5"),
        ("on_error", "ignore", ""),
    ],
)
def test_an_option_out_of_its_range_is_refused(option: str, value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=rf"{option}.*{text}"):
        DataLoader(Records(), **{option: value})


def test_length_types_and_annotation_are_torchs() -> None:
    loader: DataLoader[int] = DataLoader[int](Records(), batch_size=4, drop_last=True)
    assert len(loader) == 10 and isinstance(loader, TorchLoader)


FORKS = """
import gc, os
from stoker import DataLoader

batches = iter(DataLoader([1, 2, 3, 4]))
next(batches), next(batches)
child = os.fork()
if child:
    os.wait()
del batches
gc.collect()
print("parent" if child else "child", os.path.exists(os.environ["STOKER_EVENTS"]), flush=True)
os._exit(0)
"""


def test_a_fork_that_lets_go_of_a_pass_does_not_end_it_for_its_parent(tmp_path: Path) -> None:
    """The report of a pass that has ended shows whose finalizers ran."""
    events = {"STOKER_EVENTS": str(tmp_path / "events.jsonl")}
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    done = subprocess.run(
        command, env=os.environ | events, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["child", "False", "parent", "True"]


def test_an_address_where_nobody_answers_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match=r"no Ray cluster answers at 127\.0\.0\.1:1: .*refused"):
        connection.connect("127.0.0.1:1")


def test_a_file_of_ranks_that_were_killed_is_not_taken_for_that_of_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(connection, "RANKS_WAIT_S", 0.1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    folder = tmp_path / f"stoker-ranks-{os.getuid()}"
    folder.mkdir(mode=0o700)
    file = folder / f"{os.getppid()}-.json"
    file.write_text("of a process that had this number")
    os.utime(file, (1e9, 1e9))
    with pytest.raises(UsageError, match="local rank 0 started no Ray cluster"):
        connection._with_other_ranks()


@pytest.mark.parametrize("failed", [False, True])
def test_the_rank_that_started_the_cluster_leaves_after_the_others_or_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    file = tmp_path / "1-none-localhost.json"
    file.touch()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        mark = file.with_suffix(f".{other.pid}")
        mark.touch()
        if failed:
            monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
        leaves = threading.Thread(target=connection._leave, args=(file, os.getpid()))
        leaves.start()
        leaves.join(60.0 if failed else 0.3)
        assert leaves.is_alive() != failed
    leaves.join(60.0)
    assert not leaves.is_alive() and not list(tmp_path.iterdir())


class Longer(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))

    def __len__(self) -> int:
        return 3


def test_a_stream_that_is_longer_than_it_says_is_warned_of_as_by_torch() -> None:
    said = list[list[str]]()
    for loader in (TorchLoader(Longer(), 1), DataLoader(Longer(), 1)):
        assert len(loader) == 3
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert len(list(loader)) == 4
        texts = (str(warning.message).rstrip(". ") for warning in caught)
        said.append([text[-60:] for text in texts if "was reported" in text])
    assert said[0] == said[1] and len(said[0]) == 1
