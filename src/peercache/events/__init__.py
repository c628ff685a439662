"""KV events: reports of who stores which blocks, in the formats that routers read."""
