"""Rows 32, 33 and 36: every command reads a run through its seal, reads only files, and keeps them
private.
"""

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import stat
from pathlib import Path

import pytest
from harness import contents, experiment, go, in_child
from run_fuzz import damaged

from flrce.cli.cli import main
from flrce.cli.options import PATH_TYPE
from flrce.errors import BadInput
from flrce.simulation.executors import prepare_jobs_folder
from flrce.storage import read
from flrce.storage.disk import make_folder, refuse_writable_by_others, write_atomically
from flrce.storage.limited import read_limited
from flrce.storage.manifest import _canonical_json, find_damage, read_manifests
from flrce.storage.seal import MANIFESTS, SEAL_FILE, SEALED_FILES, read_seal, serialize_marks

row32 = pytest.mark.row(
    32, "sealed runs: flips, deletions, swaps, additions", "found by verify, shown by nobody"
)
row33 = pytest.mark.row(
    33, "links, pipes, devices, folders, bombs in a run's place", "one line, < 500 MB, no hang"
)
row36 = pytest.mark.row(36, "who may read run directories", "their owner alone; pages by the umask")
READERS = (
    ["report", "RUN", "--out", "PAGE"],
    ["why", "RUN"],
    ["whatif", "RUN"],
    ["reach", "RUN", "--target", "0.3"],
    ["verify", "RUN"],
    ["verify", "RUN", "RUN"],
    ["export", "RUN", "--out", "ADAPTERS"],
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "a"
    go(folder)
    return folder


@pytest.fixture
def copy(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "runs" / "run")
    return tmp_path / "runs" / "run"


def answered(capsys, command, run):
    """A command's exit code and all that it printed; at most one line of error."""
    places = {
        "RUN": run,
        "PAGE": run.parent.parent / "r.html",
        "ADAPTERS": run.parent.parent / "peft",
    }
    code = main([str(places.get(word, word)) for word in command])
    out, error = capsys.readouterr()
    assert error.count("\n") == (1 if code == 2 else 0), error
    return code, out + error


def state_in(capsys, run):
    """What `runs` and `watch` say of a run, and whether either shows a figure of it."""
    assert main(["runs", str(run.parent), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)[0]
    assert main(["watch", str(run), "--json"]) == 0
    watched = json.loads(capsys.readouterr().out)[0]
    shown = listed["final model"] != "--" or "shown" in watched
    return listed["state"], watched["state"].partition(":")[0], shown


def spoil_newest_manifest(run):
    read_manifests(run / "checkpoint")[0][0][0].unlink()


def spoil_spare_manifest(run):
    read_manifests(run / "checkpoint")[0][1][0].unlink()


def empty_spare_state(run):
    newest, spare = (commit.files for _, commit, _ in read_manifests(run / "checkpoint")[0])
    only = next(name for name in spare if name not in newest and name.endswith(".state"))
    (run / "checkpoint" / only).write_bytes(b"")


def move_checkpoint(run):
    (run / "checkpoint").rename(run.parent.parent / "elsewhere")


def link_checkpoint(run):
    move_checkpoint(run)
    (run / "checkpoint").symlink_to(run.parent.parent / "elsewhere")


def add_manifest(run):
    shutil.copy(read_manifests(run / "checkpoint")[0][0][0], run / "checkpoint" / "manifest.json")


def add_model(run):
    shutil.copy(run / "model.safetensors", run / "added")
    marks = json.loads((run / SEAL_FILE).read_text())
    del marks["files"]["last.safetensors"]
    (run / SEAL_FILE).write_bytes(serialize_marks(marks["files"]))


def spoil_manifest(text):
    def spoil(run):
        path = read_manifests(run / "checkpoint")[0][0][0]
        path.unlink()
        path.write_bytes(text) if text else path.mkdir()

    return spoil


DAMAGE = {
    "the newest manifest deleted": spoil_newest_manifest,
    "the spare manifest deleted": spoil_spare_manifest,
    "the spare's state emptied": empty_spare_state,
    "the checkpoint gone": move_checkpoint,
    "the checkpoint a link": link_checkpoint,
    "an older manifest added": add_manifest,
    "a model that the seal does not know": add_model,
    "a manifest of deep brackets": spoil_manifest(b"[" * 100_000),
    "a folder for a manifest": spoil_manifest(b""),
}


@row32
@pytest.mark.parametrize(
    "earlier", [False, True], ids=["sealed now", "sealed by an earlier version"]
)
@pytest.mark.parametrize("name", DAMAGE)
def test_verify_does_not_call_it_whole(copy, capsys, name, earlier):
    if earlier:  # without the manifests
        files = {name: mark for name, mark in read_seal(copy).items() if name not in MANIFESTS}
        (copy / SEAL_FILE).write_bytes(serialize_marks(files))
    assert answered(capsys, ["verify", "RUN"], copy)[0] == 0
    DAMAGE[name](copy)
    if earlier and name in ("the spare manifest deleted", "an older manifest added"):
        return  # that seal cannot tell
    code, told = answered(capsys, ["verify", "RUN"], copy)
    assert (code, "whole" in told) == (1, False), told


@row32
def test_every_file_of_both_commits_is_checked(copy, seen):
    rng, count = random.Random(1), 0
    for path in sorted((copy / "checkpoint").iterdir()):
        whole = path.read_bytes()
        for _ in range(10):
            data = bytearray(whole)
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            assert find_damage(copy)[1], path
            count += 1
        path.write_bytes(whole)
    assert not find_damage(copy)[1]
    seen(f"{count} flips found")


@row32
def test_every_bit_of_the_seal(copy, seen):
    path = copy / SEAL_FILE
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 5):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(BadInput, match=SEAL_FILE):
            read.read_run(copy)
    seen(f"{8 * len(whole) // 5} flips refused")


def edit_accuracy(run):
    rows = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    rows[-1]["accuracy"] = rows[-1]["averaged"] = 0.999
    (run / "rounds.jsonl").write_text(
        "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    )


def edit_seed(run):
    text = (run / "experiment.toml").read_text()
    (run / "experiment.toml").write_text(text.replace("rounds = 3", "rounds = 9"))


def delete(name):
    return lambda run: (run / name).unlink()


def swap(name):
    def swapped(run):
        other = run.parent.parent / "other"
        go(other, what=experiment(3, seed=5))
        shutil.copy(other / name, run / name)

    return swapped


EDITS = {
    "an accuracy edited": edit_accuracy,
    "a setting edited": edit_seed,
    "rounds deleted": delete("rounds.jsonl"),
    "rounds of another run": swap("rounds.jsonl"),
    "the experiment of another run": swap("experiment.toml"),
    "the seal of another run": swap(SEAL_FILE),
}


@row32
@pytest.mark.parametrize("name", EDITS)
def test_nobody_shows_figures_that_were_not_written(copy, capsys, name):
    assert state_in(capsys, copy) == ("finished", "finished", True)
    EDITS[name](copy)
    assert state_in(capsys, copy) == ("damaged", "damaged", False)
    for command in READERS[:4]:
        code, told = answered(capsys, command, copy)
        assert (code, "was changed after it was written" in told) == (2, True), told
    assert answered(capsys, READERS[4], copy)[0] == 1
    code, told = answered(capsys, READERS[5], copy)
    assert code in (1, 2)
    assert "identical" not in told


@row32
def test_an_edit_of_a_run_without_a_seal_is_known_by_its_last_commit(copy, capsys):
    (copy / SEAL_FILE).unlink()
    assert state_in(capsys, copy)[2]
    edit_accuracy(copy)
    assert state_in(capsys, copy) == ("damaged", "damaged", False)
    assert answered(capsys, READERS[0], copy)[0] == 2


@row32
def test_lines_after_the_last_commit_are_not_shown(copy):
    (copy / SEAL_FILE).unlink()
    with open(copy / "rounds.jsonl", "ab") as file:
        file.write(
            (copy / "rounds.jsonl").read_bytes().splitlines()[-1].replace(b'"t":3', b'"t":4')
            + b"\n"
        )
    assert [h.t for h in read.read_run(copy).rounds] == [1, 2, 3]


@row32
@pytest.mark.parametrize(
    "damage", [spoil_manifest(b"[" * 100_000), spoil_manifest(b"")], ids=["brackets", "folder"]
)
def test_a_resume_goes_on_from_the_spare(copy, finished, damage):
    damage(copy)
    if any(path.is_dir() for path in (copy / "checkpoint").iterdir()):
        with pytest.raises(BadInput, match="Is a directory"):
            go(copy, resume=True)
    else:
        go(copy, resume=True)
        assert contents(copy) == contents(finished)
    for path in (copy / "checkpoint").glob("manifest.*"):
        shutil.rmtree(path) if path.is_dir() else path.write_bytes(b"[" * 100_000)
    with pytest.raises(BadInput, match=r"is damaged, and so is its spare|has 3 rounds"):
        go(copy, resume=True)


@row32
@pytest.mark.parametrize(
    "field", ["files", "latest", "rounds", "scalars", "ledger", "roster", "t", "versions"]
)
def test_a_manifest_with_a_hash_of_its_own_and_odd_fields(copy, field):
    for path, _, _ in read_manifests(copy / "checkpoint")[0]:
        body = json.loads(path.read_text())["commit"]
        for odd in (
            None,
            [],
            "../../x",
            -1,
            {"../x": {"bytes": -1, "sha256": "x"}},
            {"a": "../../x"},
        ):
            if type(odd) is type(body[field]) and field in ("scalars", "versions"):
                continue
            made = body | {field: odd}
            sha256 = hashlib.sha256(_canonical_json(made)).hexdigest()
            path.write_text(json.dumps({"sha256": sha256, "commit": made}))
            assert any(path.name in line for line in read_manifests(copy / "checkpoint")[1]), (
                field,
                odd,
            )


@row32
@pytest.mark.parametrize("seed", range(2))
def test_damage_of_all_kinds_is_found(finished, tmp_path, capsys, seed, seen):
    """As `make fuzz` does for longer."""
    rng, count = random.Random(seed), 0
    for _ in range(40):
        run, what = damaged(finished, tmp_path / "runs" / "run", rng)
        code, told = answered(capsys, ["verify", "RUN"], run)
        assert code in (1, 2) or not what, (what, told)
        assert answered(capsys, ["why", "RUN"], run)[0] in (0, 2)
        count += bool(what)
    seen(f"{count} found")


def link_to(target):
    return lambda path: path.symlink_to(target)


PLACES = {
    "a link to /dev/zero": link_to("/dev/zero"),
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a terabyte of zeros": lambda path: (path.touch(), os.truncate(path, 2**40)),
}


@row33
@pytest.mark.parametrize("is_sealed", [True, False], ids=["sealed", "no checksums"])
@pytest.mark.parametrize("name", PLACES)
def test_what_stands_in_a_files_place_is_not_read(copy, capsys, name, is_sealed):
    """Files of a run in turn, under every command: one line, no hang, no memory."""
    files = [
        "experiment.toml",
        "partition.json",
        "rounds.jsonl",
        "model.safetensors",
        "summary.json",
        "lock",
    ]
    if is_sealed:
        files += [SEAL_FILE, MANIFESTS[0]]
    else:
        (copy / SEAL_FILE).unlink()
        shutil.rmtree(copy / "checkpoint")

    def child():
        signal.alarm(300)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for file in files:
            path, aside = copy / file, copy.parent.parent / "aside"
            path.rename(aside)
            PLACES[name](path)
            for command in READERS:
                if (
                    command[0] != "verify" or name != "a terabyte of zeros"
                ):  # it would hash them all
                    assert answered(capsys, command, copy)[0] in (0, 1, 2)
            for command in (["runs", str(copy.parent)], ["watch", str(copy), "--once"]):
                assert answered(capsys, command, copy)[0] == 0
            os.rmdir(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            aside.rename(path)
        assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 500e6

    assert in_child(child) == 0


@row33
@pytest.mark.parametrize("name", ["a link to /dev/zero", "a pipe", "a folder"])
@pytest.mark.parametrize(
    "file", ["rounds.jsonl", "partition.json", "experiment.toml", "summary.json"]
)
def test_a_resume_does_not_read_it_either(copy, name, file):
    (copy / file).unlink()
    PLACES[name](copy / file)
    with pytest.raises(BadInput, match=file):
        go(copy, resume=True)


@row33
@pytest.mark.parametrize(
    "command",
    [
        ["watch", "NAME"],
        ["report", "NAME"],
        ["runs", "NAME"],
        ["verify", "NAME"],
        ["export", "NAME", "--out", "x"],
        ["why", "NAME"],
        ["whatif", "NAME"],
        ["reach", "NAME", "--target", "1"],
        ["compare", "--out", "NAME"],
        ["run", "--out", "NAME"],
        ["doctor", "NAME"],
    ],
    ids=lambda words: words[0],
)
def test_names_that_no_file_can_have(capsys, command):
    for name in ("x" * 300, "a\0b"):
        assert main([name if word == "NAME" else word for word in command]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert PATH_TYPE.convert("fine", None, None) == Path("fine")


@row33
@pytest.mark.parametrize("place", ["/", ".", "..", "runs"])
def test_a_page_that_would_replace_a_folder(copy, capsys, place, monkeypatch):
    monkeypatch.chdir(copy.parent.parent)
    code, told = answered(capsys, ["report", "RUN", "--out", place], copy)
    assert (code, "is a folder; name another file" in told) == (2, True), told


def modes(folder):
    return {
        stat.S_IMODE(path.lstat().st_mode)
        for path in [folder, *folder.rglob("*")]
        if path.name != "report.html"
    }


@row36
def test_a_run_directory_is_its_owners_alone(tmp_path, capsys):
    before = os.umask(0o022)
    try:
        go(tmp_path / "new" / "a")
        small = ["--set", "rounds=1", "--set", "clients=4", "--set", "per_round=2"]
        assert (
            main(
                ["compare", *small, "--recipes", "fedavg", "--out", str(tmp_path / "new" / "both")]
            )
            == 0
        )
        assert modes(tmp_path / "new") == {0o700, 0o600}
        assert stat.S_IMODE((tmp_path / "new" / "both" / "report.html").stat().st_mode) == 0o644
        for path in (tmp_path / "new" / "a").rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)  # as an earlier version left it
        go(tmp_path / "new" / "a", resume=True, what=experiment(4))
        ledgers = [tmp_path / "new" / "a" / name for name in (*SEALED_FILES, SEAL_FILE, "lock")]
        assert {stat.S_IMODE(path.stat().st_mode) for path in ledgers if path.exists()} == {0o600}
    finally:
        os.umask(before)


@row36
def test_jobs_are_not_loaded_from_a_folder_that_others_can_write_to(tmp_path, monkeypatch):
    make_folder(tmp_path / "out" / "running")
    assert prepare_jobs_folder(tmp_path / "out" / "running").is_dir()
    for place in ("out", "out/running", "out/running/jobs"):
        for mode in (0o770, 0o707, 0o777):
            (tmp_path / place).chmod(mode)
            with pytest.raises(BadInput, match="chmod go-w"):
                prepare_jobs_folder(tmp_path / "out" / "running")
        (tmp_path / place).chmod(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with pytest.raises(BadInput, match="symbolic link"):
        refuse_writable_by_others(tmp_path / "link")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    make_folder(tmp_path / "open" / "out")
    with pytest.raises(BadInput, match="every user can write to"):
        refuse_writable_by_others(tmp_path / "open" / "out")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(BadInput, match="belongs to another user"):
        refuse_writable_by_others(tmp_path / "out")


def test_reading_stops_at_the_limit(tmp_path):
    write_atomically(tmp_path / "a", b"12345")
    assert read_limited(tmp_path / "a", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_limited(tmp_path / "a", 4)
