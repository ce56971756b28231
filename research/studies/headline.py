"""What a target costs with FLrce's default, against FedAvg with the same average and the same bits.

    python research/studies/headline.py run   --data CACHE --out DIR [--tasks digits,femnist] [--device cuda] [--stack 12] \
        [--seconds 500] [--share 0/4] [--plan research/studies/plans/frontier-average.json]
    python research/studies/headline.py table --out research/results/headline [--page research/docs/target-cost.md]
    python research/studies/headline.py holdouts --data CACHE --out DIR --tasks digits,mnist-writers

plans/headline.json holds tasks, rows, seeds and the rule; runs found in DIR are not made again. A
run without an average is the same run, judged by its last model. `holdouts` says what judging costs
the default: joules of 20 rounds of the target seeds with it over those without. With --stack the
rows of several seeds train as one stack. What time cut off is kept too: a task counts with the
rounds that all its runs have, if that is half of them or more.
"""

import argparse
import gzip
import json
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from headline_tables import PLAN, embed, read, tables

from flrce.config.experiment import Experiment
from flrce.methods.stopping.marginal_gain import MarginalGain
from flrce.simulation import runs
from flrce_reproduction.execute import load_dataset


def experiment(task, row, seed, device="cpu"):
    """The plan's tables for one run."""
    own = PLAN["tasks"][task]
    recipe = {
        key: (
            {"AVERAGE": PLAN["average"], "BITS": PLAN["bits"]}.get(value, value)
            if isinstance(value, str)
            else value
        )
        for key, value in PLAN["rows"][row].items()
    }
    tables = {
        **PLAN["all"],
        **own,
        "seed": seed,
        "recipe": recipe,
        "data": {**PLAN["all"]["data"], **own["data"]},
        "engine": {**PLAN["all"]["engine"], "device": device},
    }
    if tables["data"]["partition"] == "natural":
        tables["data"].pop("alpha")
    return Experiment.from_tables(tables)


def wanted(task):
    """(task, row, seed), seed by seed: a cut leaves whole seeds."""
    yield from ((task, PLAN["base"], seed) for seed in PLAN["targets"])
    for seed in PLAN["seeds"]:
        yield from ((task, row, seed) for row in PLAN["rows"])


class TimeUp(Exception):
    pass


def run(options):
    until = time.monotonic() + options.seconds
    part, parts = map(int, options.share.split("/"))
    options.out.mkdir(parents=True, exist_ok=True)
    found = {
        key for key, line in read(options.out).items() if len(line["last"]) == PLAN["all"]["rounds"]
    }
    many = options.stack or (1 if options.device == "cpu" else 12)
    for task in options.tasks.split(",") if options.tasks else PLAN["tasks"]:
        todo = [key for key in list(wanted(task))[part::parts] if key not in found]
        if todo and time.monotonic() < until:
            pool = load_dataset(PLAN["tasks"][task]["data"]["name"], options.data, verify=False)
        while todo and time.monotonic() < until:
            keys, todo = todo[:many], todo[many:]
            lines = [
                json.dumps(line, separators=(",", ":"))
                for line in trained(keys, pool, options, many > 1, until)
            ]
            with gzip.open(options.out / f"headline-{part}.jsonl.gz", "at") as f:
                f.writelines(f"{line}\n" for line in lines)
            print(f"{keys[0]}: {len(keys)} runs, {until - time.monotonic():.0f} s left", flush=True)


def trained(keys, pool, options, together, until):
    """A line of figures by round for every run, as far as time allowed."""
    records, active = defaultdict(list), defaultdict(list)

    def watch(i, done):
        waits = [
            c.spent.idle_watts * max(done.record.seconds - c.spent.seconds, 0.0)
            for c in done.clients
        ]
        active[i].append(sum(client.spent.joules for client in done.clients) - sum(waits))
        records[i].append(done.record)
        if time.monotonic() > until:
            raise TimeUp

    jobs = [experiment(*key, options.device) for key in keys]
    with suppress(TimeUp):
        if together:
            beside = int(options.share.split("/")[1])
            tables = [(job, None) for job in jobs]
            runs.run_in_process(
                tables, data=lambda _: pool, watch=watch, device=options.device, beside=beside
            )
        else:
            runs.run(jobs[0], data=pool, watch=lambda done: watch(0, done), allow_divergence=True)
    for i, (key, job) in enumerate(zip(keys, jobs, strict=True)):
        h = records[i]
        yield {
            "key": key,
            "sweep": -(-job.clients // job.per_round),
            "handed": short(r.final_model_metric for r in h),
            "last": short(r.last_model_metric for r in h),
            "joules": short(r.joules for r in h),
            "active": short(active[i]),
            "bytes_up": [r.bytes_up for r in h],
            "bytes": [r.bytes_up + r.bytes_down for r in h],
            "stopped": stopped(h) if key[1] == "default" else None,
        }


def stopped(history):
    """The round in which the default's stop ends the run; None: not in these."""
    rule = MarginalGain()
    return next((t for t in range(1, len(history) + 1) if rule(history[:t])), None)


def short(values):
    return [None if value is None else float(f"{value:.6g}") for value in values]


def holdouts(options):
    for task in options.tasks.split(","):
        pool, spent = (
            load_dataset(PLAN["tasks"][task]["data"]["name"], options.data, verify=False),
            [],
        )
        for asked in (True, False):
            PLAN["rows"]["default"]["holdouts"], PLAN["all"]["rounds"] = asked, 20
            histories = [
                runs.run(experiment(task, "default", seed), data=pool).history
                for seed in PLAN["targets"]
            ]
            spent.append(sum(record.joules for history in histories for record in history))
        print(f"{task}: {spent[0] / spent[1]:.3f}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("does", choices=("run", "table", "holdouts"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="put the tables between their marks in this page")
    parser.add_argument("--plan", type=Path, help="another than plans/headline.json, to run")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tasks")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--stack", type=int, help="runs that train as one; on a GPU 12")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--share", default="0/1", help="I/N: every N-th run, from the I-th")
    options = parser.parse_args()
    PLAN.update(json.loads(options.plan.read_text()) if options.plan else {})
    if options.does == "run":
        run(options)
    elif options.does == "holdouts":
        holdouts(options)
    else:
        made = tables(options.out)
        if options.page:
            embed(made, options.page)
        print("\n".join(made.values()))


if __name__ == "__main__":
    main()
