"""One adapter per contender: the same work on the same bytes, through its public interface."""
