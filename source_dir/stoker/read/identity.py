"""Head: checks whether a split still holds the records that it held when a checkpoint was written.

A fingerprint has a base (names, sizes, counts, a dataset's state) and digests of content samples, each four
times as large as the previous one. Their number is limited by time and by what can be read, so two
fingerprints agree if their bases and the digests that both have agree.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import time
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from math import gcd
from pathlib import PurePath
from typing import Any

from stoker.protocol import BadRecord, Shard
from stoker.read.sources import (
    Source,
    digest,
    drawing,
    listing_of,
    read_again,
    seed_globals,
    states,
)

MOST_ITEMS = 20_000
"""Maximum number of items of lists, dicts and objects to hash; longer ones are sampled evenly."""
MOST_OF_A_LIST = 4096
MOST_BYTES = 4 * 2**20
"""Maximum bytes of an array to hash; larger ones are sampled evenly."""
PARTS = 64
DEEPEST = 8
SYSTEM = {"_io", "_thread", "builtins", "io", "logging", "multiprocessing", "threading", "weakref"}
"""Modules whose objects do not describe records."""


def content_digest(value: Any, whole: bool = False) -> bytes:
    """A digest of an object's content; unless it is hashed `whole`, computed in a fraction of a second."""
    contents = _Contents(whole)
    contents.add(value)
    return contents.hash.digest()


