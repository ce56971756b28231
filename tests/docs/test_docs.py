"""What the documentation names is there: links, commands, scripts, pictures.
newcomer/test_reading.py runs it.
"""

import pydoc
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
import torch
from test_layers import LAYERS

import flrce
from flrce.cli import cli
from flrce.config import sections
from flrce.config.experiment import Experiment
from flrce.core import types
from flrce.core.roles import RoundView
from flrce.core.state_values import grow_state_tables
from flrce.core.types import RoundEvent, Updates
from flrce.methods.catalogue.recipes import CATALOGUE
from flrce.methods.registry import PIECES
from reading import (
    DOCS,
    FENCE,
    NOT_RUN,
    OTHERS,
    PAGES,
    RESEARCH,
    ROOT,
    RUN,
    blocks,
    name_page,
    run,
    script,
)


def name_link_page(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


DOTTED = r"\bflrce(?:\.[A-Za-z_]\w*)+"


def test_the_fences_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "a\n\n```python\n# x.py\n1\n```\n\n```\nplain\n```\n- b\n\n  ```sh\n  c\n  ```\n"
    )
    assert [(b.line, b.kind, b.file) for b in blocks(page)] == [
        (3, "python", "x.py"),
        (8, "", None),
        (13, "sh", None),
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_every_block_says_whether_it_runs(page: Path) -> None:
    assert {b.kind for b in blocks(page)} <= RUN | NOT_RUN


def test_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run(ROOT / "README.md", tmp_path, monkeypatch, capsys)


def test_the_example_selector_meets_clients_that_join() -> None:
    """Three clients when the run starts, five in round 2: on a grid, clients come when they
    come.
    """
    names: dict = {}
    exec(next(b.text for b in blocks(DOCS / "piece-selector.md") if b.file == "longest.py"), names)
    selector = names["LongestAway"]()
    memory, w = selector.initial_state(3, 2, 2), torch.zeros(2)
    view = RoundView(1, 2, (0, 1, 2), torch.ones(3), None, None, None)
    assert selector.select(memory, view, None).k == (0, 1)
    updates = Updates(torch.tensor([0, 1]), torch.zeros(2, 2), torch.ones(2), 2)
    memory = selector.observe(memory, RoundEvent(1, w, w, updates, 3))
    memory = grow_state_tables(memory, 5)
    view = RoundView(2, 4, (0, 1, 2, 3, 4), torch.ones(5), None, None, None)
    assert selector.select(memory, view, None).k == (2, 3, 4, 0)
    updates = replace(updates, k=torch.tensor([2, 4]))
    memory = selector.observe(memory, RoundEvent(2, w, w, updates, 5))
    assert memory.last.tolist() == [1, 1, 2, 0, 2]


def drawn_layers(picture: str) -> dict[str, int]:
    """Package or module -> the layer that the drawing gives it; a row without a number has that of
    the row above.
    """
    layers: dict[str, int] = {}
    layer = -1
    for line in picture.splitlines():
        row = re.fullmatch(r" *(\d+)?  +(\w+/.*|[\w ]+)", line)
        assert row, f"not a row of the drawing: {line!r}"
        layer = int(row[1]) if row[1] else layer
        names = [row[2].partition("/")[0]] if "/" in row[2] else row[2].split()
        for name in names:
            assert name not in layers, f"{name} is drawn twice"
            layers[name] = layer
    return layers


def test_the_packages_are_drawn_as_the_layers_are_checked() -> None:
    """Every package of tests/test_layers.py is in the drawing, with its layer; higher layers are
    higher up.
    """
    drawn = drawn_layers(next(b.text for b in blocks(DOCS / "architecture.md")))
    assert drawn == {name: at for name, at in LAYERS.items() if name not in ("", "__main__")}
    assert list(drawn.values()) == sorted(drawn.values(), reverse=True)


def test_the_drawing_names_every_package() -> None:
    source = ROOT / "src" / "flrce"
    names = {path.parent.name for path in source.glob("*/__init__.py")}
    names |= {path.stem for path in source.glob("*.py")} - {"__init__", "__main__"}
    assert set(drawn_layers(next(b.text for b in blocks(DOCS / "architecture.md")))) == names


def test_the_page_about_the_tree_names_what_there_is() -> None:
    """Files, folders of pieces, functions and classes that docs/architecture.md mentions."""
    text = (DOCS / "architecture.md").read_text()
    source = ROOT / "src" / "flrce"
    paths = re.findall(r"(?<!tests/)\b(?:core|methods)/[\w/]+\.py\b", text)
    assert {"core/loop.py", "core/gate.py", "core/checked_replies.py", "core/types.py"} <= set(
        paths
    )
    assert [path for path in paths if not (source / path).exists()] == []
    (line,) = [line for line in text.splitlines() if "one folder for each kind of piece" in line]
    folders = {path.parent.name for path in (source / "methods").glob("*/__init__.py")}
    assert set(re.findall(r"`(\w+)`", line)) == folders - {"catalogue"}
    flow = list(blocks(DOCS / "architecture.md"))[1].text
    steps = re.findall(r"^ *\|  (\w[\w.]*) ", flow, re.MULTILINE)
    files = ("loop", "checked_replies", "pieces")
    code = "".join((source / "core" / f"{name}.py").read_text() for name in files)
    assert {"plan_round", "collect_replies", "validate_replies", "server.step"} <= set(steps)
    assert [name for name in steps if f"{name}(" not in code] == []
    for name, fields in re.findall(r"^  ([A-Z]\w+) \((.*?)\)", flow, re.MULTILINE):
        known = {field.name for field in dataclass_fields(getattr(types, name))}
        assert set(fields.split(", ")) <= known, name


def test_the_reference_names_what_there_is() -> None:
    """Said here in a second; `make docs` would say it too."""
    for name in re.findall(r"^::: (\S+)", (DOCS / "reference.md").read_text(), re.MULTILINE):
        pydoc.resolve(name)


RENAMED = "# Names that changed in 0.2"


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_dotted_names_can_be_imported(page: Path) -> None:
    """What a page calls `flrce.x.y` in its text exists; tables of old names are apart."""
    text = re.sub(FENCE, "", page.read_text()).partition(RENAMED)[0]
    names = {name for code in re.findall(r"`[^`\n]+`", text) for name in re.findall(DOTTED, code)}
    missing = {name for name in names if pydoc.locate(name) is None}
    assert missing <= {"flrce.pieces"}, page.name  # a group of entry points, and not a module


def renamed() -> Iterator[tuple[str, str]]:
    """(old, new) as the tables of renames.md have them, in the order of each cell."""
    text = (RESEARCH / "renames.md").read_text().partition(RENAMED)[2]
    for line in text.splitlines():
        cells = [re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:-1]]
        if cells and cells[-1]:
            yield from zip(cells[-2], cells[-1], strict=False)


