"""The environment of a test session, and of all its child processes; imported before torch and
transformers are.

All tests run alike with and without a GPU, which they do not see: a GPU is pretended, and Triton's
kernels run in Python. What a real GPU computes is tested in sessions of their own, which
tests/gpu/test_real_gpu.py starts.
"""

import os

ON_GPU = os.environ.get("APBV_TEST_ON_GPU") == "1"

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if not ON_GPU:
    os.environ.setdefault("APBV_TEST_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TRITON_INTERPRET", "1")
