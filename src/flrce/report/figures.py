"""The paper's figures as svg and pdf, from the same groups as the page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flrce.errors import BadInput, format_install_command
from flrce.report.tables import RunGroup, choose_units, compute_mean_band, get_primary_metric
from flrce.storage import metric_format as words

COLOURS = ("#0068a8", "#cf5a00", "#00805c", "#b04a86", "#97700a", "#6b4fb3", "#5b6770", "#a3302a")
LINE_STYLES = ("-", "--", ":", "-.")
MATPLOTLIB_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "flrce",
    "pdf.fonttype": 42,
    "figure.constrained_layout.use": True,
}
#: file name -> (figure, y label, unit)
BAR_FIGURES = {
    "energy": ("joules", "energy, {}", "joules"),
    "bandwidth": ("bytes", "traffic, {}", "bytes"),
    "computation-efficiency": ("computation_efficiency", "accuracy per kJ", ""),
    "communication-efficiency": ("communication_efficiency", "accuracy per GB", ""),
}


def draw_figures(groups: Sequence[RunGroup], folder: Path) -> list[Path]:
    """Every figure, as svg and pdf; returns what was written."""
    try:
        import matplotlib
    except ImportError as why:
        raise BadInput(f"--figures needs matplotlib; {format_install_command('report')}") from why
    matplotlib.use("Agg")
    from matplotlib import pyplot, rc_context

    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with rc_context(MATPLOTLIB_STYLE):
        for name, paint in _list_figure_drawers(groups).items():
            figure, axes = pyplot.subplots(figsize=(4.2, 2.9))
            paint(axes)
            for kind in ("svg", "pdf"):
                path = folder / f"{name}.{kind}"
                when = (
                    {"Date": None} if kind == "svg" else {"CreationDate": None}
                )  # same data, same bytes
                figure.savefig(path, metadata=when)
                written.append(path)
            pyplot.close(figure)
    return written


def _list_figure_drawers(groups: Sequence[RunGroup]) -> dict[str, Any]:
    judged = get_primary_metric(groups)
    plans: dict[str, Any] = {judged: lambda axes: _draw_curves(axes, groups, judged)}
    for name, (figure, _, _) in BAR_FIGURES.items():
        if any(
            group.get_values(figure) for group in groups
        ):  # what is gained per joule is known of accuracy alone
            plans[name] = lambda axes, name=name: _draw_bars(axes, groups, name)
    if any(run.relations for group in groups for run in group.runs):
        plans["conflicts"] = lambda axes: _draw_conflicts(axes, groups)
    return plans


def _line_style(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % 8], "linestyle": LINE_STYLES[i // 8 % 4]}


def _escape_dollars(label: str) -> str:
    """Not mathematics, whatever dollars a label holds."""
    return label.replace("$", r"\$")


def _draw_curves(axes: Any, groups: Sequence[RunGroup], judged: str) -> None:
    """The headline metric over the rounds; shares in percent, and their bands within 0 and 100."""
    per, ends = words.metric_unit(judged), (0, 1) if judged in words.SHARES else (None, None)
    for i, group in enumerate(groups):
        x, mean, half = compute_mean_band(group, "rounds")
        axes.plot(
            x, mean / per, label=_escape_dollars(group.label), linewidth=1.4, **_line_style(i)
        )
        if half is not None:
            low, high = (mean - half).clip(*ends) / per, (mean + half).clip(*ends) / per
            axes.fill_between(x, low, high, alpha=0.12, color=COLOURS[i % 8])
    axes.set(
        xlabel="round",
        ylabel="accuracy, %" if judged == "accuracy" else words.format_metric_heading(judged),
    )
    axes.legend()


def _draw_bars(axes: Any, groups: Sequence[RunGroup], name: str) -> None:
    figure, label, unit = BAR_FIGURES[name]
    per, called = choose_units(groups)[unit]
    found = [group.compute_interval(figure).divide_by(per) for group in groups]
    positions = range(len(groups))
    axes.bar(
        positions,
        [f.mean or 0 for f in found],
        color=[COLOURS[i % 8] for i in positions],
        width=0.62,
    )
    for i, f in enumerate(found):
        if f.half is not None and f.mean is not None:
            axes.errorbar(
                i, f.mean, [[min(f.half, f.mean)], [f.half]], color="black", capsize=3, linewidth=1
            )
    axes.set_xticks(
        positions,
        [_escape_dollars(group.label) for group in groups],
        rotation=25,
        ha="right",
        rotation_mode="anchor",
    )
    axes.set(ylabel=label.format(called))
    axes.grid(axis="x", visible=False)


def _draw_conflicts(axes: Any, groups: Sequence[RunGroup]) -> None:
    """Exploit rounds of every seed that kept a relationship map, the thresholds, and where runs
    stopped.
    """
    for i, group in enumerate(groups):
        points = [
            (h.t, run.count_conflicts(h))
            for run in group.runs
            if run.relations
            for h in run.committed_rounds
            if h.exploit
        ]
        if not points:
            continue
        axes.scatter(
            *zip(*points, strict=True),
            s=9,
            color=COLOURS[i % 8],
            alpha=0.6,
            label=_escape_dollars(group.label),
        )
        for psi in {run.psi for run in group.runs} - {None}:
            axes.axhline(psi, color=COLOURS[i % 8], linewidth=1, linestyle="--")
        for run in group.runs:
            if run.rounds[-1].stop and run.committed_rounds:
                axes.scatter(
                    run.committed_rounds[-1].t,
                    run.committed_rounds[-1].conflicts,
                    s=48,
                    facecolors="none",
                    edgecolors=COLOURS[i % 8],
                )
    axes.set(xlabel="round", ylabel="conflicting peers")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
