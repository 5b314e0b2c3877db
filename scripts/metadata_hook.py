"""Build hook: the README as PyPI shows it, and the project's URLs.

Both need the address of the repository, which only its own CI knows (`GITHUB_REPOSITORY`). Elsewhere the
README keeps its relative links and the package has no URLs.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Metadata(MetadataHookInterface):
    """Sets the dynamic fields `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        urls = {}
        if name := os.environ.get("GITHUB_REPOSITORY"):
            home = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}"
            text = absolute(text, home)
            urls = {
                "Homepage": home,
                "Documentation": f"{home}/tree/HEAD/docs",
                "Changelog": f"{home}/blob/HEAD/CHANGELOG.md",
                "Issues": f"{home}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls


def absolute(text: str, home: str) -> str:
    """Replace relative links: images by their raw file, pages by the page that shows them."""
    text = re.sub(r"(!\[[^\]]*\])\((?!\w+:|#)([^)]+)\)", rf"\1({home}/raw/HEAD/\2)", text)
    return re.sub(r"(?<!!)(\[[^\]]*\])\((?!\w+:|#)([^)]+)\)", rf"\1({home}/blob/HEAD/\2)", text)
