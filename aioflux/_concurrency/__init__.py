"""Fan-out, shielded clean-up and iteration for asyncio."""
