"""Who is compared, and how each one's environment is made: torch once, and a small environment per
peer above it.
"""

import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TORCH = "torch==2.13.0"
PATIENCE = 600  # seconds that an installation may take


@dataclass(frozen=True)
class Peer:
    """A row of the table. Without `install`, it runs in the environment that flrce is installed
    in.
    """

    name: str
    script: str
    label: str
    install: tuple[tuple[str, ...], ...] = ()
    package: str = ""  # whose version to print
    args: tuple[str, ...] = ()
    absent: str = ""  # why it cannot take part at all
    cores: tuple[int, ...] = (1, 2)  # tables it takes part in
    networks: tuple[str, ...] = ("cnn", "resnet-8", "lstm", "gpt")

    @property
    def environment(self) -> str:
        return self.name if self.install else ""


PEERS = (
    Peer(
        "native",
        "ours.py",
        "flrce, fused kernels (threads)",
        package="flrce",
        networks=("cnn", "resnet-8"),
    ),
    Peer(
        "auto",
        "ours.py",
        "flrce, torch with compiled layers (processes)",
        package="flrce",
        args=("--kernel", "auto"),
        networks=("gpt",),
    ),
    Peer(
        "torch", "ours.py", "flrce, torch (processes)", package="flrce", args=("--kernel", "torch")
    ),
    Peer("plain", "plain.py", "plain PyTorch loop, DataLoader", package="torch"),
    Peer("pfl", "pfl_peer.py", "pfl-research (processes)", (("pfl",),), "pfl"),
    Peer(
        "fluke",
        "fluke_peer.py",
        "fluke",
        # without its trackers, data readers and torchvision, none of which this work uses
        (
            ("--no-deps", "fluke-fl"),
            (
                "rich",
                "typer",
                "diskcache",
                "cerberus",
                "omegaconf",
                "pandas",
                "scikit-learn",
                "torchmetrics",
                "psutil",
                "pyyaml",
                "requests",
                "matplotlib",
            ),
        ),
        "fluke-fl",
    ),
    Peer(
        "fedlab",
        "fedlab_peer.py",
        "FedLab",
        (("--no-deps", "fedlab"), ("munch", "pandas", "scikit-learn", "tqdm", "pillow")),
        "fedlab",
    ),
    Peer(
        "flwr",
        "flower_peer.py",
        "Flower simulation (Ray actors)",
        (("flwr[simulation]==1.41.0",),),
        "flwr",
    ),
    Peer(
        "fedjax",
        "fedjax_peer.py",
        "FedJAX (jit)",
        (("fedjax", "jax<0.5"),),
        "fedjax",
        cores=(1,),
        networks=("cnn",),
    ),
    Peer(
        "blazefl",
        "",
        "BlazeFL",
        absent="needs Python 3.12 or newer (its free-threaded mode 3.14); no adapter",
    ),
)


class CannotRun(RuntimeError):
    """A peer cannot be installed or run; the reason goes into the table."""


def python_of(peer: Peer, home: Path) -> Path:
    """The interpreter of a peer's environment, which is made if there is none yet."""
    if peer.absent:
        raise CannotRun(peer.absent)
    if not peer.install:
        return Path(sys.executable)
    base = _make(home / "torch", ((TORCH, "numpy"),), None)
    return _make(home / peer.environment, peer.install, base) / "bin" / "python"


def _make(folder: Path, install: tuple[tuple[str, ...], ...], base: Path | None) -> Path:
    mark = folder / "complete"
    if mark.exists():
        if why := mark.read_text():
            raise CannotRun(why)
        return folder
    venv.create(folder, with_pip=True)
    if base:  # packages of the base show through, and pip counts them as installed
        (_site(folder) / "base.pth").write_text(str(_site(base)) + "\n")
    for wanted in install:
        command = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", *wanted]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            raise CannotRun(
                f"pip install {' '.join(wanted)}: not done after {PATIENCE} s"
            ) from None
        if done.returncode:
            why = f"pip install {' '.join(wanted)}: {_reason(done.stderr)}"
            mark.write_text(why)
            raise CannotRun(why)
    mark.write_text("")
    return folder


def _site(folder: Path) -> Path:
    return Path(
        sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    )


def _reason(stderr: str) -> str:
    """The last line of pip's complaint."""
    lines = [line for line in stderr.splitlines() if "WARNING" not in line and line.strip()]
    return lines[-1][:200] if lines else "no reason given"


def version_of(peer: Peer, python: Path) -> str:
    code = f"from importlib.metadata import version; print(version({peer.package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() or "?"
