"""Fuzzing of what reads bytes of others: messages, frames, files, tables, events, questions."""
