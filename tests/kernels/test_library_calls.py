"""How often a library is called for a block, with what, and that the results are right all the
same."""

import math

import pytest
import torch

from apbv.kernels import library_attention as libraries
from apbv.kernels import reference, segmented_attention, torch_attention

from apbv_tests.attention_cases import assert_attention, make_inputs
from apbv_tests.wrong_attention import by_definition

pytestmark = pytest.mark.cpu  # on which libraries are played

CPU = torch.device("cpu")


def top_left(q, k, v, scale, causal):
    """A causal mask under which the first query sees the first key only, however many there are."""
    if not causal:
        return by_definition(q, k, v, scale, False)
    rows = min(q.shape[2], k.shape[2])
    return by_definition(q[:, :, :rows], k[:, :, :rows], v[:, :, :rows], scale, True)


@pytest.fixture
def library(monkeypatch):
    """A library on this CPU; returns the calls of it: (queries, keys, causal)."""
    calls = []

    def install(attend):
        def recorded(q, k, v, scale, causal):
            call = (q.shape[2], k.shape[2], causal)
            assert k.shape[2] > 0 and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
            if call not in libraries.FEWER_QUERIES:  # on which it is tried
                calls.append(call)
            return attend(q, k, v, scale, causal)

        monkeypatch.setitem(libraries.ATTEND, "flash_attn", recorded)
        libraries.is_bottom_right.cache_clear()
        return calls

    monkeypatch.setattr(libraries, "usable", lambda *problem: None)
    monkeypatch.setattr("apbv.kernels.operators.choose_attention", lambda *problem: "flash_attn")
    yield install
    libraries.is_bottom_right.cache_clear()


def attend(queries, keys, *, group=7, alone=0):
    """Also into a given output."""
    q, segments = make_inputs(queries, keys, dim=16, group=group, dtype=torch.float32)
    segments[-1] = tuple(states.mT.contiguous().mT for states in segments[-1])
    out = torch.full((q.shape[0], queries, *q.shape[1::2]), math.nan).transpose(1, 2)
    result = segmented_attention(q, segments, 0.1, True, num_anchor_queries=alone, out=out)
    wide = q.double(), [(k.double(), v.double()) for k, v in segments]
    exact = reference.segmented_attention(*wide, 0.1, True, num_anchor_queries=alone)
    assert result[0].data_ptr() == out.data_ptr()
    assert_attention(result, exact, torch.float32)


@pytest.mark.parametrize(
    ("function", "keys", "group", "alone", "expected"),
    [
        # A block, and what it sees of others.
        (by_definition, [20, 9, 9, 111], 7, 0, [(111, 149, True)]),
        # A merge costs less than copying as many KV heads as there are query heads.
        (by_definition, [20, 9, 111], 1, 0, [(111, 29, False), (111, 111, True)]),
        # Nor are keys copied that many queries would not: those of all hosts, for one's question.
        (by_definition, [1000, 111], 7, 0, [(111, 1000, False), (111, 111, True)]),
        (
            by_definition,
            [9, 9, 131],
            7,
            20,
            [(111, 18, False), (131, 131, True)],
        ),  # the anchor with its block
        (by_definition, [200, 0], 7, 0, [(111, 200, False)]),
        # A mask from the top left is used for squares only.
        (top_left, [20, 9, 9, 111], 7, 0, [(111, 38, False), (111, 111, True)]),
        (top_left, [300], 7, 0, [(111, 189, False), (111, 111, True)]),
    ],
)
def test_calls_of_a_library(library, function, keys, group, alone, expected):
    calls = library(function)
    attend(111 + alone, keys, group=group, alone=alone)
    assert calls == expected


def test_what_is_in_one_piece_or_has_few_queries_is_not_copied(monkeypatch, library):
    """A single token, or a window of drafted ones, reads K and V once for all heads of a group."""
    calls = library(by_definition)
    # Copying would call it.
    monkeypatch.setattr(torch_attention, "joined", None)
    attend(111, [300])
    assert calls == [(111, 300, True)]
    calls.clear()
    attend(torch_attention.FEW_QUERIES, [300])
    assert len(calls) == 2 and not calls[0][2]
