"""Observability: the log, metrics, reasons, and reports to the home node."""