def test_renamed_things_exist_under_their_new_names_only() -> None:
    pairs = list(renamed())
    assert ("init", "initial_state") in pairs
    assert ("flrce.pieces", "flrce.core.pieces") in pairs
    source = "".join(path.read_text() for path in (ROOT / "src" / "flrce").rglob("*.py"))
    for old, new in pairs:
        if new.startswith("flrce."):
            assert pydoc.locate(new), new
        else:
            last = re.search(r"(\w+)(\(\))?$", new)[1]
            made = rf"(def|class) {last}\b|^ +{last}: |^{last} =|^from \S+ import .*\b{last}\b"
            module = f"flrce.methods.catalogue.{last}"
            assert re.search(made, source, re.MULTILINE) or pydoc.locate(module), new
        if old.startswith("flrce.") and old not in ("flrce.config", "flrce.recipes"):
            assert pydoc.locate(old) is None, old


def written() -> list[tuple[str, str]]:
    """Every flrce command line that the pages show but do not run, with its place."""
    return [
        (f"{page.name}:{block.line + i}", line.strip().removeprefix("$ "))
        for page in PAGES
        for block in blocks(page)
        if block.kind in NOT_RUN
        for i, line in enumerate(block.text.splitlines(), 1)
        if re.match(r"\s*(\$ )?flrce ", line)
    ]


def test_the_tables_of_methods_are_those_of_the_base_classes() -> None:
    text = script("generated").write_roles()
    assert "| `select(state, view, rng)`, required |" in text
    assert "| `ends_training(state)` |" in text


def test_the_tables_of_pieces_have_every_piece_and_setting() -> None:
    text = script("generated").write_pieces()
    names = {name for pieces in PIECES.values() for name in pieces}
    assert [name for name in names if f"| `{name}` |" not in text] == []
    assert "| `median` |" in text
    assert "bits = " in text.partition("| `topk` |")[2].partition("\n")[0]


