"""Adapters of SmolLM2-135M on Shakespeare's roles: perplexity against bytes and joules, with and
without FLrce's lead.

    python research/studies/language.py METHOD --text shakespeare.jsonl.gz --out DIR    a method's rate, then the plan's runs
    python research/studies/language.py central ...        the untouched base, and LoRA on everyone's samples together
    python research/studies/language.py speed ...          tokens a second and memory, against plain loops

plans/language.json holds settings, cells and rules; language_tables.py makes research/docs/language.md's
tables of the lines. A run is a file DIR/NAME.json, written anew at every evaluation; one that is
complete, there or among the lines of earlier occasions, is not run again. Without a model and a
text of one's own, `--model FOLDER --text FILE --rounds 2` try it on a CPU with any small one.
"""

import argparse
import copy
import gc
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import flrce
from flrce.core import loop
from flrce.core.types import PendingTask
from flrce.data.sources import Source
from flrce.data.user.text import from_text
from flrce.devices.costs import inference_flops, training_flops
from flrce.models.adapters import add_lora_adapters
from flrce.models.flat import pack_model
from flrce.models.llama import Llama
from flrce.simulation import simulator
from flrce.simulation.run_slot import DeviceSchedulers
from flrce.simulation.runs import build_simulation, run_in_process
from flrce.simulation.simulator import build_evaluation
from flrce.training.gpu.batch_trainer import ClientBatchTrainer
from flrce.training.gpu.variants import Variant
from flrce.training.objectives import NextToken

PLAN = json.loads((Path(__file__).parent / "plans" / "language.json").read_text())
ARMS = PLAN["arms"]
RUN = ("-averaged", "-guided")  # a plain run is an averaged one, judged by its last model


def experiment(
    method: str, arm: str, lr: float, seed: int, args: Any, rounds: int | None = None
) -> Any:
    """One cell of the plan."""
    how, task = PLAN["methods"][method], PLAN["task"]
    recipe = {"name": method, **how.get("recipe", {}), **ARMS[arm]}
    return flrce.Experiment(
        seed=seed,
        rounds=rounds or args.rounds or task["rounds"],
        clients=task["clients"],
        per_round=task["per_round"],
        recipe=recipe,
        data={"partition": "natural"},  # of the samples that are handed over
        model={
            "name": "llama",
            "options": {"path": args.model, "dtype": args.dtype, **PLAN["model"], **how["model"]},
        },
        objective={"name": "next-token", "metrics": ["perplexity", "accuracy"]},
        train={**PLAN["train"], **how["train"], "lr": lr},
        engine={"device": args.device, "eval_every": task["eval_every"], "workers": 1},
    )


def roles(args: Any) -> Source:
    """The text by role; a prepared .npz holds x, y, group and groups."""
    task = PLAN["task"]
    if not args.text.endswith(".npz"):
        return from_text(args.text, args.model, task["length"], task["most"], task["least"])
    held = np.load(args.text)
    x, y = held["x"].astype(np.int64), held["y"].astype(np.int64)
    return Source("roles", x, y, (), held["group"], tuple(held["groups"].tolist()), kind="tokens")


def run(jobs: Sequence[tuple[str, Any]], source: Source, args: Any) -> dict[str, float]:
    """Runs together on one device, each kept in its file; the last perplexity of each."""
    start = time.time()
    lines: list[dict[str, Any]] = [
        {"name": name, "rounds": [], "complete": False} for name, _ in jobs
    ]

    def watch(i: int, done: Any) -> None:
        r, line = done.record, lines[i]
        keys = ("t", "bytes_up", "bytes_down", "joules", "seconds", "averaged", "stop")
        figures = {"perplexity": r.metrics.get("perplexity"), "pooled": r.pooled.get("perplexity")}
        line["rounds"].append(
            {key: getattr(r, key) for key in keys} | figures | {"clock": time.time() - start}
        )
        line["complete"] = bool(r.stop) or r.t == jobs[i][1].rounds
        if r.last_model_metric is not None or line["complete"]:
            (args.out / f"{line['name']}.json").write_text(json.dumps(line))

    runs = [(exp, None) for _, exp in jobs]
    run_in_process(runs, data=lambda _: source, watch=watch, device=args.device, beside=args.beside)
    return {line["name"]: _last(line) for line in lines}


def _last(line: dict[str, Any]) -> float:
    """The perplexity of what a run hands back, at its end."""
    judged = [r for r in line["rounds"] if r["perplexity"] is not None]
    if not judged:
        return math.inf
    return float(
        judged[-1]["perplexity"] if judged[-1]["averaged"] is None else judged[-1]["averaged"]
    )


