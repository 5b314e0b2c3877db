"""Laptop: writes the findings as one self-contained HTML file."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from stoker.errors import UsageError


def write_page(target: Path, **values: Any) -> None:
    """Laptop: render the template; values from the data are escaped.

    Raises:
        UsageError: the file cannot be written.
    """
    environment = Environment(
        loader=PackageLoader("launcher.advise.peek", "."),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    written = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    text = environment.get_template("peek.html").render(written=written, **values)
    draft = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")
        draft.replace(target)
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror}") from None
