"""The token split against its definition: integers only, nothing recomputed with the code under test."""

import math
from dataclasses import asdict, dataclass
from fractions import Fraction

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from apbv.layout import (
    LayoutError,
    intersect,
    offsets_within,
    plan_layout,
    shared_out_layout,
    single_host_layout,
    split_evenly,
    star_layout,
)

from pairs import each_choice


@dataclass(frozen=True)
class Request:
    """What ``plan_layout`` is asked, with the lengths that the paper prescribes for it."""

    num_hosts: int
    num_tokens: int
    context_start: int
    query_start: int
    anchor_len: int | None = None
    passing_len: int | None = None
    zigzag: bool = True

    def plan(self):
        return plan_layout(**asdict(self))

    @property
    def num_blocks(self) -> int:
        return 2 * self.num_hosts if self.zigzag else self.num_hosts

    @property
    def anchor_stop(self) -> int:
        """l_a: 1/64 of the input, at least 128 and at most a quarter; the prefix always belongs to it."""
        length = self.anchor_len
        if length is None:
            length = max(128, math.ceil(Fraction(self.num_tokens, 64)))
            length = min(length, math.floor(Fraction(self.num_tokens, 4)))
        return 0 if length == 0 else max(self.context_start, length)

    @property
    def expected_passing_len(self) -> int:
        """l_p: 1/128 of the input for 2H blocks, 1/64 for H; at least 128."""
        if self.passing_len is not None:
            return self.passing_len
        return max(128, math.ceil(Fraction(self.num_tokens, 128 if self.zigzag else 64)))

    @property
    def fits(self) -> bool:
        return self.query_start - self.anchor_stop >= self.num_blocks

    def host_of_block(self, block: int) -> int:
        """Hosts 0 .. H-1 take the first H blocks upwards and the other H downwards."""
        return (*range(self.num_hosts), *reversed(range(self.num_hosts)))[block]


@st.composite
def requests(draw, max_tokens=20_000, must_fit=False):
    num_tokens = draw(st.one_of(st.integers(1, 60), st.integers(1, max_tokens)))
    query_len = draw(st.one_of(st.integers(1, min(num_tokens, 20)), st.integers(1, num_tokens)))
    query_start = num_tokens - query_len
    context_start = draw(st.one_of(st.integers(0, min(query_start, 20)), st.integers(0, query_start)))
    lengths = st.integers(0, max(query_start - 1, 0))
    request = Request(
        num_hosts=draw(st.integers(1, 9)),
        num_tokens=num_tokens,
        context_start=context_start,
        query_start=query_start,
        anchor_len=draw(st.one_of(st.none(), st.just(0), st.integers(0, 9).filter(query_start.__gt__), lengths))
        if query_start
        else None,
        passing_len=draw(st.one_of(st.none(), st.just(0), st.integers(0, 40), st.integers(0, num_tokens))),
        zigzag=draw(st.booleans()),
    )
    assume(request.fits or not must_fit)
    return request


def tokens(spans) -> list[int]:
    return [token for span in spans for token in span]


