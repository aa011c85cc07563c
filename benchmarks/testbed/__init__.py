"""An unequal cluster on one Linux machine, enforced by its kernel.

One network namespace per host of the cluster file, a bridge between them, ``tc`` rates for each direction, one Gloo
rank per device; compute made unequal by deadline or by quota. Emulated speeds, real bytes: nothing here says what a GPU
would do. ``python -m benchmarks.testbed`` is the command, ``Testbed`` the same for programs; ``layout`` draws it.
"""

from benchmarks.testbed.bed import Testbed
from benchmarks.testbed.errors import RankError, TestbedError
from benchmarks.testbed.layout import played
from benchmarks.testbed.network import Counters
from benchmarks.testbed.pace import Deadline, deadline, throttle

__all__ = ["Counters", "Deadline", "RankError", "Testbed", "TestbedError", "deadline", "played", "throttle"]
