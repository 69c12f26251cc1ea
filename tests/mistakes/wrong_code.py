"""Invalid code of users: rewards, estimators, callbacks and modules."""

from dataclasses import dataclass

import lightning as L
import torch

from lit_klrb.estimators import KLEstimator, MonteCarlo

not_callable = 5


def text(texts):
    return "good"


def nothing(texts):
    return None


def texts_back(texts):
    return list(texts)


def numbers_as_texts(texts):
    return ["1.0"] * len(texts)


def generator(texts):
    yield from (float(len(text)) for text in texts)


def one_number(texts):
    return 1.0


def too_few(texts):
    return [1.0] * (len(texts) - 1)


def too_many(texts):
    return [1.0] * (len(texts) + 1)


def empty(texts):
    return []


def columns(texts):
    return [[1.0, 2.0]] * len(texts)


def ragged(texts):
    return [[1.0], *[[1.0, 2.0]] * (len(texts) - 1)]


def not_a_number(texts):
    return [float("nan")] * len(texts)


def infinite(texts):
    return [float("inf")] * len(texts)


def overflowing(texts):
    return [1e300] * len(texts)


def complex_numbers(texts):
    return [1j] * len(texts)


def mapping(texts):
    return dict.fromkeys(texts, 1.0)


def nones(texts):
    return [None] * len(texts)


def booleans(texts):
    return [len(text) > 30 for text in texts]


def integers(texts):
    return [len(text) for text in texts]


def tensor(texts):
    return torch.tensor([float(len(text)) for text in texts])


def tensor_with_gradient(texts):
    return torch.tensor([float(len(text)) for text in texts], requires_grad=True)


def double(texts):
    return torch.tensor([float(len(text)) for text in texts], dtype=torch.float64)


def raises(texts):
    raise RuntimeError("no luck today")


def raises_key(texts):
    return {}["nothing"]


def raises_deep(texts):
    return torch.zeros(2) + torch.zeros(3)


def no_arguments():
    return [1.0]


def two_arguments(texts, more):
    return [1.0] * len(texts)


def exits(texts):
    raise SystemExit(3)


def recursive(texts):
    return recursive(texts)


def later(texts, calls=[]):  # noqa: B006  wrong on purpose: remembers its calls
    calls.append(1)
    return [1.0] * len(texts) if len(calls) < 3 else [float("nan")] * len(texts)


class Reward:
    """Given as a class instead of an instance."""

    def __call__(self, texts):
        return [1.0] * len(texts)


class NeedsArguments:
    def __init__(self, needed):
        self.needed = needed


class NotAnEstimator:
    pass


@dataclass(frozen=True, kw_only=True)
class Abstract(KLEstimator):
    """Does not implement the abstract methods."""


@dataclass(frozen=True, kw_only=True)
class RaisesInInit(MonteCarlo):
    def __post_init__(self):
        raise RuntimeError("no luck at the start")


@dataclass(frozen=True, kw_only=True)
class RaisesInWeights(MonteCarlo):
    def weights(self, *args, **kwargs):
        raise RuntimeError("no luck with weights")


@dataclass(frozen=True, kw_only=True)
class NoWeights(MonteCarlo):
    def weights(self, *args, **kwargs):
        return None


@dataclass(frozen=True, kw_only=True)
class FewWeights(MonteCarlo):
    def weights(self, *args, **kwargs):
        return super().weights(*args, **kwargs).map(lambda field: field[:1])


@dataclass(frozen=True, kw_only=True)
class ListWeights(MonteCarlo):
    def weights(self, *args, **kwargs):
        return list(super().weights(*args, **kwargs))


@dataclass(frozen=True, kw_only=True)
class NanWeights(MonteCarlo):
    def weights(self, *args, **kwargs):
        return super().weights(*args, **kwargs).map(lambda field: field * float("nan"))


@dataclass(frozen=True, kw_only=True)
class OtherArguments(MonteCarlo):
    def weights(self, stats, mask):
        return mask.float()


@dataclass(frozen=True, kw_only=True)
class NoLoss(MonteCarlo):
    is_fusable = False

    def loss(self, *args, **kwargs):
        return None


@dataclass(frozen=True, kw_only=True)
class LongLoss(MonteCarlo):
    is_fusable = False

    def loss(self, stats, mask, weights, **kwargs):
        return stats.logprobs.sum(1)


@dataclass(frozen=True, kw_only=True)
class DetachedLoss(MonteCarlo):
    is_fusable = False

    def loss(self, stats, mask, weights, **kwargs):
        return stats.logprobs.sum().detach()


@dataclass(frozen=True, kw_only=True)
class RaisesInLoss(MonteCarlo):
    is_fusable = False

    def loss(self, *args, **kwargs):
        raise RuntimeError("no luck with the loss")


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

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(4, 2))


class EmptyData(L.LightningDataModule):
    pass
