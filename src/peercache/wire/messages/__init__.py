"""Every control message, one file a conversation."""