def chosen(method: str, source: Source, args: Any) -> float:
    """The method's rate: the one with the least perplexity after a few rounds on a seed of its
    own.
    """
    rates, search = PLAN["methods"][method]["rates"], PLAN["search"]
    if len(rates) == 1:
        return float(rates[0])
    before = {lr: args.known.get(f"search-{method}-{lr:g}", math.nan) for lr in rates}
    if all(math.isfinite(value) for value in before.values()):
        return float(min(rates, key=lambda lr: before[lr]))
    jobs = [
        (
            f"search-{method}-{lr:g}",
            experiment(method, "", lr, search["seed"], args, search["rounds"]),
        )
        for lr in rates
    ]
    found = run([(name, exp) for name, exp in jobs], source, args)
    return float(min(rates, key=lambda lr: found[f"search-{method}-{lr:g}"]))


def confirm(method: str, source: Source, args: Any) -> None:
    """The method with an average and under FLrce's lead, a seed at a time: what a cut leaves are
    whole seeds.
    """
    lr, arms, also = args.rate or chosen(method, source, args), RUN, ""
    if args.rate:  # beside the plan: what another rate would have done
        arms, also = RUN[:1], f"-rate{args.rate:g}"
    print(method, "rate", lr, round(time.time() - args.start, 1), flush=True)
    for seed in args.seeds or (*PLAN["seeds"], *PLAN["more"]):
        while (
            seed in PLAN["more"]
            and not first_seeds(args)
            and time.time() - args.start < args.seconds
        ):
            time.sleep(1)  # the device is for those that have not had their first seeds
        if time.time() - args.start > args.seconds:
            return
        jobs = [
            (f"{method}{also}{arm}-s{seed}", experiment(method, arm, lr, seed, args))
            for arm in arms
        ]
        left = [
            (name, exp)
            for name, exp in jobs
            if name not in args.known and not _complete(args.out, name)
        ]
        if left:
            run(left, source, args)
        print(method, seed, round(time.time() - args.start, 1), flush=True)


def first_seeds(args: Any) -> bool:
    """Whether every method has had the seeds that come first."""
    names = [
        f"{method}{arm}-s{seed}"
        for method in PLAN["methods"]
        for arm in RUN
        for seed in PLAN["seeds"]
    ]
    return all(name in args.known or _complete(args.out, name) for name in names)


def _complete(out: Path, name: str) -> bool:
    path = out / f"{name}.json"
    return path.exists() and bool(json.loads(path.read_text())["complete"])


def known(lines: Path) -> dict[str, float]:
    """The complete runs among the lines of earlier occasions, with their last perplexity."""
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    return {row["name"]: row["seen"][-1][4] for row in rows if row["complete"]}


def central(source: Source, args: Any) -> None:
    """All clients' samples in one place, Adam throughout, as many steps a round as its P clients
    have together.
    """
    task, train, own = (
        PLAN["task"],
        {**PLAN["train"], **PLAN["methods"]["fedit"]["train"]},
        PLAN["central"],
    )
    for seed in PLAN["seeds"]:
        if f"central-s{seed}" in args.known or _complete(args.out, f"central-s{seed}"):
            continue
        if time.time() - args.start > args.seconds:
            return
        built = build_simulation(
            experiment("fedit", "", own["rate"], seed, args),
            source,
            schedulers=DeviceSchedulers(args.device),
        )
        runner = built.engine.runner.to_device(args.device)
        trainer, rows = runner._build_torch_trainer(runner.all), built.federation.holdout_index
        w = pack_model(built.net, runner.layout).to(args.device)
        line: dict[str, Any] = {
            "name": f"central-s{seed}",
            "rounds": [{"t": 0, "perplexity": judged(trainer, w, rows, runner)}],
            "complete": False,
        }
        everyone = np.concatenate(built.federation.train)
        rng = np.random.default_rng(seed)
        m, v, step = torch.zeros_like(w), torch.zeros_like(w), 0
        rounds = args.rounds or own["rounds"]
        for t in range(1, rounds + 1):
            trainer.w.copy_(w)
            trainer.net.train()
            for _ in range(train["steps"] * task["per_round"]):
                some = torch.from_numpy(rng.choice(everyone, train["batch"], replace=False)).to(
                    args.device
                )
                trainer.g.zero_()
                NextToken().losses(trainer.net(runner.x[some]), runner.y[some]).mean().backward()
                step += 1
                m.lerp_(trainer.g, 0.1)
                v.lerp_(trainer.g.square(), 0.001)
                trainer.w.sub_(
                    m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8), alpha=own["rate"]
                )
            w = trainer.w.clone()
            if t % task["eval_every"] == 0:
                line["rounds"].append({"t": t, "perplexity": judged(trainer, w, rows, runner)})
                line["complete"] = t == rounds
                (args.out / f"central-s{seed}.json").write_text(json.dumps(line))
        built.engine.close()


