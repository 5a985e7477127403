"""Tools for asyncio: fan-out, run to completion, single flight, byte budgets, iteration."""
