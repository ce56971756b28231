"""Kernels and torch held to AVX2 on an x86 that has more, for `--avx2` of native.py, cells.py and
wide.py.
"""

import os
import sys

#: read as torch is loaded: its own kernels, oneDNN's and MKL's
TORCH = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}


def narrow() -> None:
    """From here on vectors have 8 floats. Starts the script anew where torch was loaded without
    being told.
    """
    if any(os.environ.get(name) != value for name, value in TORCH.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **TORCH})
    from flrce.core import c_compiler

    known = c_compiler.detect_target

    def target(path: str, stamp: float) -> tuple[tuple[str, ...], str, c_compiler.Processor]:
        return (
            ("-march=native", "-mno-avx512f"),
            f"{known(path, stamp)[1]} held to AVX2",
            c_compiler.Processor(8, 16),
        )

    c_compiler.detect_target = target  # type: ignore[assignment]