def judged(trainer: Any, w: torch.Tensor, rows: Any, runner: Any) -> float:
    index = torch.from_numpy(rows[0]).to(w.device)
    found = trainer.evaluate(w, runner.x[index], runner.y[index], 1.0, 0.0)
    numbers = {name: each.cpu().double().numpy() for name, each in found.items()}
    return float(build_evaluation(runner.objective, numbers, rows[1], 0).value)


def speed(source: Source, args: Any) -> Iterator[dict[str, Any]]:
    """Tokens a second and memory for 10, 5 and 1 clients of one round: flrce's engine and two plain
    loops, in turn.

    A plain loop takes its clients one after another, so that two of them tell its speed.
    """
    task, train = PLAN["task"], {**PLAN["train"], **PLAN["methods"]["fedit"]["train"]}
    tokens = train["steps"] * train["batch"] * task["length"]
    for dtype in args.dtype.split(","):
        args.dtype = dtype
        before = clean(args.device)
        exp = experiment("fedit", "", 1e-3, 0, args).model_copy(update={"per_round": 10})
        built = build_simulation(exp, source, schedulers=DeviceSchedulers(args.device))
        told("built", args)
        state = built.initial_state()
        tasks = loop.plan_round(built.recipe, built.engine, state, 0, 60).tasks
        base = clean(args.device) - before  # the engine's own copy of base and samples
        memory: dict[str, dict[str, int]] = {}
        calls: dict[str, Any] = {}
        for how, make in (("engine", engine), ("plain", ours), ("transformers", theirs)):
            before = clean(args.device) - (base if how == "engine" else 0)
            try:
                call = make(built, state, args.device, dtype)
                call(tasks if how == "engine" else tasks[:1])  # warms up; an engine records
            except Exception as why:  # another's package: the others are measured all the same
                print(how, type(why).__name__, str(why)[:300], flush=True)
                continue
            calls[how], memory[how] = call, peak(args.device, before)
            told(f"{dtype} {how} ready", args)
        for clients in (10, 5, 1):
            calls["engine"](tasks[:clients])  # records
            for repeat in range(args.repeats):
                if time.time() - args.start > args.seconds:
                    return
                rates = {}
                for how, call in calls.items():
                    some = tasks[: clients if how == "engine" else min(clients, 2)]
                    wait(args.device)
                    start = time.perf_counter()
                    call(some)
                    wait(args.device)
                    rates[how] = len(some) * tokens / (time.perf_counter() - start)
                scheduler = getattr(built.engine.workers, "scheduler", None)
                trainers = scheduler.trainers.values() if scheduler else ()
                ways = sorted({getattr(trainer, "default_variant", "loop") for trainer in trainers})
                row = {"clients": clients, "dtype": dtype, "repeat": repeat, "rates": rates}
                yield {**row, "memory": memory, "ways": ways}
            told(f"{dtype} {clients} clients", args)
        built.engine.close()
        del built, calls, call


def told(what: str, args: Any) -> None:
    print(what, round(time.time() - args.start, 1), flush=True)


def engine(built: Any, state: Any, device: str, dtype: str) -> Any:
    return lambda tasks: built.engine.train([PendingTask(one, state.w) for one in tasks], {}, None)


def ours(built: Any, state: Any, device: str, dtype: str) -> Any:
    """A loop over clients with the same module that the engine trains."""
    net = copy.deepcopy(built.net).to(device).train()
    names = {name: p for name, p in net.named_parameters() if p.requires_grad}
    views = built.engine.runner.layout.view_tensors(state.w.to(device))
    return lambda tasks: plain(
        net, lambda: {names[name]: views[name] for name in names}, built, state.w, tasks, device
    )


def theirs(built: Any, state: Any, device: str, dtype: str) -> Any:
    """The same loop with transformers' Llama of the same sizes (weights at random), adapters as
    peft's.
    """
    from transformers import LlamaForCausalLM

    inner = next(module for module in built.net.modules() if isinstance(module, Llama))
    options, config = PLAN["model"], copy.deepcopy(inner.config)
    config.use_cache = False
    torch.manual_seed(0)
    with torch.device(device):
        net = LlamaForCausalLM(config).to(getattr(torch, dtype))
    add_lora_adapters(net, options["rank"], options["alpha"], options["targets"])
    net.train()
    trained = [p for p in net.parameters() if p.requires_grad]
    first = {p: p.detach().clone() for p in trained}
    return lambda tasks: plain(_Scores(net), lambda: first, built, state.w, tasks, device)


