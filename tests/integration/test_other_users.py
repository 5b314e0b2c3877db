"""Other users of a host reach nothing of a run, and a killed process leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from stoker.hosts.machine import runs
from tests.waiting import until

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65_534
TRIES = """
for path in "$@"; do
    [ -r "$path" ] && echo "reads $path"
    { echo x > "$path/new" && rm "$path/new" && echo "writes below $path"; } 2>/dev/null
    { ln -s "$VICTIM" "$path/new" && rm "$path/new" && echo "links in $path"; } 2>/dev/null
    { mv "$path" "$path.gone" && mv "$path.gone" "$path" && echo "renames $path"; } 2>/dev/null
done
true
"""
"""What another user of the host may try with each of the paths, which it may guess."""

SCRIPT = """
import sys
from stoker import DataLoader

for batch in DataLoader(list(range(64)), batch_size=2):
    print(batch.tolist(), flush=True)
    sys.stdin.readline()
"""
RECIPE = """
import time
from rows import Counting

class Endless(Counting):
    def training_step(self, model, batch):
        time.sleep(0.2)
        return super().training_step(model, batch)
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def processes_with(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(folder) and runs(process.pid):
                found.append(" ".join(process.cmdline()))
    return found


def refuse_to_others(folder: Path) -> None:
    paths = [path for path in folder.glob("sray-*/**/*") if not path.is_symlink()]
    assert any(path.name == "plasma_store" for path in paths), "Ray's socket is in it"
    ours = {path: oct(path.stat().st_mode & 0o777) for path in folder.glob("sray-*")}
    assert [*ours.values()] == ["0o700"]
    if os.geteuid() == 0:
        victim = folder / "victim"
        victim.touch(mode=0o600)
        done = subprocess.run(
            ["/bin/sh", "-c", TRIES, "sh", *map(str, paths)],
            user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", env={"VICTIM": str(victim)},
            capture_output=True, text=True,
        )  # fmt: skip
        assert (done.stdout, done.returncode) == ("", 0)
        victim.unlink()


def wait_until_nothing_is_left(folder: Path) -> None:
    until(lambda: not processes_with(folder) and not [*folder.glob("s*")])
    assert [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")] == []


@contextlib.contextmanager
def started(command: list[str], shared: Path, folder: Path) -> Iterator[IO[str]]:
    environment = {**os.environ, "TMPDIR": str(shared), "PYTHONPATH": str(ROOT / "source_dir")}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=pipe, stdout=pipe, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        process.kill()
        process.communicate()
    wait_until_nothing_is_left(shared)


def test_a_scripts_cluster_is_its_users_alone_and_ends_with_a_killed_script(
    shared: Path, tmp_path: Path
) -> None:
    with started([sys.executable, "-c", SCRIPT], shared, tmp_path) as output:
        assert output.readline() == "[0, 1]\n"
        refuse_to_others(shared)


def test_a_local_run_is_its_users_alone_and_ends_with_a_killed_launcher(
    shared: Path, tmp_path: Path
) -> None:
    source = tmp_path / "own"
    source.mkdir()
    (source / "endless.py").write_text(RECIPE)
    shutil.copy(ROOT / "tests/recipes/rows.py", source)
    (tmp_path / "job.yaml").write_text(
        "recipe: endless:Endless\ntrain: {epochs: 5000, batch_size: 8}\n"
    )
    command = [sys.executable, str(ROOT / "launcher/submit.py"), "job.yaml", "--source-dir", "own"]
    with started(command, shared, tmp_path) as output:
        assert any("epoch 1/5000 done" in line for line in output)
        refuse_to_others(shared)
