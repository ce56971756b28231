"""A ledger that grows, read line by line while somebody writes to it."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flrce.core.types import RoundRecord
from flrce.storage.limited import open_regular, split_lines
from flrce.storage.read import parse_lines, validate_round_line
from flrce.storage.seal import DamagedRun


@dataclass
class RecordTail:
    """The lines of a file that grows, each read once; from the start again if what was read is not
    there any more.
    """

    path: Path
    at: int = 0
    end: bytes = b""  # the line before `at`, by which the file is known again
    records: list[RoundRecord] = field(default_factory=list)
    digest: Any = field(default_factory=hashlib.sha256)  # of everything before `at`

    def read_new_lines(self, mark: Mapping[str, Any] | None = None) -> bool:
        """Take in what is new, as far as it is committed (`mark`); whether anything was. Damaged if
        it was edited.
        """
        before, length = self.at, None if mark is None else mark["bytes"]
        if length is not None and length < self.at:
            self._restart()
        try:
            with open_regular(self.path) as file:
                file.seek(self.at - len(self.end))
                if file.read(len(self.end)) != self.end:
                    self._restart()
                    file.seek(0)
                for line in split_lines(file, None if length is None else length - self.at):
                    self.digest.update(line)
                    self.at, self.end = self.at + len(line), line
                    self.records += [
                        validate_round_line(row) for row in parse_lines([line], self.path.name)
                    ]
        except FileNotFoundError:
            self._restart()
        if mark is not None and (
            self.at < mark["bytes"]
            or (mark["sha256"] and self.digest.hexdigest() != mark["sha256"])
        ):
            raise DamagedRun(
                f"{self.path} is not as it was written; flrce verify {self.path.parent} checks all"
                " files"
            )
        return self.at != before

    def _restart(self) -> None:
        self.at, self.end, self.records, self.digest = 0, b"", [], hashlib.sha256()
