"""Experiments of strangers that name code: nothing is called or imported that has no right to
be.
"""

import random

import pytest
from name_fuzz import case


@pytest.mark.parametrize("seed", range(3))
def test_names_of_code(seed, tmp_path):
    for i in range(60):
        case(tmp_path, random.Random(f"{seed} {i}"))
