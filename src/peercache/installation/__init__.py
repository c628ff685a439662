"""What pip installed: the distribution's name and version, and the compiled library."""
