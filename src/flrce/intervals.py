"""How sure a mean over seeds is: 95 % intervals by Student's t."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def half_width(values: ArrayLike) -> Any:
    """Half the width of the mean's interval, over the first axis; of two values at least."""
    from scipy.special import stdtrit  # a single run needs none of scipy

    found = np.asarray(values, float)
    n = len(found)
    return stdtrit(n - 1, 0.975) * found.std(0, ddof=1) / n**0.5
