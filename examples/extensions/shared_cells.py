"""Clients that train in one round share the radio cells that they are in.

    rounds = 8
    clients = 8
    per_round = 4
    recipe.name = "fedavg"
    data.alpha = 1.0
    [fleet]
    costs = { piece = "shared_cells:SharedCells", cells = 3, up_bits = 4e6 }

    $ PYTHONPATH=examples/extensions flrce run experiment.toml

The energy of the network is booked beside the clients' joules, as a cost of its own.
"""

from collections import Counter
from dataclasses import dataclass, replace

import flrce


@dataclass(frozen=True)
class SharedCells(flrce.CostModel):
    """Client i is in cell i mod `cells`. A cell's uplink is divided among the clients that work
    there at the same time; at night, when others sleep, there is twice as much of it.
    """

    cells: int = 3
    up_bits: float = 4e6  # per second and cell
    joules_per_byte: float = 1e-6

    def price(self, loads):
        busy = Counter(self.find_cell(load) for load in loads)
        return [self.price_load(load, busy[self.find_cell(load)]) for load in loads]

    def price_load(self, load, sharers):
        night = load.hour < 6
        rate = self.up_bits * (2 if night else 1) / sharers
        device = replace(load.device, up_bits=min(load.device.up_bits, rate))
        cost = load.price_on(device)
        energy = self.joules_per_byte * (cost.bytes_up + cost.bytes_down)
        return replace(cost, other={"network_joules": energy})

    def find_cell(self, load):
        return int(load.client) % self.cells
