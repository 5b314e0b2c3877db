"""The script that `init --kind script` writes: each record is trained once, however it is started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, submit

pytestmark = pytest.mark.long

RECORDS = 256
OBSERVED = """
import json, os, sys
from pathlib import Path
import train

seen, network = [], train.network

def observed():
    model = network()
    model.register_forward_pre_hook(lambda model, inputs: seen.extend(inputs[0].flatten().tolist()))
    return model

train.network = observed
if __name__ == "__main__":
    folder, *words = sys.argv[1:]
    train.main(words)
    Path(folder, f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(seen))
"""
STARTS = {
    "python": [sys.executable, "observed.py"],
    "torchrun": [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "observed.py",
    ],
    "stoker": [
        *(sys.executable, str(ROOT / "launcher/submit.py"), "observed.py"),
        *("train.workers=2", "--"),
    ],
}


@pytest.mark.parametrize("start", STARTS)
def test_each_record_is_trained_once(start: str, tmp_path: Path) -> None:
    assert submit("init", "mine", "--kind", "script", cwd=tmp_path).returncode == 0
    project, found = tmp_path / "mine", tmp_path / "found"
    found.mkdir()
    (project / "observed.py").write_text(OBSERVED)
    words = [str(found), "--epochs", "1", "--records", str(RECORDS)]
    done = subprocess.run(
        [*STARTS[start], *words], cwd=project, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads(file.read_text()) for file in found.iterdir()]
    assert len(ranks) == (1 if start == "python" else 2)
    records = (
        f"import train; print([train.Curve({RECORDS})[i][0].item() for i in range({RECORDS})])"
    )
    data = subprocess.run([sys.executable, "-c", records], cwd=project, capture_output=True)
    assert sorted(x for rank in ranks for x in rank) == sorted(
        json.loads(data.stdout.splitlines()[-1])
    )
