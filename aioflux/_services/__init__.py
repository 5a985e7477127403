"""Storage services: one method is one request and one attempt."""
