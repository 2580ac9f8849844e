"""Fixtures of the tests of host groups."""

import pytest
import torch.distributed as dist

from fresh_hosts import Store


@pytest.fixture(params=["file", "memory of host 0"])
def store(request, tmp_path):
    return Store(tmp_path, in_host_0=request.param != "file")


@pytest.fixture
def agent_store():
    """The key-value store that torchrun's agent holds for its processes."""
    return dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
