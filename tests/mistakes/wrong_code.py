"""Invalid code of users: rewards, estimators, callbacks and modules."""

from dataclasses import dataclass

import lightning as L
import torch

from lit_klrb.estimators import KLEstimator, MonteCarlo

not_callable = 5
_COUNT = r"must return \d+ numbers"


def _raises(texts):
    raise RuntimeError("no luck today")


def _exits(texts):
    raise SystemExit(3)


def _recursive(texts):
    return _recursive(texts)


def _later(texts, calls=[]):  # noqa: B006  wrong on purpose: remembers its calls
    calls.append(1)
    return [1.0] * len(texts) if len(calls) < 3 else [float("nan")] * len(texts)


def _lengths(texts):
    return [float(len(text)) for text in texts]


# Functions by name, and a pattern of the error; None where what they return is fine.
REWARDS = {
    "text": (lambda texts: "good", "'good'"),
    "nothing": (lambda texts: None, "None"),
    "texts_back": (lambda texts: [*texts], "must return .* numbers"),
    "numbers_as_texts": (lambda texts: ["1.0"] * len(texts), r"'1\.0'"),
    "generator": (lambda texts: iter(_lengths(texts)), None),
    "one_number": (lambda texts: 1.0, "1\\.0"),
    "too_few": (lambda texts: [1.0] * (len(texts) - 1), rf"{_COUNT} .*got \d+"),
    "too_many": (lambda texts: [1.0] * (len(texts) + 1), rf"{_COUNT} .*got \d+"),
    "empty": (lambda texts: [], rf"{_COUNT} .*got 0"),
    "columns": (lambda texts: [[1.0, 2.0]] * len(texts), _COUNT),
    "ragged": (lambda texts: [[1.0], *[[1.0, 2.0]] * (len(texts) - 1)], _COUNT),
    "not_a_number": (lambda texts: [float("nan")] * len(texts), "gave nan for the text"),
    "infinite": (lambda texts: [float("inf")] * len(texts), "gave inf for the text"),
    "overflowing": (lambda texts: [1e300] * len(texts), "gave .* for the text"),
    "complex_numbers": (lambda texts: [1j] * len(texts), "1j"),
    "mapping": (lambda texts: dict.fromkeys(texts, 1.0), _COUNT),
    "nones": (lambda texts: [None] * len(texts), "every reward gives None for"),
    "booleans": (lambda texts: [len(text) > 30 for text in texts], None),
    "integers": (lambda texts: list(map(len, texts)), None),
    "tensor_with_gradient": (lambda texts: torch.tensor(_lengths(texts), requires_grad=True), None),
    "double": (lambda texts: torch.tensor(_lengths(texts), dtype=torch.float64), None),
    "raises": (_raises, r"RuntimeError: no luck today \(.*wrong_code\.py, line \d+\)"),
    "raises_key": (lambda texts: {}["nothing"], r"KeyError: 'nothing' \(.*wrong_code\.py, line \d+\)"),
    "raises_deep": (
        lambda texts: torch.zeros(2) + torch.zeros(3),
        r"RuntimeError: .*size.* \(.*wrong_code\.py, line \d+\)",
    ),
    "no_arguments": (lambda: [1.0], r"cannot be called with a list of texts .*takes 0"),
    "two_arguments": (
        lambda texts, more: [1.0] * len(texts),
        r"cannot be called with a list of texts .*missing .*'more'",
    ),
    "recursive": (_recursive, r"RecursionError"),
    "later": (_later, "gave nan for the text"),
}
globals().update({name: function for name, (function, _) in REWARDS.items()})


class Reward:
    """Given as a class instead of an instance."""

    def __call__(self, texts):
        return [1.0] * len(texts)


class NotAnEstimator:
    pass


@dataclass(frozen=True, kw_only=True)
class Abstract(KLEstimator):
    """Does not implement the abstract methods."""


def _estimator(name, **methods):
    if "loss" in methods:
        methods["is_fusable"] = False
    return dataclass(frozen=True, kw_only=True)(
        type(name, (MonteCarlo,), {"__module__": __name__, **methods})
    )


def _fails(when):
    def method(*args, **kwargs):
        raise RuntimeError(f"no luck {when}")

    return method


def _changed_weights(change):
    return lambda self, *args, **kwargs: change(MonteCarlo.weights(self, *args, **kwargs))


RaisesInInit = _estimator("RaisesInInit", __post_init__=_fails("at the start"))
RaisesInWeights = _estimator("RaisesInWeights", weights=_fails("with weights"))
RaisesInLoss = _estimator("RaisesInLoss", loss=_fails("with the loss"))
NoWeights = _estimator("NoWeights", weights=lambda *args, **kwargs: None)
FewWeights = _estimator(
    "FewWeights", weights=_changed_weights(lambda found: found.map(lambda part: part[:1]))
)
ListWeights = _estimator("ListWeights", weights=_changed_weights(list))
NanWeights = _estimator(
    "NanWeights", weights=_changed_weights(lambda w: w.map(lambda part: part * float("nan")))
)
OtherArguments = _estimator("OtherArguments", weights=lambda self, stats, mask: mask.float())
NoLoss = _estimator("NoLoss", loss=lambda *args, **kwargs: None)
LongLoss = _estimator("LongLoss", loss=lambda self, stats, mask, weights, **kwargs: stats.logprobs.sum(1))
DetachedLoss = _estimator(
    "DetachedLoss", loss=lambda self, stats, mask, weights, **kwargs: stats.logprobs.sum().detach()
)


class Unexplained(MonteCarlo):
    """A valid estimator without an explanation."""


class RaisingCallback(L.Callback):
    def on_train_start(self, trainer, pl_module):
        raise RuntimeError("no luck in a callback")


class RaisingModule(L.LightningModule):
    def __init__(self):
        super().__init__()
        raise RuntimeError("no luck in a module")


class OtherModule(L.LightningModule):
    """A module of another project, without the attributes that data modules need."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(torch.ones(1, 1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OtherData(L.LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(4, 2))

    val_dataloader = train_dataloader


class EmptyData(L.LightningDataModule):
    pass
