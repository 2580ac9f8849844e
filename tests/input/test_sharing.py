"""How the work on a prompt's items is shared out among hosts, and cut into chunks."""

from itertools import chain, combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from apbv import HostGroup
from apbv.input.prompts.visual import VisualInput, VisualItem, share_out, split_by_cost
from apbv.layout import split_evenly

COSTS = st.lists(st.integers(1, 50), min_size=1, max_size=9)


@given(COSTS, st.integers(1, 4))
def test_no_other_cut_has_a_cheaper_costliest_part(costs, parts):
    shares = split_by_cost(costs, parts)
    assert list(chain.from_iterable(shares)) == list(range(len(costs)))

    def costliest(ranges) -> int:
        return max(sum(costs[part.start : part.stop]) for part in ranges)

    others = []
    for cut in combinations(list(range(len(costs) + 1)) * 2, parts - 1):
        bounds = [0, *sorted(cut), len(costs)]
        others.append([range(start, stop) for start, stop in pairwise(bounds)])
    assert len(shares) == parts
    assert costliest(shares) == min(map(costliest, others))


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
    costs = []
    for item in items:
        costs += [item.patch_bytes] * item.num_patches
    patches = split_by_cost(costs, num_hosts)
    visual = VisualInput(single.items, patches, 0, single.row_starts)
    runs = []  # the run that each patch is in
    for number, item in enumerate(items):
        run = "images" if item.kind == "image" else number
        runs += [run] * item.num_patches
    for number, share in enumerate(patches):
        chunks = visual.chunks(number, num_bytes)
        assert list(chain.from_iterable(chunks)) == list(share)
        assert all(chunks)
        for chunk in chunks:
            cost = sum(costs[chunk.start : chunk.stop])
            assert len(set(runs[chunk.start : chunk.stop])) == 1
            assert len(chunk) == 1 or cost <= num_bytes


def test_frames_of_many_items_are_counted_once():
    """Videos that end with a row of no frame, and images between."""
    items = [VisualItem("video", 7, 3, num_ending_rows=1), VisualItem("image", 4)] * 50
    visual = share_out(items, HostGroup.single("cpu"))
    starts = []
    for first in range(0, 550, 11):
        starts += [first, first + 2, first + 4, first + 7]
    assert visual.row_starts == (*starts, 550)
    lengths = [len(frame) for frame in visual.frames]
    assert lengths == [2, 2, 2, 4] * 50
    assert [visual.ending_rows_of(range(patch, patch + 1)) for patch in range(8)] == [
        0,
        0,
        1,
        0,
    ] * 2
