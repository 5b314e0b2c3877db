"""Chain worker: video files → clips, exactly the frames asked for, decoded by PyAV (FFmpeg).

The packet headers list a file's frames, so that needs no decoding. Decoding then begins at the last key
frame before the clip and ends with its last frame. One thread decodes: there is a chain worker per CPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from stoker.chain.decode import check_pixels
from stoker.chain.stages import RecordTransform, column_value
from stoker.errors import UsageError
from stoker.protocol import Record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class DecodeVideo(RecordTransform):
    """An encoded video → `video`, one clip, uint8, frames × height × width × 3, upright.

    A file that is damaged or shorter than a clip raises, which quarantines its record.

    Args:
        frames: of a clip.
        rate: frames per second of the clip; each is the nearest frame of the file. None: consecutive frames.
        start: "random", drawn from the record's generator, or "centre", the same in every epoch.
        size: height and width to which frames are resized; None: as they are, alike in all files.
        column: that holds the file's bytes, which the clip replaces.
    """

    uses_random = False

    def __init__(
        self,
        frames: int,
        rate: float | None = None,
        start: Literal["random", "centre"] = "random",
        size: tuple[int, int] | None = None,
        column: str = "mp4",
    ) -> None:
        if importlib.util.find_spec("av") is None:
            raise UsageError(
                "DecodeVideo: needs the package av; pip install 'stoker[video]', or add av to requirements.txt"
            )
        if frames < 1 or (rate is not None and rate <= 0) or start not in ("random", "centre"):
            raise UsageError(
                f"DecodeVideo: frames={frames}, rate={rate}, start={start!r}: frames and rate must be above"
                ' 0, start "random" or "centre"'
            )
        self.frames, self.size, self.column = frames, size, column
        self.rate = None if rate is None else Fraction(rate)
        self.random = start == "random"

    def prepare(self) -> None:
        import av  # noqa: F401

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        place = rng.random() if self.random else 0.5
        clip = decode_clip(
            column_value(record, self.column), self.frames, self.rate, place, self.size
        )
        others = {name: value for name, value in record.items() if name != self.column}
        return others | {"video": clip}


def decode_clip(
    content: bytes, frames: int, rate: Fraction | None, place: float, size: tuple[int, int] | None
) -> NDArray[Any]:
    """One clip; `place` chooses it among all that the file has: 0 the first, just below 1 the last."""
    import av
    import numpy as np

    try:
        with av.open(io.BytesIO(content)) as container:
            stream = next(iter(container.streams.video), None)
            if stream is None:
                raise ValueError("the file holds no video")
            check_pixels(stream.width, stream.height)
            stream.codec_context.thread_count = 1
            stream.codec_context.options = {"err_detect": "explode"}
            packets = list(container.demux(stream))
            if any(packet.is_corrupt for packet in packets):
                raise ValueError("cannot be decoded: damaged or truncated")
            per_unit = rate and rate * stream.time_base
            shown = (packet for packet in packets if packet.size and not packet.is_discard)
            moments = {packet.pts for packet in shown} - {None}
            wanted = _choose(sorted(moments), frames, per_unit, place)
            found = _decode(stream, packets, wanted, size)
            if not found.keys() >= set(wanted):
                # Not every packet gives a frame: hidden ones, fields, what precedes the first whole picture.
                packets = packets[_keys(packets)[0] :]
                moments = {frame.pts for frame in _frames(stream, packets)} - {None}
                wanted = _choose(sorted(moments), frames, per_unit, place)
                found = _decode(stream, packets, wanted, size, first=0)
    except av.error.FFmpegError as error:
        raise ValueError(f"cannot be decoded: {error.strerror}") from None
    return np.stack([found[moment] for moment in wanted])


def _choose(moments: list[int], frames: int, rate: Fraction | None, place: float) -> list[int]:
    if rate is None:
        starts = len(moments) - frames + 1
    else:
        # Containers round: half a frame beyond the last one is still that one.
        span = (moments[-1] - moments[0]) / max(1, len(moments) - 1) if moments else 0
        last = moments[-1] + min(1 / rate, span) / 2 - (frames - 1) / rate if moments else -1
        starts = bisect_right(moments, last)
    if starts < 1:
        pace = "" if rate is None else " at the clip's rate"
        raise ValueError(f"too short: a clip has {frames} frames{pace}, the video {len(moments)}")
    first = int(place * starts)
    if rate is None:
        return moments[first : first + frames]
    return [
        _nearest(moments, moments[first], i * rate.denominator, rate.numerator)
        for i in range(frames)
    ]


def _nearest(moments: list[int], start: int, after: int, of: int) -> int:
    """The moment nearest to start + after / of; ties go to the earlier one."""
    at = bisect_left(moments, start - -after // of)
    return min(moments[max(0, at - 1) : at + 1], key=lambda one: abs((one - start) * of - after))


def _decode(
    stream: Any,
    packets: list[Any],
    wanted: list[int],
    size: tuple[int, int] | None,
    first: int | None = None,
) -> dict[int, NDArray[Any]]:
    if first is None:
        keys = _keys(packets)
        first = max((i for i in keys if packets[i].pts <= wanted[0]), default=keys[0])
    found: dict[int, NDArray[Any]] = {}
    left = set(wanted)
    for frame in _frames(stream, packets[first:]):
        if frame.pts in left:
            if frame.is_corrupt:
                raise ValueError("cannot be decoded: damaged")
            if found and frame.pts < max(found):
                raise ValueError("the times of its frames are not in the order of the frames")
            found[frame.pts] = _pixels(frame, size)
            left.remove(frame.pts)
        if not left:
            break
    return found


def _keys(packets: list[Any]) -> list[int]:
    keys = [i for i, each in enumerate(packets) if each.is_keyframe and each.pts is not None]
    return keys or [0]


def _frames(stream: Any, packets: list[Any]) -> Iterator[Any]:
    """In the order in which they are shown, which is the decoder's."""
    stream.codec_context.flush_buffers()
    for packet in packets:
        yield from packet.decode()


def _pixels(frame: Any, size: tuple[int, int] | None) -> NDArray[Any]:
    import numpy as np

    quarters = round(frame.rotation / 90) % 4
    height, width = (size[::-1] if quarters % 2 else size) if size else (frame.height, frame.width)
    array = frame.to_ndarray(
        format="rgb24", height=height, width=width, interpolation="BILINEAR", threads=1
    )
    # No matrix, or beside data that PyAV does not know.
    with contextlib.suppress(KeyError, ValueError):
        a, b, _, c, d = np.frombuffer(frame.side_data["DISPLAYMATRIX"], np.int32)[:5].tolist()
        array = array[::-1] if a * d < b * c else array
    return np.rot90(array, quarters)
