"""What a refusal says to programs: the keys of its lines and the exit code; its words are for people."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from stoker import StokerError


@contextmanager
def refused(*keys: str, code: int = 1) -> Iterator[None]:
    """The block raises an error with these keys, one for each line, in this order."""
    with pytest.raises(StokerError) as raised:
        yield
    assert tuple(line.key for line in raised.value.problems) == keys, raised.value
    assert raised.value.exit_code == code, raised.value