class _Scores:
    def __init__(self, net: torch.nn.Module) -> None:
        self.net, self.parameters = net, net.parameters

    def __call__(self, ids: torch.Tensor) -> Any:
        return self.net(input_ids=ids, use_cache=False).compute_logits.float()


def plain(net: Any, first: Any, built: Any, w: torch.Tensor, tasks: Any, device: str) -> None:
    """What a script does: one client after another, torch's Adam, a backward pass a step."""
    runner = built.engine.runner
    x, y = runner.x.to(device), runner.y.to(device)
    trained = [p for p in net.parameters() if p.requires_grad]
    for task in tasks:
        with torch.no_grad():
            for p, value in first().items():
                p.copy_(value)
        optimiser = torch.optim.Adam(trained, 1e-3)
        job = runner.prepare_task(
            w, task, built.federation.train[built.federation.row[task.client]], {}
        )
        for some in torch.from_numpy(job.order).to(device).split(job.sizes.tolist()):
            optimiser.zero_grad(set_to_none=True)
            NextToken().losses(net(x[some]), y[some]).mean().backward()
            optimiser.step()


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def clean(device: str) -> int:
    """Bytes in use before something new is built."""
    if device != "cuda":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak(device: str, before: int) -> dict[str, int]:
    """Bytes more than before: at most in use, and held for good (recordings keep theirs)."""
    if device != "cuda":
        return {}
    wait(device)
    used = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    return {"used": used, "held": torch.cuda.memory_reserved() - before}


def once(count: Any) -> Any:
    """Counted once for each shape: all networks here are of one architecture, and a count takes
    seconds.
    """
    known: dict[Any, float] = {}

    def call(
        net: torch.nn.Module, shape: tuple[int, ...], samples: int = 2, tokens: bool = False
    ) -> float:
        tensors = tuple(
            (name, tuple(p.shape), p.requires_grad) for name, p in net.named_parameters()
        )
        key = (tensors, shape, samples, tokens)
        if key not in known:
            known[key] = count(net, shape, samples, tokens)
        return known[key]

    return call


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("phase", choices=[*PLAN["methods"], "central", "speed"])
    ask.add_argument("--model", default="smollm2")
    ask.add_argument("--text", default="shakespeare.jsonl.gz")
    ask.add_argument("--out", type=Path, required=True)
    ask.add_argument("--device", default="cuda")
    ask.add_argument("--dtype", default="bfloat16")
    ask.add_argument("--seconds", type=float, default=1e9)
    ask.add_argument("--repeats", type=int, default=4)
    ask.add_argument("--rounds", type=int, default=0)
    ask.add_argument(
        "--seeds",
        type=lambda text: [int(each) for each in text.split(",")],
        default=[],
        help="these only, where several processes share a method; all of the plan's unless given",
    )
    ask.add_argument(
        "--rate",
        type=float,
        default=0.0,
        help="this one instead, without FLrce's lead, beside the plan",
    )
    ask.add_argument(
        "--anew", action="store_true", help="also what lines/language.jsonl holds already"
    )
    ask.add_argument(
        "--beside", type=int, default=1, help="processes that share the device's memory"
    )
    ask.add_argument(
        "--way", default="", help="how a GPU trains lanes; chosen by rule unless given"
    )
    args = ask.parse_args()
    args.start = time.time()
    args.known = {} if args.anew else known(Path(__file__).parent / "lines" / "language.jsonl")
    if args.way:
        ClientBatchTrainer.default_variant = Variant(args.way)  # type: ignore[assignment, method-assign]
    simulator.training_flops, simulator.inference_flops = map(
        once, (training_flops, inference_flops)
    )
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    source = roles(args)
    told("data", args)
    if args.phase == "speed":
        simulator.training_flops = simulator.inference_flops = lambda *_, **__: (
            1.0
        )  # nobody asks for joules here
        with open(args.out / "speed.jsonl", "a") as file:
            for row in speed(source, args):
                file.write(json.dumps(row) + "\n")
                file.flush()
    elif args.phase == "central":
        central(source, args)
    else:
        confirm(args.phase, source, args)


if __name__ == "__main__":
    main()
