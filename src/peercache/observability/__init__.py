"""What PeerCache tells: the log, metrics, reasons, and reports to the home node."""
