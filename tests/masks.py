"""Masks of random tokens, for engines."""

from functools import lru_cache

import numpy as np

VOCAB = 32


@lru_cache(10_000)
def random_mask(vocab, share, *seed):
    rng = np.random.default_rng(seed)
    allowed = rng.integers(0, share, vocab) == 0
    allowed[rng.integers(vocab)] = True
    return allowed


class Walk:
    """Allows about a third of the vocabulary, another third after every token."""

    def __init__(self, vocab=VOCAB, salt=0, share=3):
        self.vocab, self.salt, self.share = vocab, salt, share
        self.tokens = []

    def allowed(self):
        return random_mask(self.vocab, self.share, self.salt, len(self.tokens), *self.tokens[-2:])

    def push(self, token):
        assert self.allowed()[token], "the engine takes a token that is not allowed"
        self.tokens.append(token)

    def pop(self, count):
        assert 0 < count <= len(self.tokens)
        del self.tokens[len(self.tokens) - count :]


class Lenient(Walk):
    """Takes any token, as broken engines need it."""

    def push(self, token):
        self.tokens.append(token)
