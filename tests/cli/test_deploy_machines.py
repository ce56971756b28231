"""What flrce deploy server and device write: units that systemd accepts, certificates that verify,
keys that only their owner reads.
"""

import re
import shutil
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="comes with flrce[flower]")

from cryptography.hazmat.primitives import serialization

from flrce.cli.cli import main

PREFIX = str(Path(sys.executable).parent.parent)


@pytest.fixture
def fleet(tmp_path):
    server, device = tmp_path / "server", tmp_path / "pi"
    told = ["--prefix", PREFIX, "--place", str(tmp_path / "there")]
    assert main(["deploy", "server", str(server), "--address", "10.0.0.5", *told]) == 0
    assert (
        main(["deploy", "device", str(device), "--server", str(server), "--node", "3", *told]) == 0
    )
    return server, device


def test_nothing_is_left_to_fill_in(fleet):
    for folder in fleet:
        for path in folder.rglob("*"):
            if path.is_file():
                assert not re.search(r"@[a-z]+@", path.read_text()), path
    server, device = fleet
    assert "10.0.0.5:8000" in (device / "flrce-supernode.service").read_text()
    assert (
        'partition-id=3 client-id=\\"device-3\\"'
        in (device / "flrce-supernode.service").read_text()
    )
    assert (server / "keys" / "device-3.pub").read_text() == (device / "node.pub").read_text()


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl here")
def test_the_certificate_names_the_address_and_verifies(fleet):
    server, device = fleet
    authority, made = device / "ca.pem", server / "server.pem"
    told = subprocess.run(
        ["openssl", "verify", "-CAfile", authority, "-verify_ip", "10.0.0.5", made],
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    other = subprocess.run(
        ["openssl", "verify", "-CAfile", authority, "-verify_ip", "10.0.0.6", made],
        capture_output=True,
    )
    assert other.returncode != 0
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, server / "server.key")  # the key is the certificate's


def test_a_host_name_is_a_dns_name(tmp_path):
    assert main(["deploy", "server", str(tmp_path / "s"), "--address", "fl.example.org"]) == 0
    seen = ssl._ssl._test_decode_cert(str(tmp_path / "s" / "server.pem"))
    assert seen["subjectAltName"] == (("DNS", "fl.example.org"),)


def test_keys_are_secret_and_of_flowers_kind(fleet):
    server, device = fleet
    for path in (server / "ca.key", server / "server.key", device / "node.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = serialization.load_ssh_private_key((device / "node.key").read_bytes(), None)
    assert key.curve.name == "secp384r1"
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    assert (device / "node.pub").read_text().split()[:2] == public.decode().split()
    assert main(["doctor", "--tls", str(server)]) == 0


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
@pytest.mark.skipif(
    not (Path(PREFIX) / "bin" / "flower-superlink").exists(), reason="Flower is not installed here"
)
def test_systemd_accepts_the_units(fleet):
    units = [path for folder in fleet for path in folder.glob("*.service")]
    assert len(units) == 3
    for unit in units:
        told = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
        ours = [line for line in told.stderr.splitlines() if unit.name in line]
        assert not ours, told.stderr


def test_scripts_and_container_files_are_well_formed(fleet):
    server, device = fleet
    assert subprocess.run(["sh", "-n", server / "enrol.sh"]).returncode == 0
    yaml = pytest.importorskip("yaml")
    for folder, service in ((server, "superlink"), (device, "supernode")):
        told = yaml.safe_load((folder / "compose.yaml").read_text())["services"][service]
        assert told["restart"] == "on-failure"
        assert "\n" not in told["command"].strip()
        assert (folder / "Containerfile").read_text().count("FROM ") == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--address", "10.0.0.5; rm -rf /"], "an address or a host name"),
        (["--address", "10.0.0.5", "--place", "etc/flrce"], "an absolute path without spaces"),
        (["--address", "10.0.0.5", "--prefix", "/opt/my env"], "an absolute path without spaces"),
        (["--address", "10.0.0.5", "--user", "a b"], "letters, digits"),
    ],
)
def test_what_a_unit_cannot_hold_is_refused(tmp_path, capsys, more, said):
    assert main(["deploy", "server", str(tmp_path / "s"), *more]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_nothing_is_overwritten_and_a_server_is_needed(fleet, tmp_path, capsys):
    server, _ = fleet
    before = (server / "ca.key").read_text()
    assert main(["deploy", "server", str(server), "--address", "10.0.0.5"]) == 2
    assert "overwrites no file" in capsys.readouterr().err
    assert (server / "ca.key").read_text() == before
    told = [
        "deploy",
        "device",
        str(tmp_path / "d"),
        "--node",
        "1",
        "--server",
        str(tmp_path / "no"),
    ]
    assert main(told) == 2
    assert "name the folder that flrce deploy server wrote" in capsys.readouterr().err
