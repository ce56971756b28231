"""flrce deploy server, flrce deploy device: units, certificates, keys and container files."""

import datetime
import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flrce.cli.deploy import fill_placeholders, read_template, write_new_file
from flrce.core.files import read_text_limited
from flrce.errors import BadInput, format_install_command

SECRET_MODE = 0o600
HOST_PATTERN = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:-]{0,251}[A-Za-z0-9])?")
PATH_PATTERN = re.compile(r"/[\w./@+-]*")  # nothing that systemd or a shell would take apart
NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,60}")
#: template -> file
SERVER_FILES = {
    "superlink.service": "flrce-superlink.service",
    "metrics.service": "flrce-metrics.service",
    "Containerfile.server": "Containerfile",
    "compose.server.yaml": "compose.yaml",
    "enrol.sh": "enrol.sh",
    "connection.toml": "flwr/config.toml",
    "SERVER.md": "README.md",
}
DEVICE_FILES = {
    "supernode.service": "flrce-supernode.service",
    "Containerfile.device": "Containerfile",
    "compose.device.yaml": "compose.yaml",
    "DEVICE.md": "README.md",
}
MAX_FILE_BYTES = 1 << 20  # of an address or a certificate


def write_server_files(
    folder: Path, address: str, port: int, place: str, prefix: str, user: str, days: int
) -> None:
    """Write what a server needs: an authority, a certificate for its address, units, containers."""
    require_match("--address", address, HOST_PATTERN, "an address or a host name")
    names = check_places(place, prefix, user)
    values = {**names, "@address@": address, "@port@": str(port)}
    _write_templates(folder, SERVER_FILES, values, "deploy server")
    for name, data in make_certificates(address, days).items():
        mode = SECRET_MODE if name.endswith(".key") else 0o644
        write_new_file(folder / name, data, "deploy server", mode)
    (folder / "keys").mkdir(exist_ok=True)
    write_new_file(folder / "address", f"{address}:{port}\n", "deploy server")
    print(f"wrote {folder}; next: see its README.md")


def _read_server_file(server: Path, name: str) -> str:
    remedy = "name the folder that flrce deploy server wrote"
    path = server / name
    return read_text_limited(path, MAX_FILE_BYTES, remedy, where=f"--server: {path}")


def write_device_files(
    folder: Path, server: Path, node: int, name: str | None, place: str, prefix: str, user: str
) -> None:
    """Write a device's files: the authority's certificate, a key, a systemd unit."""
    label = name or f"device-{node}"
    require_match("--name", label, NAME_PATTERN, "letters, digits and . _ -")
    address, _, port = _read_server_file(server, "address").strip().rpartition(":")
    authority = _read_server_file(server, "ca.pem")
    private, public = make_node_key()
    write_new_file(server / "keys" / f"{label}.pub", public, "deploy device")
    values = {**check_places(place, prefix, user), "@address@": address, "@port@": port}
    values |= {"@node@": str(node), "@name@": label}
    _write_templates(folder, DEVICE_FILES, values, "deploy device")
    write_new_file(folder / "ca.pem", authority, "deploy device")
    write_new_file(folder / "node.key", private, "deploy device", SECRET_MODE)
    write_new_file(folder / "node.pub", public, "deploy device")
    print(f"wrote {folder}; next: copy it to the device, then sh {server}/enrol.sh on the server")


def check_places(place: str, prefix: str, user: str) -> dict[str, str]:
    """Placeholders of the folder, the environment and the user on the machine."""
    require_match("--place", place, PATH_PATTERN, "an absolute path without spaces")
    require_match("--prefix", prefix, PATH_PATTERN, "an absolute path without spaces")
    require_match("--user", user, NAME_PATTERN, "letters, digits and . _ -")
    return {
        "@folder@": place.rstrip("/"),
        "@prefix@": prefix,
        "@bin@": f"{prefix.rstrip('/')}/bin",
        "@user@": user,
    }


def require_match(option: str, text: str, pattern: re.Pattern[str], use: str) -> None:
    """BadInput for a text that could not be written into a unit or a script as it is."""
    if not pattern.fullmatch(text):
        raise BadInput(f"{option} {text!r}: use {use}")


def _write_templates(
    folder: Path, files: Mapping[str, str], values: dict[str, str], command: str
) -> None:
    for template, name in files.items():
        text = fill_placeholders(read_template(template), values)
        write_new_file(folder / name, text, command, 0o755 if name.endswith(".sh") else 0o644)


def make_certificates(address: str, days: int) -> dict[str, str]:
    """File -> text: an authority of our own, and a certificate that names the server's address."""
    x509, hashes, ec, _ = _import_cryptography()
    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = _make_name(x509, "flrce authority")
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=5)

    def build(name: Any, key: Any) -> Any:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(start + datetime.timedelta(days=days))
        )

    root = build(issuer, authority.public_key()).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    leaf = build(_make_name(x509, address[:64]), server.public_key()).add_extension(
        x509.SubjectAlternativeName([_make_alternative(x509, address)]), critical=False
    )
    certificates = {"ca.pem": root, "server.pem": leaf}
    texts = {
        name: _to_pem(each.sign(authority, hashes.SHA256())) for name, each in certificates.items()
    }
    return {**texts, "ca.key": _to_private_pem(authority), "server.key": _to_private_pem(server)}


def make_node_key() -> tuple[str, str]:
    """(private, public) key of a device: ECDSA P-384, as Flower's node authentication wants it."""
    _, _, ec, serialization = _import_cryptography()
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    return private.decode(), public.decode() + "\n"


def _import_cryptography() -> Any:
    """cryptography comes with Flower."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as missing:
        raise BadInput(
            f"certificates need the package cryptography; {format_install_command('flower')}"
        ) from missing
    return x509, hashes, ec, serialization


def _make_name(x509: Any, text: str) -> Any:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _make_alternative(x509: Any, address: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _to_pem(certificate: Any) -> str:
    serialization = _import_cryptography()[3]
    text: str = certificate.public_bytes(serialization.Encoding.PEM).decode()
    return text


def _to_private_pem(key: Any) -> str:
    serialization = _import_cryptography()[3]
    text: str = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    return text
