"""Rows 1, 2, 21, 22, 26, 27: the disk tells the truth, whatever happened to the process or to the
files.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
import time

import pytest
from harness import DATA, ENGINE, KILLED, contents, experiment, go, in_child, places, same

from flrce.errors import BadInput
from flrce.methods.catalogue.recipes import CATALOGUE
from flrce.simulation import runs
from flrce.storage import manifest


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The undisturbed run: its bytes, and every step of its journal."""
    folder = tmp_path_factory.mktemp("reference")
    record = folder / "steps.txt"
    assert in_child(lambda: go(folder / "run"), f"record:{record}") == 0
    return folder / "run", contents(folder / "run"), places(record)


def found(folder):
    """The manifests, newest first."""
    readable, problems = manifest.read_manifests(folder / "checkpoint")
    assert not problems
    return readable


@pytest.mark.row(1, "SIGKILL at every journal step", "BIT after --resume")
def test_killed_at_every_step(reference, tmp_path, seen):
    _, wanted, steps = reference
    assert len(steps) > 80
    assert {step.partition(":")[0] for step in steps} >= {
        "aside.opened",
        "aside.written",
        "aside.synced",
        "aside.renamed",
        "lines.opened",
        "lines.cut",
        "lines.written",
        "lines.synced",
        "round.done",
        "round.committed",
        "commit.ready",
        "commit.done",
        "commit.swept",
    }
    for step in steps:
        folder = tmp_path / step.replace(":", "-")
        assert in_child(lambda folder=folder: go(folder), step) == KILLED, step
        go(folder, resume=True)
        same(folder, wanted)
        shutil.rmtree(folder)
    seen(f"{len(steps)} steps, all BIT")


@pytest.mark.row(1, "SIGKILL while resuming, then again", "BIT after --resume")
def test_killed_while_resuming(reference, tmp_path, seen):
    """Killed in round 3 and then at every step of the resumption: opening, cutting, replaying,
    finishing.
    """
    _, wanted, _ = reference
    half, record = tmp_path / "half", tmp_path / "steps.txt"
    assert in_child(lambda: go(half), "commit.ready:3") == KILLED
    once = tmp_path / "once"
    shutil.copytree(half, once)
    assert in_child(lambda: go(once, resume=True), f"record:{record}") == 0
    steps = places(record)
    for step in steps:
        folder = tmp_path / step.replace(":", "-")
        shutil.copytree(half, folder)
        assert in_child(lambda folder=folder: go(folder, resume=True), step) == KILLED, step
        go(folder, resume=True)
        same(folder, wanted)
        shutil.rmtree(folder)
    seen(f"{len(steps)} steps, all BIT")


@pytest.mark.row(1, "SIGKILL in round 3, every recipe of the catalogue", "BIT after --resume")
@pytest.mark.parametrize(
    "name", [name for name in CATALOGUE if name != "ffa-lora"]
)  # wants adapters: tests/methods/test_lora.py
def test_every_recipe_resumes(tmp_path, name):
    """What each piece remembers survives: only rows that a round touched are ever written."""
    epochs = 2 if name == "fedrep" else 1  # one for the body, one for the head
    what = experiment(
        rounds=5, recipe={"name": name}, clients=9, per_round=6, train={"epochs": epochs}
    )
    go(tmp_path / "straight", what=what)
    assert in_child(lambda: go(tmp_path / "run", what=what), "commit.ready:3") == KILLED
    go(tmp_path / "run", True, what)
    same(tmp_path / "run", contents(tmp_path / "straight"))


@pytest.mark.row(2, "SIGKILL during the checkpoint's write", "old manifest valid, BIT")
def test_killed_in_the_write(reference, tmp_path):
    _, wanted, _ = reference
    folder = tmp_path / "run"
    assert in_child(lambda: go(folder), "commit.ready:2") == KILLED
    assert [commit.t for _, commit, _ in found(folder)] == [1]
    go(folder, resume=True)
    same(folder, wanted)