class _Contents:
    def __init__(self, whole: bool) -> None:
        self.hash = blake2b(digest_size=8)
        self._whole, self._left = whole, MOST_ITEMS
        self._above: list[int] = []

    def add(self, value: Any) -> None:
        self._left -= 1
        kind = type(value)
        self._text(kind.__qualname__)
        if value is None or isinstance(value, bool | int | float | complex | range):
            self._text(repr(value))
        elif isinstance(value, str | PurePath):
            self._text(movable(str(value)))
        elif isinstance(value, bytes | bytearray | memoryview):
            self._bytes(memoryview(value).cast("B"))
        elif kind.__module__.partition(".")[0] in SYSTEM and not isinstance(
            value, dict | list | tuple | set
        ):
            pass
        elif len(self._above) < DEEPEST and id(value) not in self._above:
            self._above.append(id(value))
            self._inside(value)
            self._above.pop()

    def _inside(self, value: Any) -> None:
        if isinstance(value, dict):
            self._items([part for pair in value.items() for part in pair])
        elif isinstance(value, list | tuple):
            self._items(value)
        elif isinstance(value, set | frozenset):
            self._items(sorted(value, key=repr))
        elif hasattr(value, "tobytes") or hasattr(value, "detach"):
            self._array(value)
        elif hasattr(value, "__dict__"):
            # Private attributes that are not containers are internals: handles, counters, times.
            held = {
                name: part
                for name, part in vars(value).items()
                if name[:1] != "_" or (hasattr(part, "__len__") and not isinstance(part, str))
            }
            self._items([*held.items()])

    def _items(self, items: Any) -> None:
        self._text(str(len(items)))
        step = 1 if self._whole else max(1, -(-len(items) // MOST_OF_A_LIST))
        for at in range(0, len(items), step):
            if not self._whole and self._left <= 0:
                return
            self.add(items[at])

    def _array(self, value: Any) -> None:
        import numpy as np

        if hasattr(value, "detach"):
            import torch

            self._text(f"{value.dtype} {tuple(value.shape)}")
            value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        array = np.asarray(value)
        self._text(f"{array.dtype} {array.shape}")
        if array.dtype == object:
            self._items(array.ravel().tolist())
        else:
            self._bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def _bytes(self, content: memoryview) -> None:
        self._text(str(len(content)))
        if self._whole or len(content) <= MOST_BYTES:
            self.hash.update(content)
            return
        size, step = MOST_BYTES // PARTS, len(content) // PARTS
        for part in range(PARTS):
            self.hash.update(content[part * step : part * step + size])
        self.hash.update(content[-size:])

    def _text(self, text: str) -> None:
        self.hash.update(text.encode(errors="surrogatepass") + b"\0")


def movable(text: str) -> str:
    """A text without the folder of the data: of a long path, the last two parts."""
    if text.startswith("/") or "://" in text[:10]:
        return "/".join(text.rsplit("/", 2)[-2:])
    return text


def tensor_as_array(value: Any) -> Any:
    """How to pickle a tensor as an array; NotImplemented for anything else."""
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ == "Tensor" and not value.requires_grad:
        with contextlib.suppress(TypeError, RuntimeError):
            import torch

            return torch.from_numpy, (value.numpy(),)
    return NotImplemented


SEPARATOR = "~"
BUDGET_S = 0.25
"""No larger sample starts after this time, so all samples take about a second at most."""
BUDGET_BYTES = 64 * 2**20
CHUNK_BYTES = 2**20
CHUNKS = (4, 16, 64, 256, 1024, 4096, 16384)
RECORDS = (2, 4, 8, 16)
"""Number of records in each successive sample, if only reading gives their content."""
SAMPLED_PIECE = 256


@dataclass(frozen=True)
class Identity:
    text: str
    draws: str = ""
    """Why records must not be cached across epochs: reading draws random numbers."""
    unstable: str = ""
    """Why the records cannot be identified: reading one twice gives different results."""


def agree(one: str, other: str) -> bool:
    """Whether two fingerprints match, as far as both have sampled."""
    return all(a == b for a, b in zip(one.split(SEPARATOR), other.split(SEPARATOR), strict=False))


def identity_of(source: Source) -> Identity:
    """A source's fingerprint; if it has none, that of a sample of its records."""
    text = source.fingerprint()
    if text and not source.random:
        return Identity(text)
    kind = type(getattr(source, "dataset", source)).__name__
    base = text or digest(source.count(), content_digest(source).hex())
    try:
        copied = _as_tasks_get_it(source)
        digests, draws, differs = _sample(source, copied)
    except Exception as error:
        why = f"{kind} cannot be read twice here ({type(error).__name__}: {str(error)[:120]})"
        return Identity(base, why, why)
    drawn = f"{kind} draws random numbers as it reads a record" if draws or differs else ""
    if differs:
        return Identity(base, drawn, f"{kind} returns a different record at each read")
    return Identity(SEPARATOR.join([base] if text else [base, *digests]), drawn)


def _as_tasks_get_it(source: Source) -> Source:
    """A copy, because reading may open files that cannot be pickled; arrays are shared, not copied."""
    from ray.cloudpickle import CloudPickler

    class Sharing(CloudPickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            shared = tensor_as_array(value)
            return super().reducer_override(value) if shared is NotImplemented else shared

    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    Sharing(stream, protocol=5, buffer_callback=buffers.append).dump(source.for_workers())
    copied: Source = pickle.loads(stream.getbuffer(), buffers=buffers)  # noqa: S301 - of this process
    return copied


def _sample(source: Source, copied: Source) -> tuple[list[str], bool, bool]:
    content, found, draws, differs = blake2b(digest_size=4), [], False, False
    shards = list(_sampled_shards(source))
    until, done = time.monotonic() + BUDGET_S, 0
    for shard, count in shards:
        for first, again, other in zip(
            *(_read(copied, shard, count, seed) for seed in "112"), strict=True
        ):
            draws |= first[1] or first[0] != other[0]
            differs |= first[0] != again[0]
            content.update(first[0])
            done += 1
            if done in RECORDS:
                found.append(content.hexdigest())
        if done >= RECORDS[-1] or (found and time.monotonic() > until):
            break
    else:
        found.append(content.hexdigest())
    return found, draws, differs


def _sampled_shards(source: Source) -> Iterator[tuple[Shard, int]]:
    shards = source.shards(SAMPLED_PIECE, None)
    count = max(1, -(-RECORDS[-1] // max(1, len(shards))))
    for number in spread(len(shards), RECORDS[-1]):
        listing = listing_of(source, shards[number])
        if listing is None:
            yield shards[number], count
        else:
            for at in spread(len(listing), count):
                yield listing[at][1], 1


def _read(source: Source, shard: Shard, count: int, seed: str) -> list[tuple[bytes, bool]]:
    """Content of a shard's first records, and whether reading each drew from a global generator."""
    found: list[tuple[bytes, bool]] = []
    with drawing(seed):
        reader = iter(source.read(shard, None))
        for number in range(count):
            seed_globals(f"{seed}/{number}")
            before = states()
            record = next(reader, None)
            if record is None:
                break
            after = states()
            drew = any(after[name] != state for name, state in before.items())
            record = {"key": record.key} if isinstance(record, BadRecord) else record
            found.append((content_digest(record, whole=True), drew))
    return found


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
