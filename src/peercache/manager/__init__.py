"""The prefix index: how much of a prompt is where, in stores of nodes and on GPUs of engines."""
