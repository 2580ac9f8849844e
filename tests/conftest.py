import os

# Before torch or transformers are imported, here and in every child process.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch

# Before triton is: without a GPU its kernels run in Python, so that what they compute is tested all the same.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as property_settings

from patience import TEST_TIMEOUT
from pool import HostPool

# How long an example takes says how busy the machine is, nothing of what is tested.
property_settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
property_settings.load_profile("untimed")

# pytest-timeout reads it when it is configured; an option of the command line goes before.
os.environ.setdefault("PYTEST_TIMEOUT", str(TEST_TIMEOUT))


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """Host processes for jobs over real gloo groups; see ``pool.HostPool``."""
    pool = HostPool(str(tmp_path_factory.mktemp("pool") / "rendezvous"))
    yield pool
    pool.close()
