"""Suggestions for misspelt names."""

import difflib
from collections.abc import Callable, Collection

# Options that must stay unset because training data are infinite, and what to set instead.
INSTEAD = dict.fromkeys(("trainer.max_epochs", "trainer.min_epochs"), "trainer.max_steps")


def suggestion(word: str, known: Collection[str]) -> str:
    """A question naming the known name that was probably meant, or the empty string.

    The last part of a dotted name counts most: a name that has the same one, then one whose words begin with
    the given letters, then one with the same word in it, then the most similar spelling. Of equally similar
    names it is the first.

    Example:
        >>> suggestion("lr", ["lora", "learning_rate"]), suggestion("model.lr", ["model.learning_rate"])
        (' (did you mean learning_rate?)', ' (did you mean model.learning_rate?)')
        >>> suggestion("beta", ["kl.beta", "kl.final_beta"]), suggestion("nonsense", ["kl.beta"])
        (' (did you mean kl.beta?)', '')
        >>> suggestion("trainer.epochs", ["trainer.max_epochs", "trainer.max_steps"])
        ' (did you mean trainer.max_steps?)'
    """
    last = word.rpartition(".")[2].lower()
    alike: tuple[Callable[[list[str]], bool], ...] = (
        lambda parts: last == "_".join(parts),
        lambda parts: len(parts) > 1 and last == "".join(part[:1] for part in parts),
        lambda parts: len(last) > 3 and last.removesuffix("s") in [part.removesuffix("s") for part in parts],
    )
    for is_alike in alike:
        candidates = [name for name in known if is_alike(name.rpartition(".")[2].lower().split("_"))]
        if candidates:
            meant = max(candidates, key=lambda name: difflib.SequenceMatcher(None, name, word).ratio())
            break
    else:
        # Of short words, half of the letters agree by chance
        similar = difflib.get_close_matches(word, known, n=1, cutoff=0.6 if len(last) > 4 else 0.75)
        if not similar:
            return ""
        meant = similar[0]
    return f" (did you mean {INSTEAD.get(meant, meant)}?)"
