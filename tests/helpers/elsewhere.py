"""A device that is not there: tensors of the host that count as a device's, for machines without a
GPU.

While it lasts, an operation that mixes them with the host's own raises, as it would on a GPU, and
what crosses through `flrce.core.tensor_bytes` is counted. What they are computed with is the
host's arithmetic.
"""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from flrce.core import tensor_bytes
from flrce.core.sketch import make_sketch

COPIES = ("copy_",)  # between devices
LOOKS = ("index", "index_put_", "index_put", "_index_put_impl_")  # whose indices may lie anywhere


class Mixed(RuntimeError):
    """Tensors of both in one operation."""


class Elsewhere(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.far, self.up, self.down = WeakIdKeyDictionary(), 0, 0

    def is_far(self, x):
        return x in self.far

    def there(self, x, device="far"):
        """As crossing.there: everything that is not there yet goes."""
        if self.is_far(x):
            return x
        self.up += x.numel() * x.element_size()
        with _disable_current_modes():
            copy = x.clone()
        self.far[copy] = True
        return copy

    def home(self, x):
        if not self.is_far(x):
            return x
        self.down += x.numel() * x.element_size()
        with _disable_current_modes():
            return x.clone()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if name in LOOKS:
            tensors = [args[0], *(x for x in args[2:] if isinstance(x, torch.Tensor))]
        far = [self.is_far(x) for x in tensors]
        if any(far) and name not in COPIES:
            mixed = [
                tuple(x.shape)
                for x, there in zip(tensors, far, strict=True)
                if not there and x.dim()
            ]
            written = name.endswith("_") and not far[0]
            if mixed or written:
                raise Mixed(f"Expected all tensors to be on the same device: {name} of {mixed}")
        out = func(*args, **kwargs)
        lies_far = far[0] if name in COPIES else any(far)
        if lies_far:
            for x in tree_leaves(out):
                if isinstance(x, torch.Tensor):
                    self.far[x] = True
        return out


@contextmanager
def elsewhere(monkeypatch):
    """Tensors that `tensor_bytes.there` sent are far until `tensor_bytes.home` brings them
    back.
    """
    mode = Elsewhere()
    make_sketch.cache_clear()  # maps remember what they sent to a device
    with monkeypatch.context() as patch:
        patch.setattr(tensor_bytes, "is_on_host", lambda x: not mode.is_far(x))
        patch.setattr(tensor_bytes, "to_device", mode.there)
        patch.setattr(
            tensor_bytes,
            "to_device_of",
            lambda x, y: mode.there(x) if mode.is_far(y) else mode.home(x),
        )
        patch.setattr(tensor_bytes, "to_host", mode.home)
        with mode:
            yield mode
    make_sketch.cache_clear()
