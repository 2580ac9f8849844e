"""Videos that are probed once: for several questions, and by one host for all."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from apbv import HostGroup
from apbv.input.media.files import KnownVideos, probe_once
from apbv.input.media.video import VideoError, probe
from apbv.stats import StageTimer

from apbv_tests.video_files import encode


def test_a_file_is_probed_again_only_when_it_was_written(tmp_path):
    videos = KnownVideos()
    path = tmp_path / "a.mp4"
    encode(path, n=20)
    first = videos.probe(path)
    assert videos.probe(str(path)).pts is first.pts
    (tmp_path / "link.mp4").symlink_to(path)
    linked = videos.probe(tmp_path / "link.mp4")
    assert linked.pts is first.pts and linked.path == str(tmp_path / "link.mp4")
    encode(path, n=30)
    assert videos.probe(path).num_frames == 30


def test_only_the_latest_files_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr("apbv.input.media.files.MOST_KNOWN", 2)
    videos = KnownVideos()
    paths = [tmp_path / f"{name}.mp4" for name in "abc"]
    encode(paths[0], n=5)
    for path in paths[1:]:
        shutil.copy(paths[0], path)
    first = [videos.probe(path) for path in paths[:2]]
    videos.probe(paths[0])
    videos.probe(paths[2])  # the second, which was not used again, makes room
    assert videos.probe(paths[0]).pts is first[0].pts
    assert videos.probe(paths[1]).pts is not first[1].pts


def share_job(hosts: HostGroup, paths: list[str | None]):
    """What each host learns, or how it fails."""
    try:
        paths = [paths[hosts.rank]] if paths[hosts.rank] else []
        infos = probe_once(KnownVideos(), paths, hosts, StageTimer(hosts))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return [(info.path, info.to_bytes()) for info in infos]


def test_the_leader_tells_the_others_what_it_found(pool, tmp_path):
    """The other host's file cannot be probed, so nobody tried."""
    good = Path(encode(tmp_path / "good.mp4", n=20))
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(os.urandom(good.stat().st_size))
    expected = probe(good)
    [(path, data)], [(other, told)] = pool.run(2, share_job, [str(good), str(bad)])
    assert (path, other) == (str(good), str(bad))
    with pytest.raises(VideoError):
        probe(bad)
    for found in (data, told):
        found = type(expected).from_bytes(found)
        assert np.array_equal(found.timestamps, expected.timestamps)
        assert np.array_equal(found.pts, expected.pts)
    assert pool.run(2, share_job, [None, None]) == [[], []]


@pytest.mark.parametrize(
    ("case", "leader", "other"),
    [
        (
            "missing",
            "VideoError: .*gone.mp4: no such file",
            "VideoError: .*gone.mp4: no such file",
        ),
        (
            "another",
            "VideoError: .*bytes long here",
            "VideoError: .*bytes long here",
        ),
        ("broken", "VideoError: .*cannot be read", "VideoError: .*cannot be read"),
    ],
)
def test_hosts_that_disagree_all_fail(pool, tmp_path, case, leader, other):
    good = encode(tmp_path / "a.mp4", n=10)
    longer = encode(tmp_path / "b.mp4", n=20)
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video" * 99)
    paths = {
        "missing": [good, str(tmp_path / "gone.mp4")],
        "another": [good, longer],
        "broken": [str(broken), good],
    }[case]
    results = pool.run(2, share_job, paths)
    for found, expected in zip(results, (leader, other), strict=True):
        assert re.match(expected, found), found
