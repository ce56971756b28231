"""Every cell of the reproduction on one GPU machine, in several processes, in order of importance.

    python research/studies/reproduce_device.py step --packed PART --work WORK [--wait 500] [--out DIR]

`step` adds the files of PART to WORK (data sets may come in parts, as large uploads do), converts
each data set once all of its files are there, and starts the scheduler unless it runs already. The
scheduler is a process of its own: it outlives the command and works on what data there is, so that
computing and copying overlap. `--wait` looks on until everything is done or so many seconds have
passed; `--out` then gets what is finished: records-N.jsonl.gz, wide.jsonl.gz and status.json. A run
that is cut off loses only the groups of cells that were under way; the same command goes on.

    python research/studies/reproduce_device.py list      the groups of cells, in their order

The groups: first the tables (seven methods, four data sets, two regimes, seeds 0 to 4), the
motivation, the search for learning rates, then plans/wide.json (the catalogue's other methods in
the paper's setting).

`research/studies/reproduce_device.py merge --from DIR --to research/results` puts the records of a
machine beside the committed ones, in place of older records of the same cells.
"""

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
WIDE_PLAN = HERE / "plans" / "wide.json"
DATASETS = ("speech", "femnist", "cifar10", "cifar100")
SHEETS = 20  # of each CIFAR
RATES = {"speech": 0.05, "femnist": 0.002}  # those that the search by the paper's rule found
SEED_PARTS = ((0, 1), (2, 3, 4))
SEARCH = {
    "femnist": (2e-5, 2e-4, 2e-3, 2e-2),
    "speech": (5e-5, 5e-4, 5e-3, 5e-2),
    "cifar10": (0.01, 0.1, 1.0),
    "cifar100": (0.2, 0.35, 0.5, 1.0),
}
MAX_FILE_BYTES = 15_000_000


@dataclass(frozen=True)
class CellGroup:
    """Cells that one process trains together."""

    name: str
    dataset: str
    kind: str  # table, motivation, rates or wide
    regime: str
    seeds: tuple[int, ...]
    methods: tuple[str, ...] = ()  # of the wide table


def list_groups() -> list[CellGroup]:
    """Every group, the most important first."""
    regimes = ("quantity", "dirichlet")
    groups = [
        CellGroup(f"table-{dataset}-{regime}-{part}", dataset, "table", regime, seeds)
        for part, seeds in enumerate(SEED_PARTS)
        for dataset in DATASETS
        for regime in regimes
    ]
    groups.append(CellGroup("motivation", "cifar10", "motivation", "", (0, 1, 2, 3, 4)))
    groups += [CellGroup(f"rates-{dataset}", dataset, "rates", "", (0,)) for dataset in SEARCH]
    wide = json.loads(WIDE_PLAN.read_text())
    for dataset in wide["datasets"]:
        for number, methods in enumerate(wide["groups"]):
            for regime in regimes:
                name = f"wide-{dataset}-{number}-{regime}"
                seeds = tuple(wide["seeds"])
                groups.append(CellGroup(name, dataset, "wide", regime, seeds, tuple(methods)))
    return groups


def build_cells(group: CellGroup, data: Path, device: str, rounds: int | None):
    """The cells of a group; `rounds` shortens them for a rehearsal."""
    from flrce_reproduction import plan
    from flrce_reproduction.execute import read_dataset_sizes

    targets = {"table": "table3", "motivation": "fig-motivation", "rates": "rates"}
    facts = {group.dataset: read_dataset_sizes(group.dataset, data)}
    request = plan.ReproductionRequest(
        (targets.get(group.kind, "table3"),),
        (group.dataset,),
        (group.regime,) if group.regime else plan.REGIMES,
        group.seeds,
        rates=RATES if group.kind != "rates" else {},
        search=SEARCH[group.dataset] if group.kind == "rates" else (),
        device=device,
        workers=1,
    )
    if group.kind == "wide":
        cells = build_wide_cells(request, group, facts)
    else:
        cells = plan.plan_cells(request, facts)
    if rounds:
        cells = [shorten_cell(cell, rounds) for cell in cells]
    return cells, facts


