"""Users' tables: csv, json lines, parquet, pandas. One row per sample."""

import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.core.files import format_path, read_text_limited, validate_memory, validate_regular
from flrce.data.dates import holds_dates
from flrce.data.preprocessing import ColumnTable, FeatureColumn, Preprocessing
from flrce.data.readers.columns import convert_column, parse_csv_cells, read_json_objects
from flrce.data.sources import Source
from flrce.data.text_features import load_tokenizer
from flrce.data.user.arrays import COLUMNS, from_arrays, refuse_columns
from flrce.data.user.identifiers import find_identifiers, find_label_sorters
from flrce.data.user.text_columns import (
    describe_texts,
    find_text_columns,
    report_texts,
    require_columns,
)
from flrce.errors import BadInput, format_install_command, format_one_line

MAX_FILE_BYTES = 4 << 30  # bytes of one text file
MAX_TEXT_VALUES = 50  # distinct texts of a column that becomes one column each
TARGETS = ("y", "label", "target", "class", "labels", "targets")
GROUPS, SPLITS = ("group", "client"), ("split", "test")
Cells = list[Any] | NDArray[Any]  # of a column: as they stand in a file, or in their dtype
log = logging.getLogger("flrce")


@dataclass(frozen=True)
class TableOptions:
    """What a user says about the columns of a table."""

    target: str | Sequence[str] = ""  # to be learnt: one column or several
    group: str = ""  # the client
    test: str = ""  # the split
    ignore: str | Sequence[str] = ()
    features: str | Sequence[str] = ()
    text: str | Sequence[str] = ()  # columns to read
    buckets: int = 0
    tokenizer: str = ""
    length: int = 0


@dataclass(frozen=True)
class ColumnRoles:
    """Which columns are to be learnt, and which name a sample's client and split; "" for none."""

    targets: tuple[str, ...]
    owner: str
    split: str

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.targets, self.owner, self.split)


OPTION_NAMES = tuple(field.name for field in fields(TableOptions))


def from_columns(
    columns: ColumnTable,
    target: str | Sequence[str] = "",
    group: str = "",
    test: str = "",
    *,
    name: str = "mine",
    where: str = "table",
    **how: Any,
) -> Source:
    """A source from named columns: `target` to learn (one or several), `group`, `test` (split).

    Without a name, columns called y, label, target or class; group or client; split or test are
    taken for those. All others but those to `ignore` and those that only tell rows apart are
    features, unless `features` names them; text with few values becomes one column of 0 and 1 a
    value. The columns `text`, or those that hold sentences, become hashed n-grams or token ids.
    """
    given = {key: how.pop(key) for key in OPTION_NAMES if key in how}
    options = TableOptions(target, group, test, **given)
    _validate_lengths(columns, where)
    columns = _drop_columns(columns, _as_list(options.ignore), where)
    roles = _find_roles(columns, options, where)
    needed = [key for key in (*roles.targets, roles.owner) if key]
    columns = _drop_incomplete_rows(columns, needed, how.get("fill"), where)
    chosen, texts = _choose_features(columns, roles, options, where)
    _refuse_gaps({k: v for k, v in chosen.items() if k not in texts}, how.get("fill"), where)
    described = _describe_features(chosen, texts, options, where)
    prepared = Preprocessing(tuple(described), roles.targets)
    x = prepared.encode_table(chosen, where)
    _report_columns(x.shape[1], described, roles, where)
    tokens = {"layout": "tokens", "standardise": False} if options.tokenizer else {}
    given = {"layout": "table", **how, **tokens, "name": name, "where": where}
    source = _encode_samples(x, columns, roles, {**given, "preprocessing": prepared})
    if options.tokenizer:
        return replace(source, ids=load_tokenizer(options.tokenizer)[1])
    return source


