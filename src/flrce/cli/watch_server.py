"""A page on this machine's loopback that shows runs under way. It answers two questions and changes
nothing.

Only 127.0.0.1 is listened on; a request must name that address (a stranger's site that a browser is
led to cannot), and the path begins with a key that only this user can read, since other users of
the machine reach the same loopback.
"""

import base64
import hashlib
import hmac
import html
import json
import os
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from flrce.errors import BadInput
from flrce.report.live import RunWatcher
from flrce.report.metrics import CONTENT_TYPE, render_metrics
from flrce.version import __version__

HOST = "127.0.0.1"
SNAPSHOT_SECONDS = 0.5  # seconds for which one look serves everybody who asks
SCRIPT_FILES = ("draw.js", "watch.js")


class WatchSnapshot:
    """What the page is told: the last look, with a number that changes when it does."""

    def __init__(self, watcher: RunWatcher) -> None:
        self.watcher, self.lock = watcher, threading.Lock()
        self.at, self.version, self.text = 0.0, "", "[]"

    def get_runs_json(self) -> tuple[str, str]:
        """(version, runs as JSON)."""
        with self.lock:
            if time.monotonic() - self.at > SNAPSHOT_SECONDS:
                try:
                    self.text = json.dumps(self.watcher.take_snapshot(), separators=(",", ":"))
                except BadInput as why:  # a place that is gone, for now
                    self.text = json.dumps([{"folder": "", "state": f"unreadable: {why}"}])
                self.version = hashlib.sha256(self.text.encode()).hexdigest()[:16]
                self.at = time.monotonic()
            return self.version, self.text


def render_watch_page() -> tuple[str, str]:
    """The page, and the policy that lets it run its own script and ask its own server, and nothing
    else.
    """
    script = "\n".join(_read_asset(name) for name in SCRIPT_FILES)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src"
        " data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors"
        " 'none'"
    )
    text = Template(_read_asset("watch.html")).substitute(
        script=script,
        style=_read_asset("page.css") + _read_asset("watch.css"),
        version=html.escape(__version__),
    )
    return text, policy


def build_watch_server(watcher: RunWatcher, port: int, key: str) -> ThreadingHTTPServer:
    """A server bound to the loopback; `serve_forever` runs it."""
    board, (text, policy) = WatchSnapshot(watcher), render_watch_page()

    class WatchRequestHandler(BaseHTTPRequestHandler):
        server_version, sys_version = "flrce", ""

        def do_GET(self) -> None:
            if self.headers.get("Host") not in (
                f"{HOST}:{made.server_port}",
                f"localhost:{made.server_port}",
            ):
                return self.answer(403, "text/plain", "ask for this machine by its address")
            path, _, query = self.path.partition("?")
            given, _, rest = path.removeprefix("/").partition("/")
            if not hmac.compare_digest(given.encode(), key.encode()) or rest not in ("", "state"):
                return self.answer(
                    404, "text/plain", "nothing here; take the address that flrce watch printed"
                )
            if rest == "":
                return self.answer(200, "text/html; charset=utf-8", text)
            version, runs = board.get_runs_json()
            if query == f"since={version}":
                return self.answer(200, "application/json", json.dumps({"version": version}))
            self.answer(200, "application/json", f'{{"version":"{version}","runs":{runs}}}')

        do_HEAD = do_GET

        def answer(self, code: int, kind: str, body: str) -> None:
            data = body.encode()
            self.send_response(code)
            for name, value in {
                "Content-Type": kind,
                "Content-Length": str(len(data)),
                "Content-Security-Policy": policy,
                "Cache-Control": "no-store",
                "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer",
                "Cross-Origin-Resource-Policy": "same-origin",
            }.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass  # a poll every two seconds is no news

    try:
        made = ThreadingHTTPServer((HOST, port), WatchRequestHandler)
        return made
    except (OSError, OverflowError) as why:
        reason = getattr(why, "strerror", None) or why
        raise BadInput(f"--port {port}: {reason}; name another, or 0 for any") from why


def build_metrics_server(watcher: RunWatcher, host: str, port: int) -> ThreadingHTTPServer:
    """Answers /metrics for Prometheus; figures of runs only, no names of clients."""

    class MetricsRequestHandler(BaseHTTPRequestHandler):
        server_version, sys_version = "flrce", ""

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                return self.answer(404, "text/plain", "nothing here; ask for /metrics")
            try:
                with lock:
                    text = render_metrics(watcher.take_snapshot())
            except BadInput as why:  # a folder that is not there yet
                return self.answer(503, "text/plain", f"{why}\n")
            self.answer(200, CONTENT_TYPE, text)

        do_HEAD = do_GET

        def answer(self, code: int, kind: str, body: str) -> None:
            data = body.encode()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass  # a scrape every few seconds is no news

    lock = threading.Lock()
    try:
        return ThreadingHTTPServer((host, port), MetricsRequestHandler)
    except (OSError, OverflowError) as why:
        reason = getattr(why, "strerror", None) or why
        raise BadInput(f"metrics on {host}:{port}: {reason}; name another port or host") from why


def derive_page_key(places: list[Path]) -> str:
    """The path's key: the same for the same folders, so that an open page survives a restart of the
    watcher.
    """
    base = os.environ.get("FLRCE_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flrce"
    kept = (Path(base) if base else home) / "watch.key"
    named = "\n".join(sorted(str(place.resolve()) for place in places)).encode()
    return hmac.new(_load_user_secret(kept), named, hashlib.sha256).hexdigest()[:32]


def _load_user_secret(kept: Path) -> bytes:
    """32 bytes of chance that only this user can read; where they cannot be kept, new ones."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        try:
            made = os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(made, "wb") as file:
                file.write(secrets.token_bytes(32))
        except FileExistsError:
            pass
        found = os.stat(kept, follow_symlinks=False)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            return secrets.token_bytes(32)  # not ours alone
        known = kept.read_bytes()
        return known if len(known) == 32 else secrets.token_bytes(32)
    except OSError:
        return secrets.token_bytes(32)


def _read_asset(name: str) -> str:
    return (files("flrce.report") / "assets" / name).read_text("utf-8")
