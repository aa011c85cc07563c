"""What is timed, and the testbed that it is timed on. See ``benchmarks.common`` and ``benchmarks.testbed``."""
