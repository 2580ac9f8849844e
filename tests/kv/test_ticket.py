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


MALFORMED = {
    "version": 2,
    "transfer": "abc",
    "token": "Z" * 64,
    "sources": [],
    "path": "",
    "num_tokens": 0,
    "tokens_sha256": 7,
    "positions_sha256": None,
    "position_rule": None,
    "model": 1,
    "config_sha256": [],
    "weights_sha256": {},
    "dtype": "int64",
    "num_layers": True,
    "num_kv_heads": 1.5,
    "head_dim": -1,
    "method": 0,
    "exact": "yes",
}


SOURCES = [None, 5, ["a"], [["a"]], [["a", 0]], [["a", 65536]], [["", 1]], [[1, 1]], [["a", True]], [["a", "1"]]]


def without(record: dict, name: str) -> dict:
    return {key: value for key, value in record.items() if key != name}


WRONG = [(name, lambda record, pair={name: value}: record | pair) for name, value in MALFORMED.items()]
WRONG += [("sources", lambda record, value=value: record | {"sources": value}) for value in SOURCES]
WRONG += [("sources", lambda record: record | {"sources": [["a", 1]] * 1025})]
WRONG += [("not an object", lambda record: []), ("more", lambda record: {**record, "more": 1})]
WRONG += [("dtype", lambda record: without(record, "dtype")), ("version", lambda record: {})]


def test_a_malformed_ticket_is_refused_by_the_name_of_what_is_wrong():
    assert len(WRONG) == 33
    for message, change in WRONG:
        params = a_ticket().to_params()
        params["apbv"] = change(json.loads(json.dumps(params["apbv"])))
        with pytest.raises(StorageError, match=message):
            Ticket.from_params(params)


def test_digests_are_of_little_endian_int64_wherever_the_numbers_lie():
    numbers = torch.arange(24).view(2, 12)
    assert digest_of_tokens(numbers[1].int()) == digest_of_tokens(list(range(12, 24)))
    assert digest_of_positions(numbers.t().contiguous().t()) == digest_of_positions(numbers)
    assert digest_of_tokens([1]) == "7c9fa136d4413fa6173637e883b6998d32e1d675f88cddff9dcbcf331820f4b8"
