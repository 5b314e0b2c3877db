"""Ray on Spark on one machine as on several: each Spark worker's Ray node has a folder of its own.

Ray's nodes unpack a job's code into their folder, which nodes of one machine share, each over the other's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ray.util.spark.start_hook_base import RayOnSparkStartHook

FOLDER_VARIABLE = "STOKER_TEST_SPARK_FOLDER"


class Hook(RayOnSparkStartHook):  # type: ignore[misc]
    """For RAY_ON_SPARK_START_HOOK: where Ray's nodes have their folders."""

    def __init__(self) -> None:
        super().__init__(is_global=False)

    def get_default_temp_root_dir(self) -> str:
        return os.environ[FOLDER_VARIABLE]


def apart(folder: Path, script: Path) -> str:
    """Write the interpreter of Spark's workers: as this one, with a folder that only it sees."""
    private = f"""unshare --mount sh -c 'mount -t tmpfs tmpfs "$0" && exec "$@"' {folder} {sys.executable}"""
    script.write_text(f'#!/bin/sh\nexec {private} "$@"\n')
    script.chmod(0o755)
    return str(script)
