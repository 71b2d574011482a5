"""A grammar over the vocabulary: which tokens may come next.

Grammars are texts in the Lark dialect of llguidance, which compiles and runs them. Control tokens are allowed where a
grammar names one, by the rules that `RULES` lists, and nowhere else; tokens that no text becomes, nowhere at all.

Measured for the V4 vocabulary of 129,280 ids on one core of a cloud machine: 0.4 s and 45 MB once for the vocabulary;
1 to 2 ms to compile the schema of a typical tool, 15 ms for thirty strict ones; a mask takes 0.03 ms on average and
0.15 ms at most in JSON, 0.05 and 1.3 ms in a strict tool's call, 0.2 and 5 ms in one of thirty that are not strict.
xgrammar took 20 ms to compile and 0.01 ms on average, 0.9 ms at most, for a mask of JSON, and brings PyTorch along.
"""
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ds4mlx.errors import BadRequest
from ds4mlx.text.segments import DSML
from ds4mlx.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

RULES: Mapping[str, str] = {"dsml": DSML}   # rule of every grammar -> the control token that it is
MAX_SOURCE = 512 << 10     # characters
MAX_DIGITS = 40            # in a row of a number, of which a float keeps 17: a model that likes one may never end it
# Of llguidance, in its units: a hostile schema was refused within 0.6 s, be it at once or at a later token.
LIMITS = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 100_000, "step_max_items": 50_000,
          "max_lexer_states": 20_000, "max_grammar_size": 20_000}


class Vocabulary:
    """The tokens that grammars choose from. Built when the first grammar is compiled; any thread may compile.

    width: logits per position, where they are more than the ids with a token.
    """

    def __init__(self, tokenizer: Tokenizer, width: int | None = None) -> None:
        self.tokenizer, self.width = tokenizer, width or tokenizer.vocab_size
        self._lock = threading.Lock()
        self._made: LLTokenizer | None = None     # llguidance's form of it
        self._digits = np.zeros(self.width, bool)    # tokens that begin with a digit
        self._letter = 0                     # a token that no number holds

    def compile(self, source: str, param: str) -> "Grammar":
        """The grammar that `source` describes. Raises BadRequest, naming `param`, for one that is faulty or too large,
        that no text satisfies, or that asks for what llguidance does not know."""
        from llguidance import LLMatcher, LLParserLimits
        if len(source) > MAX_SOURCE:
            raise BadRequest(f"{param}: the schema makes a grammar of {len(source)} characters, {MAX_SOURCE} are "
                             "allowed; make it smaller", param=param, code="invalid_schema")
        control = self.tokenizer.control
        rules = "".join(f"\n{rule}: <[{control[literal]}]>" for rule, literal in RULES.items())
        matcher = LLMatcher(self._vocabulary(), LLMatcher.grammar_from_lark(source + rules), log_level=0,
                            limits=LLParserLimits(verbose_errors=False, **LIMITS))    # type: ignore[arg-type]
        grammar = Grammar(matcher, self, param)
        grammar.mask()   # faults that only show at the first token are found here
        return grammar

    def matches(self, source: str, text: str) -> bool:
        """Whether a text is a whole one of the grammar's; False where that cannot be told."""
        try:
            grammar = self.compile(source, "text")
            grammar.skip(self.tokenizer.encode_literal(text))
            return bool(grammar.mask()[self.tokenizer.eos])
        except BadRequest:
            return False

    def shortened(self, mask: np.ndarray) -> np.ndarray:
        """A mask without digits if what comes is a number, to which no letter belongs, and something else is left."""
        if mask[self._letter]:
            return mask
        rest = mask & ~self._digits
        return rest if rest.any() else mask

    def all_but_eos(self) -> np.ndarray:
        """A mask that keeps the answer from ending."""
        mask = np.ones(self.width, bool)
        mask[self.tokenizer.eos] = False
        return mask

    def _vocabulary(self) -> "LLTokenizer":
        with self._lock:
            if self._made is None:
                from llguidance import LLTokenizer, TokenizerWrapper
                spelled = _Spelled(self.tokenizer)
                self._digits[[i for i, token in enumerate(spelled.tokens) if token[:1].isdigit()]] = True
                self._letter = spelled.tokens.index(b"q")
                self._made = LLTokenizer(TokenizerWrapper(spelled), eos_token=self.tokenizer.eos)
            return self._made


class Grammar:
    """One text as it is sampled: mask(), then accept() of a token. Both raise BadRequest where that gets too costly."""

    def __init__(self, matcher: "LLMatcher", vocabulary: Vocabulary, param: str) -> None:
        self._matcher, self._vocabulary, self._param = matcher, vocabulary, param
        self._digits = 0    # at the end of the text
        self._check()

    @property
    def done(self) -> bool:
        """Nothing but the end may follow."""
        return self._matcher.is_stopped()

    def mask(self) -> np.ndarray:
        """bool [width], True for the tokens that may come next, EOS where the text is complete.

        Where only one text may follow, its first token alone, as the tokenizer would spell it: the model has seen no
        other spelling of what never changes. A number that could go on for ever ends behind `MAX_DIGITS`.
        """
        forced, width = self._matcher.compute_ff_tokens(), self._vocabulary.width
        if forced:
            mask = np.zeros(width, bool)
            mask[forced[0]] = True
            return mask
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.unpackbits(bits, bitorder="little")[:width].view(bool)
        mask = mask if len(mask) == width else np.pad(mask, (0, width - len(mask)))
        return mask if self._digits < MAX_DIGITS else self._vocabulary.shortened(mask)

    def accept(self, token: int) -> None:
        """Go on by one token that the mask allowed."""
        self._matcher.consume_token(token)
        self._check()
        spelled = self._vocabulary.tokenizer.token_bytes(token)
        behind = len(spelled) - len(spelled.rstrip(b"0123456789"))
        self._digits = behind + (self._digits if behind == len(spelled) else 0)

    def skip(self, tokens: list[int]) -> None:
        """Go on by a text that is there already. Raises BadRequest when it is no beginning of one allowed."""
        self._matcher.consume_tokens(tokens)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise BadRequest(f"{self._param}: the answer cannot be held to the schema ({self._reason()}); simplify it, "
                             "or ask without strict", param=self._param, code="invalid_schema")

    def _reason(self) -> str:
        line = self._matcher.get_error().partition("\n")[0].rpartition(": failed to compile JSON schema: ")[2]
        return "no text satisfies it" if line.startswith("NoExtension") else line[:300]


class _Spelled:
    """A tokenizer as llguidance asks for it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        known = tokenizer.text_ids | tokenizer.control_ids
        self.eos_token_id, self.bos_token_id = tokenizer.eos, tokenizer.bos
        self.tokens = [tokenizer.token_bytes(token) if token in known else b"" for token in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.control_ids)

    def __call__(self, text: str) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("text, not bytes")
        return self._tokenizer.encode_literal(text)
