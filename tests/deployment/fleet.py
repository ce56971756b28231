"""A real Flower deployment on this machine's loopback: one SuperLink, some SuperNodes, and `flwr`
to drive it.
"""

import datetime
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
APP = ROOT / "examples" / "flower-app"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Fleet:
    """Started processes, all bound to 127.0.0.1; `close` ends exactly those."""

    def __init__(
        self, folder: Path, tls: bool = False, authenticate: bool = False, database: bool = False
    ) -> None:
        self.folder, self.tls, self.authenticate = folder, tls, authenticate
        self.home, self.port = folder / "home", free_port()
        self.home.mkdir(parents=True)
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        secure = self._certificates() if tls else []
        connection = f'root-certificates = "{folder}/ca.pem"' if tls else "insecure = true"
        (self.home / "config.toml").write_text(
            '[superlink]\ndefault = "test"\n\n[superlink.test]\naddress ='
            f' "127.0.0.1:{self.port}"\n{connection}\n'
        )
        self.link = [
            "flower-superlink",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--disable-runtime-dependency-installation",
            *(secure or ["--insecure"]),
            *(["--enable-supernode-auth"] if authenticate else []),
            *(["--database", str(folder / "link.db")] if database else []),
        ]
        self.start_link()

    def start_link(self) -> None:
        self._start("link", self.link)
        self._until(self._listening, 120, "the SuperLink to listen")

    def node(self, partition: int) -> None:
        """Start the SuperNode of a partition."""
        trust = ["--root-certificates", str(self.folder / "ca.pem")] if self.tls else ["--insecure"]
        key = (
            ["--auth-supernode-private-key", str(self._key(partition))] if self.authenticate else []
        )
        self._start(
            f"node{partition}",
            [
                "flower-supernode",
                "--superlink",
                f"127.0.0.1:{self.port}",
                "--host",
                "127.0.0.1",
                "--port",
                str(free_port()),
                "--node-config",
                f"partition-id={partition} num-partitions=3",
                *trust,
                *key,
            ],
        )

    def stranger(self) -> None:
        """Start a SuperNode without a key."""
        self._start(
            "stranger",
            [
                "flower-supernode",
                "--superlink",
                f"127.0.0.1:{self.port}",
                "--host",
                "127.0.0.1",
                "--port",
                str(free_port()),
                "--root-certificates",
                str(self.folder / "ca.pem"),
            ],
        )

    def kill(self, name: str) -> None:
        """kill -9 a process and all it started."""
        process = self.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def run(self, config: str, app: Path = APP) -> str:
        """`flwr run`; returns the run's id."""
        out = self.flwr("run", str(app), "test", "--run-config", config, "--format", "json")
        return str(json.loads(out)["run-id"])

    def status(self, run: str) -> str:
        found = json.loads(self.flwr("list", "test", "--run-id", run, "--format", "json"))
        return str(found["runs"][0]["status"])

    def finish(self, run: str, seconds: float = 400) -> str:
        """Wait for the run's end; returns its status, with the ServerApp's log where it is not a
        good one.
        """
        self._until(
            lambda: self.status(run).startswith("finished"),
            seconds,
            f"run {run} to finish",
            every=2,
        )
        status = self.status(run)
        return (
            status
            if status == "finished:completed"
            else f"{status}\n{self.flwr('log', run, 'test', '--show')}"
        )

    def flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            ["flwr", *arguments], env=self.environment, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, f"flwr {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    def logs(self) -> str:
        return "\n".join(
            path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log"))
        )

    def serverapps(self) -> list[int]:
        """Process ids of ServerApps that this fleet's SuperLink started."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                command, environment = (
                    (path / "cmdline").read_bytes(),
                    (path / "environ").read_bytes(),
                )
            except OSError:
                continue
            if b"flwr-serverapp" in command and str(self.home).encode() in environment:
                found.append(int(path.name))
        return found

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)

    def _start(self, name: str, command: list[str]) -> None:
        with open(self.folder / f"{name}.log", "ab") as out:
            self.processes[name] = subprocess.Popen(
                command,
                env=self.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _listening(self) -> bool:
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0

    def _until(self, true, seconds: float, what: str, every: float = 0.3) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, f"waited {seconds:g} s for {what}\n{self.logs()[-6000:]}"
            time.sleep(every)

    def _key(self, partition: int) -> Path:
        """A key for node authentication (ECDSA P-384), registered with the SuperLink."""
        path = self.folder / f"key{partition}"
        if path.exists():
            return path
        key = ec.generate_private_key(ec.SECP384R1())
        form = serialization.PrivateFormat.OpenSSH
        path.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        )
        public = serialization.PublicFormat.OpenSSH
        path.with_suffix(".pub").write_bytes(
            key.public_key().public_bytes(serialization.Encoding.OpenSSH, public)
        )
        self.flwr("supernode", "register", str(path.with_suffix(".pub")), "test")
        return path

    def _certificates(self) -> list[str]:
        """A certificate for 127.0.0.1 signed by an authority of our own."""
        authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        _sign(self.folder / "ca.pem", "test authority", authority, authority, None)
        _sign(
            self.folder / "server.pem",
            "127.0.0.1",
            server,
            authority,
            ipaddress.ip_address("127.0.0.1"),
        )
        form = serialization.PrivateFormat.PKCS8
        (self.folder / "server.key").write_bytes(
            server.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        )
        names = {
            "--ssl-ca-certfile": "ca.pem",
            "--ssl-certfile": "server.pem",
            "--ssl-keyfile": "server.key",
        }
        return [part for flag, name in names.items() for part in (flag, str(self.folder / name))]


def _sign(path: Path, name: str, key, authority, address) -> None:
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test authority")])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
        now + datetime.timedelta(days=2)
    )
    made = made.add_extension(
        x509.BasicConstraints(ca=address is None, path_length=None), critical=True
    )
    if address is not None:
        made = made.add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(address)]), critical=False
        )
    path.write_bytes(made.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


def rounds(state: Path) -> list[dict]:
    """The committed lines of a run directory."""
    path = state / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def copied(folder: Path, **changes: str) -> Path:
    """The example app with some lines of its client changed."""
    shutil.copytree(APP, folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "flower_app" / "client_app.py"
    path.write_text(path.read_text() + "".join(changes.values()))
    return folder


def hosts(text: str) -> set[str]:
    """Names that look like hosts in a trace of getaddrinfo calls."""
    return set(re.findall(r"LOOKUP (\S+)", text))