@given(requests())
@example(Request(num_hosts=4, num_tokens=512, context_start=3, query_start=500))
@example(Request(num_hosts=1, num_tokens=1, context_start=0, query_start=0))
def test_anchor_blocks_and_query_partition_the_prompt(request):
    layout, hosts = request.plan(), range(request.num_hosts)
    assert layout.num_tokens == request.num_tokens and layout.is_split == request.fits
    assert tokens([layout.anchor, *layout.blocks, layout.query]) == list(range(request.num_tokens))
    slices, passed = list(map(layout.anchor_slice, hosts)), list(map(layout.num_passed, range(len(layout.blocks))))
    assert tokens(slices) == list(layout.anchor)
    assert max(map(len, slices)) - min(map(len, slices)) <= 1
    assert passed == [min(request.expected_passing_len, len(block)) for block in layout.blocks]
    assert layout.max_passed == max(passed, default=0)
    if request.fits:
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
        longer = request.anchor_stop % request.num_hosts
        owners = [
            h
            for h in range(request.num_hosts)
            for _ in range(request.anchor_stop // request.num_hosts + (h < longer))
        ]
        for block, span in enumerate(layout.blocks):
            owners += [request.host_of_block(block)] * len(span)
        owners += [0] * (request.num_tokens - request.query_start)
    assert [layout.owner(token) for token in range(request.num_tokens)] == owners
    for host in range(request.num_hosts):
        kept = tokens(layout.cache_spans(host))
        assert kept == [token for token, owner in enumerate(owners) if owner == host]
    for stranger in (-1, request.num_tokens):
        with pytest.raises(IndexError, match=rf"{stranger} .* {request.num_tokens}"):
            layout.owner(stranger)


@given(requests(must_fit=True))
def test_virtual_hosts_pair_up_and_invert(request):
    layout, hosts = request.plan(), request.num_hosts
    assert layout.zigzag == request.zigzag
    pairs = [layout.virtual_hosts(host) for host in range(hosts)]
    assert pairs == [(h, 2 * hosts - 1 - h) if request.zigzag else (h,) for h in range(hosts)]
    assert sorted(v for pair in pairs for v in pair) == list(range(request.num_blocks))
    assert all(layout.host_of_block(v) == host for host, pair in enumerate(pairs) for v in pair)


@given(requests())
def test_local_spans_are_what_a_host_computes_in_token_order(request):
    layout = request.plan()
    for host in range(request.num_hosts):
        spans, kept = layout.local_spans(host), layout.cache_spans(host)
        local = tokens(spans)
        assert local == sorted(set(local))
        assert [local[row] for row in tokens(offsets_within(spans, kept))] == tokens(kept)
        if not request.fits:
            assert local == (list(range(request.num_tokens)) if host == 0 else [])
            continue
        own = [span for v, span in enumerate(layout.blocks) if request.host_of_block(v) == host]
        assert spans == (layout.anchor, *own, layout.query)


@pytest.mark.parametrize(
    ("num_tokens", "zigzag", "anchor_len", "passing_len"),
    [
        (200, True, 50, 128),  # a quarter of the prompt
        (512, True, 128, 128),
        (8192, True, 128, 128),
        (8193, True, 129, 128),
        (16384, True, 256, 128),
        (16385, True, 257, 129),
        (16385, False, 257, 257),
        (100_000, True, 1563, 782),
        (100_000, False, 1563, 1563),
    ],
)
def test_default_lengths(num_tokens, zigzag, anchor_len, passing_len):
    layout = Request(2, num_tokens, 3, num_tokens - 10, zigzag=zigzag).plan()
    assert (len(layout.anchor), layout.passing_len) == (anchor_len, passing_len)


@pytest.mark.parametrize(("anchor_len", "anchor_stop"), [(0, 0), (1, 30), (29, 30), (30, 30), (31, 31), (89, 89)])
def test_prefix_is_anchor_unless_the_anchor_is_switched_off(anchor_len, anchor_stop):
    layout = Request(1, 100, context_start=30, query_start=95, anchor_len=anchor_len).plan()
    assert layout.anchor == range(anchor_stop)
    assert tokens(layout.blocks) == list(range(anchor_stop, 95))


@given(st.integers(1, 9), st.integers(1, 5000), st.booleans())
def test_sharing_out_gives_every_token_to_one_host(num_hosts, num_tokens, zigzag):
    layout = shared_out_layout(num_hosts, num_tokens, zigzag)
    everything = list(range(num_tokens))
    assert layout.num_tokens == num_tokens
    assert layout.is_split == (num_tokens >= num_hosts * (2 if zigzag else 1))
    for spans_of in (layout.local_spans, layout.cache_spans):
        assert sorted(token for host in range(num_hosts) for token in tokens(spans_of(host))) == everything
    assert layout.last_token_host == layout.owner(num_tokens - 1)
    lengths = [len(block) for block in layout.blocks]
    assert not lengths or max(lengths) - min(lengths) <= 1


@given(st.integers(1, 9), st.integers(1, 5000), st.integers(1, 40))
def test_star_takes_the_first_of_equal_blocks_as_everybodys_anchor(num_hosts, query_start, query_len):
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


def test_star_needs_a_query():
    with pytest.raises(LayoutError, match="after the context of 50 tokens is empty"):
        star_layout(2, 50, 50)


@each_choice(num_hosts=[1, 2, 5], zigzag=[True, False])
def test_context_too_short_to_cut_runs_on_host_zero(num_hosts, zigzag):
    blocks = num_hosts * (2 if zigzag else 1)
    enough = Request(num_hosts, 4 + blocks + 3, 4, 4 + blocks, anchor_len=2, passing_len=1, zigzag=zigzag)
    layout = enough.plan()
    assert [len(block) for block in layout.blocks] == [1] * blocks
    short = Request(num_hosts, 4 + blocks + 2, 4, 4 + blocks - 1, anchor_len=2, passing_len=1, zigzag=zigzag)
    layout = short.plan()
    assert layout == single_host_layout(num_hosts, short.num_tokens)
    assert not layout.is_split and not layout.zigzag and layout.max_passed == 0
    assert layout.local_spans(0) == layout.cache_spans(0) == (range(short.num_tokens),)
    for host in range(1, num_hosts):
        assert layout.local_spans(host) == layout.cache_spans(host) == layout.virtual_hosts(host) == ()


def test_impossible_requests_name_their_numbers():
    for request, numbers in (
        (Request(2, 100, 5, 90, anchor_len=90), (90, 100)),  # the anchor is the context
        (Request(2, 100, 5, 70, anchor_len=4096), (4096, 70, 100)),  # and beyond the prompt
        (Request(2, 100, 5, 100), (5, 100)),  # no query
        (Request(2, 100, 5, 101), (101, 100)),  # a query beyond the prompt
        (Request(2, 100, 51, 50), (51, 50)),  # a context behind the query
        (Request(2, 100, -1, 50), (-1, 50)),  # before the prompt
        (Request(2, 0, 0, 0), (0,)),  # no tokens
    ):
        with pytest.raises(LayoutError) as raised:
            request.plan()
        assert all(str(number) in str(raised.value) for number in numbers)


def test_prompt_without_context_takes_any_anchor_length():
    assert not Request(3, 20, 0, 0, anchor_len=64).plan().is_split


@given(st.integers(0, 300), st.integers(1, 9), st.integers(0, 50))
def test_frames_go_to_hosts_by_equation_6(num_frames, num_hosts, start):
    shares = split_evenly(range(start, start + num_frames), num_hosts)
    lengths = [num_frames // num_hosts + (host < num_frames % num_hosts) for host in range(num_hosts)]
    assert [len(share) for share in shares] == lengths
    assert tokens(shares) == list(range(start, start + num_frames))


runs = st.builds(lambda start, length: range(start, start + length), st.integers(0, 40), st.integers(0, 40))


@given(runs, runs)
def test_intersect_is_what_two_runs_share(a, b):
    common = intersect(a, b)
    assert list(common) == sorted(set(a) & set(b))
    assert common == intersect(b, a)
    assert common.step == 1 and common.stop >= common.start


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), min_size=1, max_size=6), st.data())
def test_offsets_within_point_at_the_wanted_tokens(gaps_and_lengths, data):
    spans, position = [], 0
    for gap, length in gaps_and_lengths:
        spans.append(range(position + gap, position + gap + length))
        position += gap + length
    wanted = []
    for span in data.draw(st.lists(st.sampled_from(spans), max_size=5)):
        start = data.draw(st.integers(span.start, span.stop))
        wanted.append(range(start, data.draw(st.integers(start, span.stop))))
    concatenation = tokens(spans)
    offsets = offsets_within(spans, wanted)
    assert [[concatenation[i] for i in run] for run in offsets] == [list(run) for run in wanted]
    assert all(run.start >= 0 for run in offsets)
