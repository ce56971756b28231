"""Which file of a checkpoint holds a row of a table: a row's newest file counts."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass
class RowLocations:
    """In which file the newest version of each row of the tables lies; what a commit costs here is
    as its rows.
    """

    owner: dict[int, str] = field(default_factory=dict)  # row -> file with its newest version
    # file -> rows in it, current or not
    content: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # file -> rows of which it has the newest version
    live: Counter[str] = field(default_factory=Counter)

    def count_current_rows(self, changed_rows: Iterable[int]) -> Counter[str]:
        """Current rows by file, once these rows have moved on."""
        return self.live - Counter(self.owner[k] for k in changed_rows if k in self.owner)

    def move_rows(self, rows: Sequence[int], file: str) -> None:
        """These rows lie in a new file now."""
        self.live = self.count_current_rows(rows) + Counter({file: len(rows)})
        self.owner.update(dict.fromkeys(rows, file))
        self.content = {name: self.content.get(name, tuple(rows)) for name in self.live}

    def find_stragglers(self, changed_rows: set[int]) -> list[int]:
        """Current rows of the emptiest file, once less than half of all stored rows is current."""
        live = self.count_current_rows(changed_rows)
        if sum(len(self.content[file]) for file in live) <= 2 * live.total():
            return []
        emptiest = min(live, key=lambda file: (live[file] / len(self.content[file]), file))
        return [
            k for k in self.content[emptiest] if self.owner[k] == emptiest and k not in changed_rows
        ]
