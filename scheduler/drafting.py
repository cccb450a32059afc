"""Drafting without a model: what followed these tokens before may follow them again.

Prompt look-up (Saxena, 2023; vLLM's n-gram proposer). A pure function of the tokens, so drafts need no randomness and a
journal can be decided again.
"""

from collections.abc import Sequence

MAX_NGRAM = 3
LOOK_BACK_TOKENS = 2048


def prompt_lookup(tokens: Sequence[int], most: int) -> list[int]:
    """Up to `most` tokens that followed an earlier occurrence of the last tokens.

    The longest match of at most `MAX_NGRAM` tokens wins, among equals the latest; at most `LOOK_BACK_TOKENS` are looked at.
    """
    window = list(tokens[-LOOK_BACK_TOKENS:])
    end = len(window)
    for length in range(min(MAX_NGRAM, end - 1), 0, -1):
        pattern = window[end - length :]
        for start in range(end - length - 1, -1, -1):
            if window[start] == pattern[0] and window[start : start + length] == pattern:
                return window[start + length : start + length + most]
    return []
