"""The HTTP server of a node: /metrics, /healthz, the dashboard and its data as JSON."""
