"""Plots a training's history."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, never a window

import matplotlib.pyplot as plt


def plot_curves(history: list[dict[str, float]], path: Path) -> None:
    """Write a PNG with the share of correct answer tokens by task, and the heads' loss, over the minutes.

    Args:
        history: rows with "minutes", "learning rate", "step", losses named "dense..." and the tasks seen so far.
        path: file to write.
    """
    figure, (accuracy, loss) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    named = dict.fromkeys(name for row in history for name in row)
    for name in named:
        rows = [row for row in history if name in row]
        minutes = [row["minutes"] for row in rows]
        if name.startswith("dense"):
            loss.semilogy(minutes, [row[name] for row in rows], label=name)
        elif name not in ("minutes", "step", "learning rate"):
            accuracy.plot(minutes, [row[name] for row in rows], label=name)
    accuracy.set_ylabel("right answer tokens, running mean")
    loss.set_ylabel("loss of the visual tokens' labels")
    loss.set_xlabel("minutes")
    for axes in (accuracy, loss):
        if axes.lines:
            axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    plt.close(figure)
