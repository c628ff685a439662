"""The client against real nodes."""
