"""Imports what the tests' processes need, once for all that are forked; see ``pool.start``."""

from apbv_tests import session  # noqa: F401  (before torch)

# isort: split
import gc
import os
from contextlib import suppress
from importlib import import_module

import pytest  # noqa: F401
from PIL import Image

import apbv.serve.server  # noqa: F401

from apbv_tests import (
    prompts,
    rehearsals,  # noqa: F401
)
from support import bench, exams  # noqa: F401

# transformers imports the files of a model and of its processor when they are first used.
for _family in (*prompts.ALL_FAMILIES, "got_ocr2"):
    _name = _family.removesuffix("_thinker")
    for _kind in ("modeling", "processing", "image_processing", "video_processing"):
        with suppress(ImportError):
            import_module(f"transformers.models.{_name}.{_kind}_{_name}")

# The folders of this and of other modules are for this process alone.
_, _, os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].split(os.pathsep, 2)

with suppress(ImportError):
    import_module("apbv.kernels.triton_attention")
Image.init()

# Collections of garbage would walk through all of it in every process, and copy its pages.
gc.collect()
gc.freeze()
