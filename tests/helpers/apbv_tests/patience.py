"""How long tests wait before they take something for hung.

Nothing is to be concluded from how fast a machine is: limits are far above what one under heavy
load needs.
"""

import os
import time
from collections.abc import Callable

# For machines that need longer still; in the children of a test process, too.
_FACTOR = float(os.environ.get("APBV_TEST_TIMEOUT", "1"))


def limit(seconds: float) -> float:
    """A limit on waiting, in seconds, times the environment variable APBV_TEST_TIMEOUT."""
    return seconds * _FACTOR


# From a failure until everybody has heard of it, or from the call of a script until it has refused
# what is wrong.
HANGING = limit(120.0)
# Of groups of hosts, where it is not the timeout that is tested: longer than HANGING, so that
# whoever hears of a failure only by waiting in vain is found out.
GROUP_TIMEOUT = limit(600.0)
# Of a test, its fixtures included.
TEST_TIMEOUT = limit(900.0)


def wait_for(condition: Callable[[], bool], seconds: float = HANGING) -> None:
    """Poll until the condition holds.

    Raises:
        AssertionError: it does not hold within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain"
        time.sleep(0.02)
