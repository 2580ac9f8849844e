"""Reading videos with PyAV: timestamps, frame sampling, and decoding of chosen frames only.

Every host probes the file, samples the same frame indices and decodes its own share of them. :func:`probe` reads
the packets (all bytes of the file, almost no decoding) and lists the frames in presentation order;
:func:`read_frames` seeks to the keyframe before each run of wanted frames and stops at the last of them. What it
returns is bit-equal to decoding the whole file and picking the frames.

That takes a container that stores presentation times (mp4/mov, mkv/webm, mpegts, flv) or a file of keyframes
only. In others (avi, mpeg, raw streams...) packet times are missing or guessed, wrongly where there are
B-frames, and some writers of mp4 store decoding times instead. Such files are decoded once to probe them, and
from the start to read frames.

Rotation and mirroring metadata are applied. The sample aspect ratio is ignored: pixels come as stored.
"""

from .info import VideoError, VideoInfo
from .probing import probe
from .reading import read_frames
from .sampling import sample_fps, sample_uniform

__all__ = ["VideoError", "VideoInfo", "probe", "read_frames", "sample_fps", "sample_uniform"]
