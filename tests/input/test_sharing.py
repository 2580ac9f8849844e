"""How the work on a prompt's items is shared out among hosts, and cut into chunks."""

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from apbv import HostGroup
from apbv.input.prompts.visual import VisualInput, VisualItem, share_out, split_by_cost
from apbv.layout import split_evenly

COSTS = st.lists(st.integers(1, 50), min_size=1, max_size=9)


@given(COSTS, st.integers(1, 4))
def test_no_other_cut_has_a_cheaper_costliest_part(costs, parts):
    shares = split_by_cost(costs, parts)
    assert [index for share in shares for index in share] == list(range(len(costs)))
    bounds = [sorted(cut) for cut in combinations(list(range(len(costs) + 1)) * 2, parts - 1)]
    least = min(max(sum(costs[a:b]) for a, b in pairwise([0, *cut, len(costs)])) for cut in bounds)
    assert (
        len(shares) == parts
        and max(sum(costs[index] for index in share) for share in shares) == least
    )


@given(st.integers(0, 20), st.integers(1, 8), st.integers(0, 9))
def test_equal_costs_are_shared_evenly(count, parts, cost):
    assert split_by_cost([cost] * count, parts) == tuple(split_evenly(range(count), parts))


BYTES = st.integers(1, 2**27)
ITEMS = st.lists(
    st.one_of(
        st.builds(VisualItem, st.just("image"), st.just(1), patch_bytes=BYTES),
        st.builds(
            VisualItem,
            st.just("video"),
            st.just(40),
            st.integers(1, 40),
            patch_bytes=st.integers(1, 2**27),
        ),
    ),
    min_size=1,
    max_size=6,
)


@given(ITEMS, st.integers(1, 4), st.integers(1, 2**30))
def test_chunks_cover_a_share_and_keep_to_one_run(items, num_hosts, num_bytes):
    """A chunk is of one video or of images side by side, takes no more than it may, and no fewer
    than it can."""
    host = HostGroup.single("cpu")
    single = share_out(items, host)
    costs = [item.patch_bytes for item in items for _ in range(item.num_patches)]
    patches = split_by_cost(costs, num_hosts)
    visual = VisualInput(single.items, patches, 0, single.row_starts)
    kinds = [
        (item.kind, 0 if item.kind == "image" else number) for number, item in enumerate(items)
    ]
    of_patch = [
        kind for item, kind in zip(items, kinds, strict=True) for _ in range(item.num_patches)
    ]
    for number, share in enumerate(patches):
        chunks = visual.chunks(number, num_bytes)
        assert [patch for chunk in chunks for patch in chunk] == list(share) and all(chunks)
        for chunk in chunks:
            cost = sum(costs[chunk.start : chunk.stop])
            assert len({of_patch[patch] for patch in chunk}) == 1
            assert len(chunk) == 1 or cost <= num_bytes


def test_frames_of_many_items_are_counted_once():
    """Videos that end with a row of no frame, and images between."""
    items = [VisualItem("video", 7, 3, num_ending_rows=1), VisualItem("image", 4)] * 50
    visual = share_out(items, HostGroup.single("cpu"))
    starts = [
        start
        for item in range(50)
        for start in (11 * item, 11 * item + 2, 11 * item + 4, 11 * item + 7)
    ]
    assert visual.row_starts == (*starts, 550)
    lengths = [len(frame) for frame in visual.frames]
    assert lengths == [2, 2, 2, 4] * 50
    assert [visual.ending_rows_of(range(patch, patch + 1)) for patch in range(8)] == [
        0,
        0,
        1,
        0,
    ] * 2
