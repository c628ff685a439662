"""The tcp fabric: client, channel, wire format, server, and the compiled loops."""
