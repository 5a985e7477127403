"""One module for each client: functions that do a `Work` through the client's public interface."""
