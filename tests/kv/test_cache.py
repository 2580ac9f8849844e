"""The sharded cache in one process: which rows a host keeps, appending, cropping. No data travels
here."""

import pytest
import torch
from transformers import DynamicCache

from apbv.kv.cache import ShardedCache, appending_in_place
from apbv.layout import plan_layout

from apbv_tests.pairs import each_choice

LAYERS = 2
HEADS = 2
DIM = 4


def make_layout(num_hosts, zigzag, anchor_len):
    lengths = {
        "num_tokens": 61,
        "context_start": 2,
        "query_start": 54,
        "anchor_len": anchor_len,
        "passing_len": 2,
    }
    return plan_layout(num_hosts=num_hosts, zigzag=zigzag, **lengths)


# Of one host, an anchor that does not divide evenly, one run per host, and hosts without anchor
# tokens.
LAYOUTS = [make_layout(*spec) for spec in ((1, True, 6), (3, True, 7), (2, False, 0), (8, True, 3))]


def kept_tokens(layout, host, with_query=True):
    """By definition: slice h of the anchor, blocks h and 2H-1-h (or h alone), and on host 0 the
    query."""
    hosts = layout.num_hosts
    anchor = list(layout.anchor)
    sizes = [len(anchor) // hosts + (h < len(anchor) % hosts) for h in range(hosts)]
    kept = [*anchor[sum(sizes[:host]) : sum(sizes[: host + 1])], *layout.blocks[host]]
    if len(layout.blocks) == 2 * hosts:
        kept += layout.blocks[2 * hosts - 1 - host]
    return kept + (list(layout.query) if with_query and host == 0 else [])


def states_of(tokens, layer=0):
    """K and V ``[1, Hkv, T, D]`` that name their token, layer, head and column."""
    tokens = torch.tensor(list(tokens), dtype=torch.float64)
    marks = layer * 0.1 + torch.arange(HEADS)[:, None, None] * 0.01 + torch.arange(DIM) * 0.001
    keys = (tokens[:, None] + marks)[None]
    return keys, -keys


def assert_holds(cache, tokens):
    for index, layer in enumerate(cache.layers):
        torch.testing.assert_close(
            (layer.keys, layer.values), states_of(tokens, index), rtol=0, atol=0
        )


def update(cache, tokens):
    """One forward pass over the tokens; returns what attention got back, per layer."""
    return [cache.update(*states_of(tokens, index), index) for index in range(len(cache.layers))]


def prefilled(layout, host, keep_query=True):
    """A cache after prefill, and the tokens that it should hold."""
    cache = ShardedCache(LAYERS, layout, host, keep_query=keep_query)
    local = [token for span in layout.local_spans(host) for token in span]
    local = [token for token in local if keep_query or token not in layout.query]
    for index, states in enumerate(update(cache, local)):
        torch.testing.assert_close(states, states_of(local, index), rtol=0, atol=0)
    return cache, kept_tokens(layout, host, with_query=keep_query)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prefill_keeps_what_the_host_owns_and_shows_attention_everything(layout):
    everything = []
    for host in range(layout.num_hosts):
        cache, kept = prefilled(layout, host)
        assert_holds(cache, kept)
        assert cache.get_seq_length() == layout.num_tokens
        assert [token for span in cache.owned_spans(host) for token in span] == kept
        for layer in (
            cache.layers
        ):  # no replicated row is kept alive; where the answer comes there is room besides
            rows = layer.keys.untyped_storage().nbytes() // (HEADS * DIM * layer.keys.itemsize)
            assert rows == len(kept) + (256 if host == 0 else 0)
        everything += kept
        cache, _ = prefilled(layout, host, keep_query=False)
        update(cache, layout.query)  # in a pass of its own
        assert_holds(cache, kept)
    assert sorted(everything) == list(range(layout.num_tokens))


@each_choice(layout=LAYOUTS[:3], count=[(5, 2), (5, 0), (300, 100), (5, 9), (0, 6), (0, 7)])
def test_cropped_tokens_make_room_for_others(layout, count):
    (generated, removed) = count
    new = range(1000, 1300)
    for host in range(min(2, layout.num_hosts)):
        cache, kept = prefilled(layout, host)
        update(cache, range(61, 61 + generated))
        kept += range(61, 61 + generated) if host == 0 else []
        too_many = generated + len(layout.query) + 1  # into the context by one
        for count, message in (
            (3, "not 3"),
            (-too_many, "cannot remove"),
            (-1000, "cannot remove"),
        ):
            with pytest.raises(ValueError, match=message):
                cache.crop(count)
        cache.crop(-removed)
        kept = kept[: len(kept) - removed] if host == 0 else kept
        left = 61 + generated - removed
        assert_holds(cache, kept)
        assert cache.get_seq_length() == left
        assert [token for span in cache.owned_spans(host) for token in span] == kept
        # Other tokens than the first time, so that stale rows would show.
        update(cache, new)
        assert_holds(cache, kept + (list(new) if host == 0 else []))
        assert cache.get_seq_length() == left + 300
        # A host also knows what the others hold.
        assert cache.owned_spans(0)[-1].stop == left + 300


def test_a_plain_cache_appends_in_place_and_leaves_alone_what_it_was_given():
    given = [states_of(range(50), layer) for layer in range(LAYERS)]
    cache = appending_in_place(DynamicCache(given))
    places = []
    for token in range(50, 56):
        update(cache, [token])
        places.append([layer.keys.data_ptr() for layer in cache.layers])
    assert places[1:] == places[:-1] and places[0] != [keys.data_ptr() for keys, _ in given]
    cache.crop(-4)
    update(cache, range(90, 93))
    update(cache, range(100, 400))  # as much as makes it move
    assert_holds(cache, [*range(52), 90, 91, 92, *range(100, 400)])
    for layer, (keys, values) in enumerate(given):
        assert torch.equal(keys, states_of(range(50), layer)[0]) and torch.equal(values, -keys)


def test_a_cache_whose_rows_were_replaced_does_not_append_to_the_old_ones():
    cache = appending_in_place(
        DynamicCache([states_of(range(9), layer) for layer in range(LAYERS)])
    )
    update(cache, [9])
    cache.batch_select_indices(torch.tensor([0, 0]))
    for layer in range(LAYERS):
        keys, values = states_of([10], layer)
        cache.update(keys.expand(2, -1, -1, -1), values.expand(2, -1, -1, -1), layer)
        assert torch.equal(
            cache.layers[layer].keys, states_of(range(11), layer)[0].expand(2, -1, -1, -1)
        )
