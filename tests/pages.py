"""Code that a page of the documentation shows."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def examples(page: str, language: str = "python") -> dict[str, str]:
    blocks = re.findall(
        rf"^```{language}\n# (\S+)\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S
    )
    assert len(dict(blocks)) == len(blocks), f"{page}: two examples of one name"
    return dict(blocks)


def change(page: str) -> tuple[str, str]:
    [lines] = re.findall(r"^```diff\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    before, after = (re.findall(rf"^\{sign}(.*\n)", lines, re.M) for sign in "-+")
    return "".join(before), "".join(after)
