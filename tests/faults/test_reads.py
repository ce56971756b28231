"""Row 33: files that are no files, that have no end, or that grow when they are unpacked."""

import gzip
import hashlib
import json
import os
import resource
import socket
import time

import numpy as np
import pytest
from harness import in_child

from flrce.cli.cli import main
from flrce.core import files
from flrce.data import cache
from flrce.data.readers import DATASET_READERS, read_dataset
from flrce.data.user import from_path
from flrce.devices import carbon, costs, traces
from flrce.errors import BadInput
from flrce.formats.language import open_language_model
from flrce.formats.plain_pickle import load_plain_pickle

row33 = pytest.mark.row(33, "devices, pipes, endless and packed files", "one line, < 2 s, < 500 MB")
NOT_FILES = ("device", "pipe", "socket", "folder", "proc")


def put(path, kind):
    """Something that is no regular file at a path, or one of unknown size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's name may have 107 characters only
        socket.socket(socket.AF_UNIX).bind(path.name)
        os.chdir(here)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/proc/self/pagemap")  # a regular file of 0 bytes that holds 256 GB
    return path


def refuses(work, match=""):
    """Runs in a child: one line, in little time and memory."""

    def child():
        limit = 4 << 30
        resource.setrlimit(resource.RLIMIT_AS, (limit + (64 << 30), limit + (64 << 30)))
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        with pytest.raises(BadInput, match=match) as refused:
            work()
        assert "\n" not in str(refused.value)
        assert time.process_time() - began < 5
        assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 500e6

    assert in_child(child) == 0


SINGLE = {
    "csv": ("mine.csv", from_path),
    "tsv": ("mine.tsv", from_path),
    "jsonl": ("mine.jsonl", from_path),
    "parquet": ("mine.parquet", from_path),
    "npz": ("mine.npz", from_path),
    "leaf": ("mine.json", from_path),
    "carbon": ("c.csv", lambda path: carbon.load_intensities(str(path))),
    "carbon npz": ("c.npz", lambda path: carbon.load_intensities(str(path))),
    "clients": ("c.csv", lambda path: costs.read_device_assignments(str(path))),
    "trace": ("t.csv", lambda path: traces.load_sessions(str(path))),
    "profile": ("p.toml", lambda path: costs.load_profile(str(path))),
    "GGUF": ("m.gguf", open_language_model),
    "text": ("t.jsonl.gz", lambda path: list(files.read_lines(path, 1 << 30, "give text"))),
}


@row33
@pytest.mark.parametrize("kind", ["device", "pipe", "socket", "proc"])
@pytest.mark.parametrize("name", SINGLE)
def test_what_is_no_file_is_refused(name, kind, tmp_path):
    file, work = SINGLE[name]
    path = put(tmp_path / file, kind)
    refuses(lambda: work(path), "" if kind == "proc" else "not a regular file")


#: files inside a folder that somebody else made -> who reads them
INSIDE = {
    "client's csv": ("a/train.csv", from_path),
    "client's npz": ("a.npz", from_path),
    "client's parquet": ("a.parquet", from_path),
    "image": ("cats/a.png", from_path),
    "LEAF": ("all_data/a.json", from_path),
    "meta.json": ("meta.json", cache.load_prepared),
    "csv of carbon": ("a.csv", lambda path: carbon.load_intensities(str(path))),
    "config": ("config.json", open_language_model),
    "mnist": ("train-images-idx3-ubyte", lambda path: read_dataset("mnist", path)),
    "mnist, packed": ("train-images-idx3-ubyte.gz", lambda path: read_dataset("mnist", path)),
    "hospitals": ("processed.cleveland.data", lambda path: read_dataset("fed-heart", path)),
    "plays": ("a.txt", lambda path: read_dataset("shakespeare", path)),
    "speech": ("yes/abc_nohash_0.wav", lambda path: read_dataset("speech", path)),
}


@row33
@pytest.mark.parametrize("kind", ["device", "pipe"])
@pytest.mark.parametrize("name", INSIDE)
def test_folders_that_hold_no_files(name, kind, tmp_path):
    file, work = INSIDE[name]
    folder = tmp_path / "folder"
    put(folder / file, kind)
    if name.startswith("mnist"):
        (folder / "train-labels-idx1-ubyte").write_bytes(b"")
    refuses(lambda: work(folder))


@row33
def test_every_public_reader_is_named_here():
    """A reader that is added has to be attacked, too; those of images and pickles open files in one
    place each.
    """
    known = {"mnist", "fed-heart", "shakespeare", "speech"}
    same = {"fashion-mnist", "femnist", "shakespeare-tokens", "images", "cifar10", "cifar100"}
    assert set(DATASET_READERS) == known | same


@row33
@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.parametrize(
    "key", ["data.path", "fleet.carbon", "fleet.clients", "fleet.availability.path"]
)
def test_on_the_command_line(key, kind, tmp_path, capfd):
    path = put(tmp_path / "mine.csv", kind)
    values = [f"{key}={path}"]
    if key == "fleet.availability.path":
        values = [f'fleet.availability={{piece="trace", path="{path}"}}']
    words = [word for value in values for word in ("--set", value)]
    assert in_child(lambda: os._exit(main(["run", "--set", "rounds=1", *words]))) == 2
    told = capfd.readouterr().err
    assert "Traceback" not in told
    assert (
        len([line for line in told.splitlines() if "error" in line.lower() or str(path) in line])
        >= 1
    )


@row33
@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_an_experiment_that_is_no_file(kind, tmp_path, capfd):
    path = put(tmp_path / "mine.toml", kind)
    assert in_child(lambda: os._exit(main(["run", str(path)]))) == 2
    assert "not a regular file" in capfd.readouterr().err


@row33
def test_packed_lines_that_grow(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    with gzip.open(path, "wb") as file:
        for i in range(260):
            file.write(b"\n" * (1 << 20) if i % 2 else (b" " * 1023 + b"\n") * 1024)
    assert path.stat().st_size < 2e6
    refuses(lambda: next(files.read_lines(path, 4 << 30, "give text")), "would unpack to 0.3 GB")
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"[" * (17 << 20))
    refuses(lambda: list(files.read_lines(path, 4 << 30, "give text")), "line 1 has more than")


@row33
@pytest.mark.parametrize("size", [5 << 30, 1 << 42])
@pytest.mark.parametrize(
    "name", [name for name in SINGLE if name not in ("npz", "carbon npz", "GGUF", "parquet")]
)
def test_sparse_files(name, size, tmp_path):
    """Terabytes that take no room on the disk."""
    file, work = SINGLE[name]
    path = tmp_path / file
    with open(path, "wb") as sparse:
        sparse.truncate(size)
    refuses(lambda: work(path), "bytes")


@row33
def test_memory_is_asked_before_it_is_taken(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    with open(path, "wb") as sparse:
        sparse.truncate(1 << 30)
    monkeypatch.setattr(files, "get_available_memory", lambda: 4 << 30)
    refuses(lambda: from_path(path), "GB can be used here")


@row33
def test_pickles_that_grow():
    assert load_plain_pickle(b"\x80\x02}r\xff\xff\xff\x7f.") == {}  # a memo of 2^31 entries
    assert load_plain_pickle(b"}p2000000000\n.") == {}
    nested = b"".join(
        b"q%ch%c\x86" % (i, i) for i in range(60)
    )  # ((1, 1), (1, 1)) and so on, 2^60 ones to hash
    with pytest.raises(ValueError, match="for a key"):
        load_plain_pickle(b"\x80\x02}(K\x01K\x01\x86" + nested + b"K\x01u.")
    with pytest.raises(ValueError, match="no complete pickle of plain"):
        load_plain_pickle(b"\x80\x04\x8f.")  # a set


@row33
def test_one_list_that_many_clients_name(tmp_path, monkeypatch):
    path = tmp_path / "t.pkl"
    pairs = b"(" + b"K\x01" * 1000 + b"l"
    many = b"".join(b"X\x04\x00\x00\x00" + b"%04d" % i + b"h\x01" for i in range(2000))
    keys = (
        b"}(X\x06\x00\x00\x00active"
        + pairs
        + b"q\x00X\x08\x00\x00\x00inactiveh\x00X\x0b\x00\x00\x00finish_timeK\x09u"
    )
    path.write_bytes(b"\x80\x02}(X\x01\x00\x00\x00a" + keys + b"q\x01" + many + b"u.")
    monkeypatch.setattr(files, "get_available_memory", lambda: 300 << 20)
    with pytest.raises(BadInput, match="give fewer clients"):
        traces.load_sessions(str(path))


@row33
def test_a_prepared_array_that_is_a_zip_file(tmp_path):
    from flrce.data.sources import read_digits

    folder = cache.write_prepared(read_digits(), tmp_path / "digits")
    np.savez(tmp_path / "x.npz", x=np.zeros(3))
    (folder / "x.npy").write_bytes((tmp_path / "x.npz").read_bytes())
    meta = cache.DatasetMetadata.model_validate(json.loads((folder / cache.META_FILE).read_bytes()))
    entry = cache._save_array(tmp_path / "other.npy", np.zeros(1))
    raw = (folder / "x.npy").read_bytes()
    entry = entry.model_copy(update={"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()})
    sealed = meta.model_copy(update={"files": {**meta.files, "x.npy": entry}}).with_seal()
    (folder / cache.META_FILE).write_text(sealed.to_json_text())
    with pytest.raises(BadInput, match=r"no plain \.npy"):
        cache.load_prepared(folder)


def run_command(*words):
    def child():
        resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30))
        code = main([str(word) for word in words])
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        os._exit(code if peak < 3e9 else 99)

    return in_child(child)


@row33
def test_a_meter_without_end(tmp_path, capfd):
    meter = put(tmp_path / "joules", "device")
    assert run_command("profile", "--meter", meter, "--out", tmp_path / "p.toml") == 2
    assert "is not a regular file" in capfd.readouterr().err
    huge = tmp_path / "huge"
    with open(huge, "wb") as file:
        file.truncate(1 << 42)
    assert run_command("profile", "--meter", huge, "--out", tmp_path / "p.toml") == 2


@row33
@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_certificates_without_end(kind, tmp_path, capfd):
    folder = tmp_path / "tls"
    put(folder / "ca.pem", kind)
    assert run_command("doctor", "--tls", folder) == 2
    assert "not a regular file" in capfd.readouterr().err


@row33
@pytest.mark.parametrize("name", ["address", "ca.pem"])
def test_a_servers_files_without_end(name, tmp_path, capfd):
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "address").write_text("here:9092\n")
    (folder / name).unlink(missing_ok=True)
    put(folder / name, "device")
    command = ["deploy", "device", tmp_path / "device", "--server", folder, "--node", 1]
    assert run_command(*command) == 2
    assert "not a regular file" in capfd.readouterr().err


DEEP_TOML = {
    "table": "[a" + ".a" * 60_000 + "]",
    "key": "a" + ".a" * 60_000 + " = 1",
    "quoted": '"a,"' + '."a,"' * 60_000 + " = 1",
    "inline": "x = {" + "a" + ".a" * 60_000 + " = 1}",
    "after a comment": '# """\n[a' + ".a" * 60_000 + "]",
    "after a string": 'x = {p = """\n\' """, a' + ".a" * 60_000 + " = 1}",
    "brackets": "x = " + "[" * 200_000,
    "braces": "x = {a = " * 50_000,
}


@row33
@pytest.mark.parametrize("name", DEEP_TOML)
def test_deep_keys_and_brackets(name):
    """Keys of many parts took the parser quadratic time: 120 kB half a minute."""
    began = time.process_time()
    with pytest.raises(ValueError, match=r"dots|too deep|Invalid|Expected"):
        files.parse_toml(DEEP_TOML[name])
    assert time.process_time() - began < 2


@row33
def test_text_with_dots_is_no_deep_key():
    text = 'x = "' + "a. " * 200 + '"\ny = [' + "0.5, " * 200 + "]\n# " + "a." * 200
    assert files.parse_toml(text)["y"] == [0.5] * 200


@row33
def test_a_rule_of_deep_brackets(tmp_path, capfd):
    run = tmp_path / "run"
    sizes = [word for key in ("rounds=2", "clients=6", "per_round=2") for word in ("--set", key)]
    assert main(["run", "--out", str(run), *sizes]) == 0
    capfd.readouterr()
    deep = '{ piece = "patience", x = ' + "[" * 3000 + " }"
    assert main(["whatif", str(run), "--stop", deep]) == 2
    assert capfd.readouterr().err.count("\n") == 1