@pytest.mark.row(21, "truncated or bit-flipped checkpoint or ledger", "spare used, BIT")
@pytest.mark.parametrize("damage", ["truncate", "flip-first", "flip-middle", "flip-last", "remove"])
def test_damage_to_the_newest_commit(reference, tmp_path, damage, caplog, seen):
    """Every file that only the newest manifest needs, the manifest itself, and the ledger's last
    line.
    """
    folder, wanted, _ = reference
    (path, newest, _), (_, spare, _) = found(folder)
    assert (newest.t, spare.t) == (3, 2)
    names = [f"checkpoint/{name}" for name in newest.files if name not in spare.files] + [
        f"checkpoint/{path.name}"
    ]
    for name in [*names, "rounds.jsonl", "clients.jsonl"]:
        ledger = name.endswith("jsonl")
        if ledger and damage in ("flip-first", "flip-middle", "remove"):
            continue  # below: that is damage to what the spare needs too
        copy = tmp_path / "run"
        shutil.copytree(folder, copy)
        hurt(copy / name, damage)
        caplog.clear()
        go(copy, resume=True)
        if damage != "remove" or "manifest" not in name:
            assert "previous commit" in caplog.text
        same(copy, wanted)
        shutil.rmtree(copy)
    seen(f"{len(names) + 2} files, spare used, BIT")


@pytest.mark.row(21, "damage beyond the spare", "HALT, one line, disk unchanged")
def test_damage_beyond_the_spare(reference, tmp_path, seen):
    folder, _, _ = reference
    shared = [name for name in found(folder)[1][1].files if "000001" in name]
    for names in [
        ["checkpoint/" + shared[0]],
        ["rounds.jsonl"],
        [f"checkpoint/{name}" for name in manifest.MANIFEST_FILES],
    ]:
        copy = tmp_path / "run"
        shutil.copytree(folder, copy)
        for name in names:
            hurt(copy / name, "flip-first")
        before = {
            p: p.read_bytes() for p in sorted(copy.rglob("*")) if p.is_file() and p.name != "lock"
        }
        began = time.process_time()
        with pytest.raises(BadInput, match="is damaged, and so is its spare") as why:
            go(copy, resume=True)
        assert time.process_time() - began < 5
        assert "\n" not in str(why.value)
        assert before == {
            p: p.read_bytes() for p in sorted(copy.rglob("*")) if p.is_file() and p.name != "lock"
        }
        shutil.rmtree(copy)
    seen("HALT, names the file")


@pytest.mark.row(21, "checkpoint folder gone", "HALT, ledger untouched")
def test_a_missing_checkpoint_does_not_wipe_the_ledger(reference, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(reference[0], copy)
    shutil.rmtree(copy / "checkpoint")
    with pytest.raises(BadInput, match="has 3 rounds but checkpoint/ has none"):
        go(copy, resume=True)
    assert (copy / "rounds.jsonl").read_bytes() == reference[1]["rounds.jsonl"]


def hurt(path, damage):
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(data[: len(data) - 7])
    else:
        data[
            {"flip-first": 3, "flip-middle": len(data) // 2, "flip-last": len(data) - 5}[damage]
        ] ^= 4
        path.write_bytes(data)


@pytest.mark.row(
    22,
    "write fails at every journal step (ENOSPC, EIO, EROFS)",
    "HALT, last commit intact, then BIT",
)
def test_every_write_fails_once(reference, tmp_path, seen):
    _, wanted, steps = reference
    writes = [s for s in steps if not s.startswith(("round", "commit"))]
    for i, step in enumerate(writes):
        action = ("ENOSPC", "EIO", "EROFS")[i % 3]
        folder, log = tmp_path / "run", tmp_path / "log"
        assert in_child(lambda folder=folder: go(folder), f"{step}:{action}", log) == 2, step
        line = log.read_text().strip()
        assert os.strerror(getattr(errno, action)) in line
        assert "--resume" in line
        assert "\n" not in line
        go(folder, resume=True)
        same(folder, wanted)
        shutil.rmtree(folder)
        log.unlink()
    seen(f"{len(writes)} writes, all HALT then BIT")


@pytest.mark.row(22, "a disk that is really full", "HALT, last commit intact, then BIT")
def test_a_full_disk(reference, tmp_path, seen):
    """A tmpfs of a few hundred kB fills up in mid-run; once it is larger, the run goes on."""
    _, wanted, _ = reference
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)], capture_output=True
    ).returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        stops = []
        for size in range(64, 400, 24):
            subprocess.run(["mount", "-o", f"remount,size={size}k", str(mount)], check=True)
            began = (mount / "run").exists()
            code = in_child(
                lambda began=began: go(mount / "run", resume=began), log=tmp_path / "log"
            )
            if code == 0:
                break
            assert code == 2, (tmp_path / "log").read_text()
            assert "No space left on device" in (tmp_path / "log").read_text()
            stops.append(size)
        assert code == 0
        assert len(stops) >= 2
        same(mount / "run", wanted)
    finally:
        subprocess.run(["umount", str(mount)], check=True)
    seen(f"full at {stops} kB, then BIT")


