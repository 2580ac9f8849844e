import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def no_real_gpu():
    """Where there is a GPU, Triton compiles its kernels for it, and none has to be pretended."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, which needs no stand-in")
