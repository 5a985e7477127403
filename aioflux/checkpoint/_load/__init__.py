"""Loading: plans of reads, fetches and decoding."""
