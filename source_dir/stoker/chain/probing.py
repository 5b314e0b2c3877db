"""Head: determines the schema of each split from its first records, before training."""

from __future__ import annotations

import contextlib
import pickle
import re
import sys
import time
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from stoker.chain.chain import Chain
from stoker.chain.collating import all_of, collated
from stoker.chain.decode import depth_of
from stoker.chain.joint import LAST, PERHAPS, SURELY, moved_alone, noting_places
from stoker.chain.stages import Stage
from stoker.chain.transforms import DecodeImage, Rename
from stoker.errors import SchemaError, UsageError
from stoker.figures import count_of
from stoker.protocol import BadRecord, BlockReport, Record, Schema, Shard
from stoker.read.identity import content_digest
from stoker.read.sources import Source, drawing

PROBE_RECORDS = 4
SYSTEMATIC = re.compile(
    r"(column [^:]+|[^:]+: (LookupError|KeyError|IndexError|TypeError|AttributeError|ValueError)): "
)
"""Reasons that the columns and the chain may give for every record, unlike a read that fails."""
SLOW_S = 1.0
"""A chain that takes longer for these records does not run again to compare what it gives."""
MANY_RECORDS = 256
PROBE_S = 30.0
"""Deadline; after it the run starts anyway, and its first block fixes the schema."""
FEW_LEVELS = 64
"""So few of 256 mean that the values use only some of the bits, such as 12 of 16."""


class ProbeResult(NamedTuple):
    refused: str | None = None
    schemas: tuple[Schema, ...] = ()
    note: str = ""
    unstable: str = ""
    made: tuple[dict[str, Any], BlockReport] | None = None


def fix_schemas(
    sources: dict[str, Any], chains: dict[str, Chain], block_records: int
) -> dict[str, Any]:
    """Set the schemas that every block of a split must have on the chains of a job.

    If Ray is connected, a task on this host runs the chains, since a record may crash its process; otherwise
    this process does. If that gives no schema (for example because the first records are bad or need another
    host), and for a `ray.data.Dataset`, the first block of the run fixes it.
    """
    asked = {
        split: (source, shard, chains[split])
        for split, source in sources.items()
        if (shard := next(iter(source.shards(block_records, None)), None)) is not None
    }
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        found = _in_tasks(asked)
    else:
        found = {split: probe(*parts) for split, parts in asked.items()}
    for split, answer in found.items():
        if answer.refused is not None:
            raise UsageError(f"{split}: {answer.refused}")
        chains[split].schemas, chains[split].note = answer.schemas, answer.note
        chains[split].unstable = answer.unstable
    return {split: answer.made for split, answer in found.items() if answer.made}


def probe(source: Source, shard: Shard, chain: Chain) -> ProbeResult:
    from ray import cloudpickle

    stages, reached = chain.stages, {LAST: dict[str, int]()}
    chain = chain.of(noting_places(stages, reached))
    started = time.monotonic()
    packed = b""
    with contextlib.suppress(Exception):  # it cannot be copied
        packed = cloudpickle.dumps(chain)  # before a stage changes
    try:
        records = _first(source, shard)
        note = remarks(records, stages)
        columns, report, _ = _made(chain, records)
    except (SchemaError, UsageError) as error:
        return ProbeResult(_moved(stages, reached) or str(error))
    except Exception:
        return ProbeResult()  # the run reports it where it happens
    if why := _moved(stages, reached) or _every(source, shard, chain, report):
        return ProbeResult(why)
    if perhaps := _moved(stages, reached, PERHAPS):
        note = "; ".join(filter(None, (note, f"{perhaps}, unless it shows something else")))
    quick = time.monotonic() - started < SLOW_S
    unstable = _unstable(source, shard, packed) if quick else ""
    return ProbeResult(None, report.schemas, note, unstable, (columns, report) if columns else None)


def _first(source: Source, shard: Shard) -> list[Record | BadRecord]:
    with drawing("probe"):
        return list(islice(source.read(shard, None), PROBE_RECORDS))


def _made(
    chain: Chain, records: Iterable[Record | BadRecord]
) -> tuple[dict[str, Any], BlockReport, Any]:
    with drawing("probe"):
        columns, report = chain.run(records, 0)
        batch = columns
        if chain.collate and report.rows:
            batch = collated(chain.collate, all_of([(columns, 0, report.rows)])[0], "probe")
    return columns, report, batch


