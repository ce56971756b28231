"""PowerSGD (Vogels et al. 2019): uploads of low rank, with error feedback.

    rounds = 10
    clients = 8
    per_round = 4
    data.alpha = 1.0
    [recipe]
    name = "fedavg"
    compressor = { piece = "error-feedback", inner = { piece = "powersgd:LowRank", rank = 3 } }

    $ PYTHONPATH=examples/extensions flrce run experiment.toml

Both sides draw the same start of the power iteration, so that it need not travel.
"""

from dataclasses import dataclass
from math import isqrt

import torch

import flrce
from flrce.core.pieces import get_buffer


def find_rows(size):
    """The rows of the most square matrix of so many floats."""
    return next(rows for rows in range(isqrt(size), 0, -1) if size % rows == 0)


@dataclass(frozen=True)
class LowRank(flrce.Compressor):
    """Each tensor as a matrix M of `rank`: P = orth(M Q) and R = M' P travel, P R' is decoded."""

    rank: int = 2

    def count_floats(self, size):
        """Floats of one tensor: as factors, or as it is where that is no more."""
        rows = find_rows(size)
        return min(size, self.rank * (rows + size // rows))

    def encode(self, u, layout, rng, client_state):
        sent = []
        for (_, size), part in zip(layout, u.split([size for _, size in layout]), strict=True):
            rows = find_rows(size)
            start = torch.from_numpy(rng.standard_normal((size // rows, self.rank))).float()
            if self.count_floats(size) == size:
                sent.append(part.float())
                continue
            matrix = part.float().reshape(rows, -1)
            left = torch.linalg.qr(matrix @ start)[0]
            sent += [left.reshape(-1), (matrix.T @ left).reshape(-1)]
        return flrce.Payload({"factors": torch.cat(sent)}), client_state

    def decode(self, payload, layout, rng):
        sizes = self.list_sizes(layout)
        factors = get_buffer(payload, "factors", torch.float32, sum(sizes))
        floats = iter(factors.split(sizes))
        return torch.cat([self.decode_tensor(size, floats) for _, size in layout])

    def decode_tensor(self, size, floats):
        if self.count_floats(size) == size:
            return next(floats)
        left, right = (next(floats).reshape(-1, self.rank) for _ in range(2))
        return (left @ right.T).reshape(-1)

    def list_sizes(self, layout):
        sizes = []
        for _, size in layout:
            rows = find_rows(size)
            whole = self.count_floats(size) == size
            sizes += [size] if whole else [self.rank * rows, self.rank * (size // rows)]
        return sizes

    def estimate_bytes(self, layout, rng):
        return 4 * sum(self.count_floats(size) for _, size in layout)
