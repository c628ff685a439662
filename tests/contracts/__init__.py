"""One suite a port: whatever fills the port, real or fake, passes the same tests."""
