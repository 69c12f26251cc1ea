"""Files that the package reads: rows as JSON lines, and models as folders."""

import json


def write_rows(path, rows):
    """Write rows, one per line; return the path as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def write_splits(folder, **splits):
    """Write the rows of each split to a folder; return it."""
    for split, rows in splits.items():
        write_rows(folder / f"{split}.jsonl", rows)
    return folder


def save(folder, model, tokenizer):
    """Write a model with its tokenizer to a folder; return it."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
