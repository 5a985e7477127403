"""The names of other libraries over ours."""
