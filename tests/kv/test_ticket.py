"""Tickets: what routers carry from a prefill worker to a consumer, and what is refused of it."""

import json

import pytest
import torch

from apbv import StorageError
from apbv.kv.ticket import Ticket, digest_of_positions, digest_of_tokens

from offered import a_ticket


@pytest.mark.parametrize("path", [None, "/kv/clip"])
def test_a_ticket_comes_back_from_json_as_it_was(path):
    ticket = a_ticket(path=path)
    params = json.loads(json.dumps(ticket.to_params()))
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert Ticket.from_params(params) == ticket
    assert ticket.num_bytes == 2 * 2 * 3 * 12 * 8 * 2


@pytest.mark.parametrize("params", [None, {}, [], "apbv", {"do_remote_prefill": True}, {"apbv": None}])
def test_params_of_others_have_no_ticket(params):
    assert Ticket.from_params(params) is None


def test_no_two_transfers_are_alike_and_the_secret_is_not_shown():
    one, other = a_ticket(), a_ticket()
    assert one.transfer != other.transfer and one.token != other.token
    assert one.token not in repr(one) and one.transfer in repr(one)


MALFORMED = [("version", 2), ("transfer", "abc"), ("token", "Z" * 64), ("path", ""), ("num_tokens", 0)]
MALFORMED += [("tokens_sha256", 7), ("position_rule", None), ("dtype", "int64"), ("num_layers", True)]
MALFORMED += [("exact", "yes"), ("more", 1), ("sources", []), ("sources", ["a"]), ("sources", [["a", 0]])]
MALFORMED += [("sources", value) for value in ([["a", 65536]], [["", 1]], [["a", True]], [["a", 1]] * 1025)]


@pytest.mark.parametrize(("name", "value"), MALFORMED, ids=lambda value: str(value)[:20])
def test_a_malformed_ticket_is_refused_by_the_name_of_what_is_wrong(name, value):
    params = a_ticket().to_params()
    params["apbv"][name] = value
    with pytest.raises(StorageError, match=name):
        Ticket.from_params(params)


def test_a_ticket_without_a_field_is_refused():
    params = a_ticket().to_params()
    del params["apbv"]["dtype"]
    for record, message in ((params["apbv"], "dtype"), ([], "not an object")):
        with pytest.raises(StorageError, match=message):
            Ticket.from_params({**params, "apbv": record})


def test_digests_are_of_little_endian_int64_wherever_the_numbers_lie():
    numbers = torch.arange(24).view(2, 12)
    assert digest_of_tokens(numbers[1].int()) == digest_of_tokens(list(range(12, 24)))
    assert digest_of_positions(numbers.t().contiguous().t()) == digest_of_positions(numbers)
    assert digest_of_tokens([1]) == "7c9fa136d4413fa6173637e883b6998d32e1d675f88cddff9dcbcf331820f4b8"
