"""Fan-out, work run to completion, single flight, byte budgets and iteration for asyncio."""
