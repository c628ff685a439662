"""KV events: who stores which blocks, told as it happens, in the formats that routers read."""
