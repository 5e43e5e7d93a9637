"""What the figures of the experiments share: colours, a canvas, a band over seeds, a legend below, saving."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lab.report import COLOURS

RED, ORANGE, SKY, BLUE, GREEN, PINK, BLACK = COLOURS
YELLOW = "#F0E442"  # of the same eight, but too light for lines
GREY = "#666666"


def canvas(
    rows: int, columns: int, size: tuple[float, float], font: float = 12, titles: float | str = 13, grid: bool = True,
    **more
):  # fmt: skip
    """A figure and its axes (rows, columns), drawn without a screen."""
    import matplotlib  # here, so that a process that only wants a colour does not wait for it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": font, "axes.titlesize": titles, "axes.grid": grid, "grid.alpha": 0.25})
    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **more)


def band(
    axis, x: Sequence, points: Sequence[Sequence[float]], colour: str, label: str | None = None,
    least: float = -np.inf, most: float = np.inf, shade: float = 0.18, **style
) -> None:  # fmt: skip
    """Points (mean, low, high) over x: a line, and its interval as a band, cut at what the measure can be."""
    mean, *ends = np.array(points).T
    axis.plot(x, mean, color=colour, label=label, **({"linewidth": 2} | style))
    axis.fill_between(x, *np.clip(ends, least, most), color=colour, alpha=shade, linewidth=0)


def legend_below(figure, axis, columns: int) -> None:
    """One legend for the whole figure, of what is named in `axis`."""
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False)


def save(figure, path: Path, dpi: int = 100) -> None:
    """Write a figure and forget it, and the style of its canvas."""
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=dpi)
    plt.close(figure)
    plt.rcdefaults()
