"""DeepSeek V4 Flash on one's own machine."""

__version__ = "0.1.0"
