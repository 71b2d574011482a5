"""DSML, the tool syntax of DeepSeek V4."""
from ds4mlx.chat.syntax.dsml_writing import render_calls

__all__ = ["render_calls"]
