"""Calls that do nothing, constants that mean nothing."""


def __getattr__(name):
    return 0 if name.startswith("CUBLAS") else lambda *args: None
