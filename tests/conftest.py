"""Fixtures and options of all tests.

Nothing here imports torch, or what does, before a session collects: with pytest-xdist the process
that only hands out the tests reads this file, too, before it starts the others.
"""

from apbv_tests.session import ON_GPU  # before torch

# isort: split
import gc
import os
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from apbv_tests.patience import TEST_TIMEOUT

# pytest-timeout reads it when it is configured; an option of the command line goes before.
os.environ.setdefault("PYTEST_TIMEOUT", str(TEST_TIMEOUT))


def pytest_configure(config: pytest.Config) -> None:
    """Let pytest-xdist hand out files in their order here, in which the scripts, that take longest,
    come first.

    By itself it begins with the files of many tests, and ends with one worker in a long file of
    few.
    """
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_sessionstart(session: pytest.Session) -> None:
    """Prepare what every test module finds, in the processes that run tests."""
    if getattr(session.config.option, "numprocesses", None) and not hasattr(
        session.config, "workerinput"
    ):
        return
    import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)

    # isort: split
    from hypothesis import HealthCheck, settings

    # How long an example takes says how busy the machine is, nothing of what is tested.
    settings.register_profile(
        "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("untimed")
    if not ON_GPU and find_spec("triton"):
        from apbv_tests.interpreting import keep_replaced

        keep_replaced()


def pytest_collection_finish() -> None:
    """Let no collection of garbage walk through torch, transformers and the tests themselves any
    more."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let it be freed as the process ends, which some extension modules complain about
    otherwise."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what needs the other kind of session."""
    other, reason = (
        ("cpu", "for sessions without a GPU") if ON_GPU else ("gpu", "for sessions on a real GPU")
    )
    for item in items:
        if item.get_closest_marker(other):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """Host processes for jobs over real gloo groups; see ``pool.HostPool``."""
    from apbv_tests.pool import HostPool

    pool = HostPool(str(tmp_path_factory.mktemp("pool") / "rendezvous"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def on_hosts(pool):
    """``pool.run``, with simulated hosts in place of more real ones than a small machine runs well.

    ``test_simulate`` shows that they give the results of real ones.
    """

    from apbv.testing.simulated import simulate

    def run(num_hosts: int, job: Callable, *args) -> list:
        return (pool.run if num_hosts <= 4 else simulate)(num_hosts, job, *args)

    return run


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """A saved tiny model and processor of each family, made when first asked for."""
    from apbv_tests import families

    folder = tmp_path_factory.mktemp("checkpoints")

    def get(family: str) -> Path:
        path = folder / family
        if not path.exists():
            families.save_checkpoint(family, path)
        return path

    return get


@pytest.fixture(scope="session")
def clip(tmp_path_factory) -> Path:
    """A real H.264 file with B-frames and several keyframes."""
    from apbv_tests import families
    from apbv_tests.engines import write_clip

    path = tmp_path_factory.mktemp("clips") / "clip.mp4"
    write_clip(path, families.synthetic_video(30, 64, 96))
    return path


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Say in two lines what was left out, and why."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ").split(":")[0]
        for report in terminalreporter.stats.get("skipped", ())
    )
    if reasons:
        told = (f"{reason} ({count})" for reason, count in sorted(reasons.items()))
        terminalreporter.write_line(f"Skipped: {'; '.join(told)}.")
    if "not thorough" in config.option.markexpr:
        terminalreporter.write_line(
            "Left out: slower tests, which pytest -n 2 --dist loadfile -m thorough runs."
        )
