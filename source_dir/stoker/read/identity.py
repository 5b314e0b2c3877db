"""Head: checks whether a split still holds the records that it held when a checkpoint was written.

A fingerprint has a base (names, sizes, counts) and digests of samples of the files' content, each four times
as large as the previous one. Their number is limited by time and by what can be read, so two fingerprints
agree if their bases and the digests that both have agree.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from math import gcd
from typing import Any

from stoker.protocol import BadRecord
from stoker.read.sources import Source, digest, read_again

SEPARATOR = "~"
BUDGET_S = 0.25
"""No larger sample starts after this time, so all samples take about a second at most."""
BUDGET_BYTES = 64 * 2**20
CHUNK_BYTES = 2**20
CHUNKS = (4, 16, 64, 256, 1024, 4096, 16384)


def agree(one: str, other: str) -> bool:
    """Whether two fingerprints match, as far as both have sampled."""
    return all(a == b for a, b in zip(one.split(SEPARATOR), other.split(SEPARATOR), strict=False))


def kind_of(source: Source) -> str:
    return type(getattr(source, "dataset", source)).__name__


def identity_of(source: Source) -> str:
    """A source's fingerprint; if it has none, the type and the number of its records."""
    return source.fingerprint() or digest(kind_of(source), source.count())


def tensor_as_array(value: Any) -> Any:
    """How to pickle a tensor as an array; NotImplemented for anything else."""
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ == "Tensor" and not value.requires_grad:
        with contextlib.suppress(TypeError, RuntimeError):
            import torch

            return torch.from_numpy, (value.numpy(),)
    return NotImplemented


def fingerprint_of_files(filesystem: Any, paths: list[str], sizes: list[int], about: Any) -> str:
    ends = list(accumulate(-(-size // CHUNK_BYTES) for size in sizes))
    chunks = list(spread(ends[-1], CHUNKS[-1])) if ends and ends[-1] else []
    files = [bisect_right(ends, chunk) for chunk in chunks]

    def read_chunk(at: int) -> bytes:
        file, chunk = files[at], chunks[at]
        offset = (chunk - (ends[file - 1] if file else 0)) * CHUNK_BYTES
        with filesystem.open_input_file(paths[file]) as stream:
            stream.seek(offset)
            return blake2b(stream.read(CHUNK_BYTES), digest_size=8).digest()

    def read(at: int) -> bytes | None:
        """None: not now; a file that is missing or forbidden is so in every run."""
        content = read_again(paths[files[at]], partial(read_chunk, at))
        if isinstance(content, BadRecord):
            return None if content.passing else b"cannot be read"
        return content

    sample, found = blake2b(digest_size=4), [digest(about, sizes)]
    until, done = time.monotonic() + BUDGET_S, 0
    with ThreadPoolExecutor(8) as pool:
        for level in CHUNKS:
            part = range(done, min(level, len(chunks)))
            contents = [content for content in pool.map(read, part) if content is not None]
            if len(contents) < len(part):
                break  # another run compares the digests before
            sample.update(b"".join(contents))
            done = part.stop
            found.append(sample.hexdigest())
            seen = sum(min(CHUNK_BYTES, sizes[files[at]]) for at in range(done))
            if done == len(chunks) or seen > BUDGET_BYTES or time.monotonic() > until:
                break
    return SEPARATOR.join(found)


def spread(total: int, most: int) -> Iterator[int]:
    """Up to `most` distinct numbers of 0 … total - 1, always the same, spread evenly."""
    step = max(1, int(total * 0.6180339887498949))
    while gcd(step, total) > 1:
        step += 1
    return (k * step % total for k in range(min(total, most)))