def build_wide_cells(request, group, facts):
    """Cells of the wide table: the plan's recipes in the paper's setting."""
    from dataclasses import replace

    from flrce.config.experiment import Experiment

    wide, cells = json.loads(WIDE_PLAN.read_text()), []
    for method in group.methods:
        setting = wide["methods"][method]
        for seed in group.seeds:
            base = request.build_cell(
                group.dataset, group.regime, "fedavg", seed, facts[group.dataset]
            )
            tables = base.experiment.model_dump()
            tables["recipe"] = setting["recipe"]
            tables["engine"] |= {"eval_every": wide["eval_every"]}
            tables["train"] |= setting.get("train", {})
            experiment = Experiment.from_tables(tables, f"{method} on {group.dataset}")
            place = base.place.removesuffix("fedavg") + method
            cells.append(replace(base, method=method, experiment=experiment, place=place))
    return cells


def shorten_cell(cell, rounds):
    from dataclasses import replace

    return replace(cell, experiment=cell.experiment.model_copy(update={"rounds": rounds}))


def work(options) -> None:
    """Trains one group and writes its records."""
    from functools import cache

    from flrce_reproduction.execute import load_dataset

    group = next(group for group in list_groups() if group.name == options.group)
    data = options.work / "cache"
    cells, facts = build_cells(group, data, options.device, options.rounds)
    sources = cache(lambda name: load_dataset(name, data, verify=False))
    began = time.monotonic()
    # what cannot train many clients at once, or fails, must not take the others along
    runs, failed = train_cells(cells, sources, options)
    write_group(group, runs, facts, options.work, time.monotonic() - began, failed)
    print(f"{group.name}: {len(runs)} runs in {time.monotonic() - began:.0f} s", flush=True)


def train_cells(cells, sources, options):
    """Runs by cell, and why the others failed; a failing batch is retried method by method."""
    try:
        return train_together(cells, sources, options), {}
    except Exception:
        traceback.print_exc(limit=8, file=sys.stdout)
    runs, failed = [], {}
    for method in dict.fromkeys(cell.method for cell in cells):
        mine = [cell for cell in cells if cell.method == method]
        try:
            runs += train_together(mine, sources, options)
        except Exception as why:
            failed[method] = f"{type(why).__name__}: {why}"
            print(f"{method} failed: {failed[method]}", flush=True)
    return runs, failed


def train_together(cells, sources, options):
    """One run for each cell, all in this process."""
    from flrce.simulation import runs

    begun = time.monotonic()

    def watch(i, done):
        if i == 0 and done.record.t % 20 == 0:
            print(f"  round {done.record.t}, {time.monotonic() - begun:.0f} s", flush=True)

    results = runs.run_in_process(
        [(cell.experiment, None) for cell in cells],
        data=sources,
        watch=watch,
        device=options.device,
        beside=options.processes,
    )
    return [build_run(cell, result) for cell, result in zip(cells, results, strict=True)]


def build_run(cell, result):
    """A finished run as the reproduction keeps it."""
    from flrce_reproduction import records

    summary = result.summary
    return records.PaperRun(
        cell.name,
        cell.experiment.model_dump(mode="json"),
        tuple(records._round_record(record) for record in result.history),
        summary["floats_on_the_wire"],
        summary["parameters"],
        ", ".join(f"{name} {version}" for name, version in summary["versions"].items()),
        summary["hardware"],
    )


def write_group(group, runs, facts, folder, seconds, failed) -> None:
    from flrce_reproduction import records

    aside = folder / "aside" / group.name
    shutil.rmtree(aside, ignore_errors=True)
    records.write_records(runs, aside)
    lines = b"".join(
        gzip.decompress(path.read_bytes()) for path in sorted(aside.glob("*.jsonl.gz"))
    )
    done = folder / "done"
    done.mkdir(exist_ok=True)
    (done / f"{group.name}.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    status = {
        "runs": len(runs),
        "seconds": round(seconds, 1),
        "failed": failed,
        "data": {name: asdict(sizes) for name, sizes in facts.items()},
    }
    (done / f"{group.name}.json").write_text(json.dumps(status))


