"""Rows 23 and 24, and what `doctor` and `verify` say: refusals before any work, and honest answers
after it.
"""

import json
import os
import shutil
import subprocess
import time

import pytest
import torch
from clients import Fleet
from harness import experiment, go

from flrce.cli import cli
from flrce.core import host, memory_limits
from flrce.core.host import get_available_memory
from flrce.core.loop import make_initial_state, plan_round
from flrce.errors import BadInput
from flrce.methods.catalogue.recipes import CATALOGUE

MALFORMED = {
    "rouns = 5": "rouns is no known key; did you mean 'rounds'?",
    "rounds = 0": "rounds = 0",
    "rounds = 'many'": "rounds = 'many'",
    "seed = -1": "seed = -1",
    "[data]\nname = 'digitz'": "data.name = 'digitz'",
    "[data]\nalpha = nan": "data.alpha = nan",
    "[train]\nlr = -0.1": "train.lr = -0.1",
    "[recipe]\nname = 'flrec'": "did you mean 'flrce'?",
    "[recipe]\nname = 'flrce'\npsi = 99.0": "psi must be",
    "per_round = 200": "per_round must be at most clients",
    "rounds = [": "is not valid TOML",
    "\x00": "is not valid TOML",
}


@pytest.mark.row(23, "malformed experiment file", "HALT before any work: key, value, nearest")
@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_experiments(tmp_path, capsys, text):
    (tmp_path / "bad.toml").write_text(text)
    began = time.process_time()
    assert cli.main(["run", str(tmp_path / "bad.toml"), "--out", str(tmp_path / "run")]) == 2
    assert time.process_time() - began < 5
    line = capsys.readouterr().err.strip()
    assert MALFORMED[text] in line
    assert line.count("\n") == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.row(
    24, "M = 10,000 to 1,000,000", "estimate first, HALT with the figure, no allocation"
)
@pytest.mark.parametrize("M", [10_000, 100_000, 1_000_000])
def test_memory_is_known_beforehand(M, seen, monkeypatch):
    """22 GB available: M x M alone is 0.4 GB, 40 GB and 4 TB."""
    monkeypatch.setattr(memory_limits, "get_available_memory", lambda: 22_000_000_000)
    recipe, fleet = CATALOGUE["flrce"](P=10, preset="paper"), Fleet(M=M, trainable=10_000)
    tables = memory_limits.estimate_table_bytes(recipe, M, 10_000, 10_000)
    assert tables["selector.Omega"] == 4 * M * M
    assert tables["selector.V"] == 4 * M * 10_000
    if M == 10_000:
        memory_limits.check_memory(recipe, M, 10_000, 10_000)
        seen("0.8 GB: goes ahead")
        return
    began = time.process_time()
    with pytest.raises(
        BadInput, match=f"{M} clients and 10000 trained floats need .* GB .*selector.Omega"
    ) as why:
        make_initial_state(recipe, fleet, torch.zeros(10_000))
    assert time.process_time() - began < 5
    memory_limits.check_memory(CATALOGUE["fedavg"](P=10), M, 10_000, 10_000)
    seen(str(why.value)[:60])


@pytest.mark.row(24, "a crowd of new names", "they stay out, the run goes on")
def test_names_cannot_fill_the_memory(seen, monkeypatch, caplog):
    """One of 5 clients comes back 100,000 times under other names: Omega alone would take 40 GB."""
    monkeypatch.setattr(memory_limits, "get_available_memory", lambda: 22_000_000_000)
    recipe, fleet = CATALOGUE["flrce"](P=3, preset="paper"), Fleet(M=5, trainable=6)
    state = make_initial_state(recipe, fleet, torch.zeros(6))
    names = list(fleet.clients(0))
    monkeypatch.setattr(fleet, "clients", lambda t: [*names, *(f"x{i}" for i in range(100_000))])
    plan = plan_round(recipe, fleet, state, seed=0)
    assert plan.state.roster == state.roster
    assert {task.client for task in plan.tasks} <= set(names)
    assert len(plan.tasks) == 3
    assert "100000 newcomers ('x0' first) stay out" in caplog.text
    monkeypatch.setattr(fleet, "clients", lambda t: [*names, "x0"])
    assert plan_round(recipe, fleet, state, seed=0).state.roster == (*state.roster, "x0")
    seen("3 of the 5 train")


