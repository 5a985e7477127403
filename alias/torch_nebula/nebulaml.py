"""What the manual of Nebula imports as `nebulaml`: `aioflux.compat.nebula`."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("aioflux.compat.nebula")
