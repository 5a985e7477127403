"""What DeepSpeed imports as `torch_nebula`: `aioflux.compat.nebula`."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("aioflux.compat.nebula")
