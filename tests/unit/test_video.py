"""Clips of video files hold exactly the frames that were asked for, or their record is quarantined."""

from __future__ import annotations

import struct
import wave
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from damage import chained, reasons

from stoker.data import DecodeVideo
from stoker.errors import UsageError
from stoker.protocol import BlockReport

FORMATS = {
    "mkv": ("libx264rgb", "rgb24", {"qp": "0", "g": "12", "bf": "2"}),
    "mp4": ("libx264rgb", "rgb24", {"qp": "0", "g": "12", "bf": "2", "x264-params": "open-gop=1"}),
    "avi": ("ffv1", "bgr0", {}),
    "mov": ("png", "rgb24", {}),
    "webm": ("libvpx", "yuv420p", {}),
    "ts": ("libx264", "yuv420p", {"g": "12", "bf": "2"}),
}
"""Suffix → codec, pixel format, options; the last two lose a little. x264 stores frames in another order."""


def pictures(count: int, size: tuple[int, int] = (32, 48)) -> list[Any]:
    """Noise that differs in each frame, below a bar that tells its number."""
    rng = np.random.default_rng(3)
    frames = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for _ in range(count)]
    for i, frame in enumerate(frames):
        frame[:8] = 4 * i
    return frames


def written(
    folder: Path, frames: list[Any], suffix: str = "mkv", rate: Any = 25, moments: Any = None
) -> bytes:
    """A file of these frames.

    Args:
        folder: where it lies.
        frames: rows × columns × 3.
        suffix: of FORMATS.
        rate: frames per second.
        moments: of the frames, where they are not evenly spaced, in units of 1 / rate.
    """
    path = folder / f"video.{suffix}"
    codec, form, options = FORMATS[suffix]
    faststart = {"movflags": "faststart"} if suffix in ("mp4", "mov") else {}
    with av.open(str(path), "w", options=faststart) as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = form
        for i, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = (moments[i] if moments else i), 1 / Fraction(rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path.read_bytes()


def run(
    contents: list[bytes], entry: DecodeVideo, epoch: int = 0, **options: Any
) -> tuple[dict[str, Any], BlockReport]:
    records = [{"key": str(i), "mp4": content, "label": i} for i, content in enumerate(contents)]
    return chained(records, entry, epoch=epoch, **options)


def numbers(clips: Any) -> list[list[int]]:
    return [[int(frame[:8].mean().round()) // 4 for frame in clip] for clip in clips]


@pytest.mark.long
@pytest.mark.parametrize("suffix", ["mkv", "mp4", "avi", "mov"])
def test_a_clip_holds_the_very_frames_that_were_written(tmp_path: Path, suffix: str) -> None:
    frames = pictures(40)
    content = written(tmp_path, frames, suffix)
    columns, report = run([content] * 60, DecodeVideo(8))
    assert not report.bad
    assert columns["video"].shape == (60, 8, 32, 48, 3)
    assert columns["video"].dtype == np.uint8
    firsts = set()
    for clip, (first, *_) in zip(columns["video"], numbers(columns["video"]), strict=True):
        assert np.array_equal(clip, frames[first : first + 8])
        firsts.add(first)
    assert len(firsts) > 15  # before, at and behind key frames
    assert min(firsts) < 4 and max(firsts) > 28


def test_each_record_and_epoch_draws_its_own_start_and_again_the_same(tmp_path: Path) -> None:
    contents = [written(tmp_path, pictures(40))] * 12
    first, again, later = (run(contents, DecodeVideo(4), epoch)[0]["video"] for epoch in (0, 0, 1))
    assert np.array_equal(first, again)
    assert numbers(first) != numbers(later)


def test_the_centre_is_the_same_in_every_epoch_and_may_be_cached(tmp_path: Path) -> None:
    entry = DecodeVideo(8, start="centre")
    columns, _ = run([written(tmp_path, pictures(40))], entry)
    assert numbers(columns["video"]) == [list(range(16, 24))]
    assert not entry.random


RATES = [
    (30, 10, [0, 3, 6, 9]),
    (60, 10, [0, 6, 12, 18]),
    (Fraction(30000, 1001), 29.97, [0, 1, 2, 3]),
    (24, 24, [0, 1, 2, 3]),
    (10, 20, [0, 0, 1, 1]),
    (25, 10, [0, 2, 5, 7]),
]


@pytest.mark.parametrize("suffix", ["mkv", "mp4"])
@pytest.mark.parametrize(("rate", "clip_rate", "expected"), RATES)
def test_a_clip_has_its_rate_whatever_the_files(
    tmp_path: Path, suffix: str, rate: Any, clip_rate: float, expected: list[int]
) -> None:
    content = written(tmp_path, pictures(40), suffix, rate)
    columns, report = run([content] * 8, DecodeVideo(4, rate=clip_rate))
    assert not report.bad
    found = numbers(columns["video"])
    assert len({first for first, *_ in found}) > 3
    assert [[number - clip[0] for number in clip] for clip in found] == [expected] * 8


@pytest.mark.parametrize("suffix", ["avi", "asf"])
def test_frames_are_in_the_order_in_which_they_are_shown_or_the_file_is_quarantined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """H.264 stores frames in another order, and these containers only when each is decoded."""
    for between in (0, 3):
        options = {"crf": "1", "x264-params": f"scenecut=0:b-adapt=0:bframes={between}"}
        monkeypatch.setitem(FORMATS, suffix, ("libx264", "yuv420p", options))
        columns, report = run([written(tmp_path, pictures(20), suffix)] * 9, DecodeVideo(8))
        for clip in columns.get("video", ()):
            found = [round(float(frame[:6].mean()) / 4) for frame in clip]
            assert found == [*range(found[0], found[0] + 8)]
        assert len(report.bad) == (9 if between else 0)
        assert all("not in the order of the frames" in bad.reason for bad in report.bad)


def test_unevenly_spaced_frames_are_taken_by_the_time_at_which_they_are_shown(
    tmp_path: Path,
) -> None:
    moments = [0, 1, 2, 3, 10, 11, 12, 20, 21, 30, 31, 32]
    content = written(tmp_path, pictures(12), "mkv", 100, moments)
    columns, _ = run([content] * 30, DecodeVideo(3, rate=10))
    found = numbers(columns["video"])
    assert [0, 4, 7] in found
    for clip in found:
        first = moments[clip[0]]
        for number, wanted in zip(clip, (first, first + 10, first + 20), strict=True):
            assert abs(moments[number] - wanted) == min(abs(moment - wanted) for moment in moments)


@pytest.mark.long
def test_a_recording_that_begins_between_key_frames_begins_with_its_first_whole_picture(
    tmp_path: Path,
) -> None:
    content = written(tmp_path, pictures(60), "ts")
    begun = tmp_path / "begun.ts"
    begun.write_bytes(content[len(content) // 10 // 188 * 188 :])
    with av.open(str(begun)) as container:
        there = sum(packet.size > 0 for packet in container.demux(video=0))
    with av.open(str(begun)) as container:
        shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert 50 > len(shown) < there
    columns, report = run([begun.read_bytes()] * 60, DecodeVideo(40))
    assert not report.bad
    places = range(len(shown) - 39)
    starts = [
        next(i for i in places if np.array_equal(clip, shown[i : i + 40]))
        for clip in columns["video"]
    ]
    assert set(starts) == set(places)


MATRICES = [
    ((0, 1, -1, 0), lambda frame: np.rot90(frame, -1)),
    ((0, -1, 1, 0), np.rot90),
    ((-1, 0, 0, -1), lambda frame: np.rot90(frame, 2)),
    ((-1, 0, 0, 1), np.fliplr),
    ((1, 0, 0, -1), np.flipud),
    ((0, 1, 1, 0), lambda frame: frame.swapaxes(0, 1)),
    ((0, -1, -1, 0), lambda frame: np.rot90(frame.swapaxes(0, 1), 2)),
]


@pytest.mark.parametrize(("matrix", "shown"), MATRICES)
def test_a_turned_or_mirrored_video_is_shown_as_in_a_player(
    tmp_path: Path, matrix: Any, shown: Any
) -> None:
    frames = pictures(9)
    content = written(tmp_path, frames, "mp4")
    at = content.index(b"tkhd") + 44
    a, b, c, d = (number << 16 for number in matrix)
    turned = content[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + content[at + 36 :]
    columns, _ = run([turned], DecodeVideo(9))
    assert np.array_equal(columns["video"][0], [shown(frame) for frame in frames])
    columns, _ = run([turned], DecodeVideo(9, size=(24, 16)))
    assert columns["video"].shape == (1, 9, 24, 16, 3)


def test_files_of_any_size_give_clips_of_one(tmp_path: Path) -> None:
    flat = [np.full((64, 80, 3), 100, np.uint8)] * 9
    contents = [written(tmp_path, pictures(9)), written(tmp_path, flat)]
    columns, report = run(contents, DecodeVideo(8, size=(20, 24)))
    assert not report.bad
    assert columns["video"].shape == (2, 8, 20, 24, 3)
    assert (columns["video"][1] == 100).all()


def test_a_file_that_is_too_short_is_quarantined_with_its_length(tmp_path: Path) -> None:
    enough, short = written(tmp_path, pictures(8)), written(tmp_path, pictures(7))
    for entry, of in ((DecodeVideo(8), ""), (DecodeVideo(8, rate=25), " at the clip's rate")):
        columns, report = run([enough, short], entry)
        assert reasons(report) == [
            f"DecodeVideo: ValueError: too short: a clip has 8 frames{of}, the video 7"
        ]
        assert numbers(columns["video"]) == [list(range(8))]


@pytest.mark.parametrize("suffix", ["mkv", "mp4", "avi", "mov", "webm"])
def test_a_truncated_file_gives_frames_that_it_holds_or_is_quarantined(
    tmp_path: Path, suffix: str
) -> None:
    frames = pictures(40)
    content = written(tmp_path, frames, suffix)
    parts = [content[: int(share * len(content))] for share in (0.0, 0.01, 0.3, 0.6, 0.9)]
    columns, report = run(parts, DecodeVideo(4))
    assert {"0", "1"} <= {bad.key for bad in report.bad}, "nothing is left of these"
    clips = columns.get("video", ())
    for clip, (first, *_) in zip(clips, numbers(clips), strict=True):
        assert suffix == "webm" or np.array_equal(clip, frames[first : first + 4])


UNREADABLE = "cannot be decoded", "cannot be decoded", "the file holds no video"


def test_what_is_no_video_is_quarantined_with_the_reason(tmp_path: Path) -> None:
    sound = tmp_path / "sound.wav"
    with wave.open(str(sound), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(1600))
    _, report = run([b"", b"not a video at all" * 9, sound.read_bytes()], DecodeVideo(4))
    for reason, says in zip(reasons(report), UNREADABLE, strict=True):
        assert says in reason


@pytest.mark.parametrize("suffix", ["mkv", "mp4", "avi", "mov"])
def test_damage_never_gives_a_clip_of_another_length_or_kills_the_process(
    tmp_path: Path, suffix: str
) -> None:
    content, rng = written(tmp_path, pictures(40), suffix), np.random.default_rng(8)
    damaged = []
    for _ in range(30):
        one = bytearray(content)
        at = int(rng.integers(len(one) - 64))
        one[at : at + 64] = rng.bytes(64)
        damaged.append(bytes(one))
    columns, report = run(damaged, DecodeVideo(8))
    assert report.records == 30 == len(columns.get("video", ())) + len(report.bad)
    assert len(report.bad) < 30
    assert columns["video"].shape[1:] == (8, 32, 48, 3)


def test_a_video_of_too_many_pixels_is_quarantined_undecoded(tmp_path: Path) -> None:
    content = written(tmp_path, pictures(9))
    _, report = run([content], DecodeVideo(4), max_pixels=32 * 48 - 1)
    run([], DecodeVideo(4))  # the limit is the process's
    assert "more than data.max_pixels allows" in report.bad[0].reason


@pytest.mark.parametrize(
    "arguments", [{"frames": 0}, {"frames": 4, "rate": 0}, {"frames": 4, "start": "middle"}]
)
def test_arguments_that_make_no_clip_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="above 0"):
        DecodeVideo(**arguments)


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'stoker\[video\]'"):
        DecodeVideo(4)
