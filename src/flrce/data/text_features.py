"""Text as features: hashed n-grams, which need no vocabulary, or ids of a language model."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.errors import BadInput
from flrce.formats.language import open_language_model
from flrce.formats.tokenizers import Tokenizer

DEFAULT_BUCKETS = 4096  # features of a text column, unless data.buckets says otherwise
ROW_NORM = 4.0  # length of a text's feature vector; of 1, 4 and 16 the best in one small trial
DEFAULT_TOKENS = 128  # ids of a text, unless data.length says otherwise
NGRAMS = (1, 2)  # single words and pairs of words
WORD_PATTERN = r"(?u)\b\w+\b"
MIN_PROSE_WORDS = 3.0  # words of a text on average, from which a column of texts is prose
TEXT_NAMES = {
    *("text", "sentence", "review", "message", "content", "body", "comment", "tweet", "document"),
    *("question", "utterance", "description", "abstract", "headline", "title", "summary"),
}


def hash_texts(texts: Sequence[str] | NDArray[Any], buckets: int) -> NDArray[np.float32]:
    """(N, buckets): signed counts of hashed words and pairs of words, each row of norm ROW_NORM.

    Weinberger et al. 2009, "Feature hashing for large scale multitask learning", with MurmurHash3.
    An empty text is a row of zeros.
    """
    hashed = _make_vectorizer(buckets).transform([str(text) for text in texts])
    return np.asarray(ROW_NORM * hashed.toarray(), np.float32)


@lru_cache(maxsize=8)
def _make_vectorizer(buckets: int) -> Any:
    from sklearn.feature_extraction.text import HashingVectorizer

    return HashingVectorizer(
        n_features=buckets, ngram_range=NGRAMS, token_pattern=WORD_PATTERN, dtype=np.float32
    )


@lru_cache(maxsize=2)
def load_tokenizer(wanted: str) -> tuple[Tokenizer, int]:
    """A model's tokenizer, and the number of ids that the model has weights for."""
    try:
        model = open_language_model(wanted)
        tokens = model.tokenizer()
        return tokens, min(len(tokens.tokens), model.vocabulary)
    except BadInput as why:
        raise BadInput(f"data.tokenizer = {wanted!r}: {why}") from why


def tokenize_texts(
    texts: Sequence[str] | NDArray[Any], tokenizer: str, length: int
) -> NDArray[np.int64]:
    """(N, length): the first ids of each text, padded on the left by the id that ends a text.

    The padding stands first, so that a recurrent network reads the text last.
    """
    tokens, _ = load_tokenizer(tokenizer)
    ids = np.full((len(texts), length), tokens.end, np.int64)
    for row, text in zip(ids, texts, strict=True):
        found = tokens.encode(str(text))[:length]
        if found:
            row[-len(found) :] = found
    return ids


def is_prose(name: str, values: NDArray[Any], max_values: int) -> bool:
    """Whether a column holds texts to read, not values of a category or names of rows."""
    if values.dtype.kind not in "OUS":
        return False
    texts = values.astype(str)
    distinct = len(np.unique(texts))
    if distinct <= min(max_values, len(texts) / 2):
        return False
    words = [len(re.findall(WORD_PATTERN, text)) for text in texts[:1000]]
    named = name.lower() in TEXT_NAMES
    return float(np.mean(words)) >= (1 if named else MIN_PROSE_WORDS)
