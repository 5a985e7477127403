"""Records: many samples in one object."""
