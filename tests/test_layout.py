"""The token split against its definition: integers only, nothing recomputed with the code under
test."""

import math
from dataclasses import asdict, dataclass
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from apbv.layout import (
    LayoutError,
    intersect,
    plan_layout,
    shared_out_layout,
    single_host_layout,
    star_layout,
)


@dataclass(frozen=True)
class Request:
    """What ``plan_layout`` is asked, with the lengths that the paper prescribes for it."""

    num_hosts: int
    num_tokens: int
    context_start: int
    query_start: int
    anchor_len: int | None = None
    passing_len: int | None = None
    passing_budget: float | None = None
    zigzag: bool = True

    def plan(self):
        return plan_layout(**asdict(self))

    @property
    def num_blocks(self) -> int:
        return 2 * self.num_hosts if self.zigzag else self.num_hosts

    @property
    def anchor_stop(self) -> int:
        """l_a: 1/64 of the input, at least 128 and at most a quarter; the prefix always belongs to
        it."""
        length = self.anchor_len
        if length is None:
            length = max(128, math.ceil(Fraction(self.num_tokens, 64)))
            length = min(length, math.floor(Fraction(self.num_tokens, 4)))
        return 0 if length == 0 else max(self.context_start, length)

    @property
    def expected_passing_len(self) -> int:
        """l_p: 1/128 of the input for 2H blocks, 1/64 for H; at least 256.

        Or each block's part of a budget.
        """
        if self.passing_len is not None:
            return self.passing_len
        if self.passing_budget is not None:
            all_passed = Fraction(self.passing_budget) * self.num_tokens
            return math.ceil(all_passed / self.num_blocks)
        return max(256, math.ceil(Fraction(self.num_tokens, 128 if self.zigzag else 64)))

    @property
    def fits(self) -> bool:
        return self.query_start - self.anchor_stop >= self.num_blocks

    def host_of_block(self, block: int) -> int:
        """Hosts 0 .. H-1 take the first H blocks upwards and the other H downwards."""
        return (*range(self.num_hosts), *reversed(range(self.num_hosts)))[block]


@st.composite
def requests(draw, max_tokens=20_000):
    num_tokens = draw(st.one_of(st.integers(1, 60), st.integers(1, max_tokens)))
    query_len = draw(st.one_of(st.integers(1, min(num_tokens, 20)), st.integers(1, num_tokens)))
    query_start = num_tokens - query_len
    context_start = draw(
        st.one_of(st.integers(0, min(query_start, 20)), st.integers(0, query_start))
    )
    lengths = st.integers(0, max(query_start - 1, 0))
    passing_len = draw(
        st.one_of(st.none(), st.just(0), st.integers(0, 40), st.integers(0, num_tokens))
    )
    return Request(
        num_hosts=draw(st.integers(1, 9)),
        num_tokens=num_tokens,
        context_start=context_start,
        query_start=query_start,
        anchor_len=draw(
            st.one_of(st.none(), st.just(0), st.integers(0, 9).filter(query_start.__gt__), lengths)
        )
        if query_start
        else None,
        passing_len=passing_len,
        # Exact as floats.
        passing_budget=draw(st.none() | st.sampled_from([2**-10, 0.125, 0.5, 1]))
        if passing_len is None
        else None,
        zigzag=draw(st.booleans()),
    )


def tokens(spans) -> list[int]:
    return [token for span in spans for token in span]


@given(requests())
@example(Request(num_hosts=4, num_tokens=512, context_start=3, query_start=500))
@example(Request(num_hosts=1, num_tokens=1, context_start=0, query_start=0))
@example(Request(num_hosts=3, num_tokens=20, context_start=0, query_start=0, anchor_len=64))
@example(Request(num_hosts=2, num_tokens=32769, context_start=3, query_start=32000))
@example(Request(num_hosts=2, num_tokens=99, context_start=30, query_start=95, anchor_len=1))
def test_anchor_blocks_and_query_partition_the_prompt(request):
    layout = request.plan()
    hosts = range(request.num_hosts)
    assert layout.num_tokens == request.num_tokens and layout.is_split == request.fits
    assert tokens([layout.anchor, *layout.blocks, layout.query]) == list(range(request.num_tokens))
    slices = list(map(layout.anchor_slice, hosts))
    passed = list(map(layout.num_passed, range(len(layout.blocks))))
    assert tokens(slices) == list(layout.anchor)
    assert max(map(len, slices)) - min(map(len, slices)) <= 1
    assert passed == [min(request.expected_passing_len, len(block)) for block in layout.blocks]
    assert layout.max_passed == max(passed, default=0)
    if not request.fits:
        assert layout == single_host_layout(request.num_hosts, request.num_tokens)
    else:
        assert layout.passing_len == request.expected_passing_len
        assert layout.anchor == range(0, request.anchor_stop)
        assert tokens(layout.blocks) == list(range(request.anchor_stop, request.query_start))
        lengths = [len(block) for block in layout.blocks]
        assert len(lengths) == request.num_blocks and min(lengths) >= 1
        assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


