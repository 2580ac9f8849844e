"""Video reading: timestamps, frame sampling, and decoding of selected frames only.

Every host knows the file's frames, samples the same frame indices and decodes its own share of
them. :func:`probe` reads the packets (all bytes of the file, almost no decoding) and lists the
frames in presentation order; what it finds may be sent to other hosts. :func:`iter_frames` seeks to
the keyframe before each run of wanted frames, stops at the last of them, and on the way leaves out
frames that no other refers to. What it gives out, chunk by chunk, is bit-equal to decoding the
whole file and picking the frames; :func:`read_frames` returns it in one piece.

That takes a container that stores presentation times (mp4/mov, mkv/webm, mpegts, flv) or a file of
keyframes only. In others (avi, mpeg, raw streams...) packet times are missing or guessed, wrongly
where there are B-frames, and some writers of mp4 store decoding times instead. Such files are
decoded once to probe them, and from the start to read frames.

All this is done with PyAV.

Rotation and mirroring metadata are applied. The sample aspect ratio is ignored: pixels come as
stored.
"""

from .file import VideoError, VideoInfo, probe
from .frames import frames_within, iter_frames, length_of, read_frames, sample_fps, sample_uniform

__all__ = [
    "VideoError",
    "VideoInfo",
    "frames_within",
    "iter_frames",
    "length_of",
    "probe",
    "read_frames",
    "sample_fps",
    "sample_uniform",
]
