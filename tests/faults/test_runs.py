"""Rows 32 and 33: run directories that were damaged, changed or made by somebody else."""

import json
import os
import random
import resource
import shutil
import stat
import sys
from pathlib import Path

import pytest
from harness import contents, experiment, go, in_child

from flrce.cli.cli import main
from flrce.errors import BadInput
from flrce.storage import disk
from flrce.storage.disk import LineFile
from flrce.storage.ledger import Ledger
from flrce.storage.seal import MODEL_FILE, SEAL_FILE, SEALED_FILES

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))  # experiment_fuzz
row32 = pytest.mark.row(
    32, "damaged experiment.toml, partition.json, finished run", "HALT in one line"
)
row33 = pytest.mark.row(33, "run directories made by an attacker", "one line, < 500 MB")
COMMANDS = (
    ["report", "RUN", "--out", "PAGE"],
    ["why", "RUN", "--stop"],
    ["why", "RUN", "--round", "2"],
    ["whatif", "RUN"],
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "a"
    go(folder)
    return folder


@pytest.fixture
def copy(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def said(capsys, command, run):
    """A command's exit code and its one line of error."""
    code = main(
        [
            str(run) if w == "RUN" else str(run.parent / "r.html") if w == "PAGE" else w
            for w in command
        ]
    )
    error = capsys.readouterr().err
    assert error.count("\n") == (1 if code else 0), error
    return code, error


@row32
@pytest.mark.parametrize("name", ["experiment.toml", "partition.json"])
def test_a_damaged_description_ends_a_resume_in_one_line(copy, name):
    rng, whole = random.Random(0), (copy / name).read_bytes()
    for i in range(40):
        data = bytearray(whole)
        if i % 2:
            del data[rng.randrange(len(data)) :]
        else:
            data[rng.randrange(len(data))] = rng.randrange(256)
        (copy / name).write_bytes(data)
        try:
            go(copy, resume=True)
        except BadInput as why:
            text = str(why)
        else:
            text = "as before"
        assert text == "as before" or name in text, text
    for odd in (b"", b"[]", b"null", b"\xff", b"[" * 5000, b"9" * 9999):
        (copy / name).write_bytes(odd)
        with pytest.raises(BadInput, match=name):
            go(copy, resume=True)


@row32
@pytest.mark.parametrize("name", SEALED_FILES)
def test_flips_in_a_finished_run_are_found(copy, name, capsys, seen):
    """One bit of any file: `verify` names the file, and what reads the file refuses it."""
    path, rng, found = copy / name, random.Random(name), 0
    whole = path.read_bytes()
    for _ in range(8):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        assert main(["verify", str(copy)]) == 1
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        assert out.startswith(f"{name}: ")
        found += 1
        if name.endswith((".jsonl", ".json", ".toml")):
            reader = ["predict", "RUN", "mine.csv"] if name == MODEL_FILE else COMMANDS[0]
            code, error = said(capsys, reader, copy)
            assert code == 2
            assert f"{name} was changed after it was written" in error
    path.write_bytes(whole)
    assert main(["verify", str(copy)]) == 0
    assert "whole: " in capsys.readouterr().out
    seen(f"{found} flips found")


@row32
def test_what_verify_says_of_other_damage(copy, capsys):
    assert main(["verify", str(copy.parent)]) == 2
    (copy / "model.safetensors").unlink()
    with open(copy / "clients.jsonl", "ab") as f:
        f.write(b"{}\n")
    state = next((copy / "checkpoint").glob("*.state"))
    state.write_bytes(state.read_bytes()[:-1])
    capsys.readouterr()
    assert main(["verify", str(copy), "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert "model.safetensors: missing" in problems
    assert "clients.jsonl: 3 bytes more than were committed" in problems
    assert any(line.startswith(f"checkpoint/{state.name}: ") for line in problems)
    (copy / SEAL_FILE).write_text("{}")
    assert main(["verify", str(copy)]) == 2
    assert "checksums.json was changed after it was written" in capsys.readouterr().err
    (copy / SEAL_FILE).unlink()
    assert main(["verify", str(copy)]) == 2
    assert "has no checksums.json" in capsys.readouterr().err


@row32
def test_a_run_that_goes_on_is_sealed_again(tmp_path, capsys):
    go(tmp_path / "a", what=experiment(2))
    first = (tmp_path / "a" / SEAL_FILE).read_bytes()
    go(tmp_path / "a", resume=True, what=experiment(2))
    assert (tmp_path / "a" / SEAL_FILE).read_bytes() == first
    go(tmp_path / "a", resume=True, what=experiment(3))
    assert (tmp_path / "a" / SEAL_FILE).read_bytes() != first
    assert main(["verify", str(tmp_path / "a")]) == 0


@row33
@pytest.mark.parametrize("seed", range(3))
def test_mutated_run_directories(finished, tmp_path, seed, capsys, seen):
    """Without a seal anything may stand in the files: every command answers, or refuses in one
    line.
    """
    from run_fuzz import mutated

    rng, refused, count = random.Random(seed), 0, 0
    for _ in range(60):
        run = mutated(finished, tmp_path / "run", rng)
        for command in COMMANDS:
            code, _ = said(capsys, command, run)
            assert code in (0, 2)
            refused, count = refused + (code == 2), count + 1
    seen(f"{refused} of {count} answers refused")


SPOILT = {
    "a metric's value is text": ("rounds.jsonl", {"accuracy": "x", "averaged": "y"}),
    "a metric's name is a table": ("rounds.jsonl", {"metric": {"a": 1}}),
    "a line is a list": ("rounds.jsonl", [1]),
    "rounds without end": ("experiment.toml", "rounds = inf\n"),
    "deep brackets": ("experiment.toml", "x = " + "[" * 3000 + "]" * 3000 + "\n"),
    "a recipe that is text": ("experiment.toml", 'recipe = "x"\n'),
}


@row33
@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_run_is_left_out_of_the_list(copy, capsys, name):
    """`flrce runs` looks at whatever lies in a folder; others are listed all the same."""
    (copy / SEAL_FILE).unlink()
    shutil.rmtree(copy / "checkpoint")  # it vouches for the ledger as well
    file, what = SPOILT[name]
    shutil.copytree(copy, copy.parent / "beside")
    if isinstance(what, str):
        (copy / file).write_text(what)
    else:
        rows = [json.loads(line) for line in (copy / file).read_text().splitlines()]
        rows[-1] = {**rows[-1], **what} if isinstance(what, dict) else what
        (copy / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["runs", str(copy.parent), "--json"]) == 0
    listed = [Path(row["folder"]).name for row in json.loads(capsys.readouterr().out)]
    assert listed == ["beside"]
    assert main(["runs", str(copy.parent)]) == 0


@row33
def test_comparing_runs_prints_nothing_that_a_terminal_obeys(copy, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(copy, other)
    rows = [json.loads(line) for line in (other / "clients.jsonl").read_text().splitlines()]
    rows[0] |= {"client": "\x1b[2J", "n": 10**9}
    (other / "clients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["verify", str(other), str(copy)]) == 1
    assert "\x1b" not in capsys.readouterr().out
    (other / "clients.jsonl").write_text("[1]\n")
    code, error = said(capsys, ["verify", str(copy), "RUN"], other)
    assert (code, "clients.jsonl cannot be compared: line 1 is no table" in error) == (2, True)
    (other / "clients.jsonl").write_text("[" * 100_000 + "\n")
    assert said(capsys, ["verify", str(copy), "RUN"], other)[0] == 2


@row33
def test_a_row_of_100_million_takes_no_memory(copy, capsys):
    (copy / SEAL_FILE).unlink()
    shutil.rmtree(copy / "checkpoint")
    path = copy / "relations.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["k"][0] = 10**8
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def child():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        code, error = said(capsys, COMMANDS[0], copy)
        assert code == 2
        assert "relations.jsonl names row 100000000 of" in error
        assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 500e6

    assert in_child(child) == 0


@row32
def test_ledgers_longer_than_one_read(tmp_path, monkeypatch):
    """A single pread returns 2 GiB at most, so a longer ledger failed its own check after a
    resume.
    """
    monkeypatch.setattr(disk, "CHUNK_BYTES", 1000)
    lines = LineFile(tmp_path / "rounds.jsonl")
    lines.open(None)
    for i in range(300):
        lines.append(b"%020d\n" % i)
    mark = lines.mark
    lines.close()
    again = LineFile(tmp_path / "rounds.jsonl")
    again.verify(mark)
    again.open(mark)
    assert again.mark == mark
    again.append(b"more\n")
    again.close()
    LineFile(tmp_path / "rounds.jsonl").verify(again.mark)


@row32
@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("FLRCE_LARGE"), reason="FLRCE_LARGE=1: hashes a sparse file of 2.1 GiB"
)
def test_a_sparse_ledger_above_2_gib(tmp_path):
    path = tmp_path / "rounds.jsonl"
    with open(path, "wb") as f:
        f.truncate(2**31 + 10**8)
    mark = disk.hash_file(path)
    lines = LineFile(path)
    lines.verify(mark)
    lines.open(mark)
    assert lines.mark == mark
    lines.close()


@pytest.mark.row(
    36, "symbolic links and odd names of --out", "HALT in one line, nothing outside touched"
)
@pytest.mark.parametrize(
    "name", ["rounds.jsonl", "lock", "checkpoint", "experiment.toml", "summary.json"]
)
def test_links_inside_a_run_are_not_followed(tmp_path, name, capsys):
    victim, folder = tmp_path / "victim", tmp_path / "run"
    folder.mkdir()
    if name == "checkpoint":
        victim.mkdir()
    else:
        victim.write_text("precious")
    (folder / name).symlink_to(victim)
    with pytest.raises(BadInput, match=r"symbolic link|already has a run"):
        go(folder)
    with pytest.raises(BadInput, match="symbolic link"):
        go(folder, resume=True)
    assert not list(victim.iterdir()) if victim.is_dir() else victim.read_text() == "precious"


@pytest.mark.row(
    36, "symbolic links and odd names of --out", "HALT in one line, nothing outside touched"
)
@pytest.mark.parametrize("name", ["x" * 300, "a\udcffb", "a\0b"], ids=["long", "not UTF-8", "null"])
def test_odd_names_of_out(tmp_path, name):
    with pytest.raises(BadInput) as refused:
        Ledger(tmp_path / name, "", {}, resume=False)
    assert str(refused.value).isprintable()


@pytest.mark.row(36, "who may read checkpoints", "their owner alone")
def test_checkpoints_are_private(finished):
    folder = finished / "checkpoint"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_nothing_else_changed(finished):
    assert set(contents(finished)) <= set(SEALED_FILES)
