"""The whole app in this process: python -m flower_app --nodes 8 --state runs/a"""

import argparse

from flrce.errors import BadInput
from flrce.flower import LocalGrid

from flower_app.client_app import app
from flower_app.task import serve

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--nodes", type=int, default=8)
parser.add_argument("--set", default="", help="changes to experiment.toml, key=value, separated by spaces")
parser.add_argument("--state", default=None, help="run directory, and where a killed run goes on from")
wanted = parser.parse_args()
config = {"set": wanted.set}
grid = LocalGrid(app, wanted.nodes, config)
try:
    result = serve(grid, config, state=wanted.state, wait_for_nodes=10.0)
except BadInput as why:
    parser.exit(2, f"error: {why}\n")
print(f"{len(result.history)} rounds; stopped early: {result.stopped or 'no'}")
