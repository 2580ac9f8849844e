"""Pretrained models, in folders that variables of the environment name."""

import os

import pytest


def folder(name: str) -> str:
    """The folder that a variable names; skips the test where it is not set."""
    if name not in os.environ:
        pytest.skip(
            "no pretrained models: APBV_PRETRAINED and APBV_PRETRAINED_DRAFT name their folders"
        )
    return os.environ[name]
