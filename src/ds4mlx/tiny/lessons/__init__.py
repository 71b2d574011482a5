"""What the built-in model learns: conversations made of templates and words, rendered as the server renders them."""
from ds4mlx.tiny.lessons.encoding import VOCABULARY, vocabulary
from ds4mlx.tiny.lessons.packing import rows, task_rows

__all__ = ["VOCABULARY", "rows", "task_rows", "vocabulary"]
