"""The whole baseline in this process, without a network or Ray: python -m flrce_baseline --set dataset=digits"""

import argparse
import tomllib
from contextlib import closing
from pathlib import Path

from flwr.app import UserConfig

from flrce.errors import BadInput
from flrce.flower import LocalGrid
from flrce_baseline.client_app import app
from flrce_baseline.server_app import run_rounds


def read_config(overrides: list[str]) -> UserConfig:
    """The run config of pyproject.toml with `key=value` changes, of the same types."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    config: UserConfig = project["tool"]["flwr"]["app"]["config"]
    for override in overrides:
        name, _, value = override.partition("=")
        if name not in config:
            raise BadInput(f"--set {override}: no such key; use one of {', '.join(config)}")
        try:
            config[name] = type(config[name])(value)
        except ValueError:
            raise BadInput(f"--set {override}: use a value like {config[name]!r}") from None
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    try:
        config = read_config(parser.parse_args().set)
        with closing(LocalGrid(app, int(config["num-clients"]), config)) as grid:
            result = run_rounds(grid, config)
    except BadInput as why:
        parser.exit(2, f"error: {why}\n")
    print(f"{len(result.history)} rounds; stopped early: {result.stopped or 'no'}")


if __name__ == "__main__":
    main()
