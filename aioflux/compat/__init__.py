"""Interfaces of other libraries, implemented by aioflux."""
