"""Many requests that make up one operation: a pure plan and a short executor each."""
