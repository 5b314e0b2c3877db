"""A run while it goes on: its verdict on the terminal, Ray's dashboard in a browser, its end by Ctrl-C."""

from __future__ import annotations

import json
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import requests
from playwright.sync_api import sync_playwright

from tests.waiting import until

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
SUBMIT = str(ROOT / "launcher/submit.py")


def test_status_judges_it_the_dashboard_opens_with_its_token_alone_and_ctrl_c_leaves_a_checkpoint(
    tmp_path: Path,
) -> None:
    """One job tells all. Its chain sleeps, as one that waits for slow storage does.

    SIGTERM to the launcher: tests/integration/test_resume.py.
    """
    (tmp_path / "job.yaml").write_text(
        "name: slow\nrecipe: asleep:Asleep\n"
        "params: {records: 100000, cpu_s: 0.1, bytes_per_sample: 100}\n"
        "data: {block_records: 4}\ntrain: {batch_size: 4}\n"
        "tracking: {log_every_steps: 2, tensorboard: false}\n"
    )
    recipes = ["--source-dir", str(ROOT / "benchmarks/recipes")]
    command = [sys.executable, SUBMIT, "job.yaml", *recipes, "--dashboard"]
    run = tmp_path / "runs/latest"

    def status() -> str:
        asked = [sys.executable, SUBMIT, "status", "runs/latest"]
        return subprocess.run(
            asked, cwd=tmp_path, capture_output=True, text=True, timeout=240
        ).stdout

    screen = tmp_path / "screen"
    with screen.open("w") as output:
        job = subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
            # A shell that runs the tests in the background has them ignore it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    try:
        said = until(lambda: "".join(re.findall("dashboard: .*\n", screen.read_text())), 240)
        address, file = said.split()[1], said.split()[-1]
        assert address.startswith("http://127.0.0.1:")
        token = Path(file).read_text().strip()
        assert stat.S_IMODE(Path(file).stat().st_mode) == 0o600
        assert requests.get(f"{address}/nodes?view=summary", timeout=120).status_code == 401
        nodes_shown(address, token)

        # At first there is a stock, of what was made while the training started.
        told = until(
            lambda: "".join(re.findall(r"(?s).*input-bound: (?:[5-9]\d|100) %.*", status())), 240
        )
        assert job.poll() is None and told.startswith("running")
        # The CPUs of this machine may be busy with something else.
        assert re.search(
            "for the storage that it reads|this host's CPUs are the bottleneck", told
        ), told
        # Of the whole run so far, its stock of the start included; the verdict is about the latest steps.
        assert re.search(r"\d+ samples/s, input wait \d+ %", told), told
        assert json.loads((run / "summary.json").read_text())["status"] == "running"
    finally:
        job.send_signal(signal.SIGINT)  # as an IDE does; a terminal sends it to the job, too
        code = job.wait(timeout=240)
    shown = screen.read_text()
    assert code == 130 and "stopped: Ctrl-C" in shown and "Traceback" not in shown, shown
    assert f"continue: the same command with --resume runs/{run.readlink()}" in shown.replace(
        f"{tmp_path}/", ""
    ), shown
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    assert list(run.glob("checkpoints/step-*/manifest.json"))
    assert not Path(file).exists(), "the token goes with the cluster"
    written = [screen, *(path for path in run.resolve().rglob("*") if path.is_file())]
    assert len(written) > 10 and not any(token.encode() in path.read_bytes() for path in written)


def nodes_shown(address: str, token: str) -> None:
    program = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(240_000)
        page.goto(f"{address}/#/cluster")
        page.get_by_placeholder("Enter your authentication token").fill(token)
        page.get_by_role("button", name="Submit").click()
        page.get_by_text("ALIVE").first.wait_for()
        browser.close()
