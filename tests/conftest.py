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

from pool import HostPool


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """Host processes for jobs over real gloo groups; see ``pool.HostPool``."""
    pool = HostPool(str(tmp_path_factory.mktemp("pool") / "rendezvous"))
    yield pool
    pool.close()
