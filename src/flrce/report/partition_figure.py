"""Who holds what, drawn with matplotlib (extra `report`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flrce.errors import BadInput, format_install_command


def import_pyplot() -> Any:
    """matplotlib.pyplot without a display, or how to get it."""
    try:
        import matplotlib
    except ImportError as why:
        raise BadInput(f"figures need matplotlib; run: {format_install_command('report')}") from why
    matplotlib.use("agg")
    matplotlib.rcParams |= {
        "svg.hashsalt": "flrce",
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.dpi": 100,
    }
    import matplotlib.pyplot as plt

    return plt


def draw_partition(described: Mapping[str, Any], title: str, path: Path) -> None:
    """Who holds what: clients x labels as shares of each client's samples, and the sizes beside
    it.
    """
    import numpy as np

    plt = import_pyplot()
    labels = np.array(described["labels"], float)  # (M, classes)
    share = labels / np.maximum(labels.sum(1, keepdims=True), 1)
    figure, (left, right) = plt.subplots(
        1,
        2,
        figsize=(9, min(2 + 0.09 * len(share), 14)),
        width_ratios=(3, 1),
        sharey=True,
        layout="constrained",
    )
    shown = left.imshow(share, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
    left.set(xlabel="label", ylabel="client (row)")
    left.yaxis.get_major_locator().set_params(integer=True)
    if share.shape[1] <= 40:
        left.set_xticks(
            range(share.shape[1]),
            [str(c)[:12] for c in described["classes"]],
            rotation=60,
            fontsize=7,
        )
    figure.colorbar(shown, ax=left, label="share of the client's samples")
    right.barh(range(len(share)), described["train"], color="#0072B2", label="train")
    right.barh(
        range(len(share)),
        described["held"],
        left=described["train"],
        color="#E69F00",
        label="held out",
    )
    right.set(xlabel="samples")
    right.legend(fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=10)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(
            path, format="svg", metadata={"Title": title, "Date": None}, bbox_inches="tight"
        )
    except OSError as why:
        raise BadInput(
            f"--svg {path} cannot be written: {why.strerror}; name another file"
        ) from why
    finally:
        plt.close(figure)
