"""A model and its checkpoint have one digest: a consumer of KV reads the files alone."""

import pytest
import torch

from apbv.hosts import HostGroup
from apbv.kv.export.prefilled import identify
from apbv.model.digest import rows_of_checkpoint, weights_digest
from apbv.model.loading.load import load_model
from apbv.model.parts import inspect_model

from apbv_tests import families
from apbv_tests.prompts import ATTENDING


@pytest.mark.parametrize("family", ATTENDING)
def test_the_digest_of_a_checkpoint_is_that_of_its_model(family, checkpoints):
    path = checkpoints(family)
    model, _ = load_model(path, "float32", HostGroup.single("cpu"))
    parts = inspect_model(model)
    rows = rows_of_checkpoint(path, parts.num_layers, torch.float32)
    assert weights_digest(rows) == identify(parts).weights_sha256
    other = families.build_model(family, seed=1)
    assert weights_digest(rows) != inspect_model(other).weights_digest()