def _as_list(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _find_roles(columns: ColumnTable, options: TableOptions, where: str) -> ColumnRoles:
    """The columns that are no features, by the options or their usual names."""
    wanted = _as_list(options.target)
    listed = [find_column(columns, one, TARGETS, "target", where) for one in wanted]
    targets = tuple(key for key in listed if key)
    owner = find_column(columns, options.group, GROUPS, "group", where)
    split = find_column(columns, options.test, SPLITS, "test", where)
    if not targets:
        raise BadInput(
            f"{where} has no label column; name it with target = one of {_format_names(columns)}"
        )
    return ColumnRoles(targets, owner, split)


def _choose_features(
    columns: ColumnTable, roles: ColumnRoles, options: TableOptions, where: str
) -> tuple[ColumnTable, list[str]]:
    """The columns that become features, and which of them are texts to read."""
    rest: ColumnTable = {key: value for key, value in columns.items() if key not in roles.names}
    if options.features:
        listed = [*_as_list(options.features), *_as_list(options.text)]
        require_columns(rest, listed, "for features", where)
        rest = {key: rest[key] for key in dict.fromkeys(listed)}
    texts = find_text_columns(rest, options.text, MAX_TEXT_VALUES, where)
    if not options.features:
        special = [*texts, *(key for key, value in rest.items() if holds_dates(value))]
        plain = {key: value for key, value in rest.items() if key not in special}
        owners = columns[roles.owner] if roles.owner else None
        kept = _without_identifiers(plain, columns[roles.targets[0]], owners, where)
        rest = {key: value for key, value in rest.items() if key in kept or key in special}
    if not rest:
        raise BadInput(
            f"{where} has no column left for features besides identifiers and"
            f" {_format_names(roles.names)}"
        )
    return rest, texts


def _report_columns(
    count: int, described: Sequence[FeatureColumn], roles: ColumnRoles, where: str
) -> None:
    text = f"{count} features of {_format_names(column.name for column in described)}"
    text += f"; label {_format_names(roles.targets)}"
    text += f"; client {roles.owner}" if roles.owner else ""
    text += f"; split {roles.split}" if roles.split else ""
    log.info("%s: %s", where, text)


def _encode_samples(
    x: NDArray[Any], columns: ColumnTable, roles: ColumnRoles, how: Mapping[str, Any]
) -> Source:
    """The source of these features and of the columns with roles."""
    several = len(roles.targets) > 1
    labels = [columns[key] for key in roles.targets]
    names = {"classes": roles.targets} if how.get("kind") == "labels" and several else {}
    group = columns[roles.owner] if roles.owner else None
    test = columns[roles.split] if roles.split else None
    y = np.stack(labels, 1) if several else labels[0]
    return from_arrays(x, y, group, test, **{**names, **how})


def _describe_features(
    columns: ColumnTable, texts: Sequence[str], options: TableOptions, where: str
) -> list[FeatureColumn]:
    """How the columns become features; token ids leave no room for other columns."""
    if options.buckets and not texts:
        raise BadInput(
            f"data.buckets = {options.buckets}: {where} has no text column; name it in data.text"
        )
    if not texts:
        return [describe_feature(key, value, where) for key, value in columns.items()]
    reading = (options.buckets, options.tokenizer, options.length)
    read = {column.name: column for column in describe_texts(columns, texts, *reading)}
    report_texts(list(read.values()), where)
    if not options.tokenizer:
        return [read.get(key) or describe_feature(key, v, where) for key, v in columns.items()]
    if len(columns) > len(read):
        dropped = _format_names(key for key in columns if key not in read)
        log.warning("%s: data.tokenizer reads the text alone; %s left out", where, dropped)
    return list(read.values())


def _refuse_gaps(columns: ColumnTable, fill: Any, where: str) -> None:
    """BadInput where values are missing and nothing says what to do about it."""
    gaps = [key for key, value in columns.items() if _find_missing(value).any()]
    if gaps and fill is None:
        count = int(np.any([_find_missing(columns[key]) for key in gaps], axis=0).sum())
        raise BadInput(
            f"{where} x holds NaN in {count} of {len(columns[gaps[0]])} samples (columns"
            f" {_format_names(gaps)}); set fill (data.fill) to 'mean', 'drop' or a number"
        )


def _validate_lengths(columns: ColumnTable, where: str) -> None:
    for key, values in columns.items():
        if values.ndim != 1:
            raise BadInput(f"{where} column {key!a} has shape {values.shape}; {COLUMNS}")
    if len({len(values) for values in columns.values()}) > 1:
        raise BadInput(f"{where} has columns of different lengths; {COLUMNS}")


def _without_identifiers(
    columns: ColumnTable, label: NDArray[Any], owner: NDArray[Any] | None, where: str
) -> ColumnTable:
    """The columns without those that only tell rows apart; each is told of."""
    identifiers = find_identifiers(columns, label, owner)
    for key, why in identifiers.items():
        text = "%s: column %s is left out as an identifier (%s); list the features in data.features"
        text += " to use it, or name it in data.ignore to drop it without this line"
        log.warning(text, where, ascii(key), why)
    kept = {key: values for key, values in columns.items() if key not in identifiers}
    for key in find_label_sorters(kept, label):
        text = "%s: column %s alone tells the label of every row: if it is not known before the"
        log.warning(f"{text} label is, name it in data.ignore", where, ascii(key))
    return kept


def _drop_columns(columns: ColumnTable, ignored: Sequence[str], where: str) -> ColumnTable:
    """The table without ignored columns, and without a nameless one that counts rows."""
    require_columns(columns, ignored, "to ignore", where)
    kept = {key: value for key, value in columns.items() if key not in ignored}
    for key in [key for key in kept if not key or key.startswith("Unnamed: ")]:
        cells = kept[key]
        if cells.dtype.kind in "iu" and np.array_equal(cells - cells[0], np.arange(len(cells))):
            text = "%s: the column without a name counts rows and is left out; name it to keep it"
            log.warning(text, where)
            del kept[key]
    return kept


def _drop_incomplete_rows(
    columns: ColumnTable, needed: Sequence[str], fill: Any, where: str
) -> ColumnTable:
    """The rows that have a label and a client; BadInput if some lack them, unless dropped."""
    if fill == "drop":
        whole = ~np.any([_find_missing(value) for value in columns.values()], axis=0)
        return {key: value[whole] for key, value in columns.items()}
    for key in needed:
        count = int(_find_missing(columns[key]).sum())
        if count:
            lacks = f"{where} column {key!a} lacks {count} values"
            raise BadInput(f"{lacks}; fill them in, or drop those rows with fill = 'drop'")
    return columns


def _find_missing(values: NDArray[Any]) -> NDArray[np.bool_]:
    missing: NDArray[np.bool_] = np.isnan(values) if values.dtype.kind == "f" else values == ""
    return np.broadcast_to(missing, values.shape)


def read_table_cells(path: Path) -> dict[str, Cells]:
    """The cells of each column of a csv, tsv, jsonl or parquet file; of parquet in their dtype."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return dict(to_columns(read_parquet(path)))
    if suffix == ".jsonl":
        return _read_json_cells(path)
    text = read_text_limited(path, MAX_FILE_BYTES, "give a csv file", expansion=8)
    return dict(parse_csv_cells(text, format_path(path)))


def read_table_columns(path: Path) -> ColumnTable:
    """The columns of a csv, tsv, jsonl or parquet file."""
    return {key: join_cells([cells], key) for key, cells in read_table_cells(path).items()}


def join_cells(parts: Sequence[Cells], name: str) -> NDArray[Any]:
    """One column of one or several tables in the dtype that holds all its cells."""
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts) and len({array.dtype.kind in "OUS" for array in arrays}) == 1:
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    cells = (part.tolist() if isinstance(part, np.ndarray) else part for part in parts)
    return convert_column([cell for part in cells for cell in part], name)


@dataclass(frozen=True)
class ClientTable:
    """One of several tables: whose it is, whether for judging, and how messages call it."""

    client: str
    cells: Mapping[str, Cells]
    label: str
    held: bool = False

    @property
    def rows(self) -> int:
        return len(next(iter(self.cells.values())))


def join_tables(tables: Sequence[ClientTable], **how: Any) -> Source:
    """The tables of all clients as one, with the same columns for all."""
    first = tables[0]
    for table in tables:
        if odd := sorted(table.cells.keys() ^ first.cells.keys()):
            raise BadInput(
                f"{table.label} and {first.label} differ in column {odd[0]!a}; make them alike"
            )
    columns = {key: join_cells([t.cells[key] for t in tables], key) for key in first.cells}
    sizes = [table.rows for table in tables]
    owner = how.get("group") or find_column(columns, "", GROUPS, "group", "data") or "client"
    columns[owner] = np.repeat(np.array([t.client for t in tables], object), sizes).astype(str)
    if any(table.held for table in tables):
        split = how.get("test") or find_column(columns, "", SPLITS, "test", "data") or "split"
        columns[split] = np.repeat([table.held for table in tables], sizes)
    return from_columns(columns, **{"where": "data", **how, "group": owner})


def from_csv(path: Path | str, **how: Any) -> Source:
    """A table from a csv file with a header line (commas, semicolons or tabs)."""
    path = Path(path)
    return from_columns(
        read_table_columns(path), **{"name": path.stem, "where": format_path(path), **how}
    )


def from_jsonl(path: Path | str, **how: Any) -> Source:
    """A table from lines of json, one object per sample; or the keys x, y, group and test."""
    path = Path(path)
    cells = _read_json_cells(path)
    given = {"name": path.stem, "where": format_path(path), **how}
    if {"x", "y"} <= cells.keys() and isinstance(cells["x"][0], list):
        refuse_columns(how, f"{format_path(path)} has x, y, group and test instead")
        more = {key: cells[key] for key in ("group", "test") if key in cells}
        return from_arrays(cells["x"], cells["y"], **more, **given)
    return from_columns({key: convert_column(cells[key], key) for key in cells}, **given)


def _read_json_cells(path: Path) -> dict[str, Any]:
    rows: list[Mapping[str, Any]] = []
    remedy = "give one object a line"
    for number, row in read_json_objects(path, MAX_FILE_BYTES, remedy, expansion=8):
        if rows and row.keys() != rows[0].keys():
            raise BadInput(
                f"{format_path(path)} line {number} has other keys than the first; {remedy}"
            )
        rows.append(row)
    if not rows:
        raise BadInput(f"{format_path(path)} holds no samples; {remedy}")
    return {key: [row[key] for row in rows] for key in rows[0]}


def from_parquet(path: Path | str, **how: Any) -> Source:
    """A table from a parquet file. Needs pandas with pyarrow."""
    path = Path(path)
    return from_pandas(read_parquet(path), **{"name": path.stem, "where": format_path(path), **how})


def read_parquet(path: Path) -> Any:
    """A parquet file as a DataFrame; BadInput where it does not fit into memory."""
    if not path.exists():
        raise BadInput(f"{format_path(path)} does not exist; give a parquet file")
    validate_regular(path, "give a parquet file")
    try:
        import pandas as pd

        parquet = importlib.import_module("pyarrow.parquet")
        with parquet.ParquetFile(path) as opened:
            metadata = opened.metadata
            groups = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
        needed = max(sum(groups), 8 * metadata.num_rows * metadata.num_columns)
        validate_memory(2 * needed, format_path(path), "give fewer samples")
        return pd.read_parquet(path)
    except ImportError as why:
        raise BadInput(
            f"parquet files need pandas and pyarrow; {format_install_command('tables')}"
        ) from why
    except BadInput:
        raise
    except Exception as why:  # pyarrow has exceptions of its own
        raise BadInput(
            f"{format_path(path)} is no parquet file ({format_one_line(why, 120)}); write it afresh"
        ) from why


def from_pandas(frame: Any, **how: Any) -> Source:
    """A table from a pandas DataFrame; its index is left out."""
    return from_columns(to_columns(frame), **{"where": "DataFrame", **how})


def to_columns(frame: Any) -> ColumnTable:
    """The columns of a DataFrame as arrays."""
    columns: dict[str, NDArray[Any]] = {}
    for key in frame.columns:
        column = frame[key]
        if column.dtype.kind in "biuf" and not hasattr(column.dtype, "numpy_dtype"):
            columns[str(key)] = column.to_numpy()
        else:  # text, categories, and numbers that may be missing
            gaps = column.isna()
            columns[str(key)] = convert_column(
                [None if gap else v for v, gap in zip(column.astype(object), gaps, strict=True)],
                str(key),
            )
    return columns


def find_column(
    columns: ColumnTable, named: str, usual: Sequence[str], role: str, where: str
) -> str:
    """The column that plays a role: the named one, else one with a usual name, else ""."""
    if named:
        require_columns(columns, [named], f"for {role}", where)
        return named
    return next((key for key in columns if key.lower() in usual), "")


def describe_feature(key: str, values: NDArray[Any], where: str) -> FeatureColumn:
    """How a column becomes features: a number as it is, a date in years, a text by its values."""
    if values.dtype.kind in "biuf":
        return FeatureColumn(key)
    if holds_dates(values):
        log.warning("%s: column %s holds dates, taken as years since 2000", where, ascii(key))
        return FeatureColumn(key, date=True)
    texts = np.unique(values)
    if len(texts) > MAX_TEXT_VALUES:
        what = f"{where} column {key!a} holds {len(texts)} different texts"
        raise BadInput(f"{what}; name it in data.text to read it, or in data.ignore to drop it")
    log.info("%s: text column %s becomes %d columns of 0 and 1", where, ascii(key), len(texts))
    return FeatureColumn(key, tuple(map(str, texts)))


def _format_names(names: Any) -> str:
    known = [ascii(name)[1:-1] for name in names if name]
    return ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