def test_the_estimate_is_what_is_taken():
    """Within a tenth of the tables' real size, for every recipe with tables."""
    for name, make in CATALOGUE.items():
        recipe = make(P=6)
        real = sum(
            memory_limits._count_bytes(getattr(m, f))
            for m in recipe.initial_state(50, 30, 30).values()
            for f in m.__dataclass_fields__
        )
        assert sum(memory_limits.estimate_table_bytes(recipe, 50, 30, 30).values()) == real, name


@pytest.mark.row(24, "available memory", "what the system says")
def test_available_memory():
    have = get_available_memory()
    assert have is not None
    assert 10**8 < have < 10**13


def test_files_that_were_read_do_not_count_against_a_control_group(tmp_path, monkeypatch):
    """A limit of 1,000,000, 900,000 in use, 700,000 of them files' pages: 800,000 can be had."""
    monkeypatch.setattr(host, "CGROUP_FOLDER", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text(
        "anon 200000\nactive_file 300000\ninactive_file 400000\nshmem 0\n"
    )
    assert get_available_memory() == 800_000
    (tmp_path / "memory.max").write_text("max\n")
    assert get_available_memory() > 1_000_000


@pytest.mark.row(25, "doctor warns of clocks apart", "Flower's -5 to +305 s")
def test_doctor(tmp_path, capsys):
    assert cli.main(["doctor", "--json"]) == 0
    lines = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    assert lines["memory"]["state"] == "ok"
    assert "-5 to +305 s" in lines["clock of peers"]["finding"]
    assert cli.main(["doctor", "--peer-clock", str(time.time() - 3600)]) == 2
    assert "3600 s old" in capsys.readouterr().err
    assert cli.main(["doctor", "--peer-clock", str(time.time())]) == 0
    assert cli.main(["doctor", "--set", "clients=1000000", "--set", "recipe.preset=paper"]) == 2
    assert "GB available" in capsys.readouterr().err


def test_doctor_looks_at_keys_and_certificates(tmp_path, capsys):
    if not shutil.which("openssl"):
        pytest.skip("no openssl to make a certificate with")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 400 -subj /CN=x -keyout server.key -out"
        " server.crt"
    )
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    os.chmod(tmp_path / "server.key", 0o600)
    assert cli.main(["doctor", "--tls", str(tmp_path), "--json"]) == 0
    lines = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    assert lines["server.crt"]["finding"] == "certificate, 400 days left"
    os.chmod(tmp_path / "server.key", 0o644)
    (tmp_path / "server.crt").write_text(
        "-----BEGIN CERTIFICATE-----\nrubbish\n-----END CERTIFICATE-----\n"
    )
    assert cli.main(["doctor", "--tls", str(tmp_path)]) == 2
    line = capsys.readouterr().err
    assert "chmod 600" in line
    assert "no valid certificate" in line
    assert cli.main(["doctor", "--tls", str(tmp_path / "nowhere")]) == 2


def test_verify(tmp_path, capsys):
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    go(a)
    shutil.copytree(a, b)
    assert cli.main(["verify", str(a), str(b)]) == 0
    assert capsys.readouterr().out.startswith("identical: partition.json, rounds.jsonl")
    go(c, what=experiment(seed=1))
    assert cli.main(["verify", str(a), str(c)]) == 1
    out = capsys.readouterr().out
    assert "rounds.jsonl: line 1, round 1, chosen[0]: " in out
    assert "model.safetensors: " in out
    assert " against " in out
    lines = (b / "rounds.jsonl").read_text().splitlines()
    (b / "rounds.jsonl").write_text(
        "\n".join([lines[0], lines[1].replace('"conflicts":', '"conflicts":9')]) + "\n"
    )
    assert cli.main(["verify", str(a), str(b), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [d["where"] for d in found] == ["line 2, round 2, conflicts"]
    assert cli.main(["verify", str(a), str(tmp_path)]) == 2
    assert "no run directory" in capsys.readouterr().err
