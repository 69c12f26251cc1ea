"""A classifier of reviews on a language model's hidden states: a reward that is no sum over words.

    python -m replication.learned FOLDER MODEL [--reviews N] [--tested N]

reads the reviews of FOLDER (train.parquet, test.parquet) with the first layers of MODEL, trains a small
network on means of their hidden states, writes `NETWORK`, and prints the network's share of right answers on
the test reviews. What was read is kept beside it: a stopped command goes on where it was.

The model is causal, so that one pass through a text gives the reward of each of its beginnings.
"""

import argparse
import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_klrb.data.batches import pad
from lit_klrb.files import write_atomically

NETWORK = Path("runs/learned/network.pt")
# Layers of the model that are read, and tokens of a review.
LAYERS, TOKENS = 16, 512
# Beginnings of a review on which the network is trained, in tokens: answers are short.
LENGTHS = (8, 16, 32, 64, 128, 256, TOKENS)
# Reviews that are read and kept together, and texts of a pass.
SHARD, ROWS = 500, 16
# Passes of the network over the reviews.
EPOCHS = 8
# Scores of the beginnings of the rows that `log_odds` read last.
_KEPT: dict[tuple[int, ...], float] = {}


class Reader(NamedTuple):
    """The first layers of a causal language model.

    Args:
        model: They, without a head.
        tokenizer: The model's tokenizer.
    """

    model: Any
    tokenizer: Any

    @classmethod
    def of(cls, folder: str) -> "Reader":
        """The first `LAYERS` layers of a model."""
        backbone: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).base_model
        backbone.layers = backbone.layers[:LAYERS]
        return cls(backbone.eval().requires_grad_(False), AutoTokenizer.from_pretrained(folder))

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The first `TOKENS` tokens of each text."""
        found: list[list[int]] = self.tokenizer([*texts], truncation=True, max_length=TOKENS).input_ids
        return found

    @torch.no_grad()
    def means(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """The mean of the hidden states up to each token, [rows, longest, D]; arbitrary after an end."""
        batch = pad([[*row] for row in rows], 0, side="right")
        hidden: Tensor = self.model(
            input_ids=batch["tokens"].long(), attention_mask=batch["attention_mask"].long(), use_cache=False
        ).last_hidden_state.float()
        return hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1)[:, None]


def new_network(size: int) -> nn.Sequential:
    """From means of hidden states [..., size] to log odds [..., 1]; the first layer standardises."""
    return nn.Sequential(nn.BatchNorm1d(size, affine=False), nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, 1))


def fit(means: Tensor, labels: Tensor) -> nn.Sequential:
    """A network trained by logistic regression, with dropout and AdamW.

    Args:
        means: Shape [n, size].
        labels: 1 for positive, 0 for negative, shape [n].
    """
    torch.manual_seed(0)
    found = new_network(means.shape[1])
    optimizer = torch.optim.AdamW(found.parameters(), lr=1e-3, weight_decay=0.1)
    for _ in range(EPOCHS):
        order: Any = torch.randperm(len(means))
        for rows in order.split(256):
            outputs = found(nn.functional.dropout(means[rows], 0.2))[:, 0]
            loss: Any = nn.functional.binary_cross_entropy_with_logits(outputs, labels[rows].float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return found.eval()


def log_odds(
    prompts: Sequence[str], completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
) -> list[float]:
    """The log odds of a positive review, of prompts with their completions: the reward.

    One pass gives the scores of all beginnings of the completions, which are kept until other ones come:
    rewards of prefixes take no further pass.

    Args:
        prompts: Beginnings of reviews.
        completions: Not read; by this name a reward asks for columns.
        completion_ids: Their token ids, of the model's own tokenizer, as the policy is a copy of the model.

    Raises:
        FileNotFoundError: If the network has not been trained.
    """
    reader, net = _trained()
    special = {*reader.tokenizer.all_special_ids}
    rows = [
        (*reader.tokenizer(prompt).input_ids, *(token for token in ids if token not in special))
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]
    if any(row not in _KEPT for row in rows):
        _KEPT.clear()
        distinct = sorted({*rows})
        for first in range(0, len(distinct), ROWS):
            part = distinct[first : first + ROWS]
            for row, means in zip(part, reader.means(part), strict=True):
                with torch.no_grad():
                    scores = net(means[: len(row)])[:, 0].tolist()
                _KEPT.update((row[: place + 1], score) for place, score in enumerate(scores))
    return [_KEPT[row] for row in rows]


@cache
def _trained() -> tuple[Reader, nn.Sequential]:
    saved = torch.load(NETWORK, weights_only=True)
    net = new_network(saved["weights"]["1.weight"].shape[1])
    net.load_state_dict(saved["weights"])
    return Reader.of(saved["model"]), net.eval()


def read(reader: Reader, file: Path, count: int | None, kept: Path) -> tuple[Tensor, Tensor]:
    """Means of reviews at `LENGTHS`, shape [n, lengths, D], and their labels [n].

    The mean of a review that is shorter than a length is that of all its tokens.

    Args:
        reader: The model.
        file: Reviews with labels.
        count: So many, half of each label; all if None.
        kept: The folder of what was read.
    """
    table = pq.read_table(file, columns=["text", "label"]).to_pydict()
    by_label = [[row for row, label in enumerate(table["label"]) if label == wanted] for wanted in (0, 1)]
    chosen = [row for pair in zip(*by_label, strict=True) for row in pair][:count]
    parts = []
    for first in range(0, len(chosen), SHARD):
        path = kept / f"{file.stem}-{first}-{len(chosen[first : first + SHARD])}.pt"
        if not path.exists():
            texts = [table["text"][row].replace("<br />", " ") for row in chosen[first : first + SHARD]]
            write_atomically(path, to_bytes(_at_lengths(reader, reader.ids(texts))))
            print(f"{file.stem}: {first + len(texts):,} of {len(chosen):,} reviews read", flush=True)
        parts.append(torch.load(path, weights_only=True).float())
    return torch.cat(parts), torch.tensor([table["label"][row] for row in chosen])


def _at_lengths(reader: Reader, rows: list[list[int]]) -> Tensor:
    """Means at `LENGTHS`, shape [rows, lengths, D], in bfloat16; rows of similar length are read together."""
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    found: list[Tensor] = [torch.empty(0)] * len(rows)
    for first in range(0, len(rows), ROWS):
        part = order[first : first + ROWS]
        for row, means in zip(part, reader.means([rows[row] for row in part]), strict=True):
            found[row] = means[[min(length, len(rows[row])) - 1 for length in LENGTHS]]
    return torch.stack(found).bfloat16()


def to_bytes(value: Any) -> bytes:
    """What `torch.save` would write."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def main(folder: Path, model: str, count: int | None = None, tested: int | None = None) -> None:
    """Read the reviews, train, write `NETWORK`, print its share of right answers by length.

    Args:
        folder: Of train.parquet and test.parquet.
        model: Folder of a causal language model.
        count: Reviews to train on, all if None.
        tested: Those to test on.
    """
    reader, kept = Reader.of(model), NETWORK.parent / "read"
    kept.mkdir(parents=True, exist_ok=True)
    means, labels = read(reader, folder / "train.parquet", count, kept)
    net = fit(means.flatten(0, 1), labels.repeat_interleave(len(LENGTHS)))
    write_atomically(NETWORK, to_bytes({"model": model, "weights": net.state_dict()}))
    test, wanted = read(reader, folder / "test.parquet", tested, kept)
    with torch.no_grad():
        right = (net(test.flatten(0, 1))[:, 0].view(len(test), -1) > 0) == wanted.bool()[:, None]
    for length, share in zip(LENGTHS, right.float().mean(0).tolist(), strict=True):
        print(f"first {length} tokens: right on {share:.4f} of {len(wanted):,} test reviews")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m replication.learned", description=__doc__)
    parser.add_argument("folder", type=Path, help="of train.parquet and test.parquet")
    parser.add_argument("model", help="folder of a causal language model")
    parser.add_argument("--reviews", type=int, help="train on so many instead of all")
    parser.add_argument("--tested", type=int, help="test on so many instead of all")
    given = parser.parse_args()
    main(given.folder, given.model, given.reviews, given.tested)
