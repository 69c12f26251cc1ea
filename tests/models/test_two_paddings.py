"""Two models of one tokenizer whose embeddings are padded to different sizes, as those of Qwen2.5 are.

trl#2215, trl#6252, torchtune#2119.
"""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from written import save, write_rows

from lit_klrb.cli.main import main
from lit_klrb.comparison import compare
from lit_klrb.comparison.measure import token_table
from lit_klrb.data.grammar import ReviewGrammar
from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.engine.generation import Sampling
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import RaoBlackwell
from lit_klrb.models.roles import model_from_config
from lit_klrb.modules import RLOOModule
from lit_klrb.rollouts.pair import Loaded, Pair
from lit_klrb.rollouts.step import policy_loss

COMMON, PADDING = 365, 64
CONFIG = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 32, "tie_word_embeddings": False}


def loaded(key, rows, seed, tokenizer=None):
    torch.manual_seed(seed)
    model = model_from_config({"model_type": "gpt2", "vocab_size": rows, **CONFIG}).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
        if rows > COMMON:  # a third of the mass is on the padding
            model.lm_head.weight[COMMON:] *= 2
    return Loaded(key, f"{rows} rows", model, tokenizer or grammar_tokenizer())


ROWS = [(COMMON + PADDING, COMMON), (COMMON, COMMON + PADDING)]


@pytest.fixture(params=ROWS)
def pair(request):
    policy, reference = request.param
    return Pair(loaded("policy_path", policy, 0), loaded("reference_path", reference, 1))


@pytest.fixture(params=ROWS)
def saved(request, tmp_path):
    """Both models, and their folders: of weights of float64."""
    policy, reference = request.param
    models = loaded("policy", policy, 0), loaded("reference", reference, 1)
    for model in models:
        save(tmp_path / model.key, model.model, model.tokenizer)
    return SimpleNamespace(models=[model.model for model in models], root=tmp_path)


def prompts():
    tokens = torch.arange(1, 17).view(4, 4)
    return {"tokens": tokens, "attention_mask": torch.ones_like(tokens, dtype=torch.bool)}


def plain(model, rollout):
    """Log-probabilities over the common rows, [B, T, V]."""
    mask = rollout.attention_mask.long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(rollout.tokens, attention_mask=mask, position_ids=positions).logits
    return logits[:, -rollout.mask.shape[1] - 1 : -1, :COMMON].log_softmax(-1)


@pytest.mark.parametrize("tiled", [True, False])
def test_rows_that_one_lacks_are_left_out_of_both_distributions(pair, tiled):
    assert f"{PADDING} rows of" in pair.note
    assert pair.vocabulary_size == COMMON
    if not tiled:
        pair.scorer._parts = (None, None)
    rollout = pair.sample(prompts(), Sampling(50, 6), seed=0)
    assert int(rollout.completions.max()) < COMMON
    states, stats = pair.score(rollout, prompts())
    own, theirs = (plain(model, rollout) for model in (pair.policy, pair.reference))
    kl = torch.where(rollout.mask, (own.exp() * (own - theirs)).sum(-1), 0)
    chosen = torch.where(rollout.mask, own.gather(-1, rollout.completions[..., None])[..., 0], 0)
    found = stats.masked(rollout.mask)
    assert (found.kl - kl).abs().max() < 1e-12
    assert (found.logprobs - chosen).abs().max() < 1e-12
    assert (pair.scorer.logprobs(rollout) - chosen).abs().max() < 1e-12

    rewards = torch.rand(len(rollout.mask), dtype=torch.float64)
    weights = RaoBlackwell().weights(stats.detach(), rollout.mask, rewards, beta=0.3, group_size=50)
    loss, _ = policy_loss(
        pair.scorer, RaoBlackwell(), rollout, states, weights, beta=0.3, behaviour_logprobs=chosen.detach()
    )
    expected = ((weights.score * chosen).sum() + (weights.kl * kl).sum()) / len(rewards)
    parameters = list(pair.policy.parameters())
    ours, truth = (
        torch.autograd.grad(value, parameters, materialize_grads=True) for value in (loss, expected)
    )
    assert max((a - b).abs().max().item() for a, b in zip(ours, truth, strict=True)) < 1e-12
    assert any(gradient.abs().max() > 1e-3 for gradient in truth)


