"""Decoding chosen frames one after the other, from the keyframes before them.

A frame is *good* if decoding it alone works: if the decoder, from the frame's keyframe on, finds no damage in what
that frame needs. Whether a frame is good does not depend on what else is asked for: a frame is given out only once
everything that it needs has come out of the decoder undamaged; one that is given out is final; and those that fail
when decoded with others are tried alone.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import av
import numpy as np
from av.video.frame import PictureType

from .file import SeekFailed, VideoFile
from .info import VideoError, VideoInfo
from .runs import FrameRun, plan_runs

# Pictures that refer to no other; decoders that do not say give NONE.
_INTRA = (PictureType.I, PictureType.SI, PictureType.NONE)


class _Undecodable(Exception):
    """Decoding from a keyframe did not work out.

    Attributes:
        entered: whether the keyframe itself came out well.
    """

    def __init__(self, reason: str, entered: bool):
        super().__init__(reason)
        self.entered = entered


class RunDecoder:
    """Decodes runs of an open file's frames.

    Args:
        check: called between packets; what it raises ends the decoding.
    """

    def __init__(self, file: VideoFile, info: VideoInfo, check: Callable[[], None]):
        self._file, self._info, self._check = file, info, check
        self._keyframes = info.packets.keyframes.tolist()
        file.expect(info.packets)

    def frames(self, run: FrameRun) -> Iterator[av.VideoFrame]:
        """Decode a run's frames, in their order.

        Raises:
            VideoError: the next frame is damaged or cannot be decoded; or the file holds other packets than those
                that were probed.
        """
        given = 0
        try:
            for frame in self._frames(run):
                given += 1
                yield frame
        except VideoError:
            if len(run.frames) == 1:
                raise
        for index in run.frames[given:]:
            yield from self._frames(plan_runs(self._info, [index])[0])

    def _frames(self, run: FrameRun) -> Iterator[av.VideoFrame]:
        """Decode a run's frames, with all that may help; VideoError where one of them does not come."""
        missing = deque(run.frames)
        back, skip = 0, True
        while missing:
            number = max(run.key - back, 0)
            try:
                for frame in self._attempt(number, run.stop, missing, skip):
                    missing.popleft()
                    yield frame
            except SeekFailed:
                self._file.can_seek = False
            except _Undecodable as error:
                if skip:  # which may have confused the order in which frames come out
                    skip = False
                    continue
                # The keyframe may be none, as with intra refresh: then only an earlier one helps. If it is fine,
                # the data after it is damaged, or refers further back than it should: one more try.
                if number == 0 or (error.entered and back):
                    raise self._file.error(f"frame {missing[0]} cannot be decoded: {error}") from error
                back = 2 * back + 1

    def _attempt(self, number: int, stop: int, wanted: Sequence[int], skip: bool) -> Iterator[av.VideoFrame]:
        """Decode from one keyframe on, and give out the wanted frames.

        Args:
            number: of the keyframe.
            stop: the packet after the last one needed.
            wanted: the frames' numbers; it may lose those that are given out.
            skip: leave out frames that are neither wanted nor needed.

        Raises:
            _Undecodable, SeekFailed: the next wanted frame does not come.
        """
        packets, start, is_first = self._info.packets, self._keyframes[number], number == 0
        pts, shown = packets.pts[start:stop], packets.shown[start:stop]
        indices = self._info.frame_packets[list(wanted)] - start
        # A frame is known to be good once all that was decoded before it, or with it, has come out.
        horizon = np.maximum.accumulate(np.where(shown, pts, pts[0]))[indices].tolist()
        waiting = deque(zip(pts[indices].tolist(), horizon, strict=True))
        held: deque[av.VideoFrame] = deque()
        needed, unseen = {time for time, _ in waiting}, set(pts[shown].tolist())
        key_time = int(pts[0])
        fed_in_full = needed | {key_time}
        origin = int(packets.pts[self._info.frame_packets[0]]) if is_first else key_time
        entered, latest = is_first or not shown[0], None
        # Nothing more is fed once the last wanted frame is in, so the decoder needs to be drained to give it out.
        for packet in itertools.chain(self._file.packets_between(start, stop), (None,)):
            self._check()
            try:
                frames = self._file.decode(packet, not skip or packet is None or packet.pts in fed_in_full)
            except av.error.FFmpegError as error:
                raise _Undecodable(error.strerror, entered) from error
            for frame in frames:
                time = frame.pts
                if time is not None and time < origin:
                    continue  # displayed before the keyframe: may lack what it refers to
                if time not in unseen or (latest is not None and time < latest):
                    raise _Undecodable("frames come out of the decoder that the file does not announce", entered)
                if frame.is_corrupt:
                    raise _Undecodable("the data is damaged", entered)
                unseen.remove(time)
                latest = time
                # The second field of an interlaced keyframe may be predicted from the first.
                if time == key_time and (frame.pict_type in _INTRA or frame.interlaced_frame):
                    entered = True
                if not entered:
                    raise _Undecodable("the keyframe is none", False)
                if time in needed:
                    held.append(frame)
                    if waiting[len(held) - 1][0] != time:
                        raise _Undecodable("the decoder does not give it out", True)
                while held and waiting[0][1] <= time:
                    waiting.popleft()
                    yield held.popleft()
        if len(held) < len(waiting):
            raise _Undecodable("the decoder does not give it out", entered)
        yield from held


def frames_from_start(
    file: VideoFile, wanted: Sequence[int], check: Callable[[], None]
) -> Iterator[av.VideoFrame]:
    """Decode a file whose packets tell nothing, and give out the wanted frames.

    Raises:
        VideoError: a frame up to the next wanted one is damaged, or there are too few.
    """
    missing = deque(wanted)
    for index, frame in enumerate(file.decode_all()):
        check()
        if frame.is_corrupt:
            raise file.error(f"frame {index} is damaged")
        if index == missing[0]:
            missing.popleft()
            yield frame
            if not missing:
                return
    raise file.error(f"frame {missing[0]} cannot be decoded")