@pytest.mark.row(22, "read-only file system", "HALT, disk unchanged")
def test_a_read_only_disk(reference, tmp_path):
    mount = tmp_path / "fixed"
    mount.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", str(mount)], capture_output=True
    ).returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        shutil.copytree(reference[0], mount / "run")
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        with pytest.raises(BadInput, match="Read-only file system"):
            go(mount / "run", resume=True)
        same(mount / "run", reference[1])
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.row(26, "two servers on one state folder", "the second HALTs naming the first")
def test_two_servers(tmp_path, seen):
    code = (
        "import sys, time; from pathlib import Path; from flrce.storage.disk import FolderLock;"
        " FolderLock(Path(sys.argv[1]));print('held', flush=True); time.sleep(60)"
    )
    (tmp_path / "run").mkdir()
    lock = tmp_path / "run" / "lock"
    first = subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE, text=True
    )
    try:
        # the object is dropped at once, so hold the lock by the open handle of the process itself
        assert first.stdout is not None
        assert first.stdout.readline().strip() == "held"
        with pytest.raises(BadInput, match=f"in use by process {first.pid} on "):
            go(tmp_path / "run")
        assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["lock"]
    finally:
        first.kill()
        first.wait()
    go(tmp_path / "run")
    seen(f"HALT naming process {first.pid}; free again after its death")


@pytest.mark.row(
    26, "lock file deleted and the folder taken over", "the stale owner stops before its commit"
)
def test_fencing(reference, tmp_path):
    folder, kept = tmp_path / "run", {}

    def steal(done):
        if done.record.t == 1:
            (folder / "lock").unlink()
            kept["other"] = runs.Ledger(folder, experiment().to_toml(), {}, resume=True)

    with pytest.raises(BadInput, match="taken over by process"):
        runs.run(experiment(), folder, data=DATA, watch=steal)
    kept["other"].close()
    assert not (folder / "summary.json").exists()
    assert found(folder)[0][1].t == 1
    go(folder, resume=True)
    same(folder, reference[1])


@pytest.mark.row(26, "server killed while a worker lives on", "its folder is free at once")
def test_orphans_hold_no_lock(tmp_path):
    """A worker forked while the lock is held must not keep it."""
    from flrce.storage.disk import FolderLock

    def hold():
        lock = FolderLock(tmp_path / "lock")
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        assert lock.handle >= 0
        os.kill(os.getpid(), 9)

    assert in_child(hold) == KILLED
    FolderLock(tmp_path / "lock").close()


@pytest.mark.row(27, "resume with another configuration", "refused, difference shown")
def test_another_configuration(reference, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(reference[0], copy)
    with pytest.raises(BadInput, match=r"train\.lr 0\.1 -> 0\.2") as why:
        go(copy, True, experiment(train={"epochs": 1, "lr": 0.2}))
    assert "\n" not in str(why.value)
    go(copy, True, experiment(engine={**ENGINE, "workers": 2}))  # changes no result
    same(copy, reference[1] | {"experiment.toml": (copy / "experiment.toml").read_bytes()})


@pytest.mark.row(27, "resume with other data", "refused")
def test_other_data(reference, tmp_path):
    from dataclasses import replace

    copy = tmp_path / "run"
    shutil.copytree(reference[0], copy)
    x = DATA.x.copy()
    x.reshape(-1)[5] += 1
    with pytest.raises(BadInput, match=r"other data .digest differ"):
        runs.run(experiment(), copy, True, data=replace(DATA, x=x))


@pytest.mark.row(27, "resume with other versions", "warned")
def test_other_versions(reference, tmp_path, caplog):
    copy = tmp_path / "run"
    shutil.copytree(reference[0], copy)
    path, commit, _ = found(copy)[0]
    commit.versions["torch"] = "1.0.0"
    path.write_bytes(manifest.serialize_commit(commit))
    go(copy, resume=True)
    assert "other versions (torch 1.0.0 -> " in caplog.text


@pytest.mark.row(27, "a manifest of a later schema", "HALT")
def test_a_later_schema(reference, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(reference[0], copy)
    path = found(copy)[0][0]
    body = json.loads(path.read_text())["commit"] | {"schema": 4}
    data = manifest._canonical_json(body)
    import hashlib

    path.write_text(json.dumps({"sha256": hashlib.sha256(data).hexdigest(), "commit": body}))
    with pytest.raises(BadInput, match="has schema 4, this version reads 3"):
        go(copy, resume=True)
