"""The hash of JSON content that all ids, checksums and locks use."""

import hashlib

import rfc8785


def canonical(content: object) -> bytes:
    """The RFC 8785 canonical JSON of `content`.

    Raises:
        ValueError: If `content` holds NaN, an infinity, an integer beyond 2**53, a key that is not a string,
            or is nested too deeply.
    """
    try:
        return rfc8785.dumps(content)  # type: ignore[arg-type]  # checked at run time
    except RecursionError:
        raise ValueError("nested too deeply") from None


def digest(content: object) -> str:
    """SHA-256, in hex, of the canonical JSON of `content`.

    Raises:
        ValueError: If `content` has no canonical JSON.

    Example:
        >>> digest({"b": 1, "a": 0.10}) == digest({"a": 1e-1, "b": 1.0})
        True
        >>> digest({"a": 0.1}) == digest({"a": "0.1"})
        False
    """
    return hashlib.sha256(canonical(content)).hexdigest()