def _unstable(source: Source, shard: Shard, packed: bytes) -> str:
    """Why the records cannot be made again: the chain does not give the same for the same records."""

    def again(chain: Chain) -> bytes:
        try:
            return content_digest(_made(chain, _first(source, shard))[-1], whole=True)
        except Exception:
            return b""

    with contextlib.suppress(Exception):  # it cannot be copied, read or compared
        chain = pickle.loads(packed)  # noqa: S301 - the stages stay as they are
        if again(chain) == again(chain):
            return ""
        first, second = ({"": [content_digest(_first(source, shard))]} for _ in range(2))
        for found in (first, second):
            again(chain.of([_noting_content(stage, found) for stage in chain.stages]))
        if first[""] != second[""]:
            return ""  # its source's identity tells
        odd = [n for n in first if first[n] != second.get(n)] or [
            n for n in first if b"" in first[n]
        ]
        name = f"stage {odd[0]}" if odd else "the chain"
        return f"{name} gives another result for the same record each time"
    return ""


def _noting_content(stage: Stage, found: dict[str, list[bytes]]) -> Stage:
    def apply(*given: Any) -> Any:
        there = found.setdefault(stage.name, [])
        there.append(b"")  # it may raise
        made = stage.apply(*given)
        there[-1] = content_digest(made, whole=True)
        return made

    return replace(stage, apply=apply)


def _every(source: Source, shard: Shard, chain: Chain, report: BlockReport) -> str:
    """Why the run would end: each of many records is refused for the same reason."""
    if report.rows or not _systematic(report):
        return ""
    report = chain.run(islice(source.read(shard, None), MANY_RECORDS), 0)[1]
    if report.rows or not (reason := _systematic(report)):
        return ""
    whole = copy(source)
    if "columns" in vars(source):
        vars(whole)["columns"] = None  # also show those that were not asked for
    there: dict[str, Any] = {}
    with contextlib.suppress(Exception):
        there.update(next(iter(whole.read(shard, None))))  # type: ignore[arg-type] # not with a BadRecord
    columns = ", ".join(
        f"{name} ({_kind(value)})" for name, value in there.items() if name != "key"
    )
    count, why = count_of(len(report.bad), "record"), reason.partition(" (columns: ")[0]
    return f"each of the first {count} is refused: {why}; columns: {columns or 'unknown'}"


def _systematic(report: BlockReport) -> str:
    reasons = {bad.reason for bad in report.bad}
    return reason if len(reasons) == 1 and SYSTEMATIC.match(reason := reasons.pop()) else ""


def _kind(value: Any) -> str:
    return str(getattr(value, "dtype", "text" if isinstance(value, str) else type(value).__name__))


def _moved(stages: list[Stage], reached: dict[str, dict[str, int]], degree: int = SURELY) -> str:
    """Why image and masks would no longer show the same, unless the chain itself says so."""
    known, found = moved_alone(stages), moved_alone(stages, reached, degree)
    return "; ".join(text for text, random in found if random and (text, random) not in known)


def _in_tasks(asked: dict[str, tuple[Source, Shard, Chain]]) -> dict[str, ProbeResult]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    task = ray.remote(_probe_packed).options(
        name="schema", num_cpus=0, max_retries=0, scheduling_strategy=here
    )
    answers = {
        split: task.remote(ray.cloudpickle.dumps((source.for_workers(), *others)))
        for split, (source, *others) in asked.items()
    }
    found = dict.fromkeys(asked, ProbeResult())
    for split, answer in answers.items():
        # Not cancelled: where that meets the task's answer, Ray ends this process.
        with contextlib.suppress(ray.exceptions.RayError):
            found[split] = ray.get(answer, timeout=PROBE_S)
    return found


def _probe_packed(packed: bytes) -> ProbeResult:
    return probe(*pickle.loads(packed))  # noqa: S301 - written by the head


def remarks(records: Iterable[Record | BadRecord], stages: Sequence[Stage]) -> str:
    """A line on what decoding leaves out of the images in these records; empty: nothing."""
    decode = next((stage.apply for stage in stages if isinstance(stage.apply, DecodeImage)), None)
    if decode is None:
        return ""
    columns = {"image": "image"}
    for stage in stages:
        columns |= stage.apply.columns if isinstance(stage.apply, Rename) else {}
    rng: Any = None
    highest, deep, several, count = 0, 0, 0, 0
    for record in records:
        image = None if isinstance(record, BadRecord) else record.get(columns["image"])
        count += 1
        with contextlib.suppress(Exception):  # a bad record has a line of its own
            depth, frames = depth_of(image)
            several += frames > 1
            if depth > 8:
                highest = max(highest, int(decode({"image": image}, rng)["image"].max()))
                deep += 1
    found = []
    if several:
        found.append(f"{several} of {count} hold several pictures or pages; the first is used")
    if deep:
        kept = f"of {decode.bits}" if decode.bits else "of them"
        found.append(
            f"{deep} of {count} have more than 8 bits per channel; decoding keeps the upper 8 {kept}"
        )
        if highest < FEW_LEVELS and not decode.bits:
            found[-1] += (
                f", which leaves {highest + 1} of 256 levels: set the bits that the values use, such as 12"
                " (DecodeImage(bits=12), params.bits of ImageClassification), or scale them to 16 bits"
            )
    return f"images: {'; '.join(found)}" if found else ""
