"""The paper's figures as svg and pdf, from the same groups as the page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flrce.errors import BadInput, installs
from flrce.results.tables import Group, band, metric, units
from flrce.store import headline as words

COLOURS = ("#0068a8", "#cf5a00", "#00805c", "#b04a86", "#97700a", "#6b4fb3", "#5b6770", "#a3302a")
STYLES = ("-", "--", ":", "-.")
STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "legend.frameon": False, "svg.hashsalt": "flrce", "pdf.fonttype": 42, "figure.constrained_layout.use": True,
}  # fmt: skip
#: file name -> (figure, y label, unit)
BARS = {
    "energy": ("joules", "energy, {}", "joules"),
    "bandwidth": ("bytes", "traffic, {}", "bytes"),
    "computation-efficiency": ("computation_efficiency", "accuracy per kJ", ""),
    "communication-efficiency": ("communication_efficiency", "accuracy per GB", ""),
}


def draw(groups: Sequence[Group], folder: Path) -> list[Path]:
    """Every figure, as svg and pdf; returns what was written."""
    try:
        import matplotlib
    except ImportError as why:
        raise BadInput(f"--figures needs matplotlib; {installs('report')}") from why
    matplotlib.use("Agg")
    from matplotlib import pyplot, rc_context

    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with rc_context(STYLE):
        for name, paint in _plans(groups).items():
            figure, axes = pyplot.subplots(figsize=(4.2, 2.9))
            paint(axes)
            for kind in ("svg", "pdf"):
                path = folder / f"{name}.{kind}"
                when = {"Date": None} if kind == "svg" else {"CreationDate": None}  # same data, same bytes
                figure.savefig(path, metadata=when)
                written.append(path)
            pyplot.close(figure)
    return written


def _plans(groups: Sequence[Group]) -> dict[str, Any]:
    judged = metric(groups)
    plans: dict[str, Any] = {judged: lambda axes: _curves(axes, groups, judged)}
    for name, (figure, _, _) in BARS.items():
        if any(group.values(figure) for group in groups):  # what is gained per joule is known of accuracy alone
            plans[name] = lambda axes, name=name: _bars(axes, groups, name)
    if any(run.relations for group in groups for run in group.runs):
        plans["conflicts"] = lambda axes: _conflicts(axes, groups)
    return plans


def _look(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % 8], "linestyle": STYLES[i // 8 % 4]}


def _text(label: str) -> str:
    """Not mathematics, whatever dollars a label holds."""
    return label.replace("$", r"\$")


def _curves(axes: Any, groups: Sequence[Group], judged: str) -> None:
    """The headline metric over the rounds; shares in percent, and their bands within 0 and 100."""
    per, ends = words.unit(judged), (0, 1) if judged in words.SHARES else (None, None)
    for i, group in enumerate(groups):
        x, mean, half = band(group, "rounds")
        axes.plot(x, mean / per, label=_text(group.label), linewidth=1.4, **_look(i))
        if half is not None:
            low, high = (mean - half).clip(*ends) / per, (mean + half).clip(*ends) / per
            axes.fill_between(x, low, high, alpha=0.12, color=COLOURS[i % 8])
    axes.set(xlabel="round", ylabel="accuracy, %" if judged == "accuracy" else words.heading(judged))
    axes.legend()


def _bars(axes: Any, groups: Sequence[Group], name: str) -> None:
    figure, label, unit = BARS[name]
    per, called = units(groups)[unit]
    found = [group.interval(figure).per(per) for group in groups]
    positions = range(len(groups))
    axes.bar(positions, [f.mean or 0 for f in found], color=[COLOURS[i % 8] for i in positions], width=0.62)
    for i, f in enumerate(found):
        if f.half is not None and f.mean is not None:
            axes.errorbar(i, f.mean, [[min(f.half, f.mean)], [f.half]], color="black", capsize=3, linewidth=1)
    axes.set_xticks(
        positions, [_text(group.label) for group in groups], rotation=25, ha="right", rotation_mode="anchor"
    )
    axes.set(ylabel=label.format(called))
    axes.grid(axis="x", visible=False)


def _conflicts(axes: Any, groups: Sequence[Group]) -> None:
    """Exploit rounds of every seed that kept a relationship map, the thresholds, and where runs stopped."""
    for i, group in enumerate(groups):
        points = [(h.t, run.conflicts(h)) for run in group.runs if run.relations for h in run.done if h.exploit]
        if not points:
            continue
        axes.scatter(*zip(*points, strict=True), s=9, color=COLOURS[i % 8], alpha=0.6, label=_text(group.label))
        for psi in {run.psi for run in group.runs} - {None}:
            axes.axhline(psi, color=COLOURS[i % 8], linewidth=1, linestyle="--")
        for run in group.runs:
            if run.rounds[-1].stop and run.done:
                axes.scatter(run.done[-1].t, run.done[-1].conflicts, s=48, facecolors="none", edgecolors=COLOURS[i % 8])
    axes.set(xlabel="round", ylabel="conflicting peers")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
