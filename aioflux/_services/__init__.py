"""Storage services: each method makes one attempt of one operation."""
