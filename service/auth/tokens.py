"""Bearer tokens: made random, stored only as a hash, shown once."""

import hashlib
import secrets

from gangline.protocol.names import TOKEN_PREFIXES


def make_token(kind: str) -> str:
    """A new token of a kind (`user`, `enrolment`, `node`, `attempt`), 256 random bits behind its prefix."""
    return TOKEN_PREFIXES[kind] + secrets.token_urlsafe(32)


def hash_token(token: str) -> str:
    """What is stored: a fast hash is right for random tokens, which cannot be guessed offline."""
    return hashlib.sha256(token.encode()).hexdigest()
