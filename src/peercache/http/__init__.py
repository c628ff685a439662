"""What a node shows to people and their tools: /metrics and /healthz."""
