"""A run's files are copied to where its users find them, during the run and at its end."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from stoker.hosts.output import Copies
from stoker.place import Outcome
from tests.waiting import until


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.hosts.output.EVERY_S", 0.01)


def test_files_appear_while_they_are_open_and_are_whole_at_the_end(
    tmp_path: Path, often: None
) -> None:
    run, copy, board = tmp_path / "run", tmp_path / "copy", tmp_path / "board"
    (run / "tensorboard").mkdir(parents=True)

    def work() -> Outcome:
        with (run / "events.jsonl").open("w", buffering=1) as events:
            events.write("first\n")
            (run / "tensorboard" / "events.out").write_text("scalars")
            (run / ".summary.json").write_text("a draft")
            until(lambda: (board / "events.out").is_file() and (copy / "events.jsonl").is_file())
            until(lambda: (copy / "events.jsonl").read_text() == "first\n")
            events.write("last\n")
        return Outcome(0)

    assert Copies({run: copy, run / "tensorboard": board}).during(work) == Outcome(0)
    assert (copy / "events.jsonl").read_text() == "first\nlast\n"
    assert sorted(path.name for path in copy.iterdir()) == ["events.jsonl"], (
        "neither drafts nor the board"
    )
    assert [path.name for path in board.iterdir()] == ["events.out"]


def test_a_run_whose_files_cannot_be_kept_has_not_succeeded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    run.mkdir()
    (run / "summary.json").write_text("{}")
    copy.write_text("a file where the folder should be")
    outcome = Copies({run: copy}).during(lambda: Outcome(0))
    assert outcome.code == 1
    assert outcome.cause.startswith(f"{copy}: cannot be written: ")
    assert f"error: {outcome.cause}" in capsys.readouterr().out
    assert Copies({run: copy}).during(lambda: Outcome(2, "no data")) == Outcome(2, "no data")


def test_a_mount_that_does_not_answer_fails_the_run_instead_of_holding_its_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, hangs = Copies({tmp_path / "run": tmp_path / "copy"}), threading.Event()
    monkeypatch.setattr("stoker.hosts.output.LAST_COPY_S", 0.1)
    monkeypatch.setattr(copies, "copy", lambda: str(hangs.wait(60)))
    outcome = copies.during(lambda: Outcome(0))
    hangs.set()
    assert outcome.code == 1 and "not copied within" in outcome.cause


def test_what_was_written_is_copied_though_the_work_raises(tmp_path: Path) -> None:
    def work() -> Outcome:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "driver.log").write_text("refused")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        Copies({tmp_path / "run": tmp_path / "copy"}).during(work)
    assert (tmp_path / "copy" / "driver.log").read_text() == "refused"


def test_what_grows_is_copied_whole_and_what_has_not_changed_is_not(tmp_path: Path) -> None:
    source, target = tmp_path / "disk", tmp_path / "volume"
    (source / "logs").mkdir(parents=True)
    (source / "summary.json").write_text("{}")
    (source / "logs/console.log").write_text("one\n")
    copies = Copies({source: target})
    copies.copy()
    (target / "summary.json").write_text("as it was copied")
    with (source / "logs/console.log").open("a") as file:
        file.write("two\n")
    copies.start()
    assert copies.finish() == ""
    assert (target / "logs/console.log").read_text() == "one\ntwo\n"
    assert (target / "summary.json").read_text() == "as it was copied"
    (target / "logs/console.log").unlink()
    (target / "logs").rmdir()
    (target / "logs").write_text("in the way")
    (source / "logs/console.log").write_text("three\n")
    (source / "report.html").write_text("report")
    problem = copies.finish()
    assert problem.startswith(f"{target}: cannot be written: ")
    assert problem.endswith(("File exists", "Not a directory"))
    assert (target / "report.html").read_text() == "report", "one file does not keep the others"


def test_storage_that_fails_for_a_while_is_told_once(tmp_path: Path, often: None) -> None:
    source = tmp_path / "disk"
    source.mkdir()
    (source / "summary.json").write_text("{}")
    (tmp_path / "volume").write_text("not yet a folder")
    told: list[str] = []
    copies = Copies({source: tmp_path / "volume" / "run"}, told.append)
    copies.start()
    until(lambda: bool(told))
    (tmp_path / "volume").unlink()
    until(lambda: (tmp_path / "volume/run/summary.json").is_file())
    assert copies.finish() == ""
    (line,) = told
    assert "cannot be written: " in line and "trying again" in line


def test_a_file_that_takes_long_is_copied_less_often_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.hosts.output.EVERY_S", 0.0)  # of each round
    source, target = tmp_path / "run", tmp_path / "copy"
    source.mkdir()
    copies, grown = Copies({source: target}), "one line"
    for pause in (0, 1e9):
        monkeypatch.setattr("stoker.hosts.output.PAUSE", pause)
        grown += ", and more"
        (source / "events.jsonl").write_text(grown)
        copies.copy()
        assert (target / "events.jsonl").read_text() == grown
    (source / "events.jsonl").write_text(grown * 2)
    (source / "summary.json").write_text("new")
    copies.copy()
    assert (target / "events.jsonl").read_text() == grown, "it took too much of the time"
    assert (target / "summary.json").read_text() == "new"
    copies.start()
    assert copies.finish() == ""
    assert (target / "events.jsonl").read_text() == grown * 2
