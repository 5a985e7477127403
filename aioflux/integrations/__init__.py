"""aioflux behind the interfaces of other libraries."""
