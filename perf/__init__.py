"""Benchmarks of aioflux and other clients: one module for each scenario and one for each client."""
