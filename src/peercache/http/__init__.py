"""The HTTP server of a node: /metrics, /healthz, the dashboard and the JSON beside it."""
