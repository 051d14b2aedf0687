"""Figures of a result: one picture a case with all routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("Agg")

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

Found = dict[str, Any]

_COLOURS: Final = {
    "serial": "#b2182b",
    "serial4": "#ef8a62",
    "direct": "#e6a817",
    "matched": "#5ab4ac",
    "scheduled": "#998ec3",
    "relay": "#2166ac",
    "relay-all": "#67a9cf",
}
_DPI: Final = 90
_MOST_RAILS: Final = 8


def draw(result: Found, path: Path) -> None:
    routes: dict[str, Found] = result["routes"]
    lossless = result["fabric"] == "lossless"
    figure = plt.figure(figsize=(max(11.0, 2.6 * len(routes)), 10.5), layout="constrained")
    grid = figure.add_gridspec(3, 1, height_ratios=(1.0, 1.2, 1.3 if lossless else 0.8))
    bars = grid[0].subgridspec(1, len(_panels(routes, lossless=lossless)))
    for at, (title, values, text) in enumerate(_panels(routes, lossless=lossless)):
        _bars(figure.add_subplot(bars[at]), title, values, text)
    _distributions(figure, grid[1], routes)
    paced = any("paced" in found for found in routes.values())
    longest_s = max(len(series) * found["series_s"] for found in routes.values() for series in found["series_received"])
    kinds = [("series_received", "decode NIC receives,\nshare of line rate", "viridis")]
    if lossless:
        kinds.append(("series_paused", "prefill NIC paused,\nshare of time", "magma_r"))
    rows = grid[2].subgridspec(len(kinds), len(routes))
    for row, (key, text, colours) in enumerate(kinds):
        cells = [figure.add_subplot(rows[row, at]) for at in range(len(routes))]
        images = [_heat(axes, found[key], found, colours) for axes, found in zip(cells, routes.values(), strict=True)]
        cells[0].set_ylabel("rail (busy)" if paced else "rail", fontsize=9)
        bar = figure.colorbar(images[-1], ax=cells, pad=0.01, aspect=10)
        bar.set_label(text, fontsize=8)
        bar.ax.tick_params(labelsize=7)
        for axes, route in zip(cells, routes, strict=True):
            axes.set_title(route if row == 0 else "", fontsize=10, color=_COLOURS[route], fontweight="bold")
            axes.set_xlabel("s" if row + 1 == len(kinds) else "", fontsize=8)
            axes.set_xlim(0, longest_s)  # so that routes can be compared
    some = next(iter(routes.values()))
    figure.suptitle(
        f"{result['case']}, {result['fabric']} fabric: {result['text']}\nNICs of {result['mbit_per_second']:g} Mbit/s,"
        f" {result['congestion']}, {some['gigabytes']:.2f} GB in {some['transfers']} transfers, {result['date'][:10]}",
        fontsize=11,
    )
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)


def _panels(routes: dict[str, Found], *, lossless: bool) -> list[tuple[str, dict[str, float], str]]:
    def of(key: str, scale: float = 1.0, part: str = "") -> dict[str, float]:
        return {route: (found[part] if part else found)[key] * scale for route, found in routes.items()}

    some = next(iter(routes.values()))
    busy = " (busy)" if "paced" in some else ""
    panels = [("share of line rate" + busy, of("share_of_line_rate"), ".3f")]
    if "victim_kept" in some:
        panels += [
            ("victim keeps, of its rate", of("victim_kept"), ".2f"),
            ("victim: p99, ms", of("victim_p99_ms"), ".0f"),
        ]
    if "chunk_p99_ms" in some:
        panels += [
            ("last layer to arrival: mean, ms", of("chunk_mean_ms"), ".0f"),
            ("last layer to arrival: p99, ms", of("chunk_p99_ms"), ".0f"),
        ]
    panels.append(("p99 of a transfer, ms" + busy, of("p99_ms"), ".0f"))
    if "paced" in some:
        panels.append(("p99 of a transfer, ms (paced)", of("p99_ms", part="paced"), ".0f"))
    if lossless:
        panels.append(("pauses of all links, s" + busy, of("pause_ms", 1e-3), ".2f"))
    else:
        panels.append(("frames dropped" + busy, of("switch_drops"), ".0f"))
        panels.append(("segments sent again" + busy, of("retransmits"), ".0f"))
    return panels


def _bars(axes: Axes, title: str, values: dict[str, float], text: str) -> None:
    shown = axes.barh(list(values), list(values.values()), color=[_COLOURS[route] for route in values])
    axes.bar_label(shown, [f"{value:{text}}" for value in values.values()], fontsize=8, padding=2)
    axes.set_title(title, fontsize=9)
    axes.invert_yaxis()
    axes.tick_params(labelsize=8)
    most = max(values.values())
    axes.set_xlim(0, 1.25 * (most or 1.0))
    if not most:
        axes.set_xticks([0])
    axes.spines[["top", "right"]].set_visible(False)


def _distributions(figure: Figure, place: Any, routes: dict[str, Found]) -> None:  # noqa: ANN401
    some = next(iter(routes.values()))
    kinds = [("a transfer", "", "quantiles_ms")]
    if "paced" in some:
        kinds = [("busy: a transfer", "", "quantiles_ms"), ("paced: a transfer", "paced", "quantiles_ms")]
    if "victim_quantiles_ms" in some:
        kinds.append(("the victim: a transfer during the incast", "", "victim_quantiles_ms"))
    if "chunk_quantiles_ms" in some:
        kinds.append(("a chunk: from its last layer to its arrival", "", "chunk_quantiles_ms"))
    cells = place.subgridspec(1, len(kinds))
    for at, (title, part, key) in enumerate(kinds):
        axes = figure.add_subplot(cells[at])
        for route, found in routes.items():
            values = (found[part] if part else found)[key]
            axes.plot(
                values,
                np.linspace(0, 100, len(values)),
                color=_COLOURS[route],
                label=route,
                linewidth=3.6 if route == "relay" else 1.4,
                zorder=2.0 if route == "relay" else 2.5,  # below, and wide: where another route does as well, both show
                linestyle="--" if route in ("matched", "relay-all") else "-",
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(f"{title}, ms (log scale)", fontsize=9)
        axes.set_ylabel("% that arrived within" if at == 0 else "", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8, loc="best")


def _heat(axes: Axes, series: list[list[float]], found: Found, colours: str) -> AxesImage:
    """A row a rail, time to the right; white after the last byte."""
    shown = series[:_MOST_RAILS]
    longest = max((len(values) for values in shown), default=0)
    cells = np.array([[*values, *[np.nan] * (longest - len(values))] for values in shown])
    extent = (0.0, longest * found["series_s"], len(shown) - 0.5, -0.5)
    image = axes.imshow(cells, cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest", extent=extent)
    axes.set_yticks(range(len(shown)))
    axes.tick_params(labelsize=7)
    return image
