"""The prefix index: how much of a prompt lies where, in stores of nodes and on GPUs of engines."""