@given(requests(max_tokens=400))
def test_every_token_is_kept_by_the_host_of_its_block(request):
    layout = request.plan()
    owners = [0] * request.num_tokens
    if request.fits:
        each, longer = divmod(request.anchor_stop, request.num_hosts)
        owners = [h for h in range(request.num_hosts) for _ in range(each + (h < longer))]
        for block, span in enumerate(layout.blocks):
            owners += [request.host_of_block(block)] * len(span)
        owners += [0] * (request.num_tokens - request.query_start)
    for host in range(request.num_hosts):
        kept = tokens(layout.cache_spans(host))
        assert kept == [token for token, owner in enumerate(owners) if owner == host]


@given(requests())
def test_local_spans_are_what_a_host_computes_in_token_order(request):
    layout = request.plan()
    if request.fits:
        upper = [
            (2 * request.num_hosts - 1 - host,) * request.zigzag
            for host in range(request.num_hosts)
        ]
        assert layout.zigzag == request.zigzag
        assert [layout.virtual_hosts(h) for h in range(request.num_hosts)] == [
            (h, *v) for h, v in enumerate(upper)
        ]
    for host in range(request.num_hosts):
        spans = layout.local_spans(host)
        kept = layout.cache_spans(host)
        local = tokens(spans)
        assert local == sorted(set(local))
        assert [local[row] for row in tokens(layout.cache_rows(host))] == tokens(kept)
        if not request.fits:
            assert local == (list(range(request.num_tokens)) if host == 0 else [])
            continue
        own = [span for v, span in enumerate(layout.blocks) if request.host_of_block(v) == host]
        assert spans == (layout.anchor, *own, layout.query)


@given(st.integers(1, 9), st.integers(1, 5000), st.booleans())
def test_sharing_out_gives_every_token_to_one_host(num_hosts, num_tokens, zigzag):
    layout = shared_out_layout(num_hosts, num_tokens, zigzag)
    everything = list(range(num_tokens))
    assert layout.num_tokens == num_tokens
    assert layout.is_split == (num_tokens >= num_hosts * (2 if zigzag else 1))
    for spans_of in (layout.local_spans, layout.cache_spans):
        assert (
            sorted(token for host in range(num_hosts) for token in tokens(spans_of(host)))
            == everything
        )
    assert any(num_tokens - 1 in span for span in layout.cache_spans(layout.last_token_host))
    lengths = [len(block) for block in layout.blocks]
    assert not lengths or max(lengths) - min(lengths) <= 1


@given(st.integers(1, 9), st.integers(1, 5000), st.integers(1, 40))
def test_star_takes_the_first_of_equal_blocks_as_everybodys_anchor(
    num_hosts, query_start, query_len
):
    num_tokens = query_start + query_len
    layout = star_layout(num_hosts, num_tokens, query_start)
    kept = [tokens(layout.cache_spans(host)) for host in range(num_hosts)]
    assert sorted(token for of_host in kept for token in of_host) == list(range(num_tokens))
    assert layout.is_split == (query_start >= num_hosts)
    if layout.is_split:
        blocks = [layout.anchor, *layout.blocks[1:]]
        assert tokens(blocks) == list(range(query_start)) and len(blocks) == num_hosts
        assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
        assert layout.last_token_host is None and layout.max_passed == 0
        for host in range(num_hosts):
            own = [] if host == 0 else list(blocks[host])
            assert tokens(layout.local_spans(host)) == [*layout.anchor, *own, *layout.query]


def test_impossible_requests_name_their_numbers():
    with pytest.raises(LayoutError, match="after the context of 50 tokens is empty"):
        star_layout(2, 50, 50)
    for request, numbers in (
        (Request(2, 100, 5, 90, anchor_len=90), (90, 100)),  # the anchor is the context
        (Request(2, 100, 5, 70, anchor_len=4096), (4096, 70, 100)),  # and beyond the prompt
        (Request(2, 100, 5, 100), (5, 100)),  # no query
        (Request(2, 100, 51, 50), (51, 50)),  # a context behind the query
        (Request(2, 0, 0, 0), (0,)),  # no tokens
    ):
        with pytest.raises(LayoutError) as raised:
            request.plan()
        assert all(str(number) in str(raised.value) for number in numbers)


runs = st.builds(
    lambda start, length: range(start, start + length), st.integers(0, 40), st.integers(0, 40)
)


@pytest.mark.parametrize(
    ("weights", "num_layers", "expected"),
    [
        ((2, 1, 0.5, 0.5), 8, [200, 200, 100, 100, 50, 50, 50, 50]),
        ((5, 1, 1, 1), 6, [250, 250, 50, 50, 50, 50]),
        ((1, 0), 3, [200, 200, 0]),
        ((1, 2, 3, 2), 2, [50, 150]),  # more runs than layers
        ((7,), 2, [100, 100]),
    ],
)
def test_a_schedule_shares_the_passed_pairs_out_over_the_layers(weights, num_layers, expected):
    layout = plan_layout(
        num_hosts=2,
        num_tokens=5000,
        context_start=0,
        query_start=4900,
        anchor_len=0,
        passing_len=100,
        zigzag=True,
        passing_weights=weights,
    )
    layouts = [layout.in_layer(layer, num_layers) for layer in range(num_layers)]
    assert [in_layer.max_passed for in_layer in layouts] == expected
    assert max(expected) <= layout.most_passing.max_passed


@given(runs, runs)
def test_intersect_is_what_two_runs_share(a, b):
    assert list(intersect(a, b)) == sorted(set(a) & set(b)) and intersect(a, b) == intersect(b, a)
