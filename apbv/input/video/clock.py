"""Times of frames: what a file says, put in order, and what it leaves out."""

from collections.abc import Sequence

import numpy as np

# No codec displays a frame further from its place in the file than this, in frames.
_MAX_REORDER = 32
# Nor further, in frames, from where its decoding time would put it.
_MOST_DELAYED = 16
# Seconds by which a frame's time may differ from that of a constant rate.
_TOLERANCE = 0.05


def is_nearly_sorted(times: np.ndarray) -> bool:
    """Return whether times are out of order by no more than the reordering of frames."""
    order = np.argsort(times, kind="stable")
    return bool(np.abs(order - np.arange(len(order))).max(initial=0) <= _MAX_REORDER)


def length_of_last(times: np.ndarray, lengths: np.ndarray) -> float:
    """Return how long the last frame is shown, if the container knows how long frames are, as the
    others show.

    Args:
        times: ascending.
        lengths: what it says, in the same units.

    Returns:
        0 if it does not know.
    """
    off = np.abs(np.diff(times) - lengths[:-1])
    return float(lengths[-1]) if len(off) and np.median(off) <= 1 else 0.0


def is_constant(seconds: np.ndarray, fps: float) -> bool:
    """Return whether frames lie at their number / ``fps``, to 50 ms."""
    return bool(np.abs(seconds - np.arange(len(seconds)) / fps).max(initial=0) <= _TOLERANCE)


def settle(times: Sequence[int | None]) -> tuple[np.ndarray, np.ndarray, int] | None:
    """Put the times of decoded frames in order, and estimate those that are missing.

    Where they begin anew, as in two recordings joined, the second follows one interval after the
    first. A single time that does not fit between its neighbours counts as missing.

    Args:
        times: in the order in which the decoder gives the frames out.

    Returns:
        float64, ascending from 0; ``[S, 2]``, of every recording the first time in the file, and
        here; and how many were estimated, between their neighbours. None if no time is known.
    """
    found = np.array([np.nan if time is None else time for time in times])
    places = np.flatnonzero(~np.isnan(found))
    if not len(places):
        return None
    known = found[places]
    in_order = np.sort(known)
    most = _MOST_DELAYED * np.median(np.diff(in_order)) if len(known) > 1 else 0
    if (np.maximum.accumulate(known) - known).max() <= most:
        known = in_order  # these were decoding times
    else:
        before = known[:-2]
        here = known[1:-1]
        after = known[2:]
        fits = np.ones(len(known), bool)
        # No recording of one frame.
        fits[0] = len(known) < 3 or known[0] <= known[1] or known[1] > known[2]
        fits[1:-1] = ~((before <= after) & ((here < before) | (here > after)))
        places = places[fits]
        known = known[fits]
    steps = np.diff(known) / np.diff(places)
    step = float(np.median(steps[steps >= 0])) if (steps >= 0).any() else 1.0
    anew = np.flatnonzero(steps < 0) + 1
    first = known[0] - places[0] * step
    starts = np.concatenate([[first], known[anew]])
    shifts = np.zeros(len(known))
    shifts[anew] = known[anew - 1] + step * (places[anew] - places[anew - 1]) - known[anew]
    settled = known + np.cumsum(shifts) - first
    everything = np.arange(len(found))
    full = np.interp(everything, places, settled)
    full[: places[0]] = everything[: places[0]] * step
    full[places[-1] :] = settled[-1] + (everything[places[-1] :] - places[-1]) * step
    clock = np.stack([starts, np.concatenate([[0.0], settled[anew]])], axis=1)
    return full, clock, len(found) - len(places)
