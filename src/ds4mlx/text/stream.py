"""Ids -> text, piece by piece, no piece ever splitting a character."""
import codecs

from ds4mlx.text.tokenizer import Tokenizer


class Detokenizer:
    """One answer's text. The pieces joined are `tokenizer.decode` of the ids.

    Up to three bytes of an unfinished character wait for the next token: half a character sent to a client
    comes back as U+FFFD in its next request and ends the reusable prefix there.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters completed by this token; often one piece, "" while a character is unfinished."""
        return self._utf8.decode(self._token_bytes(token))

    def finish(self) -> str:
        """What was left: "" or U+FFFD for the bytes of an unfinished character. The next answer may follow."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest
