"""Channel pool: which connections to which peers exist, and which are in use."""
