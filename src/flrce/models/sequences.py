"""Networks for sequences: LSTM (LEAF's) and GRU for token ids, a 1-D CNN for time series."""

from typing import Literal

from torch import Tensor, nn


class RecurrentNetwork(nn.Module):
    """Token ids (N, L) -> scores (N, outputs) after the last id, or (N, L, outputs).

    The defaults are LEAF's network for Shakespeare (Caldas et al. 2018): embedding 8, two layers of
    256.
    """

    def __init__(
        self,
        vocabulary: int,
        outputs: int,
        every: bool = False,
        cell: Literal["lstm", "gru"] = "lstm",
        embedding: int = 8,
        width: int = 256,
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.every = every
        self.embedding = nn.Embedding(vocabulary, embedding)
        kind = nn.LSTM if cell == "lstm" else nn.GRU
        self.cells = kind(embedding, width, layers, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.cells(self.embedding(ids))  # (N, L, width)
        scores: Tensor = self.head(states if self.every else states[:, -1])
        return scores


class TimeSeriesCNN(nn.Sequential):
    """Series (N, C, L) -> (N, outputs): three convolutions, each GroupNorm-ReLU, then the mean."""

    def __init__(self, channels: int, outputs: int, width: int = 32) -> None:
        layers: list[nn.Module] = []
        for out in (width, 2 * width, 2 * width):
            layers += [nn.Conv1d(channels, out, 5, padding=2), nn.GroupNorm(4, out)]
            layers += [nn.ReLU(), nn.MaxPool1d(2, ceil_mode=True)]
            channels = out
        layers[-1] = nn.AdaptiveAvgPool1d(1)
        super().__init__(*layers, nn.Flatten(), nn.Linear(2 * width, outputs))
