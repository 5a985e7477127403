"""Simulation of a thousand nodes: the code of aioflux on a virtual clock and a model of a bucket.

    clock       an asyncio event loop whose time jumps to the next timer
    bucket      the model: objects, request rates, latency, links of nodes, outages, prices
    stores      `Store` over the model, through the contract of `_services.base`
    reads       start of an epoch, and an outage
    save        a checkpoint
    check       the same scenario in processes against the embedded server

Everything above the contract of the services runs unchanged: stores, sessions, limits, retries,
listings, and the commit protocol of checkpoints.
"""
