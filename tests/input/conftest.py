"""Fixtures of the tests of what is read."""

import pytest

from apbv.input.media.video import probe

from apbv_tests.video_files import CLIPS, decode_all


@pytest.fixture(scope="session")
def encoded(tmp_path_factory):
    """Each of ``CLIPS`` by its name, made when first asked for: its path, what the probe says, and
    all frames."""
    made = {}

    def get(name):
        if name not in made:
            path = CLIPS[name](tmp_path_factory.mktemp("clip"))
            made[name] = path, probe(path), decode_all(path)
        return made[name]

    return get