# staging


def add_files(part: Path, folder: Path) -> None:
    """Moves a part's files into the folder of packed data; FILE.0, FILE.1, ... are joined once
    FILE.last says how many there are.
    """
    packed = folder / "packed"
    for path in sorted(part.rglob("*")):
        if path.is_file():
            target = packed / path.relative_to(part)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    for last in packed.rglob("*.last"):
        whole = last.with_suffix("")
        pieces = [whole.with_name(f"{whole.name}.{i}") for i in range(int(last.read_text()))]
        if all(piece.is_file() for piece in pieces):
            whole.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
            for path in (*pieces, last):
                path.unlink()
    for wheel in packed.glob("*.whl"):
        shutil.unpack_archive(wheel, folder / "site", "zip")
        wheel.unlink()


def is_complete(dataset: str, packed: Path) -> bool:
    if dataset.startswith("cifar"):
        sheets = len(list((packed / dataset).glob("train-*.webp")))
        return sheets == SHEETS and (packed / dataset / "labels.npy").is_file()
    return (packed / f"{dataset}.npz").is_file()


def convert_datasets(folder: Path, code: Path) -> None:
    """Prepared caches of the data sets whose files are complete."""
    for dataset in DATASETS:
        if not (folder / "cache" / dataset / "meta.json").is_file() and is_complete(
            dataset, folder / "packed"
        ):
            call = [sys.executable, str(code / "experiments/adapters/packed.py")]
            call += [str(folder / "packed"), dataset, "--out", str(folder / "cache")]
            subprocess.run(call, check=True, env=build_environment(folder, code))


def build_environment(folder: Path, code: Path) -> dict[str, str]:
    paths = [code / "src", code / "research" / "src", folder / "site"]
    path = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **single}


def copy_code(folder: Path) -> Path:
    """A copy of the code that stays as it is while the scheduler runs."""
    code, root = folder / "code", HERE.parent.parent
    if not code.is_dir():
        for part in ("src", "research/src", "research/studies", "experiments/adapters"):
            shutil.copytree(root / part, code / part, ignore=shutil.ignore_patterns("__pycache__"))
    return code


# scheduling


def schedule(options) -> None:
    """Starts groups whose data are there, the first of the list first, until all are done."""
    folder, code = options.work, Path(__file__).resolve().parent.parent.parent
    logs, running, failed = folder / "logs", {}, set()
    logs.mkdir(exist_ok=True)
    while True:
        for name, process in [*running.items()]:
            if process.poll() is not None:
                del running[name]
                if process.returncode:
                    failed.add(name)
        todo = [
            group
            for group in list_groups()
            if group.name not in {*running, *failed}
            and not (folder / "done" / f"{group.name}.json").is_file()
        ]
        if not todo and not running:
            (folder / "finished").write_text(f"{len(failed)} failed: {sorted(failed)}\n")
            return
        ready = [g for g in todo if (folder / "cache" / g.dataset / "meta.json").is_file()]
        if any(group.kind == "table" for group in todo):  # the wide table waits for the others
            ready = [group for group in ready if group.kind != "wide"]
        for group in ready[: max(0, options.processes - len(running))]:
            call = [sys.executable, __file__, "work", "--group", group.name]
            call += ["--work", str(folder), "--device", options.device]
            call += ["--processes", str(options.processes), "--rounds", str(options.rounds)]
            with open(logs / f"{group.name}.log", "w") as log:
                running[group.name] = subprocess.Popen(
                    call, stdout=log, stderr=log, env=build_environment(folder, code)
                )
        time.sleep(0.5)


def is_alive(path: Path) -> bool:
    """Whether the process whose number the file holds is there."""
    try:
        os.kill(int(path.read_text()), 0)
    except (OSError, ValueError):
        return False
    return True


