"""Benchmarks' plots: ticks where something was measured, and legends beside what they explain."""

import pytest

from support import plots


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (1, "1"), (1040, "1040"), (32768, "32k"), (3 * 2**20, "3M"), (2**20 + 1, "1048577")],
)
def test_counts_are_short_where_nothing_is_left_out(number, text):
    assert plots.short(number) == text


@pytest.mark.parametrize(
    ("values", "labels", "scale"),
    [
        ([131072, 8192, 8192], ["8k", "128k"], "log"),
        ([0, 8, 16], ["0", "8", "16"], "linear"),
        ([64], ["64"], "linear"),
    ],
)
def test_ticks_are_where_something_was_measured(values, labels, scale):
    figure, axes = plots.import_pyplot().subplots()
    axes.plot(values, values)
    plots.mark_values(axes.xaxis, values)
    figure.draw_without_rendering()
    assert [tick.get_text() for tick in axes.get_xticklabels()] == labels
    assert [tick.get_text() for tick in axes.get_xticklabels(minor=True)] == []
    assert axes.get_xscale() == scale
    plots.import_pyplot().close(figure)


@pytest.mark.parametrize("place", ["legend_beside", "legend_above"])
def test_a_legend_hides_nothing_and_is_saved(place, tmp_path):
    figure, axes = plots.import_pyplot().subplots()
    for number in range(16):
        axes.plot([0, 1], [number, number], label=f"way {number}, 8 hosts")
    getattr(plots, place)(axes)
    figure.draw_without_rendering()
    legend, inside = axes.get_legend().get_window_extent(), axes.get_window_extent()
    assert legend.x0 >= inside.x1 or legend.y0 >= inside.y1
    plots.save(figure, tmp_path / "figure.png")
    from PIL import Image

    width, height = Image.open(tmp_path / "figure.png").size
    scale = 150 / figure.dpi
    assert width > (legend.x1 - min(legend.x0, inside.x0)) * scale - 2
    assert height > (legend.y1 - min(legend.y0, inside.y0)) * scale - 2


def test_a_picture_that_cannot_be_written_is_one_clear_error(tmp_path):
    figure, _ = plots.import_pyplot().subplots()
    with pytest.raises(ValueError, match=r"cannot write .*figure\.png: "):
        plots.save(figure, tmp_path / "nowhere" / "figure.png")
