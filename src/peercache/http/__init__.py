"""The HTTP server of a node: /metrics, /healthz and the overview."""