def step(options) -> None:
    """One call: add data, see that the scheduler runs, wait, collect."""
    began, folder = time.monotonic(), options.work
    folder.mkdir(parents=True, exist_ok=True)
    code = copy_code(folder)
    if options.packed and options.packed.is_dir():
        add_files(options.packed, folder)
    convert_datasets(folder, code)
    if not is_alive(folder / "pid") and not (folder / "finished").is_file():
        call = [sys.executable, str(code / "research/studies/reproduce_device.py"), "schedule"]
        call += ["--work", str(folder), "--device", options.device]
        call += ["--processes", str(options.processes), "--rounds", str(options.rounds)]
        with open(folder / "scheduler.log", "a") as log:
            child = subprocess.Popen(
                call,
                stdout=log,
                stderr=log,
                env=build_environment(folder, code),
                start_new_session=True,
            )
        (folder / "pid").write_text(str(child.pid))
    print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
    while time.monotonic() - began < options.wait and not (folder / "finished").is_file():
        time.sleep(1)
    report(folder)
    if options.out:
        collect(folder, options.out)


def report(folder: Path) -> None:
    """What is done, and the last lines of what is not."""
    groups = list_groups()
    for group in groups:
        done, log = folder / "done" / f"{group.name}.json", folder / "logs" / f"{group.name}.log"
        if done.is_file():
            print(f"done   {group.name} {done.read_text()}")
        elif log.is_file():
            print(f"so far {group.name}: {' | '.join(log.read_text().splitlines()[-2:])[:300]}")
    finished = len([*(folder / "done").glob("*.json")])
    print(f"{finished} of {len(groups)} groups")


def collect(folder: Path, out: Path) -> None:
    """The finished groups in few files below MAX_FILE_BYTES."""
    out.mkdir(parents=True, exist_ok=True)
    parts: list[list[bytes]] = [[]]
    for path in sorted((folder / "done").glob("*.jsonl.gz")):
        if sum(map(len, parts[-1])) + path.stat().st_size > MAX_FILE_BYTES:
            parts.append([])
        parts[-1].append(path.read_bytes())  # gzip members may follow one another
    for number, members in enumerate(parts):
        (out / f"records-{number}.jsonl.gz").write_bytes(b"".join(members))
    status = {path.stem: json.loads(path.read_text()) for path in (folder / "done").glob("*.json")}
    (out / "status.json").write_text(json.dumps(status, indent=1, sort_keys=True))
    tails = [
        f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("logs/*.log"))
    ]
    (out / "logs.txt").write_text("\n".join(tails))


def merge(options) -> None:
    """The records of `--from`, put into the folder of records in place of the same cells' older
    ones.
    """
    from flrce_reproduction import records

    runs = records.read_records(options.source)
    kept = options.to / "records"
    stored = {} if options.replace else records.read_records(kept)
    records.write_records((stored | runs).values(), kept)
    status = json.loads((options.source / "status.json").read_text())
    tables = [table for group in status.values() for table in group["data"].items()]
    sizes = {name: records.DatasetSizes(**row) for name, row in tables}
    records.write_dataset_sizes(sizes, kept)
    print(f"{len(runs)} runs in {kept}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("step", "schedule", "work", "list", "merge"))
    parser.add_argument("--packed", type=Path, help="a folder of packed data, or a part of one")
    parser.add_argument("--work", type=Path, help="folder for data, code, logs and records")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds")
    parser.add_argument("--out", type=Path, help="folder for what is finished")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=0, help="fewer rounds, for a rehearsal")
    parser.add_argument("--group", default="")
    parser.add_argument("--from", dest="source", type=Path)
    parser.add_argument("--to", type=Path)
    parser.add_argument("--replace", action="store_true", help="drop the records that are there")
    options = parser.parse_args()
    if options.command == "list":
        for group in list_groups():
            print(group.name, len(group.methods) or "", *group.seeds)
        return
    {"step": step, "schedule": schedule, "work": work, "merge": merge}[options.command](options)


if __name__ == "__main__":
    main()
