"""Every kind of task from samples to a score: the data says what is to be learnt, the rest
follows.
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import flrce
from flrce import Experiment
from flrce.cli.cli import main
from flrce.data.readers.shakespeare import build_role_source
from flrce.data.user import from_arrays

ROOT = Path(__file__).resolve().parents[2]


def learnt(pool, **more):
    tables = {
        "rounds": 15,
        "clients": 6,
        "per_round": 6,
        "data": {"partition": "iid"},
        "recipe": {"name": "fedavg"},
        "train": {"lr": 0.1, "epochs": 2},
        "engine": {"workers": 1},
    }
    return flrce.run(Experiment(**{**tables, **more}), data=pool)


def test_values():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 4)).astype(np.float32)
    y = x @ np.array([[1, 0], [2, -1], [0, 3], [0, 0]]) + 0.1 * rng.normal(size=(240, 2))
    assert learnt((x, y), model={"name": "linear"}).summary["metrics"]["r2"] > 0.95
    assert learnt((x, y[:, 0]), rounds=30).summary["metrics"]["r2"] > 0.8  # the MLP


def test_several_labels():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 4)).astype(np.float32)
    assert (
        learnt((x, (x[:, :3] > 0).astype(int)), train={"lr": 1.0}).summary["metrics"]["label-f1"]
        > 0.9
    )


@pytest.mark.parametrize(("name", "lr"), [("lstm", 2.0), ("gpt", 0.3)])
def test_the_next_symbol_at_every_position(name, lr):
    rng = np.random.default_rng(0)
    ids = (rng.integers(0, 5, (240, 1)) + np.arange(9)) % 5  # 0 1 2 3 4 0 1 ...
    small = {"name": name, "options": {"width": 32, "layers": 1}}
    found = learnt((ids[:, :-1], ids[:, 1:]), model=small, train={"lr": lr}, rounds=20).summary[
        "metrics"
    ]
    assert found["accuracy"] > 0.95
    assert found["perplexity"] < 1.5


def test_a_text_has_a_class():
    rng = np.random.default_rng(0)
    ids = rng.integers(2, 20, (240, 8))
    y = np.arange(240) % 2
    ids[np.arange(240), rng.integers(0, 8, 240)] = y  # one telling word
    pool = from_arrays(ids, y, layout="tokens")
    small = {"name": "gru", "options": {"width": 24, "layers": 1, "embedding": 16}}
    assert learnt(pool, model=small, train={"lr": 1.0}, rounds=30).summary["accuracy"] > 0.8


def test_what_is_learnt_resumes_to_the_same_bits(tmp_path):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 5, (120, 7))
    tables = {
        "rounds": 4,
        "clients": 4,
        "per_round": 2,
        "data": {"partition": "iid"},
        "engine": {"workers": 1},
        "model": {"name": "lstm", "options": {"width": 8}},
        "recipe": {"name": "fedavg"},
    }
    whole = flrce.run(Experiment(**tables), tmp_path / "whole", data=(ids[:, :-1], ids[:, 1:]))

    class Enough(Exception):
        pass

    def leave(done):
        if done.record.t == 2:
            raise Enough

    with pytest.raises(Enough):
        flrce.run(
            Experiment(**tables), tmp_path / "half", data=(ids[:, :-1], ids[:, 1:]), watch=leave
        )
    again = flrce.run(
        Experiment(**tables), tmp_path / "half", resume=True, data=(ids[:, :-1], ids[:, 1:])
    )
    assert all(torch.equal(whole.model[name], again.model[name]) for name in whole.model)


def test_a_regression_from_the_command_line(tmp_path, capsys):
    rng = np.random.default_rng(0)
    rows = [
        f"{a:.3f},{b:.3f},{3 * a - b:.3f},farm{i % 5}"
        for i, (a, b) in enumerate(rng.normal(size=(150, 2)))
    ]
    (tmp_path / "farms.csv").write_text("\n".join(["rain,sun,harvest,farm", *rows]))
    (tmp_path / "farms.toml").write_text(
        f'rounds = 3\nclients = 5\nper_round = 2\n[data]\npath = "{tmp_path}/farms.csv"\ntarget ='
        ' "harvest"\ngroup = "farm"\npartition = "given"\n[model]\nname = "linear"\n[recipe]\nname'
        ' = "fedavg"\n'
    )
    assert main(["run", str(tmp_path / "farms.toml"), "--out", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics"]["r2"] > 0.5
    assert json.loads((tmp_path / "run" / "partition.json").read_text())["clients"] == [
        f"farm{k}" for k in range(5)
    ]
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0
    capsys.readouterr()


@pytest.fixture(scope="module")
def packed():
    spec = importlib.util.spec_from_file_location(
        "packed", ROOT / "experiments" / "adapters" / "packed.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_exam_scores_by_district(real_data, packed):
    pool = packed.chem97(real_data / "tabular.npz")
    tables = {
        "data": {"partition": "natural"},
        "clients": 20,
        "per_round": 10,
        "rounds": 3,
        "train": {"lr": 0.05},
    }
    assert learnt(pool, **tables).summary["metrics"]["r2"] > 0.4


def test_plays_by_role(real_data, packed):
    roles = dict(list(packed._roles(real_data / "shakespeare.jsonl.gz").items())[:8])
    pool = build_role_source(roles, "roles", stride=80, every=True)
    tables = {
        "data": {"partition": "natural"},
        "clients": 6,
        "per_round": 3,
        "rounds": 3,
        "model": {"name": "gpt", "options": {"width": 32}},
        "train": {"lr": 0.5, "batch": 8, "epochs": 1},
    }
    assert learnt(pool, **tables).summary["metrics"]["perplexity"] < 40  # of 80 symbols


def test_more_metrics_train_with_the_same_kernels(caplog):
    """What a run is judged by does not change what trains it: fused kernels train, torch judges."""
    base = {
        "rounds": 2,
        "clients": 6,
        "per_round": 3,
        "recipe": {"name": "fedavg"},
        "engine": {"kernel": "native"},
    }
    few = flrce.run(Experiment(**base))
    many = flrce.run(
        Experiment(
            **base, objective={"name": "classification", "metrics": ["macro-f1", "accuracy"]}
        )
    )
    assert all(torch.equal(few.model[name], many.model[name]) for name in few.model)
    assert many.history[-1].metrics["accuracy"] == pytest.approx(
        few.history[-1].last_model_metric, abs=0.01
    )
    assert many.history[-1].last_model_metric == many.history[-1].metrics["macro-f1"]
    assert "using the PyTorch trainer" not in caplog.text
