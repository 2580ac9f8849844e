"""Fixtures of the tests of host groups."""

import pytest
import torch.distributed as dist


@pytest.fixture
def agent_store():
    """The key-value store that torchrun's agent holds for its processes."""
    return dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
