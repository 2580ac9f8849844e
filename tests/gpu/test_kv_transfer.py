"""KV that lies on a GPU, on its way to a consumer, rehearsed: the right bytes, and streams in the
right order."""

import torch

from apbv import HostGroup
from apbv.kv.offers import Offers

from apbv_tests.offered import fetch, made_up, offer
from apbv_tests.pretend_gpu import rehearsal


def test_kv_on_a_gpu_is_copied_behind_what_computes_it():
    """Each layer is in pinned memory before it is sent, and stays there until it has been."""
    expected = made_up(num_layers=7, num_tokens=300)
    with rehearsal():
        device = torch.device("cuda", 0)
        hosts = HostGroup.single(device)
        layers = [tuple(states.to(device) + 0 for states in layer) for layer in expected]
        with Offers(hosts) as offers:
            found = fetch(offer(offers, layers))
    for states, wanted in zip(found, expected, strict=True):
        assert all(torch.equal(got, each[0]) for got, each in zip(states, wanted, strict=True))
