"""Hypothesis profiles: `HYPOTHESIS_PROFILE=nightly` searches longer and at random."""

from __future__ import annotations

import os

from hypothesis import settings

# A derandomized run fails only for a change in the code. Busy machines stall, hence no deadline.
settings.register_profile("ci", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile("nightly", deadline=None, max_examples=2_000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
