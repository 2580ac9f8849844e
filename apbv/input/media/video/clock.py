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
    """Return how long the last frame is shown, if the container knows; else 0.

    It knows if the lengths that it gives for the other frames agree with their times.

    Args:
        times: ascending.
        lengths: of the frames, as the container gives them, in the same units.
    """
    differences = np.abs(np.diff(times) - lengths[:-1])
    if len(differences) and np.median(differences) <= 1:
        return float(lengths[-1])
    return 0.0


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
    # The known times, and the numbers of their frames.
    all_times = np.array([np.nan if time is None else time for time in times])
    places = np.flatnonzero(~np.isnan(all_times))
    if not len(places):
        return None
    known = all_times[places]

    # Sort them where they are decoding times; else leave out single ones that do not fit.
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

    # The usual step from one frame to the next.
    steps = np.diff(known) / np.diff(places)
    step = 1.0
    if (steps >= 0).any():
        step = float(np.median(steps[steps >= 0]))

    # Join recordings: each begins one step after the one before.
    anew = np.flatnonzero(steps < 0) + 1
    first = known[0] - places[0] * step
    shifts = np.zeros(len(known))
    shifts[anew] = known[anew - 1] + step * (places[anew] - places[anew - 1]) - known[anew]
    settled = known + np.cumsum(shifts) - first
    starts_in_file = np.concatenate([[first], known[anew]])
    starts_here = np.concatenate([[0.0], settled[anew]])
    clock = np.stack([starts_in_file, starts_here], axis=1)

    # Estimate the times that are missing: between the known ones, before the first, after the last.
    numbers = np.arange(len(all_times))
    full = np.interp(numbers, places, settled)
    first_place = places[0]
    last_place = places[-1]
    full[:first_place] = numbers[:first_place] * step
    full[last_place:] = settled[-1] + (numbers[last_place:] - last_place) * step
    return full, clock, len(all_times) - len(places)
