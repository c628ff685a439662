"""Publisher: tells directory owners what this node holds."""
