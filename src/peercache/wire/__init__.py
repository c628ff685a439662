"""The bytes of the control plane: envelopes, their codec, and the messages."""
