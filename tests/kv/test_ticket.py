"""Tickets: what routers carry from a prefill worker to a consumer, and what is refused of it."""

import json

import pytest
import torch

from apbv import StorageError
from apbv.kv.facts import digest_of_positions, digest_of_tokens
from apbv.kv.ticket import Ticket

from apbv_tests.offered import a_ticket


def test_a_ticket_comes_back_from_json_as_it_was_and_other_params_have_none():
    ticket = a_ticket()
    other = a_ticket()
    params = json.loads(json.dumps(ticket.to_params()))
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert Ticket.from_params(params) == ticket
    assert ticket.num_bytes == 2 * 2 * 3 * 12 * 8 * 2
    assert other.transfer != ticket.transfer and other.token != ticket.token
    assert ticket.token not in repr(ticket)
    for params in (None, {}, [], {"do_remote_prefill": True}, {"apbv": None}):
        assert Ticket.from_params(params) is None


MALFORMED = [("version", 2), ("transfer", "abc"), ("token", "Z" * 64), ("num_tokens", 0)]
MALFORMED += [
    ("tokens_sha256", 7),
    ("position_rule", None),
    ("dtype", "int64"),
    ("num_layers", True),
]
MALFORMED += [
    ("exact", "yes"),
    ("more", 1),
    ("sources", []),
    ("sources", ["a"]),
    ("sources", [["a", 0]]),
]
MALFORMED += [
    ("sources", value) for value in ([["a", 65536]], [["", 1]], [["a", True]], [["a", 1]] * 1025)
]


def test_a_malformed_ticket_is_refused_by_the_name_of_what_is_wrong():
    for name, value in MALFORMED:
        params = a_ticket().to_params()
        params["apbv"][name] = value
        with pytest.raises(StorageError, match=name):
            Ticket.from_params(params)
    with pytest.raises(StorageError, match="not an object"):
        Ticket.from_params({**params, "apbv": []})


def test_digests_are_of_little_endian_int64_wherever_the_numbers_lie():
    numbers = torch.arange(24).view(2, 12)
    assert digest_of_tokens(numbers[1].int()) == digest_of_tokens(list(range(12, 24)))
    assert digest_of_positions(numbers.t().contiguous().t()) == digest_of_positions(numbers)
    assert (
        digest_of_tokens([1]) == "7c9fa136d4413fa6173637e883b6998d32e1d675f88cddff9dcbcf331820f4b8"
    )