def test_the_tables_of_settings_have_every_key() -> None:
    text = script("generated").write_settings()
    for section in (Experiment, *vars(sections).values()):
        if isinstance(section, type) and issubclass(section, sections.Section):
            for key, field in section.model_fields.items():
                table = isinstance(field.annotation, type) and issubclass(
                    field.annotation, sections.Section
                )
                shown = {"kept": "personal", "fixed": "frozen"}.get(key, key)
                assert table or f"| `{shown}` |" in text, key
    assert "| `holdout` | number >= 0 < 1 | `0.3` | share of a client's samples" in text
    assert '| `device` | `"auto"`, `"cpu"`, `"cuda"` | `"auto"` |' in text


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_every_mark_of_a_generated_table_is_known(page: Path) -> None:
    generated = script("generated")
    marks = re.findall(r"<!-- generated: (.*) -->", page.read_text())
    assert set(marks) <= set(generated.WRITERS)
    assert marks == generated.MARK.findall(page.read_text())


def test_the_hook_fills_in_the_tables() -> None:
    pytest.importorskip("mkdocs")
    hooks = script("hooks")
    filled = hooks.fill_marks((DOCS / "settings.md").read_text())
    assert "### [fleet]" in filled
    assert "<!--" not in filled


def test_commands_that_are_only_shown_exist() -> None:
    for place, line in written():
        here: click.Command = cli.app
        words = shlex.split(line, comments=True)[1:]
        while isinstance(here, click.Group) and words and not words[0].startswith("-"):
            child = here.get_command(click.Context(here), words.pop(0))
            assert child is not None, f"{place}: no command in {line!r}"
            here = child
        known = {option for parameter in here.params for option in parameter.opts} | {"--help"}
        for word in words:
            assert not word.startswith("--") or word in known, f"{place}: no option {word}"


def subcommands(here: click.Group) -> dict[str, click.Command]:
    """By name, those of installed packages among them."""
    context = click.Context(here)
    found = {name: here.get_command(context, name) for name in here.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


def leaves(here: click.Command, *path: str) -> Iterator[tuple[str, set[str]]]:
    """Every command that does something, with its options."""
    if isinstance(here, click.Group):
        for name, child in subcommands(here).items():
            yield from leaves(child, *path, name)
    else:
        yield " ".join(path), {option for parameter in here.params for option in parameter.opts}


def test_every_command_and_option_is_in_the_list() -> None:
    listed = script("generated").write_commands()
    for name, options in leaves(cli.app):
        section = listed.partition(f"### flrce {name}\n")[2].partition("\n### ")[0]
        assert section, name
        assert [option for option in options if option[:2] == "--" and option not in section] == []


def test_json_everywhere() -> None:
    without = {name for name, options in leaves(cli.app) if "--json" not in options}
    writers = {f"deploy {name}" for name in ("init", "server", "device", "monitor")}
    assert without == {"data prepare", *writers}  # as docs/commands.md says


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        name
        for page in PAGES
        for name in re.findall(r"(?:`|^)make (\w+)", page.read_text(), re.MULTILINE)
    }
    assert {"demo", "test"} <= named <= targets


@pytest.mark.parametrize("page", PAGES + OTHERS, ids=name_link_page)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", re.sub(FENCE, "", page.read_text())):
        assert target.startswith("https://") or (page.parent / target).exists(), (
            f"{page.name}: {target}"
        )


def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links."""
    heads = re.findall(r"^#+ (.+)$", re.sub(FENCE, "", page.read_text()), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


@pytest.mark.parametrize("page", PAGES + OTHERS, ids=name_link_page)
def test_links_lead_to_headings_that_exist(page: Path) -> None:
    for target, anchor in re.findall(
        r"\]\(([\w./-]*\.md)?#([\w-]+)\)", re.sub(FENCE, "", page.read_text())
    ):
        there = page.parent / target if target else page
        assert anchor in anchors(there), f"{page.name}: {target}#{anchor}"


def test_every_recipe_has_a_section() -> None:
    heads = re.findall(r"^### .+\((.+)\)$", (DOCS / "methods.md").read_text(), re.MULTILINE)
    named = {name for head in heads for name in re.findall(r"`([\w-]+)`", head)}
    assert named == set(CATALOGUE)


def test_the_huggingface_example() -> None:
    """The page's lines as they are, with a data set from memory where they would load one."""
    hf = pytest.importorskip("datasets", reason="needs flrce[huggingface]")
    part = hf.Dataset.from_dict(
        {"image": [[float(i), 1.0] for i in range(20)], "label": [i % 2 for i in range(20)]}
    )
    names = {
        "flrce": flrce,
        "load_dataset": lambda name: hf.DatasetDict({"train": part, "test": part.select([0, 1])}),
    }
    exec(
        next(b.text for b in blocks(DOCS / "data-python.md") if "from_huggingface" in b.text), names
    )
    assert (names["source"].outputs, names["source"].held.sum()) == (2, 2)


