"""Which release of torch the tests run on."""

import torch

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])  # (major, minor)
