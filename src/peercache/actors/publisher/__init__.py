"""Publisher: reports to directory owners what this node holds."""
