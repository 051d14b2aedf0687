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
_DPI: Final = 110
_MOST_RAILS: Final = 8


def draw(result: Found, path: Path) -> None:
    routes: dict[str, Found] = result["routes"]
    lossless = result["fabric"] == "lossless"
    columns = max(3, len(routes))
    figure = plt.figure(figsize=(3.1 * columns, 11.5), layout="constrained")
    grid = figure.add_gridspec(3, 1, height_ratios=(1.0, 1.15, 1.5))
    bars = grid[0].subgridspec(1, len(_panels(routes, lossless=lossless)))
    for at, (title, values, text) in enumerate(_panels(routes, lossless=lossless)):
        _bars(figure.add_subplot(bars[at]), title, values, text)
    _distributions(figure, grid[1], routes)
    lines = grid[2].subgridspec(2 if lossless else 1, len(routes))
    for at, (route, found) in enumerate(routes.items()):
        _rails(figure.add_subplot(lines[0, at]), route, found["series_received"], found["series_s"], first=at == 0)
        if lossless:
            _pauses(figure.add_subplot(lines[1, at]), found, first=at == 0)
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
    panels = [("share of line rate", of("share_of_line_rate"), ".3f")]
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
    panels.append(("p99 of a transfer, ms" + (" (busy)" if "paced" in some else ""), of("p99_ms"), ".0f"))
    if "paced" in some:
        panels.append(("p99 of a transfer, ms (paced)", of("p99_ms", part="paced"), ".0f"))
    if lossless:
        panels.append(("pauses, s (all links together)", of("pause_ms", 1e-3), ".2f"))
    else:
        panels += [("frames dropped", of("switch_drops"), ".0f"), ("segments sent again", of("retransmits"), ".0f")]
    return panels


def _bars(axes: Axes, title: str, values: dict[str, float], text: str) -> None:
    shown = axes.barh(list(values), list(values.values()), color=[_COLOURS[route] for route in values])
    axes.bar_label(shown, [f"{value:{text}}" for value in values.values()], fontsize=8, padding=2)
    axes.set_title(title, fontsize=9)
    axes.invert_yaxis()
    axes.tick_params(labelsize=8)
    axes.set_xlim(0, 1.25 * max(1e-9, *values.values()))
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
                linewidth=2.4 if route == "relay" else 1.4,
                linestyle="--" if route in ("matched", "relay-all") else "-",
            )
        axes.set_xscale("log")
        axes.set_xlabel(f"{title}, ms (log scale)", fontsize=9)
        axes.set_ylabel("% that arrived within" if at == 0 else "", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8, loc="upper left")


def _rails(axes: Axes, route: str, series: list[list[float]], step_s: float, *, first: bool) -> None:
    """Received by the decode node."""
    for rail, values in enumerate(series[:_MOST_RAILS]):
        if max(values, default=0.0) > 0.05:
            axes.plot(np.arange(len(values)) * step_s, values, linewidth=1, label=f"rail {rail}", color=f"C{rail}")
    _time_axes(axes, "share received by rail" if first else "", 1.08)
    axes.set_title(route, fontsize=10, color=_COLOURS[route], fontweight="bold")
    if first:
        axes.legend(fontsize=7, loc="lower right")


def _pauses(axes: Axes, found: Found, *, first: bool) -> None:
    for rail, values in enumerate(found["series_paused"][:_MOST_RAILS]):
        axes.plot(np.arange(len(values)) * found["series_s"], values, linewidth=1, color=f"C{rail}")
    _time_axes(axes, "share of time a\nsending NIC is paused" if first else "", 1.0)
    axes.set_xlabel("s", fontsize=8)


def _time_axes(axes: Axes, label: str, top: float) -> None:
    axes.set_ylim(0, top)
    axes.set_ylabel(label, fontsize=9)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