def test_the_figures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures = script("figures")
    assert (
        figures.relation((3.0, 4.0), (0.0, -2.0), (1.0, 0.0), age=8) == 0.5
    )  # 4 from the line, then 2: 1 - 2/4
    assert figures.relation((1.0, 1.0), (1.0, 0.0), (0.0, -3.0), age=1) == 0.0  # a right angle
    # two steps of (1, 0): the average is the first model's, one step behind, and a step on goes its
    # way
    assert figures.course([(0.0, 0.0), (1.0, 0.0), (2.0, 0.0), (3.0, 0.0)])[1] == 1.0
    assert figures.course([(0.0, 0.0), (1.0, 0.0), (2.0, 0.0), (1.0, 0.0)])[1] == -1.0
    figures.main(tmp_path)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == ["exploration.svg", "headway.svg", "relationships.svg", "stop.svg"]
    for name in drawn:
        ElementTree.parse(tmp_path / name)
        assert (DOCS / "img" / name).exists()


def test_the_gallery_has_eight_pictures() -> None:
    shown = script("gallery").pictures()
    assert len(shown) == len(set(shown)) == 8
    for name in shown:
        ElementTree.parse(DOCS / "img" / name)
        assert (
            f'kept("{name[8:-4]}"' in (text := (DOCS / "gallery.md").read_text())
            or f'drawn("{name[8:-4]}"' in text
        )


def test_the_recorded_session_is_of_the_quick_start() -> None:
    """The picture shows the commands that the page shows, and asks no font server for its
    letters.
    """
    picture = (DOCS / "img" / "quickstart.svg").read_text()
    shown = "".join(ElementTree.fromstring(picture).itertext()).replace("\xa0", " ")
    for line in script("record").commands():
        assert f"$ {line}" in shown
    assert "url(http" not in picture
    assert "url(&quot;http" not in picture


def test_what_lies_outside_is_taken_along() -> None:
    pytest.importorskip("mkdocs")
    hooks = script("hooks")
    text = "![a](../README.md) [b](../nothing.svg) [c](faq.md) [d](../research/docs/stop.md#goals)"
    assert hooks.find_outside(text, "index.md") == {"README.md"}
    assert hooks.rewrite_links(text, "index.md") == (
        "![a](outside/README.md) [b](../nothing.svg) [c](faq.md) [d](research/stop.md#goals)"
    )
    text = "[a](../results/README.md) [b](../../docs/faq.md#x) [c](stop.md)"
    assert hooks.find_outside(text, "research/index.md") == {"research/results/README.md"}
    assert hooks.rewrite_links(text, "research/index.md") == (
        "[a](../outside/research/results/README.md) [b](../faq.md#x) [c](stop.md)"
    )
    page = "outside/research/results/README.md"  # links as they are in the repository
    text = "[a](../docs/stop.md#x) [b](table3-dirichlet.md) [c](../../docs/faq.md)"
    assert hooks.find_outside(text, page) == {"research/results/table3-dirichlet.md"}
    assert hooks.rewrite_links(text, page) == (
        "[a](../../../research/stop.md#x) [b](table3-dirichlet.md) [c](../../../faq.md)"
    )
    outside = hooks.collect_outside({"index.md": "[a](../README.md)"})
    assert outside > {"README.md"}  # with what that page links to
    assert not any(path.startswith(("docs/", "research/docs/")) for path in outside)


def test_examples_in_docstrings_become_blocks() -> None:
    pytest.importorskip("griffe")
    fenced = script("doctests").fenced
    assert (
        fenced("Adds.\n\n>>> 1 + 1\n2\n\nMore.") == "Adds.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."
    )
    assert fenced("Nothing to run, 3 > 2.") == "Nothing to run, 3 > 2."


def test_a_long_listing_is_shortened() -> None:
    lines = [f"a  round {t}" for t in range(1, 11)]
    kept = [*lines[:3], "... 4 more rounds ...", *lines[-3:], "table"]
    assert script("record").shortened([*lines, "table"]) == kept


def test_every_method_of_every_role_is_documented() -> None:
    """The reference page leaves out what has no docstring."""
    from flrce.core.roles import ROLE_CLASSES, Piece
    from flrce.training.links import Link

    for kind in (Piece, Link, *ROLE_CLASSES.values()):
        members = {
            name: member
            for name, member in vars(kind).items()
            if not name.startswith("_") and (callable(member) or hasattr(member, "compute"))
        }
        assert [name for name, member in members.items() if not member.__doc__] == [], kind
    text = (DOCS / "reference.md").read_text()
    assert "::: flrce.core.roles\n" in text
    assert "::: flrce.training.links.Link\n" in text