def test_a_token_without_a_row_in_the_other_is_refused():
    words = grammar_tokenizer()
    longer = copy.deepcopy(words)
    longer.add_tokens([f"<{number}>" for number in range(len(words), COMMON + 1)])
    policy = loaded("policy_path", COMMON + PADDING, 0, longer)
    with pytest.raises(
        ConfigurationError, match=r"reference_path: .* id 365 is no token there and '<365>' in the policy"
    ):
        Pair(policy, loaded("reference_path", COMMON, 1, words))


def words(texts):
    """A reward, which float32 represents exactly."""
    return [float(len(text.split())) for text in texts]


def test_fit_has_the_gradient_on_the_common_rows(saved, monkeypatch, capsys):
    kept = []

    def keep(module, optimizer):
        kept.append((module.experience, [parameter.grad.clone() for parameter in module.policy.parameters()]))

    monkeypatch.setattr(RLOOModule, "on_before_optimizer_step", keep)
    argv = (
        f"--model RLOOModule --model.policy_path {saved.root}/policy "
        f"--model.reference_path {saved.root}/reference --model.reward_path {__name__}:words "
        "--model.completions_per_prompt 50 --model.max_new_tokens 6 "
        "--kl.beta 0.3 --kl.estimator RaoBlackwell --kl.estimator.baseline null "
        "--data PromptDataModule --data.batch_size 4 --data.train_size 16 --data.eval_size 4 "
        "--trainer.max_steps 1 --trainer.val_check_interval 1 --trainer.accelerator cpu "
        "--trainer.precision 64-true "
        f"--trainer.enable_progress_bar false --trainer.default_root_dir {saved.root}/run"
    )
    assert main(["fit", *argv.split()]) == 0
    assert f"{PADDING} rows of" in "".join(capsys.readouterr())
    ((experience, gradients),) = kept
    rollout = experience.rollout
    assert int(rollout.completions.max()) < COMMON, "no padding is drawn"
    policy, reference = saved.models
    with torch.no_grad():
        theirs = plain(reference, rollout)
    own = plain(policy, rollout)
    kl = torch.where(rollout.mask, (own.exp() * (own - theirs)).sum(-1), 0)
    chosen = torch.where(rollout.mask, own.gather(-1, rollout.completions[..., None])[..., 0], 0)
    after = kl.detach().flip(1).cumsum(1).flip(1) - kl.detach()
    score = 0.3 * after - experience.rewards[:, None]
    ((score * chosen).sum() + 0.3 * kl.sum()).div(len(kl)).backward()
    for gradient, parameter in zip(gradients, policy.parameters(), strict=True):
        assert gradient.dtype == torch.float64
        assert (gradient - parameter.grad).abs().max() < 1e-12
    # Means are logged in float32
    assert experience.metrics["kl"] == pytest.approx(kl.sum(1).mean().item(), rel=1e-7)


@pytest.mark.parametrize("given", ["texts", "prompts"])
def test_kl_is_that_of_the_common_rows(saved, monkeypatch, capsys, given):
    rollouts = []
    monkeypatch.setattr(
        compare,
        "token_table",
        lambda pair, some, **rest: rollouts.append(some) or token_table(pair, some, **rest),
    )
    texts = [review.text for review in ReviewGrammar().reviews(24, seed=1)]
    rows = texts if given == "texts" else [" ".join(text.split()[:3]) for text in texts]
    write_rows(saved.root / "rows.jsonl", ({given[:-1]: row} for row in rows))
    argv = (
        f"--policy {saved.root}/policy --reference {saved.root}/reference --{given} {saved.root}/rows.jsonl "
        "--max_tokens 30 --max_new_tokens 8 --json"
    )
    assert main(["kl", *argv.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert f"{PADDING} rows of" in found["tokenizers"]
    for direction, models, some in zip(
        ("forward", "reverse"), (saved.models, saved.models[::-1]), rollouts, strict=True
    ):
        assert max(int(rollout.completions.max()) for rollout in some) < COMMON, "no padding is drawn"
        total = torch.zeros((), dtype=torch.float64)
        for rollout in some:
            with torch.no_grad():
                own, theirs = (plain(model, rollout) for model in models)
            total += ((own.exp() * (own - theirs)).sum(-1) * rollout.mask).sum()
        numbers = found["directions"][direction]
        exact = "exact next-token KL" if given == "texts" else "Rao-Blackwell"
        mean = total.item() / (len(rows) if given == "texts" else numbers["sequences"])
        # It is computed in float32
        assert numbers["estimates"][exact]["sequence"]["estimate"] == pytest.approx(mean, rel=1e-6)
