"""Does flrce compute what the authors' released functions compute, on the same inputs?

    python research/verification/run.py fetch --code DIR
    python research/verification/run.py check --code DIR [--out research/results/verification.md]

`fetch` clones each repository at the commit that was read; `check` runs every comparison.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from client_training import verify_client_training
from released import REPOSITORIES, Check
from robust import verify_robust_rules
from selection import verify_selection
from server import verify_server

HEADER = (
    "| method | released function | cases | largest difference | limit | note |\n"
    "|---|---|---|---|---|---|\n"
)


def fetch_code(code: Path) -> None:
    for repository in REPOSITORIES.values():
        folder = code / repository.name
        if not folder.exists():
            subprocess.run(["git", "clone", "--quiet", repository.url, folder], check=True)
        subprocess.run(["git", "-C", folder, "checkout", "-q", repository.commit], check=True)


def format_check(check: Check) -> str:
    verdict = check.note if check.passed else f"**differs** {check.note}"
    return (
        f"| {check.method} | `{check.function}` | {check.cases} | {check.difference:.1e} |"
        f" {check.limit:.0e} | {verdict} |\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["fetch", "check"])
    parser.add_argument("--code", type=Path, required=True, help="folder of the repositories")
    parser.add_argument("--out", type=Path, help="a file for the table")
    given = parser.parse_args()
    if given.command == "fetch":
        fetch_code(given.code)
        return 0
    checks = [
        *verify_selection(given.code),
        *verify_client_training(given.code),
        *verify_server(given.code),
        *verify_robust_rules(given.code),
    ]
    table = HEADER + "".join(format_check(check) for check in checks)
    print(table, end="")
    if given.out:
        given.out.write_text(table, encoding="utf-8")
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
