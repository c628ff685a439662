"""What `deploy/` has, tried with the tools that it is for."""
