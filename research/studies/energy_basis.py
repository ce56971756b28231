"""On what do the joules of the reproduction rest?

    python research/studies/energy_basis.py --data DIR [--out research/results/energy]

One round of FedAvg in the paper's setting for each data set and regime; its joules by what they
rest on, as the ledger books them: an assumed cost of each batch, or figures that were published.
"""

import argparse
import csv
from pathlib import Path

from flrce.simulation import runs
from flrce_reproduction import paper, plan
from flrce_reproduction.execute import load_dataset, read_dataset_sizes

RATES = {"speech": 0.05, "femnist": 0.002}  # as in the tables


def measure_shares(dataset: str, regime: str, data: Path) -> dict[str, float]:
    """Basis -> % of a round's joules; the idle waiting of fast clients is one of them."""
    facts = read_dataset_sizes(dataset, data)
    request = plan.ReproductionRequest(
        ("table3",), (dataset,), (regime,), (0,), rates=RATES, device="cpu", workers=1
    )
    cell = request.build_cell(dataset, regime, "fedavg", 0, facts, 1)
    found = []
    result = runs.run(
        cell.experiment, data=load_dataset(dataset, data), watch=lambda done: found.append(done)
    )
    amounts: dict[str, float] = {}
    for client in found[0].clients:
        for name, value in client.spent.other.items():
            amounts[name] = amounts.get(name, 0.0) + value
    return {name: 100 * value / result.summary["joules"] for name, value in amounts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of prepared data sets")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [["data set", "regime", "assumed cost of a batch, %", "published figures, %"]]
    for dataset in paper.PAPER_SETTINGS:
        if not (options.data / dataset).is_dir():
            continue
        for regime in plan.REGIMES:
            shares = measure_shares(dataset, regime, options.data)
            assumed = shares.get("joules_assumed_batches", 0.0)
            modelled = shares.get("joules_modelled", 0.0)
            rows.append(
                [paper.get_dataset_label(dataset), regime, f"{assumed:.1f}", f"{modelled:.1f}"]
            )
            print(*rows[-1], shares, flush=True)
    if options.out:
        with open(options.out / "basis.csv", "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
